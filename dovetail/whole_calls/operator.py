"""The operators ``dovetail::whole_call`` and ``dovetail::whole_call_random``: a graph calls a function of tensors by a number.

A node of a graph names its function by a number. Every object that can run the graph keeps the functions alive
(:attr:`dovetail.runtime.spec.RuntimeSpec.kept_alive`); the table of numbers has weak references only.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import OutgrownError
from dovetail.torch_private import kernels as private_kernels
from dovetail.trace import Trace
from dovetail.trace.overrides import ASSUMES
from dovetail.whole_calls.facts import Facts
from dovetail.whole_calls.handles import SPARSE_LAYOUTS, carried_by, is_handle, make_handle

FlatFunction = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class WholeFunction:
    """A pure function of tensors, run for real and above autograd, so that its numbers are eager's.

    ``needs_gradient`` says which arguments require a gradient when it runs, ``grad_enabled`` whether autograd is on: torch has
    kernels of its own for inference. ``handles`` are the arguments that are sparse handles: a backend may put something else
    into the memory of one that is used up. ``draws``: it draws random numbers of the CPU, and its last result is the state of
    the generator before that. ``is_gradient``: it computes the gradients of another whole function. ``keeps_graph``: the result
    before that state owns its autograd graph (:mod:`dovetail.whole_calls.tapes`).
    """

    name: str
    function: FlatFunction
    facts: Facts
    needs_gradient: tuple[bool, ...]
    grad_enabled: bool
    handles: tuple[bool, ...] = ()
    draws: bool = False
    is_gradient: bool = False
    keeps_graph: bool = False

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Its results with their autograd graph, sparse ones as handles."""
        with private_kernels.above_autograd(), torch.set_grad_enabled(self.grad_enabled):
            leaves = [
                value.detach().requires_grad_(flag) for value, flag in zip(tensors, self.needs_gradient, strict=True)
            ]
            return list(map(_with_handle, self.function(*leaves)))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it in a graph: its results are part of no autograd graph. Raises :class:`OutgrownError`."""
        handles = self.handles or (False,) * len(tensors)
        values = [carried_by(tensor) if flag else tensor for tensor, flag in zip(tensors, handles, strict=True)]
        found = self.run(values)
        if any(handles) and not self.is_gradient and shares_values(values, found):
            raise OutgrownError(
                f"{self.name} has returned a view of a sparse argument, and has not when it was captured",
                advice="keep this call out of the compiled function",
            )
        taken = {value.untyped_storage()._cdata for value in tensors}
        expected = self.facts.rule(*tensors)
        return [self.facts.own(self.name, facts, result, taken) for result, facts in zip(found, expected, strict=True)]


def _with_handle(result: Any) -> Any:
    if not isinstance(result, torch.Tensor) or result.layout not in SPARSE_LAYOUTS:
        return result
    with torch.no_grad():
        return make_handle(result)


def _values_of(value: torch.Tensor) -> torch.Tensor:
    if value.layout is torch.jagged:
        return value._values  # type: ignore[no-any-return,return-value]
    return value._values() if value.layout is torch.sparse_coo else value.detach().values()


def shares_values(values: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether a sparse result is a sparse argument, or a view of one."""
    carried = [carried_by(result) for result in results if is_handle(result)]
    sparse = [value for value in (*values, *carried) if value.layout in SPARSE_LAYOUTS]
    storages = [_values_of(value).untyped_storage()._cdata for value in sparse]
    return len(set(storages)) < len(storages)


_FUNCTIONS: weakref.WeakValueDictionary[int, WholeFunction] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library("dovetail", "FRAGMENT")
_library.define("whole_call(int function, Tensor[] tensors) -> Tensor[]")
_library.define(
    "whole_call_random(int function, Tensor[] tensors) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)


def _kernel(function: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _FUNCTIONS[function](tensors)


_library.impl("whole_call", _kernel, "CompositeExplicitAutograd")
_library.impl("whole_call_random", _kernel, "CompositeExplicitAutograd")


def _fake(function: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [facts.empty() for facts in _FUNCTIONS[function].facts.rule(*tensors)]


def _for_each_gradient(function: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return private_kernels.one_by_one(functools.partial(_call, function), tensors)


_library.impl("whole_call", _for_each_gradient, "Batched")


def _call(function: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return WHOLE_CALL(function, tensors)  # type: ignore[no-any-return]


def _batched(info: Any, in_dims: Any, function: int, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """One call for each gradient of a batch (``torch.vmap`` over ``torch.autograd.grad``)."""
    dims = in_dims[1]
    rows = [
        [value if dim is None else value.select(dim, index) for value, dim in zip(tensors, dims, strict=True)]
        for index in range(info.batch_size)
    ]
    found = [torch.stack(results) for results in zip(*(_call(function, row) for row in rows), strict=True)]
    return found, [0] * len(found)


@functools.cache
def _register_rules() -> None:
    """Not with the module, which most programs load in vain: torch goes through all loaded modules here, for 12 ms."""
    for name in ("whole_call", "whole_call_random"):
        torch.library.register_fake(f"dovetail::{name}", _fake, lib=_library)
    torch.library.register_vmap("dovetail::whole_call", _batched, lib=_library)


WHOLE_CALL = torch.ops.dovetail.whole_call.default
RANDOM_WHOLE_CALL = torch.ops.dovetail.whole_call_random.default


def function_of(node: torch.fx.Node) -> WholeFunction:
    """The function that a node of one of the two operators calls."""
    return _FUNCTIONS[node.args[0]]  # type: ignore[index]


def _may_be_outgrown(node: torch.fx.Node) -> bool:
    return function_of(node).facts.flags is not None


ASSUMES.update({WHOLE_CALL: _may_be_outgrown, RANDOM_WHOLE_CALL: _may_be_outgrown})


def record(trace: Trace, function: WholeFunction, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Record a call as one node. The graph of the trace keeps the function alive."""
    _register_rules()
    number = next(_numbers)
    _FUNCTIONS[number] = function
    trace.kept_alive.append(function)
    return tuple((RANDOM_WHOLE_CALL if function.draws else WHOLE_CALL)(number, list(tensors)))
