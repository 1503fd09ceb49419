"""Recordings of GPU work (CUDA graphs). Checked on torch 2.13 (CPU)."""

from __future__ import annotations

import linecache
from typing import Any

import torch


def end_capture_allocations(device: torch.device, pool: Any) -> None:
    """Have the allocator end what a failed capture may have left begun; nothing happens if it was ended."""
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return


def last_line_of_generated_code(error: BaseException | None) -> str:
    """The operator and the user's line in the innermost frame of code that Dovetail has generated; may be empty.

    Errors that this one came after are looked at too: the end of a failed capture raises an error of its own.
    """
    found = ""
    while error is not None and not found:
        traceback = error.__traceback__
        while traceback is not None:
            name = traceback.tb_frame.f_code.co_filename
            if name.startswith("<dovetail"):
                found = linecache.getline(name, traceback.tb_lineno).strip().partition("# ")[2]
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__
    return found


def storage_references(tensor: torch.Tensor) -> int:
    """The number of references to a tensor's memory, C++ ones included (such as saved for a backward)."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
