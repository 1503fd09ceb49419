"""The program's lines that autograd nodes come from."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.torch_private.autograd_nodes import is_leaf_node

#: The folders of torch and Dovetail, whose lines are not the program's.
_LIBRARIES = (str(pathlib.Path(torch.__file__).parent), str(pathlib.Path(__file__).parents[1]))


def lines_are_noted() -> bool:
    """Whether torch notes the forward's lines in the nodes without checking the backward."""
    return torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()


def noting_lines(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """A block in which torch notes in each autograd node where it was made, as its anomaly mode does in a forward."""
    if not wanted or torch.is_anomaly_enabled():
        return contextlib.nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def forward_lines(nodes: Sequence[Any]) -> dict[int, str]:
    """The program's lines that made the nodes of a backward, by visit, where they are known.

    Leaves are left out: a leaf's node is made wherever the leaf was first used.
    """
    own = {index: node for index, node in enumerate(nodes) if node is not None and not is_leaf_node(node)}
    return {index: line for index, node in own.items() if (line := _line(node))}


def _line(node: Any) -> str:
    frames = [frame.strip() for frame in node.metadata.get("traceback_") or () if frame.strip()]
    own = [frame for frame in frames if not any(f'"{library}' in frame for library in _LIBRARIES)]
    if not frames:
        return ""
    where, *code = (own or frames)[-1].splitlines()
    place, _, line = where.removeprefix("File ").partition(", line ")
    number = line.split(",")[0]
    text = ":".join([place.strip().strip('"'), number]) if number.isdigit() else where
    return f"{text} `{code[0].strip()}`" if code else text
