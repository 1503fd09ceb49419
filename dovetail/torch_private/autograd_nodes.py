"""Single nodes of the autograd graph: their order, the edges that a backward comes to, saved values, hooks."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from dovetail.torch_private.autograd import asked_for

#: ``apply`` of a custom function before it is bound to a class: Python up to torch 2.14, native code since then.
FUNCTION_APPLY: Any = vars(torch.autograd.Function)["apply"]
FUNCTION_APPLY = getattr(FUNCTION_APPLY, "__func__", FUNCTION_APPLY)
#: Questions to the engine that may raise before all leaves count as wanted: each error takes 50 us.
_MOST_ERRORS = 4

_LEAF_NODE: type = torch._C._functions.AccumulateGrad
_make_saved: Any = getattr(torch._C._autograd, "_make_saved_tensor", None)

#: The function by which gradients are switched on and off; modes of torch's functions see it called.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


def is_counted(tensor: torch.Tensor) -> bool:
    """Whether autograd has counted writes to a tensor; it counts none of inference tensors."""
    return not tensor.is_inference() and tensor._version > 0


def count_from_zero(tensors: Sequence[torch.Tensor]) -> None:
    """Forget the writes to tensors that autograd has counted; those that share memory with them count together."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), (0,) * len(tensors))


def torch_functions_enabled() -> Any:
    """A context in which modes are told of torch's functions again."""
    return torch._C._EnableTorchFunction()


def is_function_apply(function: Any) -> bool:
    """Whether this is the ``apply`` of a class of ``torch.autograd.Function``.

    >>> is_function_apply(torch.autograd.Function.apply), is_function_apply(len)
    (True, False)
    """
    if isinstance(function, types.BuiltinFunctionType):
        owner = function.__self__
        return isinstance(owner, type) and function == FUNCTION_APPLY.__get__(None, owner)
    return getattr(function, "__func__", None) is FUNCTION_APPLY


def gradient_node(tensor: torch.Tensor) -> Any:
    """The autograd node at which a tensor's gradient arrives."""
    return torch.autograd.graph._get_grad_fn_or_grad_acc(tensor)


def sequence_number(node: Any) -> int:
    """The order in which a node was made; the engine runs ready nodes from the newest to the oldest."""
    return int(node._sequence_nr())


def node_name(node: Any) -> str:
    """The name of a node's kind. A custom function may have set an attribute ``name`` on its own (``ctx.name = ...``).

    >>> node_name(torch.ones(2, requires_grad=True).exp().grad_fn)
    'ExpBackward0'
    """
    return str(type(node).name(node))


def is_leaf_node(node: Any) -> bool:
    """Whether gradients are added up here: such nodes have no number of their own."""
    return node_name(node) == "torch::autograd::AccumulateGrad"


def leading_to(nodes: Collection[Any], ends: Iterable[Any]) -> set[Any]:
    """The nodes from which a backward comes to one of ``ends``; an end only where it leads to another one.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = x.exp()
    >>> node, apart = y.sum().grad_fn, x.sin().grad_fn
    >>> leading_to([node, apart, y.grad_fn], [y.grad_fn]) == {node}
    True
    """
    before: dict[Any, list[Any]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            before.setdefault(following, []).append(node)
    found: set[Any] = set()
    stack = [*ends]
    while stack:
        new = [node for node in before.get(stack.pop(), ()) if node not in found]
        found.update(new)
        stack += new
    return found


def wanted_edges(edges: Sequence[tuple[Any, int]]) -> tuple[int, ...]:
    """Positions of the edges of the autograd graph that the backward that runs now will come to (or more than those)."""
    leading = [index for index, (node, _) in enumerate(edges) if node is not None]
    if len(leading) == 1:
        # The node runs because of it.
        return tuple(leading)
    calls = asked_for(sys._getframe(), 1)
    asked = {id(item if isinstance(item, torch.Tensor) else item.node) for item in (calls[0] if calls else ())}
    wanted: list[int] = []
    raised = 0
    for index in leading:
        node = edges[index][0]
        is_leaf = type(node) is _LEAF_NODE
        if asked and is_leaf:
            # torch raises when it is asked about a leaf that autograd.grad was asked for.
            if id(node.variable) in asked or id(node) in asked:
                wanted.append(index)
            continue
        # Not known for a backward on another device, which runs in a thread of its own.
        if raised < _MOST_ERRORS or not is_leaf:
            try:
                if not torch._C._will_engine_execute_node(node):
                    continue
            except RuntimeError:
                raised += 1
        wanted.append(index)
    return tuple(wanted)


def make_saved_tensor(value: torch.Tensor) -> Any:
    """An input as an autograd node saves it: ``unpack()`` gives it with its gradient edge, or eager's error if it was
    written to meanwhile. It takes 0.3 us, and makes no cycle when the input itself is written to later.
    """
    return _SavedByNode(value) if _make_saved is None else _make_saved(value, False)


class _SavedByNode:
    """The same on torch 2.11, which saves tensors for nodes only: a node of its own, which takes 20 us."""

    def __init__(self, value: torch.Tensor) -> None:
        with torch.enable_grad():
            # The node lives as long as its result.
            self._result: Any = _Saving.apply(torch.empty(0, requires_grad=True), value)

    def unpack(self) -> torch.Tensor:
        """The value, or the error of a tensor that was written to."""
        found: torch.Tensor = self._result.grad_fn.saved_tensors[0]
        return found


class _Saving(torch.autograd.Function):
    """Saves its second argument; nothing is computed, and nobody asks for a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A tensor whose node has saved the value."""
        ctx.save_for_backward(value)
        return anchor.clone()


def saved_value(node: Any, name: str) -> Any:
    """The value that an autograd node has saved under ``name``; a negative dimension comes back as the number that it is."""
    value = getattr(node, f"_saved_{name}")
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether torch has wrapped a batch of tensors in this one, for ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside of those that ``vmap``, ``grad`` and ``jvp`` wrap around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def outside_of_batches() -> Iterator[None]:
    """A block in which random operators may run although the gradients of a backward are batched."""
    levels = torch._C._vmapmode_increment_nesting()
    for _ in range(levels):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(levels - 1):
            torch._C._vmapmode_increment_nesting()


def hooks_registered() -> int:
    """The number of hooks registered so far in this process, on tensors, nodes and modules."""
    return int(torch.utils.hooks.RemovableHandle.next_id)


def note_hook(tensor: torch.Tensor) -> None:
    """Note on the node of a tensor's gradient that the tensor has a hook, which no node shows."""
    gradient_node(tensor).metadata[note_hook] = True


def acts(node: Any) -> bool:
    """Whether a backward through the node runs code of the program's own: a custom function, or a hook."""
    if isinstance(node, torch.autograd.function.BackwardCFunction) or note_hook in node.metadata:
        return True
    variable = getattr(node, "variable", None)
    if variable is not None and (variable._backward_hooks or variable._post_accumulate_grad_hooks):
        return True
    return any(map(_has_others, (node.register_prehook, node.register_hook)))


def node_methods(name: str) -> list[Any]:
    """A method of autograd's nodes, as it stands in each of their classes."""
    kinds = [kind for kind in vars(torch._C._functions).values() if isinstance(kind, type)]
    return [vars(kind)[name] for kind in (*kinds, torch._C._FunctionBase) if name in vars(kind)]


def has_node_hooks(leaf: torch.Tensor) -> bool:
    """Whether Python has registered hooks on the node at which a leaf's gradient arrives.

    The node shows them to the garbage collector, unless an autograd graph holds the node. Then a hook that is registered, and
    removed at once, comes into the same table as the others.
    """
    if not leaf.requires_grad:
        return False
    node = gradient_node(leaf)
    return any(gc.get_referents(node)) or any(map(_has_others, (node.register_prehook, node.register_hook)))


def _has_others(register: Callable[[Callable[..., None]], Any]) -> bool:
    """Whether there are hooks beside one that is registered here; the counter that numbers hooks is set back."""
    kind: Any = torch.utils.hooks.RemovableHandle
    before = kind.next_id
    handle = register(lambda *gradients: None)
    try:
        return len(handle.hooks_dict_ref()) > 1
    finally:
        handle.remove()
        if kind.next_id == before + 1:
            kind.next_id = before


#: Has a function called when the backward that runs now has come to its end.
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
#: Questions with other answers in a backward, or in a block that the program itself enters, than where the program is called.
PASSING_ANSWERS = (
    torch._C._current_graph_task_id,
    torch._C._autograd._get_current_graph_task_keep_graph,
    torch._C._autograd._profiler_enabled,
    torch._C._is_fwd_grad_enabled,
)
