"""Anomaly mode: a captured backward step by step, and who is to blame where a step fails or makes a NaN."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from dovetail.compiled_autograd.graph import CapturedBackward
from dovetail.compiled_autograd.order import BackwardCall, hook_order
from dovetail.compiled_autograd.parts import check_unwritten, uses_of_saved


@contextlib.contextmanager
def unwatched() -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """A block in which the engine does not comment on errors; what it gives is a block in which the program's mode is as it was."""
    checks = torch.is_anomaly_check_nan_enabled()
    with torch.autograd.set_detect_anomaly(False, checks):
        yield lambda: torch.autograd.set_detect_anomaly(True, checks)


class StepByStep(fx.Interpreter):
    """Runs a captured backward one step after the other, every leaf's ``.grad`` at its place, as eager does.

    Where a step fails, the traceback of the forward call behind it is shown as a warning, in eager's words.
    """

    def __init__(self, captured: CapturedBackward, call: BackwardCall, order: tuple[int, ...]) -> None:
        super().__init__(captured.graph_for(order, check_nan=torch.is_anomaly_check_nan_enabled()))
        self.extra_traceback = False
        self._nodes = hook_order(call)
        self._saved = uses_of_saved(self.graph)
        self._tensors: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []

    def __call__(self, *arguments: Any) -> Any:
        """The gradients that were asked for."""
        self._tensors = arguments[0]
        self._versions = [tensor._version for tensor in self._tensors]
        return self.run(*arguments)

    def run_node(self, n: fx.Node) -> Any:
        """One step."""
        try:
            check_unwritten(self._tensors, self._versions, self._saved.get(n, ()))
            return super().run_node(n)
        except Exception:
            visit = n.meta.get("call")
            if visit:
                warnings.warn(_blame(self._nodes[visit]), UserWarning, stacklevel=2)
            raise


def _blame(node: Any) -> str:
    """What eager says about the node that is at fault, and about those that made it."""
    metadata = getattr(node, "metadata", {})
    text = f"Error detected in {node.name()}. "
    traceback = metadata.get("traceback_")
    if not traceback:
        return text + (
            "No forward pass information available. Enable detect anomaly during forward pass for more information."
        )
    text += f"Traceback of forward call that caused the error:\n{''.join(traceback)}"
    parent = metadata.get("parent_")
    while parent is not None:
        traceback = parent.metadata.get("traceback_")
        if not traceback:
            return text + (
                "\n\nNo forward pass information available of the previous calculation. "
                "Enable detect anomaly during forward pass for more information."
            )
        text += (
            f"\n\nPrevious calculation was induced by {parent.name()}. "
            f"Traceback of forward call that induced the previous calculation:\n{''.join(traceback)}"
        )
        parent = parent.metadata.get("parent_")
    return text
