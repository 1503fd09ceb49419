"""Regions that the program computes a second time: those of ``torch.utils.checkpoint``.

Running such a region again, eager first puts the random generator back to where the region began, so that dropout draws the
same numbers. No graph does that. But the state that is put back tells which numbers are meant: while a trace is open, the
seed of ``torch.random``'s generator, which is one of the trace's own, counts the random operators recorded so far. An operator
that meets a smaller count is one of those, and its result is used a second time.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from dovetail.errors import CaptureError

# Far from what anybody would choose, so that a state from elsewhere is noticed.
FIRST_SEED = 0x5EED_0D0E_0000


class RandomOperators:
    """The random operators of one trace, in the order in which they draw."""

    def __init__(self) -> None:
        self._nodes: list[torch.fx.Node] = []
        self._values: dict[torch.fx.Node, Any] = {}

    def open(self, stack: contextlib.ExitStack) -> None:
        """Use the seed of this thread's generator in ``torch.random`` as the counter, until the stack is closed."""
        generator = torch.random.default_generator
        stack.callback(generator.set_state, generator.get_state())
        self._count_on(0)

    def repeated(self, target: Any) -> torch.fx.Node | None:
        """The recorded operator whose numbers are asked for again, or None for new ones.

        Raises :class:`CaptureError` for a generator in a state that no recorded operator has left.
        """
        place = torch.random.default_generator.initial_seed() - FIRST_SEED
        if place == len(self._nodes):
            return None
        if not 0 <= place < len(self._nodes) or self._nodes[place].target is not target:
            raise CaptureError(
                f"{target} draws from a random generator that was set while the function runs",
                advice="set the generator outside of the compiled function",
            )
        node = self._nodes[place]
        self._values.setdefault(node, node.meta.get("val"))
        self._count_on(place + 1)
        return node

    def record(self, node: torch.fx.Node) -> None:
        """Note a new random operator."""
        self._nodes.append(node)
        self._count_on(len(self._nodes))

    def finish(self) -> None:
        """Give operators that were used a second time their first values again. Raises :class:`CaptureError` if they differ."""
        for node, value in self._values.items():
            again = node.meta.get("val")
            if _layout(value) != _layout(again):
                raise CaptureError(
                    f"{node.target} draws other numbers when a checkpointed region runs again",
                    advice="make the region do the same both times, or leave torch.utils.checkpoint out",
                )
            node.meta["val"] = value
        self._values.clear()

    @staticmethod
    def _count_on(count: int) -> None:
        torch.random.default_generator.manual_seed(FIRST_SEED + count)


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.device)
    return [_layout(item) for item in value] if isinstance(value, (tuple, list)) else value


def draws_random_numbers(target: Any) -> bool:
    """Whether an operator draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
