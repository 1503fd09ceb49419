"""All options of ``dovetail.compile`` as one typed, frozen dataclass, and the check that turns keywords into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dovetail.errors import OptionError, did_you_mean

#: The values of options that are one of a few values.
CHOICES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("fullgraph", "compiled_autograd", "check_swap", "tune"), (True, False)),
    "dynamic": (True, False, None),
    "at_recompile_limit": ("eager", "error"),
    "numerics": ("exact", "fast"),
    "tiers": ("auto", "wait", "never"),
}


@dataclass(frozen=True)
class Options:
    """The options of :func:`dovetail.compile`, whose docstring describes each.

    >>> Options(backend="aten").fullgraph
    False
    """

    backend: str | Callable[..., Any] | None = None
    fullgraph: bool = False
    recompile_limit: int = 16
    at_recompile_limit: str = "eager"
    passes: tuple[Callable[[Any], Any], ...] = ()
    dynamic: bool | None = None
    memory_budget: float | int | None = None
    numerics: str = "fast"
    compiled_autograd: bool = False
    tiers: str = "auto"
    check_swap: bool = False
    tune: bool = False
    backend_options: Mapping[str, Any] = field(default_factory=dict)


def make_options(**given: Any) -> Options:
    """Build :class:`Options` from keywords; raises :class:`OptionError` with names near an unknown one.

    >>> make_options(fullgraph=True).fullgraph
    True
    """
    known = [entry.name for entry in fields(Options)]
    for name in sorted(given.keys() - set(known)):
        advice = did_you_mean(name, known, f"the options are: {', '.join(known)}")
        raise OptionError(f"dovetail.compile has no option {name!r}", advice=advice)
    options = Options(**given)
    for name in CHOICES:
        check_choice(name, getattr(options, name))
    if type(options.recompile_limit) is not int or options.recompile_limit < 1:
        raise OptionError(f"recompile_limit must be a whole number of at least 1, not {options.recompile_limit!r}")
    check_budget(options.memory_budget)
    if not isinstance(options.backend_options, Mapping):
        raise OptionError(f"backend_options must be a mapping, not {type(options.backend_options).__name__}")
    if not (isinstance(options.passes, (tuple, list)) and all(map(callable, options.passes))):
        raise OptionError("passes must be a tuple of functions, each (JointGraph) -> JointGraph")
    return options


def check_budget(budget: object) -> None:
    """Raise :class:`OptionError` for something that is no budget: a fraction from 0.0 to 1.0, or a number of bytes."""
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool) and budget >= 0
    if budget is not None and not (is_number and (isinstance(budget, int) or budget <= 1.0)):  # type: ignore[operator]
        raise OptionError(
            f"memory_budget must be a fraction from 0.0 to 1.0 or a whole number of bytes, not {budget!r}",
            advice="memory_budget=0.5 saves half of what can be spared; memory_budget=2**30 saves at most 1 GiB",
        )


def check_choice(name: str, value: object) -> None:
    """Raise :class:`OptionError` for a value that the option ``name`` does not have."""
    *others, last = map(repr, CHOICES[name])
    if not any(type(value) is type(choice) and value == choice for choice in CHOICES[name]):
        raise OptionError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")
