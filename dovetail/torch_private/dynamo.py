"""Torch.compile as the caller of a backend, its registered backends and its counters. Checked on torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor


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


@dataclasses.dataclass(frozen=True)
class CallersInput:
    """One input of a graph that torch.compile hands over: the caller's fake value of it, and how the caller writes it."""

    value: Any
    name: str


def callers_name(source: Any) -> str:
    """How the caller writes a source, such as ``L['x']``."""
    if source is None:
        return "an input"
    name = source.name
    return str(name() if callable(name) else name)  # a method before torch 2.12


def callers_fake_mode(inputs: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of the compiler that calls, or None."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(inputs))


def callers_inputs(graph: torch.fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode) -> list[CallersInput]:
    """The inputs as the caller's own fake values, symbols included.

    The placeholders' own values will not do: the caller's trace has been through them, in-place changes of metadata included.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    found = []
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            symbols = context.tensor_to_context.get(value) if context is not None else None
            value = fake_mode.from_tensor(
                value,
                static_shapes=context is None,
                symbolic_context=symbols,
                source=getattr(symbols, "tensor_source", None),
            )
        found.append(CallersInput(value, callers_name(source)))
    return found


@contextlib.contextmanager
def symbolic_sizes_in(fake_mode: FakeTensorMode) -> Iterator[None]:
    """C++ operators made of others ask for plain sizes, their Python forms do not: use those, in this fake mode only."""
    original = fake_mode.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        with enable_python_dispatcher():
            return original(*args, **kwargs)

    fake_mode.dispatch = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        del fake_mode.dispatch


def compiling_questions() -> tuple[Any, ...]:
    """The older names of ``torch.compiler.is_compiling``, which older libraries still call."""
    from torch._dynamo import external_utils

    return torch._utils.is_compiling, external_utils.is_compiling
