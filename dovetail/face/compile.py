"""The public face: ``compile`` and ``capture``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.aot.capture_joint import capture_joint, lacks_derivative
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.state import create_state
from dovetail.errors import CaptureError, InputError, NotCallableError
from dovetail.face.attempts import MOST_ATTEMPTS, collection_paused
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.loading import load_rules
from dovetail.face.module import CompiledModule
from dovetail.frontend.code.frame import Break
from dovetail.frontend.sizes.size_changes import SizeChanges
from dovetail.options import Options, make_options
from dovetail.torch_private import state as private_state
from dovetail.trace import CaptureSettings, Retry
from dovetail.trace.settings import DATA_GUARDS, GRAPH_BREAKS, SAYS_EAGER


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
            f"an object of type {type(function).__name__} cannot be compiled because it cannot be called",
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
    if not isinstance(args, (tuple, list)):
        raise InputError(f"args is a {type(args).__name__}, and must be a tuple of arguments", advice="write (x,)")
    load_rules()
    # Dimensions that were marked are symbolic here too.
    shapes = dataclasses.replace(SizeChanges().shapes(None, True, tuple(args), kwargs or {}), data_sizes="ask")
    settings = CaptureSettings(shapes, without=frozenset({SAYS_EAGER, GRAPH_BREAKS, DATA_GUARDS}))
    for _ in range(MOST_ATTEMPTS):
        try:
            with collection_paused(), private_state.preserved_rng_state(), contextlib.ExitStack() as stack:
                joint = capture_joint(create_state(stack, function, tuple(args), kwargs, settings=settings))
                if settings.shapes.data_sizes == "keep" and (guard := joint.capture.guards.about_data()) is not None:
                    raise Break(f"{guard.source.name} depends on data", "compute both ways", guard.location)
                return joint
        except Retry as retry:
            settings = retry.changed(settings)
        except Break as stop:
            raise CaptureError(stop.reason, where=stop.where, advice=stop.advice) from stop
        except (RuntimeError, NotImplementedError) as error:
            if settings.math_attention or not lacks_derivative(error):
                raise
            settings = dataclasses.replace(settings, math_attention=True)
    raise CaptureError("the capture takes another way each time", advice="report this as a bug")
