"""The third door to torch's private names: process groups and the operators that exchange tensors between ranks."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed


def process_group(name: str) -> Any:
    """The process group with this name, which is how operators name one; raises RuntimeError if there is none. Torch 2.13."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def process_group_name(group: Any) -> str:
    """The name of a process group, as operators take it; None is the default group. Torch 2.13."""
    found = group if group is not None else torch.distributed.distributed_c10d._get_default_group()
    return str(found.group_name)


def functional_collectives() -> Any:
    """The operators ``all_reduce``, ``wait_tensor`` and so on that return new tensors, ready to be traced. Torch 2.13."""
    importlib.import_module("torch.distributed._functional_collectives")
    return torch.ops._c10d_functional
