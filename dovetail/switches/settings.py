"""Settings of torch.compile that people change (``torch._dynamo.config``): what they mean here, or that they mean nothing."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from dovetail.face.dispatcher import Dispatcher
from dovetail.options import Options
from dovetail.torch_private import dynamo as private_dynamo

LOG = logging.getLogger("dovetail")
_DEFAULTS = Options()
_IS_SO = "Dovetail always does this"
_IN_VAIN = {
    "suppress_errors": "Dovetail always runs eagerly what it cannot compile, unless fullgraph=True",
    "capture_scalar_outputs": _IS_SO,
    "capture_dynamic_output_shape_ops": _IS_SO,
    "allow_unspec_int_on_nn_module": _IS_SO,
    "inline_inbuilt_nn_modules": _IS_SO,
    "guard_nn_modules": _IS_SO,
    "trace_numpy": _IS_SO,
    "compiled_autograd": "say dovetail.compile(..., compiled_autograd=True)",
    "optimize_ddp": "Dovetail exchanges gradients inside of its graphs",
    "accumulated_recompile_limit": "recompile_limit holds for each function",
    "specialize_int": "mark what changes, or say dynamic=False",
    "specialize_float": "mark what changes, or say dynamic=False",
    "force_parameter_static_shapes": "sizes of parameters are never symbolic",
    "verbose": "set DOVETAIL_LOG",
}
_WITH_EFFECT = (
    *("disable", "error_on_recompile", "recompile_limit", "fail_on_recompile_limit_hit"),
    *("automatic_dynamic_shapes", "assume_static_by_default"),
)
_told: set[str] = set()


def say_once(text: str) -> None:
    """A line in the log of Dovetail, once in a process."""
    if text not in _told:
        _told.add(text)
        LOG.warning(text)


def changed_in_torch() -> dict[str, Any]:
    """The settings that are known here and have been changed."""
    return private_dynamo.changed_settings((*_WITH_EFFECT, *_IN_VAIN))


def apply_to(dispatcher: Dispatcher, changed: dict[str, Any]) -> None:
    """Give a function the options that torch's settings stand for, where it was given none of its own."""
    for name in changed.keys() & _IN_VAIN.keys():
        say_once(f"torch._dynamo.config.{name} has no effect on dovetail.compile: {_IN_VAIN[name]}")
    options = dispatcher.options
    news = {
        name: value
        for name, value in _meanings(changed).items()
        if getattr(options, name) == getattr(_DEFAULTS, name) and value != getattr(_DEFAULTS, name)
    }
    if news:
        dispatcher.take_options(dataclasses.replace(options, **news))


def _meanings(changed: dict[str, Any]) -> dict[str, Any]:
    """The options that changed settings stand for.

    >>> _meanings({"recompile_limit": 64, "assume_static_by_default": False})
    {'recompile_limit': 64, 'dynamic': True}
    """
    options: dict[str, Any] = {}
    if "recompile_limit" in changed:
        options["recompile_limit"] = max(1, int(changed["recompile_limit"]))
    if changed.get("fail_on_recompile_limit_hit"):
        options["at_recompile_limit"] = "error"
    if changed.get("automatic_dynamic_shapes") is False:
        options["dynamic"] = False
    if changed.get("assume_static_by_default") is False:
        options["dynamic"] = True
    return options
