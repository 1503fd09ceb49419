"""Torch.compile: its registered backends and its counters. Checked on torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def torch_backend(name: str) -> Any:
    """One of torch's own registered backends, a callable ``(graph_module, example_inputs)``."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def aot_backend(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for torch.compile: AOTAutograd, with one compiler for the forward and the backward graph."""
    from torch._dynamo.backends.common import aot_autograd

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    return backend


def dynamo_capture_seconds() -> float:
    """Seconds that torch.compile has spent so far from bytecode to backend-ready graphs, Inductor's own work excluded."""
    from torch._dynamo.utils import compilation_time_metrics as metrics

    def total(name: str) -> float:
        return float(sum(metrics.get(name, ())))

    seconds = total("_compile.compile_inner") - total("compile_fx.<locals>.fw_compiler_base")
    if "backward._backward_impl" not in metrics:  # else the backward was compiled later, outside compile_inner
        seconds -= total("compile_fx.<locals>.bw_compiler")
    return seconds


def dynamo_graph_breaks() -> int:
    """How many graph breaks torch.compile has counted so far in this process."""
    from torch._dynamo.utils import counters

    return int(sum(counters["graph_break"].values()))


def compile_lock() -> Any:
    """The lock that torch.compile holds while it compiles, in any thread."""
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def compiling_questions() -> tuple[Any, ...]:
    """The older names of ``torch.compiler.is_compiling``, which older libraries still call."""
    from torch._dynamo import external_utils

    return torch._utils.is_compiling, external_utils.is_compiling
