"""``mode=`` and ``options=`` of torch.compile, as Dovetail's own options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.errors import OptionError, did_you_mean

_TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
#: Settings of Inductor by mode, and whether GPU work is recorded as CUDA graphs.
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "reduce-overhead": ({}, True),
    "max-autotune": (_TUNED, True),
    "max-autotune-no-cudagraphs": (_TUNED, False),
}


def without_modes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same wish without ``mode`` and ``options``.

    Raises :class:`OptionError` for a mode that does not exist, and for two of ``mode``, ``options`` and ``backend_options``.

    >>> without_modes({"mode": "max-autotune-no-cudagraphs"})["backend_options"]
    {'max_autotune': True, 'coordinate_descent_tuning': True}
    >>> without_modes({"options": {"max_autotune": True}, "fullgraph": True})
    {'fullgraph': True, 'backend_options': {'max_autotune': True}}
    """
    ours = {name: value for name, value in given.items() if name not in ("mode", "options")}
    mode, options = given.get("mode"), given.get("options")
    asked = [name for name in ("mode", "options", "backend_options") if given.get(name)]
    if len(asked) > 1:
        raise OptionError(
            f"{' and '.join(asked)} are given together",
            advice="give one of them: a mode stands for options, and options are the same as backend_options",
        )
    if options is not None:
        if not isinstance(options, Mapping):
            raise OptionError(f"options must be a mapping, not {type(options).__name__}")
        if "guard_filter_fn" in options:
            from dovetail.switches.settings import say_in_vain  # where nobody asks, a capture loads no wing

            say_in_vain("guard_filter_fn")
        ours["backend_options"] = {name: value for name, value in options.items() if name != "guard_filter_fn"}
    if mode is None:
        return ours
    if mode not in MODES:
        advice = did_you_mean(mode, MODES, f"the modes are: {', '.join(MODES)}")
        raise OptionError(f"there is no mode {mode!r}", advice=advice)
    settings, records = MODES[mode]
    backend = given.get("backend")
    if mode == "default":
        return ours
    if backend not in (None, "inductor"):
        raise OptionError(
            f"mode={mode!r} is for generated kernels, and backend={backend!r} was asked for",
            advice="leave one of them out",
        )
    ours["backend_options"] = dict(settings)
    if not records or not torch.cuda.is_available():
        # Without a GPU there is nothing to record: torch.compile leaves it out too.
        return {**ours, "backend": "inductor"}
    return {**ours, "backend": "cudagraphs", "backend_options": {"kernels": "inductor", **settings}}
