"""Compiled autograd as users reach it: ``dovetail.compiled_autograd(...)`` and ``compile(..., compiled_autograd=True)``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dovetail.backward_capture.handover import open_session
from dovetail.backward_capture.session import BackwardSession
from dovetail.face.attempts import capturing
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.dispatcher import compile_lock
from dovetail.frontend.rules import rule
from dovetail.options import Options, make_options
from dovetail.rules.python.dovetail_itself import call_original
from dovetail.torch_private import state as private_state

#: Compiled segments by options: a training loop enters its block anew at every step.
_compiled_by_options: deque[tuple[Options, dict[Any, Any]]] = deque(maxlen=16)


def compiled_autograd(
    *, forward_lines: bool = False, **options: Any
) -> contextlib.AbstractContextManager[BackwardSession]:
    """A block in which ``.backward()`` and ``torch.autograd.grad`` run as graphs, whatever ran in the forward.

    The autograd graph is captured as it is when the backward runs, with its hooks, its ``torch.autograd.Function`` and its
    graph breaks. Options are those of :func:`dovetail.compile`. The block's value shows what was captured: print it; its
    ``explain()`` says what is compiled. With ``forward_lines=True`` each node is shown with the forward's line; the forward
    gets slower.

    >>> import torch, dovetail
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> with dovetail.compiled_autograd(backend="aten") as backwards:
    ...     (x * x).backward()
    >>> x.grad, backwards.runs
    (tensor(6.), 1)
    """
    session = _session_for(make_options(**options))
    session.fullgraph = bool(options.get("fullgraph"))
    session.forward_lines = forward_lines
    return open_session(session)


class FunctionWithBackwards(CompiledFunction):
    """A compiled function whose calls also capture the backwards that run in them (``compiled_autograd=True``)."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        super().__init__(function, options)
        # A backward that cannot be captured runs eagerly: it is the call that is to be one graph.
        self.backwards = _session_for(dataclasses.replace(options, fullgraph=False))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function within its backward session."""
        if torch.compiler.is_dynamo_compiling() or private_state.dispatch_mode_count() or capturing.active:
            return self.original(*args, **kwargs)
        with open_session(self.backwards):
            return super().__call__(*args, **kwargs)


# In a compiled function it is part of the same graph, like any other.
rule(FunctionWithBackwards.__call__)(call_original)


def _session_for(options: Options) -> BackwardSession:
    """A new session that shares its compiled segments with all sessions of the same options."""
    chosen = dataclasses.replace(options, compiled_autograd=False)
    with compile_lock:
        known = next((table for asked, table in _compiled_by_options if asked == chosen), None)
        if known is None:
            known = {}
            _compiled_by_options.appendleft((chosen, known))
    return BackwardSession(lambda function: CompiledFunction(function, chosen), known)
