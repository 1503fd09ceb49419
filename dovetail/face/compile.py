"""The public face: ``compile``, ``capture`` and ``explain``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.capture_joint import capture_joint
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.state import create_state
from dovetail.errors import CaptureError, NotCallableError
from dovetail.events import EventLog
from dovetail.face.compiled_function import CompiledFunction, collection_paused
from dovetail.face.module import CompiledModule
from dovetail.frontend.code.frame import Break
from dovetail.frontend.sizes.size_changes import SizeChanges
from dovetail.higher_order.capture import lacks_derivative
from dovetail.options import Options, make_options
from dovetail.torch_private import state as private_state
from dovetail.trace import CaptureSettings, Retry


def compile(function: Any = None, **options: Any) -> Any:
    """Compile a function or a module; use it like the original.

    Options are those of :class:`dovetail.options.Options`. A module gives a module with the same parameters and the same
    ``state_dict``. Raises :class:`NotCallableError`, :class:`OptionError` or :class:`UnknownBackendError` at once; what
    cannot be captured at the first call runs eagerly with one :class:`EagerFallbackWarning`, or raises
    :class:`GraphBreakError` with ``fullgraph=True``.

    >>> import torch, dovetail
    >>> double = dovetail.compile(lambda x: x * 2, backend="aten")
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """
    if function is None:
        return lambda wrapped: compile(wrapped, **options)
    chosen = make_options(**options)
    if isinstance(function, (CompiledModule, CompiledFunction)):
        function = function.original
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(compile(function.__func__, **options))
    if not callable(function):
        raise NotCallableError(
            f"a {type(function).__name__} cannot be compiled because it cannot be called",
            advice="hand over a function or a torch.nn.Module",
        )
    if isinstance(function, torch.nn.Module):
        return CompiledModule(function, functools.partial(_compiled_call, options=chosen))
    return _compiled_call(function, chosen)


def _compiled_call(function: Callable[..., Any], options: Options) -> CompiledFunction:
    if not options.compiled_autograd:
        return CompiledFunction(function, options)
    wing = importlib.import_module("dovetail.backward_capture.block")
    return wing.FunctionWithBackwards(function, options)  # type: ignore[no-any-return]


def capture(function: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> JointGraph:
    """Stages 0 and 1 with no context left open: the joint graph of one call.

    Raises :class:`CaptureError` if the call cannot be captured as one graph.

    >>> import torch, dovetail
    >>> joint = dovetail.capture(torch.nn.Linear(2, 1), (torch.ones(3, 2),))
    >>> joint.num_primals
    3
    """

    def attempt(settings: CaptureSettings) -> JointGraph:
        with collection_paused(), private_state.preserved_rng_state(), contextlib.ExitStack() as stack:
            return capture_joint(create_state(stack, function, tuple(args), kwargs, settings=settings))

    # Dimensions that were marked are symbolic here too.
    settings = CaptureSettings(SizeChanges().policy(None, False, tuple(args), kwargs or {}))
    try:
        while True:
            try:
                return attempt(settings)
            except Retry as retry:
                settings = retry.changed(settings)
            except (RuntimeError, NotImplementedError) as error:
                if not lacks_derivative(error):
                    raise
                settings = dataclasses.replace(settings, math_attention=True)
    except Break as stop:
        raise CaptureError(stop.reason, where=stop.where, advice=stop.advice) from stop


@dataclass(frozen=True)
class Explanation:
    """What Dovetail would do with a call, and why. ``breaks`` says where graphs are broken, and what runs after."""

    entries: tuple[str, ...]
    events: tuple[str, ...]
    breaks: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.entries)} compiled entries"]
        lines += [f"  entry {number}: {text}" for number, text in enumerate(self.entries)]
        if self.breaks:
            lines.append(f"{len(self.breaks)} places where a graph is broken")
            lines += [f"  {text}" for text in self.breaks]
        lines += [f"  {event}" for event in self.events]
        return "\n".join(lines)


def explain(compiled: Any) -> Callable[..., Explanation]:
    """``dovetail.explain(compiled)(*args)``: for each entry, whether its guards hold and if not, which failed and why.

    Nothing is run and nothing compiled.
    """
    function = compiled_function(compiled)

    def report(*args: Any, **kwargs: Any) -> Explanation:
        texts = []
        for entry in function.entries:
            failures = entry.checker.explain(function.original, args, kwargs)
            kind = f"runs eagerly ({entry.reason})" if entry.run is None else "hit"
            texts.append(kind if not failures else "miss: " + "; ".join(str(item) for item in failures))
        breaks = [
            f"{item.__qualname__}: {len(item.entries)} compiled entries after it"  # type: ignore[attr-defined]
            for item in function.continuations()
        ]
        return Explanation(tuple(texts), tuple(str(event) for event in function.events.events), tuple(breaks))

    return report


def compiled_function(compiled: Any) -> CompiledFunction:
    """The :class:`CompiledFunction` behind what :func:`compile` returned."""
    if isinstance(compiled, CompiledModule):
        compiled = compiled.compiled_call
    if not isinstance(compiled, CompiledFunction):
        # What compiles anew for each process group has the one that it runs under ``compiled``.
        inner = getattr(compiled, "compiled", None)
        if isinstance(inner, (CompiledModule, CompiledFunction)):
            return compiled_function(inner)
        raise NotCallableError(f"a {type(compiled).__name__} was not made by dovetail.compile")
    return compiled


def events_of(compiled: Any) -> EventLog:
    """The events of a compiled function or module."""
    return compiled_function(compiled).events
