"""The compilers that the runners know, and what they say of something compiled."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def _aot_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _dovetail_on(backend: str, fullgraph: bool = False) -> Compiler:
    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        import dovetail

        return dovetail.compile(function, fullgraph=fullgraph, backend=backend)

    return compiler


def _torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    import dovetail

    torch._dynamo.reset()
    backend = dovetail.torch_backend("aten", fullgraph=True)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def breaks(compiled: Any) -> list[str]:
    """Each graph break of something made by Dovetail: the reason and the user's line."""
    from dovetail.face.compile import CompiledFunction, CompiledModule
    from dovetail.reports.explanation import events_of

    if not isinstance(compiled, (CompiledFunction, CompiledModule)):
        return []
    found = [event for event in events_of(compiled).events if event.name == "graph break"]
    return list(dict.fromkeys(f"{event.details['reason']} at {event.details['where']}" for event in found))


COMPILERS: dict[str, Compiler] = {
    "dovetail": _dovetail_on("aten", fullgraph=True),
    "dovetail-with-breaks": _dovetail_on("aten"),
    "dovetail-eager": _dovetail_on("eager"),
    "dovetail-inductor": _dovetail_on("inductor", fullgraph=True),
    "dovetail-inductor-with-breaks": _dovetail_on("inductor"),
    "identity": lambda function: function,
    "aot_eager": _aot_eager,
    "torch.compile": _torch_compile,
}


def rounds(compiler: Compiler) -> bool:
    """Whether kernels of its own compute the results, which are eager's up to rounding."""
    return compiler is COMPILERS["dovetail-inductor"]


def not_compiled(compiled: Any) -> str:
    """Why the last call of something made by Dovetail did not run compiled code, or '' where it did.

    Without this a fall back to eager would pass every comparison.
    """
    try:
        from dovetail.face.compile import CompiledFunction, CompiledModule
        from dovetail.reports.explanation import compiled_function
    except ImportError:
        return ""
    if not isinstance(compiled, (CompiledFunction, CompiledModule)):
        return ""
    entries = compiled_function(compiled).entries
    if not entries:
        return "no entry was made"
    if entries[0].resume_point is not None:
        return "the graph is broken"
    return "" if entries[0].run is not None else f"it fell back to eager: {entries[0].reason}"


@functools.cache
def refusal_types() -> tuple[type[BaseException], ...]:
    """The exceptions that count as a refusal."""
    kinds: list[type[BaseException]] = [torch._dynamo.exc.TorchDynamoException]
    try:
        from dovetail.errors import DovetailError
    except ImportError as error:
        # Half-built packages are normal while other compilers than Dovetail are tried.
        warnings.warn(f"dovetail cannot be imported: {error}", stacklevel=2)
    else:
        kinds.append(DovetailError)
    return tuple(kinds)
