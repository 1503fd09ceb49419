"""Sparse tensors in the program: values that only whole calls look into.

Attributes that a program reads without a call (size, type, layout) are guarded. Everything else that is not a call of torch breaks
the graph.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, ValueKind, layout_rule, method_rule, rule, value_kind
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.frontend.values.values import Values
from dovetail.guards import Source
from dovetail.rules.sparse.handles import HandleSource, SparseMatch
from dovetail.rules.sparse.value import SPARSE_TYPES, SparseValue
from dovetail.runtime.recipe import Recipe
from dovetail.runtime.recipe_builder import RecipeBuilder
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace import Trace
from dovetail.whole_calls.call import whole_call
from dovetail.whole_calls.examples import carried_example, is_traced_handle
from dovetail.whole_calls.handles import SPARSE_LAYOUTS, redeem

# torch 2.13 aborts the process where one of these is traced: the call stays whole.
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_MAKES_COMPRESSED = frozenset(
    {
        *(f"to_sparse_{kind}" for kind in ("csr", "csc", "bsr", "bsc")),
        *(f"sparse_{kind}_tensor" for kind in ("csr", "csc", "bsr", "bsc", "compressed")),
    }
)
_FACTS = frozenset(
    {
        *("shape", "dtype", "layout", "device", "requires_grad", "ndim"),
        *("is_sparse", "is_sparse_csr", "is_nested", "is_cuda"),
    }
)
# Operators that are calls of torch; those that write in place are not.
SPARSE_OPERATORS = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.pow, operator.neg),
        *(operator.lt, operator.le, operator.gt, operator.ge),
    }
)
# Methods that follow from size and type.
_NUMBERS = frozenset({"size", "dim", "ndimension", "numel", "is_floating_point", "is_complex"})
# Methods for state beside the value: hooks, gradients, the autograd graph.
_STATE = frozenset(
    {
        *("backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
        *("__set__", "__get__", "__delete__"),
    }
)


def _attribute(value: SparseValue, name: str) -> Any:
    """``value.name`` for what is guarded of a sparse tensor, or a method of it."""
    method = inspect.getattr_static(type(value.example), name, None)
    # A jagged tensor has attributes of its own with names of methods (``_values``).
    if name not in vars(value.example) and isinstance(method, (types.MethodDescriptorType, types.FunctionType)):
        return functools.partial(method, value)
    if name not in _FACTS:
        raise Break(
            f".{name} of a sparse tensor is read", "read it outside of the function, or call a function of torch"
        )
    if name == "shape":
        _check_size(value)
    return getattr(value.example, name)


class SparseKind(ValueKind):
    """Sparse tensors and jagged ones: a graph has handles for them, which calls that stay whole read."""

    def claims(self, real: torch.Tensor) -> bool:
        """Whether this is a tensor of a sparse layout."""
        return real.layout in SPARSE_LAYOUTS and type(real) in SPARSE_TYPES

    def holds(self, value: Any) -> bool:
        """Whether this is a stand-in."""
        return type(value) is SparseValue

    def stand_in(self, values: Values, real: torch.Tensor, source: Source) -> SparseValue:
        """A stand-in with a traced handle."""
        if values.in_backward:
            raise Break(f"a hook or the backward of a custom autograd.Function reads {source.name}, a sparse tensor")
        values.guard(source, SparseMatch.of(real), f"{source.name} was read")
        with private_tracing.disable_current_modes():
            at = HandleSource(source)
            handle = at.read(real)
        return SparseValue(values.read(handle, at), real)

    def example(self, values: Values, value: Any) -> torch.Tensor:
        """A sparse tensor like it."""
        example: torch.Tensor = value.example
        return example

    def leave(self, interpreter: TracingInterpreter, builder: RecipeBuilder, value: Any) -> Recipe:
        """The tensor that the handle carries when the graph has run."""
        return builder.made(value, redeem, [value.handle])

    def attribute(self, interpreter: TracingInterpreter, value: Any, name: str) -> Any:
        """An attribute that the guards hold to what it is, or a method."""
        return _attribute(value, name)

    def call(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
        """A call of torch, which stays whole. Operators that would write are not among those that are calls."""
        if getattr(function, "__module__", None) == "_operator" and function not in SPARSE_OPERATORS:
            return NotImplemented
        return _call(interpreter.trace, function, args, kwargs)


@layout_rule(*_COMPRESSED)
@method_rule(*_MAKES_COMPRESSED)
def _compressed(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    return _call(interpreter.trace, function, args, kwargs)


def _check_made_inside(value: Any, what: str) -> None:
    """Refuse a call through which torch 2.13, traced, loses the gradient of a tensor in coordinates that was made inside."""
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo and value.requires_grad:
        raise Break(f"{what} of a sparse tensor that is made inside", "make the sparse tensor outside of the function")


@method_rule("to_dense", "_to_dense")
def _to_dense(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    _check_made_inside(args[0] if args else getattr(function, "__self__", None), "to_dense")
    return NotImplemented


@rule(torch.sparse.sum)
def _sum(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    _check_made_inside(args[0] if args else kwargs.get("input"), "torch.sparse.sum")
    return interpreter.call_torch(torch.sparse.sum, args, kwargs)


@method_rule("_nnz", "values", "_values", "indices", "_indices")
def _entries(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Data decides how many entries a tensor in coordinates has, unless it is made of given ones. Torch's fake has none."""
    value = args[0] if args else getattr(function, "__self__", None)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.sparse_coo:
        return NotImplemented
    recorder = interpreter.trace.recorder
    made = (call for call in reversed(recorder.calls) if len(call.results) == 1)
    call = next((call for call in made if recorder.tensors[call.results[0]] is value), None)
    if call is not None and call.function is torch.sparse_coo_tensor:
        return NotImplemented
    name = getattr(function, "__name__", "")
    raise Break(
        f"{name} of a sparse tensor has a size that data decides", "make the sparse tensor outside of the function"
    )


value_kind(SparseKind(), SparseValue)


def _check_size(value: SparseValue) -> None:
    if value.example.layout is torch.jagged:
        raise Break("the size of a jagged tensor is asked for", "read it outside of the function")


def _call(trace: Trace, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function that is given a sparse tensor, as one node. Raises :class:`Break` for one that cannot be one."""
    name = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.Tensor):
        # A method that is bound to a dense tensor.
        function, args = getattr(torch.Tensor, name), (owner, *args)
    module = getattr(function, "__module__", None) or ""
    if (name.endswith("_") and not name.endswith("__")) or name in _STATE or module.startswith("torch.autograd"):
        raise Break(f"{name} is given a sparse tensor", "call it outside of the function")
    if name in _NUMBERS and type(args[0]) is SparseValue and not any(type(item) is SparseValue for item in args[1:]):
        _check_size(args[0])
        return function(args[0].example, *args[1:], **kwargs)
    leaves, structure = private_trees.tree_flatten((args, kwargs))
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Break(f"{name} is given a sparse tensor under autocast")
    tensors: dict[int, torch.Tensor] = {}
    for at, leaf in enumerate(leaves):
        if type(leaf) is SparseValue:
            tensors[at] = leaf.handle
        elif isinstance(leaf, torch.Tensor):
            if private_tensors.is_wrapper(leaf):
                raise Break(f"{name} is given a sparse tensor and a tensor subclass")
            tensors[at] = leaf
        elif private_sizes.is_symbolic(leaf) or not is_leaf_value(leaf):
            raise Break(f"{name} is given a sparse tensor and an object that is no constant")
    constants = [None if at in tensors else leaf for at, leaf in enumerate(leaves)]
    returned: list[Any] = []

    def call(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        values = list(constants)
        for at, tensor in zip(tensors, given, strict=True):
            values[at] = tensor
        arguments, keywords = private_trees.tree_unflatten(values, structure)
        results, spec = private_trees.tree_flatten(function(*arguments, **keywords))
        if not returned:
            returned.append(spec)
        if not all(type(item) in SPARSE_TYPES for item in results):
            raise CaptureError(f"{name} of a sparse tensor returns something that is no plain tensor")
        return results

    # The tape has no sparse tensors: it could not be run again.
    trace.recorder.refuse_replay("a sparse tensor is used in it")
    try:
        with trace.recorder.paused(), private_calls.no_torch_function():
            found = whole_call(trace, name, call, list(tensors.values()))
    except CaptureError as error:
        raise Break(error.what, error.advice) from error
    except (RuntimeError, ValueError, IndexError) as error:
        # The numbers of the example need not be those that the call asks for (torch.sparse.check_sparse_tensor_invariants).
        raise Break(f"{name} is given a sparse tensor and raises for example numbers: {error}") from error
    made = [
        SparseValue(item, carried_example(trace, item)) if is_traced_handle(trace, item) else item for item in found
    ]
    for item in made:
        if isinstance(item, torch.Tensor):
            trace.recorder.number(item)
    return private_trees.tree_unflatten(made, returned[0])
