"""Anomaly mode: runs a captured backward step by step, and names the node whose step fails or makes a NaN."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dovetail.backward_capture.graph import CapturedBackward
from dovetail.backward_capture.segment_runner import check_unwritten, uses_of_saved
from dovetail.torch_private import autograd as private_autograd
from dovetail.trace.backward_order import BackwardCall, hook_order

#: The frames of a captured backward, which eager's tracebacks do not have.
_OWN_FRAMES = tuple(f'File "{path}' for path in (Path(__file__).parent, fx.interpreter.__file__))


@contextlib.contextmanager
def unwatched() -> Iterator[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """A block in which the engine does not comment on errors; it yields a block with the program's own mode."""
    checks = torch.is_anomaly_check_nan_enabled()
    with torch.autograd.set_detect_anomaly(False, checks):
        yield lambda: torch.autograd.set_detect_anomaly(True, checks)


class StepByStep(fx.Interpreter):
    """Runs a captured backward one step after the other, each write to ``.grad`` at its place, as eager does.

    Where a step fails, a warning shows the traceback of its forward call, in eager's words.
    """

    def __init__(self, captured: CapturedBackward, call: BackwardCall, order: tuple[int, ...]) -> None:
        super().__init__(captured.graph_for(order, call.create_graph, torch.is_anomaly_check_nan_enabled()))
        self.extra_traceback = False
        self._nodes = hook_order(call)
        self._notes_parents = call.create_graph
        self._saved = uses_of_saved(self.graph)
        self._tensors: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []

    def __call__(self, *arguments: Any) -> Any:
        """Run on collected values; returns the gradients that were asked for."""
        self._tensors = arguments[0]
        self._versions = [tensor._version for tensor in self._tensors]
        return self.run(*arguments)

    def run_node(self, n: fx.Node) -> Any:
        """Run one step."""
        try:
            check_unwritten(self._tensors, self._versions, self._saved.get(n, ()))
            if not self._notes_parents or not n.meta.get("call"):
                return super().run_node(n)
            first = private_autograd.next_sequence_number()
            result = super().run_node(n)
            _note_parent(self._nodes[n.meta["call"]], result, first)
            return result
        except Exception:
            visit = n.meta.get("call")
            if visit:
                for text in _blame(self._nodes[visit]):
                    warnings.warn(text, UserWarning, stacklevel=2)
            raise


def _note_parent(parent: Any, result: Any, first: int) -> None:
    """Note on the nodes that a step has made (from number ``first`` on) the node of the backward that the step belongs to."""
    values = result if isinstance(result, (tuple, list)) else (result,)
    open_nodes: list[Any] = [value.grad_fn for value in values if isinstance(value, torch.Tensor)]
    seen = set()
    while open_nodes:
        node = open_nodes.pop()
        if (
            node is None
            or node in seen
            or private_autograd.is_leaf_node(node)
            or private_autograd.sequence_number(node) < first
        ):
            continue
        seen.add(node)
        node.metadata["parent_"] = parent
        traceback = node.metadata.get("traceback_")
        if traceback:
            node.metadata["traceback_"] = [line for line in traceback if not line.lstrip().startswith(_OWN_FRAMES)]
        open_nodes += [target for target, _ in node.next_functions]


def _blame(node: Any) -> list[str]:
    """Eager's warnings about a failed node and about the nodes whose backward made it."""
    traceback = node.metadata.get("traceback_") if hasattr(node, "metadata") else None
    if not traceback:
        return [
            f"Error detected in {node.name()}. "
            "No forward pass information available. Enable detect anomaly during forward pass for more information."
        ]
    texts = [f"Error detected in {node.name()}. Traceback of forward call that caused the error:\n{''.join(traceback)}"]
    parent = node.metadata.get("parent_")
    while parent is not None:
        traceback = parent.metadata.get("traceback_")
        if not traceback:
            texts.append(
                "\n\nNo forward pass information available of the previous calculation. "
                "Enable detect anomaly during forward pass for more information."
            )
            break
        texts.append(
            f"\n\nPrevious calculation was induced by {parent.name()}. "
            f"Traceback of forward call that induced the previous calculation:\n{''.join(traceback)}"
        )
        parent = parent.metadata.get("parent_")
    return texts
