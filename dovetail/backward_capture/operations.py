"""What the nodes of a captured backward do when they run: formulas, hooks, user functions, accumulation into ``.grad``.

Each is eager's own step, with eager's checks and eager's messages.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

from dovetail.errors import CaptureError
from dovetail.torch_private import engine as private_engine
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing


def outside_of(mode: Any) -> AbstractContextManager[Any]:
    """A block that a recording mode does not see."""
    return private_tracing.disable_current_modes() if mode is not None else contextlib.nullcontext()


#: Something that has no ``__torch_function__``: only a mode can be what torch finds then.
_NO_TENSOR = (None,)


class NodeFunction:
    """The formula of one kind of native autograd node: ``formula(gradients, *saved values) -> gradients``."""

    _known: ClassVar[dict[str, NodeFunction]] = {}

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        #: A node of a C++ extension, whose code nobody can look into.
        self.is_custom = name.startswith("CppNode")
        self.function = function
        self.__name__ = name
        self.__qualname__ = name
        self.__module__ = __name__

    @classmethod
    def named(cls, name: str) -> NodeFunction:
        """The formula with a name that the engine has bound."""
        if name not in cls._known:
            cls._known[name] = cls(name, private_engine.node_function(name))
        return cls._known[name]

    def __call__(self, *args: Any) -> Any:
        """The gradients of what the node's inputs were. A call that can be overridden, as those of torch's functions can."""
        if has_torch_function(_NO_TENSOR):
            return handle_torch_function(self, (), *args)
        return self.function(*args)

    def __repr__(self) -> str:
        return self.name


_TRACING_PREFIX = "[Compiled Autograd Tracing:]"


class OutputCheck(NodeFunction):
    """What the engine does with the gradients of every node: check them against what they are the gradients of."""

    def __init__(self, node_name: str) -> None:
        super().__init__("validate_outputs", private_engine.node_function("validate_outputs"))
        self.node_name = node_name

    def __call__(self, *args: Any) -> Any:
        """The gradients, summed to the right shape and cast to the right type."""
        if has_torch_function(_NO_TENSOR):
            return handle_torch_function(self, (), *args)
        try:
            return self.function(*args)
        except RuntimeError as error:
            text = str(error)
            if not text.startswith(_TRACING_PREFIX):
                raise
            words = text.removeprefix(_TRACING_PREFIX).strip()
        raise RuntimeError(f"Function {self.node_name} returned an {words}")


def is_traceable(hook: Any, create_graph: bool = False) -> bool:
    """Whether a hook, or the backward behind a context, is code of the user's that can become a part of a graph.

    Hooks of torch itself ask the engine where it is, and keep books about it. The backward of a function that Dovetail has
    compiled is a compiled function by itself where ``create_graph`` asks for its derivative.
    """
    kind = getattr(hook, "_forward_cls", None)
    if kind is not None:
        return not _is_torchs(kind) and not (create_graph and hasattr(kind, "backward_graph"))
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if isinstance(function, types.FunctionType):
        return not _is_torchs(function) and not any(_holds_torchs(cell) for cell in function.__closure__ or ())
    return False


def _is_torchs(value: Any) -> bool:
    return str(getattr(value, "__module__", None) or "torch").split(".", 1)[0] in ("torch", "torchgen", "functorch")


def _holds_torchs(cell: types.CellType) -> bool:
    try:
        inside = cell.cell_contents
    except ValueError:
        return True
    return isinstance(inside, types.FunctionType) and _is_torchs(inside)


def add_gradients(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients that arrive at the same place; a function of the user's may have given none."""
    if old is None or new is None:
        return new if old is None else old
    # A sparse gradient can be added to a dense one, not the other way around.
    return new + old if old.layout is not torch.strided else old + new


def _obeys_layout_contract(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    if variable.is_contiguous():
        return gradient.is_contiguous()
    if not private_engine.is_dense(variable):
        return gradient.is_contiguous()
    return all(
        size == 1 or left == right
        for size, left, right in zip(variable.shape, gradient.stride(), variable.stride(), strict=True)
    )


def _with_layout_of(gradient: torch.Tensor, variable: torch.Tensor) -> torch.Tensor:
    if private_engine.is_dense(variable):
        # Asked of the gradient, which may be of a class of its own.
        empty = gradient.new_empty_strided(
            variable.shape, variable.stride(), dtype=variable.dtype, device=variable.device
        )
        return empty.copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)


def accumulate_grad(variable: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add a gradient to ``variable.grad``, in place where there is one, as eager does."""
    if gradient is None or not variable.requires_grad:
        return
    old = variable.grad
    if old is None:
        if gradient.layout is not torch.strided or variable.layout is not torch.strided:
            variable.grad = gradient.clone()
        else:
            variable.grad = _with_layout_of(gradient, variable)
    elif old.layout is not torch.strided and gradient.layout is torch.strided:
        variable.grad = gradient + old
    elif torch.is_grad_enabled():
        variable.grad = old + gradient
    else:
        old += gradient


def _references(holder: list[torch.Tensor]) -> tuple[int, int]:
    tensor = holder[0]
    return sys.getrefcount(tensor), private_tensors.storage_references(tensor)


_ALONE = _references([torch.empty(1)])


def accumulate_owned(variable: torch.Tensor, holder: list[torch.Tensor]) -> None:
    """:func:`accumulate_grad` for a gradient that only ``holder`` holds, if nobody else does: it can become ``.grad`` itself."""
    gradient = holder[0]
    ours = (
        variable.grad is None
        and variable.requires_grad
        and not torch.is_grad_enabled()
        and type(gradient) is torch.Tensor
        and gradient.layout is variable.layout is torch.strided
        and not gradient.requires_grad
        and _obeys_layout_contract(gradient, variable)
    )
    del gradient
    if ours and _references(holder) <= _ALONE and _references(holder)[1] <= _ALONE[1]:
        variable.grad = holder.pop()
    else:
        accumulate_grad(variable, holder.pop())


class SavedContext:
    """The ``ctx`` of a ``torch.autograd.Function`` in a captured backward: the real one, with the saved tensors in hand.

    The engine has let go of the saved tensors by the time the backward runs.
    """

    __slots__ = ("_context", "_tensors")
    _context: Any
    _tensors: tuple[Any, ...]

    def __init__(self, context: Any, tensors: Sequence[Any]) -> None:
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "_tensors", tuple(tensors))

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What ``save_for_backward`` was given."""
        return self._tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)


def call_backward(
    context: Any, is_tensor: Sequence[bool], was_defined: Sequence[bool], saved: Sequence[Any], *gradients: Any
) -> tuple[Any, ...]:
    """The backward of a ``torch.autograd.Function``, one result for each argument of the forward.

    ``was_defined`` says which gradients there were at the capture: for those the engine has not decided between None and
    zeros, should there be none this time.
    """
    kind = context._forward_cls
    count = len(context.needs_input_grad)
    backward = kind.vjp if kind.vjp is not torch.autograd.Function.vjp else kind.backward
    if any(item is None for item in gradients):
        gradients = tuple(
            item if item is not None or not known else _materialized(context, index)
            for index, (item, known) in enumerate(zip(gradients, was_defined, strict=True))
        )
    results = backward(SavedContext(context, saved), *gradients)
    if not isinstance(results, tuple):
        results = (results,)
    if len(results) > count and all(item is None for item in results[count:]):
        results = results[:count]
    name = f"{kind.__name__}Backward"
    if len(results) != count:
        raise RuntimeError(
            f"function {name} returned an incorrect number of gradients (expected {count}, got {len(results)})"
        )
    for position, (item, tensor) in enumerate(zip(results, is_tensor, strict=True)):
        if not tensor and item is not None:
            raise RuntimeError(
                f"function {name} returned a gradient different than None at position {position + 1}, "
                "but the corresponding forward input was not a Variable"
            )
        if item is not None and not isinstance(item, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(item).__name__})")
    return tuple(item if needed else None for item, needed in zip(results, context.needs_input_grad, strict=True))


def compiled_prologue(context: Any, was_defined: Sequence[bool], saved: Sequence[Any], *gradients: Any) -> list[Any]:
    """What the backward graph of one of Dovetail's own compiled functions is called with."""
    if [item is not None for item in gradients] != list(was_defined):
        raise CaptureError(
            "other results of a compiled function get gradients than when the backward was captured, although the autograd "
            "graph is the same",
            advice="a torch.autograd.Function gives None in some calls only: let it give zeros, or run this backward eagerly",
        )
    return context._forward_cls.prologue(context, saved, gradients)  # type: ignore[no-any-return]


def of_either_order(first: Any, higher: Any) -> Any:
    """One gradient computed in two ways: by a compiled function's graph, and by its backward that can be differentiated again.

    Which one is used is decided when the captured backward becomes a graph.
    """
    raise AssertionError("a captured backward runs without having become a graph")


def _materialized(context: Any, index: int) -> torch.Tensor | None:
    """What stands for a gradient that did not come: zeros, unless the forward said ``set_materialize_grads(False)``."""
    kind = context._forward_cls
    wanted = getattr(context, private_engine.MATERIALIZE_NOTE, None)
    if wanted is None:
        codes = [getattr(getattr(kind, name), "__code__", None) for name in ("forward", "setup_context")]
        if any(code is not None and "set_materialize_grads" in code.co_names for code in codes):
            raise CaptureError(
                f"{kind.__name__} got no gradient, and whether it wants zeros was decided before the block was entered",
                advice="run the forward inside of the compiled_autograd block too",
            )
    if wanted is False:
        return None
    like = context._input_metadata[index]
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)


def _hook_name(hook: Any) -> str:
    return str(getattr(hook, "__name__", "<unknown>"))


def _check_one(before: Any, after: Any, hook: Any) -> None:
    if after is None:
        return
    if before is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(after, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(after).__name__}'")
    if (before.dtype, before.device, before.layout) != (after.dtype, after.device, after.layout):
        raise RuntimeError(
            f"hook '{_hook_name(hook)}' has changed the type of value (was {before.type()} got {after.type()})"
        )
    if before.shape != after.shape:
        raise RuntimeError(f"hook '{_hook_name(hook)}' has changed the size of value")


def _check_tuple(before: Sequence[Any], after: Any, hook: Any) -> None:
    if not isinstance(after, tuple):
        raise TypeError(f"expected tuple, but hook returned '{type(after).__name__}'")
    if len(before) != len(after):
        raise RuntimeError(
            f"hook '{_hook_name(hook)}' has returned an incorrect number of values "
            f"(got {len(after)}, but expected {len(before)})"
        )
    for left, right in zip(before, after, strict=True):
        _check_one(left, right, hook)


def call_tensor_hook(hook: Callable[[Any], Any], gradient: Any) -> Any:
    """A hook of ``Tensor.register_hook``: its result, if there is one, takes the gradient's place."""
    result = hook(gradient)
    _check_one(gradient, result, hook)
    return gradient if result is None else result


def call_native_tensor_hooks(identifier: int, gradient: Any) -> Any:
    """Hooks that native code has registered on a tensor."""
    # retain_grad, the only one in torch itself, does nothing without a gradient.
    return None if gradient is None else private_engine.call_native_tensor_hooks(identifier, gradient)


def call_node_pre_hook(hook: Callable[..., Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    """A hook of ``Node.register_prehook``."""
    before = tuple(gradients)
    result = hook(before)
    if result is None or result is before:
        return before
    _check_tuple(before, result, hook)
    return tuple(result)


def call_node_post_hook(hook: Callable[..., Any], outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """A hook of ``Node.register_hook``."""
    before = tuple(outputs)
    result = hook(before, tuple(inputs))
    if result is None or result is before:
        return before
    _check_tuple(before, result, hook)
    return tuple(result)


def call_post_accumulate_hook(hook: Callable[[Any], Any], variable: torch.Tensor, gradient: Any) -> None:
    """A hook of ``Tensor.register_post_accumulate_grad_hook``; nothing has been accumulated where no gradient came."""
    if gradient is None:
        return
    result = hook(variable)
    if result is not None and result is not variable:
        raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def unpack_saved(hook: Callable[[Any], Any], packed: Any) -> torch.Tensor:
    """A tensor back from what a saved-tensor hook made of it."""
    result = hook(packed)
    if not isinstance(result, torch.Tensor):
        raise TypeError("Output of saved tensor unpack_hook expected to be a Tensor")
    return result


def check_for_nan(name: str, positions: Sequence[int], outputs: Sequence[Any]) -> None:
    """What anomaly mode asks of the gradients that a node gives."""
    for position, output in zip(positions, outputs, strict=True):
        if output is None:
            continue
        with torch.no_grad():
            values = output if output.layout is torch.strided else output.coalesce().values()
            is_nan = bool(torch.isnan(values).any())
        if is_nan:
            raise RuntimeError(f"Function '{name}' returned nan values in its {position}th output.")


def copy_slices_prologue(
    gradients: Sequence[Any],
    base_sizes: Sequence[int],
    base_strides: Sequence[int],
    base_offset: int,
    view_sizes: Sequence[int],
    view_strides: Sequence[int],
    view_offset: int,
) -> tuple[Any, Any, Any]:
    """An in-place write to a view: the base's gradient, the part of it that was written, and a copy of the part."""
    gradient = gradients[0]
    if gradient is None:
        return None, None, None
    result = gradient.new_empty_strided(base_sizes, base_strides)
    result.copy_(gradient)
    part = result.as_strided(view_sizes, view_strides, view_offset - base_offset)
    return result, part, part.clone(memory_format=torch.contiguous_format)


def copy_slices_epilogue(needed: Sequence[bool], result: Any, gradients: Sequence[Any], part: Any) -> list[Any]:
    """The other half: what the write's own node says about the old values goes into the base's gradient."""
    results: list[Any] = [None] * len(needed)
    for index, (flag, gradient) in enumerate(zip(needed, gradients, strict=True)):
        if not flag or gradient is None:
            continue
        if index == 0:
            part.copy_(gradient)
            results[0] = result
        else:
            results[index] = gradient
    return results


class _InTheEngine(torch.autograd.Function):
    """A node whose backward runs something else."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        ctx.function()
        return None, None


def inside_the_engine(engine_run: Callable[..., Any], keep_graph: Any, function: Callable[[], Any]) -> Any:
    """``function()`` as a part of a running backward: hooks may queue callbacks and ask which backward they are in."""
    result: list[Any] = []
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        root = _InTheEngine.apply(anchor, lambda: result.append(function()))  # type: ignore[no-untyped-call]
    engine_run((root,), (torch.ones(()),), keep_graph, False, (), True, accumulate_grad=True)
    return result[0]


#: Steps that run the user's code or write to what the user can see; they keep their order.
EFFECTS = frozenset(
    {
        accumulate_grad,
        call_backward,
        compiled_prologue,
        call_tensor_hook,
        call_native_tensor_hooks,
        call_node_pre_hook,
        call_node_post_hook,
        call_post_accumulate_hook,
        unpack_saved,
        check_for_nan,
    }
)
#: Those of them that are the user's own code.
USER_CODE = EFFECTS - {accumulate_grad, check_for_nan}
