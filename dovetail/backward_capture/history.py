"""Second derivatives over saved-tensor hooks (a checkpoint has such hooks): unpacked tensors keep their autograd history.

A hook returns values without history. Only the node that has saved them knows their place in the autograd graph, so with
``create_graph=True`` the node itself is asked: it calls the hook, and puts the result back at its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.backward_capture.builder import Collected
from dovetail.backward_capture.graph import CapturedBackward
from dovetail.errors import CaptureError
from dovetail.torch_private import engine as private_engine
from dovetail.trace.backward_order import BackwardCall, hook_order


class _All:
    """The tensors that a ``torch.autograd.Function`` has saved; its node unpacks all of them at once."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._tensors: tuple[Any, ...] = ()
        self._left: set[int] = set()

    def get(self, place: int) -> torch.Tensor:
        """The tensor at a place; the hooks are called again once each tensor has been asked for."""
        if place not in self._left:
            self._tensors = self._node.saved_tensors
            self._left = set(range(len(self._tensors)))
        self._left.discard(place)
        return self._tensors[place]  # type: ignore[no-any-return]


class UnpackWithHistory:
    """Stands for an unpack hook in a captured backward that is differentiated again."""

    def __init__(self, get: Callable[[], torch.Tensor]) -> None:
        self._get = get

    def __call__(self, packed: Any) -> torch.Tensor:
        """The saved tensor with its history; the node itself knows ``packed``."""
        return self._get()


def with_history(captured: CapturedBackward, call: BackwardCall, collected: Collected) -> Collected:
    """Collected values with unpack hooks that keep the history of what they unpack."""
    nodes = hook_order(call)
    hooks, packed = list(collected.hooks), collected.packed
    saved: dict[int, list[tuple[Any, str, int | None]]] = {}
    functions: dict[int, _All] = {}
    for visit, hook_place, packed_place in captured.unpacked:
        node = nodes[visit]
        if visit not in saved:
            saved[visit] = private_engine.saved_through_hooks(node)
            functions[visit] = _All(node)
        found = _take(saved[visit], hooks[hook_place], packed[packed_place])
        if found is None:
            raise CaptureError(
                f"{node.name()} has saved a value through hooks and does not show it (an in-place write to a view, native "
                "code), so the unpacked value has no history to differentiate"
            )
        hooks[hook_place] = UnpackWithHistory(_getter(node, functions[visit], *found))
    return collected._replace(hooks=hooks)


def _take(saved: list[tuple[Any, str, int | None]], hook: Any, packed: Any) -> tuple[str, int | None] | None:
    for index, (raw, attribute, place) in enumerate(saved):
        if raw.unpack_hook is hook and raw.data is packed:
            del saved[index]
            return attribute, place
    return None


def _getter(node: Any, function: _All, attribute: str, place: int | None) -> Callable[[], torch.Tensor]:
    if attribute == "saved_tensors":
        assert place is not None
        index = place
        return lambda: function.get(index)
    if place is None:
        return lambda: getattr(node, attribute)  # type: ignore[no-any-return]
    return lambda: _raw(node, attribute)[place].unpack()  # type: ignore[no-any-return]


def _raw(node: Any, attribute: str) -> Sequence[Any]:
    return getattr(node, f"_raw{attribute}")  # type: ignore[no-any-return]
