"""Equal calls of operators in one graph, which a backend that fuses computes once.

Programs ask for the same thing again without knowing it: under autocast, each linear layer that reads one activation casts it for
itself, and eager keeps each cast for the backward. The aim is that of common subexpression elimination, as in the partitioner of
torch's ahead-of-time autograd; here it happens while the graph is decomposed, so that views of the one value share its memory.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.aot.nodes import memory_of, must_stay, tensor_of, writes_in_place
from dovetail.torch_private import operators as private_operators

#: Two calls may give two results.
_DIFFERENT = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.nondeterministic_bitwise,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}
_PLAIN = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Entries of ``meta`` that are facts about one value, not about where it comes from.
ABOUT_THE_VALUE = frozenset({"val", "tensor_meta", "desc", "example_value", "unbacked_bindings"})
#: A mark in the ``meta`` of an input that operators of the gradients read; a decomposition may not read it.
IN_GRADIENTS = "in_gradients"
#: Entries of ``meta`` by which no step decides where a value is computed, or when.
WITHOUT_EFFECT = ABOUT_THE_VALUE | {IN_GRADIENTS, "user_line", "stack_trace", "nn_module_stack", "source_fn_stack"}


class EqualCalls:
    """The calls of one graph that have been made, with their values: ``find`` asks for an equal one, ``note`` adds one."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._is_off = any(map(writes_in_place, graph.nodes))
        # A result has memory of its own, and the program may write to it.
        self._handed_out = set(map(memory_of, graph.output_node().all_input_nodes))
        # With the arguments, whose identities are in the keys.
        self._made: dict[Any, tuple[Any, Any]] = {}

    def find(self, node: torch.fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The key of a call, None where it is made for itself, and the value of an equal one, None if there was none."""
        key = self._key(node, args, kwargs)
        return key, None if key is None else self._made.get(key, (None,))[0]

    def note(self, key: Any, value: Any, args: Any, kwargs: Any) -> None:
        """A call has given this value."""
        if key is not None:
            self._made[key] = (value, (args, kwargs))

    def _key(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        target = node.target
        if (
            self._is_off
            or not isinstance(target, private_operators.OpOverload)
            or target.namespace not in ("aten", "prims")
        ):
            return None
        if must_stay(node) or not _DIFFERENT.isdisjoint(target.tags):
            return None
        memory = None if tensor_of(node) is None else memory_of(node)
        if memory is None or memory in self._handed_out:
            return None
        marks = tuple(
            sorted((name, mark) for name, mark in node.meta.items() if name not in WITHOUT_EFFECT and mark is not None)
        )
        if not all(isinstance(mark, (int, str)) for _, mark in marks):
            return None
        try:
            return target, _key_of(args), _key_of(kwargs), marks
        except TypeError:
            return None


def _key_of(item: Any) -> Any:
    """A key of an argument; raises TypeError for what has none. Tensors and symbols are known by their identity."""
    if isinstance(item, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("object", id(item))
    if type(item) is float:
        return ("float", item.hex())
    if isinstance(item, (list, tuple)):
        return (type(item), *map(_key_of, item))
    if isinstance(item, dict):
        return tuple((name, _key_of(value)) for name, value in sorted(item.items()))
    if isinstance(item, _PLAIN):
        return (type(item), item)
    raise TypeError(f"{type(item)} has no key")
