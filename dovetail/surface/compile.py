"""``dovetail.compile``: every option typed and described, those of torch.compile included."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import torch

from dovetail.backends import Backend
from dovetail.errors import OptionError, did_you_mean
from dovetail.events import EventLog
from dovetail.face import compile as face
from dovetail.face.compiled_function import CompiledFunction
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.options import Options
from dovetail.reports.messages import Telling
from dovetail.runtime.entry import Entry
from dovetail.surface.modes import without_modes
from dovetail.surface.modules import compile_steps
from dovetail.surface.regions import compile_regions

if TYPE_CHECKING:
    from dovetail.reports.cost import Cost

Module = TypeVar("Module", bound=torch.nn.Module)
Kind = TypeVar("Kind", bound=type)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
ResultOf = TypeVar("ResultOf", covariant=True)


class CompileOptions(TypedDict, total=False):
    """The options of :func:`compile`, whose docstring describes them."""

    backend: str | Backend | Callable[..., Any] | None
    fullgraph: bool
    dynamic: bool | None
    mode: str | None
    options: Mapping[str, Any] | None
    disable: bool
    regional: bool
    recompile_limit: int
    at_recompile_limit: str
    passes: tuple[Callable[[Any], Any], ...]
    memory_budget: float | int | None
    numerics: str
    compiled_autograd: bool
    tiers: str
    check_swap: bool
    tune: bool
    backend_options: Mapping[str, Any]


class Compiled(Protocol[Parameters, ResultOf]):
    """A compiled function: called like the original; its entries, events and cost can be looked at."""

    original: Callable[..., Any]
    options: Options
    entries: list[Entry]

    @property
    def events(self) -> EventLog:
        """The log of decisions with their reasons, and of timed stages."""

    @property
    def backend(self) -> Backend:
        """The backend in use."""

    def precompile(self, *args: Any, **kwargs: Any) -> bool:
        """Compile for a call with these arguments, which does not happen, and wait for the kernels."""

    def cost(self, measure: bool = False) -> Cost:
        """FLOPs, bytes, peak of memory and measured time of a call, by module."""

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> ResultOf:
        """Call it like the original."""


class _AnyArguments(Protocol[ResultOf]):
    """A function with unknown arguments: it would be a method too."""

    def __call__(self, no_parameter_has_this_name: Any, *args: Any, **kwargs: Any) -> ResultOf: ...


class _OfObjects(Protocol):
    """A function with a first parameter ``self``. Type checkers take only a function for the override of a method."""

    def __call__(this, self: Any, *args: Any, **kwargs: Any) -> Any: ...


class _OfClasses(Protocol):
    def __call__(self, cls: Any, *args: Any, **kwargs: Any) -> Any: ...


Method = TypeVar("Method", bound=_OfObjects | _OfClasses)


class Compiler(Protocol):
    """The decorator that ``compile(**options)`` returns."""

    @overload
    def __call__(self, function: Module) -> Module: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: Kind) -> Kind: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: _AnyArguments[Result]) -> Compiled[..., Result]: ...

    @overload
    def __call__(self, function: Method) -> Method: ...

    @overload
    def __call__(self, function: Callable[Parameters, Result]) -> Compiled[Parameters, Result]: ...


@overload
def compile(function: Module, **options: Unpack[CompileOptions]) -> Module: ...  # type: ignore[overload-overlap]


@overload
def compile(function: Kind, **options: Unpack[CompileOptions]) -> Kind: ...  # type: ignore[overload-overlap]


@overload
def compile(function: _AnyArguments[Result], **options: Unpack[CompileOptions]) -> Compiled[..., Result]: ...


@overload
def compile(function: Method, **options: Unpack[CompileOptions]) -> Method: ...


@overload
def compile(
    function: Callable[Parameters, Result], **options: Unpack[CompileOptions]
) -> Compiled[Parameters, Result]: ...


@overload
def compile(function: None = None, **options: Unpack[CompileOptions]) -> Compiler: ...


def compile(function: Any = None, **given: Any) -> Any:
    """Compile a function or a module; use it like the original. Without ``function``, a decorator.

    A module gives a module with the same parameters and the same ``state_dict``; of a LightningModule the steps are compiled too,
    which is what a trainer calls. A class is given back, with what its objects are called by compiled. What cannot be captured
    breaks the graph and runs for real, with one warning at each place.
    Raises :class:`NotCallableError`, :class:`OptionError` or :class:`UnknownBackendError` at once.

    Options that torch.compile has too:

    ``backend``: the name of a backend (:func:`list_backends` shows them) or a callable; "inductor" where a compiler is found.
    ``fullgraph``: what cannot be captured is a :class:`GraphBreakError`.
    ``dynamic``: which sizes are symbolic: None for those that were seen to change, True for all, False for none.
    ``mode``: "default", "reduce-overhead" (CUDA graphs around generated kernels), "max-autotune" (kernels are tried out, then
    CUDA graphs) or "max-autotune-no-cudagraphs".
    ``options``: settings of Inductor by name, or those of another backend; the same as ``backend_options``.
    ``disable``: return the function as it is.

    Dovetail's own:

    ``regional``: compile the repeated blocks of a model in place, each for itself: the first one is captured, and the others
    share its graph and kernels. What is around them stays eager; a model without repeated blocks is compiled as a whole.
    ``recompile_limit``: how many entries one function may have.
    ``at_recompile_limit``: what happens to calls that none of them is for: "eager" (with one warning) or "error".
    ``passes``: functions ``JointGraph -> JointGraph``, run in order on the graph of forward and backward.
    ``memory_budget``: how much may be kept for the backward: a fraction from 0.0 to 1.0, or a number of bytes; the rest is
    computed again.
    ``numerics``: "exact" runs the captured operators as they are, bitwise equal to eager; "fast" leaves the choice to the backend.
    ``compiled_autograd``: a backward that runs in a call, and is no part of its graph, is captured and compiled by itself.
    ``tiers``: where the backend is slow to compile: "auto" runs ATen operators until a process in the background has compiled the
    kernels, "wait" has the first call wait for them, "never" stays on the operators. ``DOVETAIL_TIERS`` in the environment wins.
    ``check_swap``: the first call by kernels from the background is compared with the operators.
    ``tune``: variants of the kernels are compiled in the background and compete on the program's own calls; the fastest stay,
    also for later processes on this machine. Results change by rounding only, like at a swap.
    ``backend_options``: handed to the backend as they are.

    >>> import torch, dovetail
    >>> double = dovetail.compile(lambda x: x * 2, backend="aten")
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """
    # An error names the user's line, without a line of this function.
    with Telling():
        return _compiled(function, given)


def _called_by(kind: type) -> str:
    """The method by which objects of a class are called; "" without one, and for torch's own classes, which others use too."""
    name = "forward" if issubclass(kind, torch.nn.Module) else "__call__"
    method = inspect.getattr_static(kind, name, None)
    is_found = isinstance(method, (types.FunctionType, CompiledFunction)) and kind.__module__.split(".")[0] != "torch"
    return name if is_found else ""


def _compiled(function: Any, given: dict[str, Any]) -> Any:
    for name in given:
        if name not in _DEFAULTS:
            advice = did_you_mean(name, _DEFAULTS, f"the options are: {', '.join(_DEFAULTS)}")
            raise OptionError(f"dovetail.compile has no option {name!r}; {advice}")
    for name in _OURS:
        if not isinstance(given.get(name, False), bool):
            raise OptionError(f"{name} must be True or False, not {given[name]!r}")
    options = without_modes({name: value for name, value in given.items() if name not in _OURS})
    if given.get("disable"):
        return (lambda wrapped: wrapped) if function is None else function
    if function is None:
        return functools.partial(compile, **given)
    if isinstance(function, type) and (name := _called_by(function)):
        # In place, as torch.compile does it.
        setattr(function, name, face.compile(getattr(function, name), **options))
        return function
    if given.get("regional"):
        return compile_regions(function, options)
    if isinstance(function, torch.nn.Module):
        compile_steps(function, options)
    return face.compile(function, **options)


if os.environ.get("DOVETAIL_REPORT"):
    importlib.import_module("dovetail.reports.running")
_OURS = ("disable", "regional")
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(CompileOptions.__annotations__),
    **{name: parameter.default for name, parameter in inspect.signature(Options).parameters.items()},
    "disable": False,
    "regional": False,
    "backend_options": {},
}
#: The signature that ``help()`` and editors show.
compile.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("function", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in _DEFAULTS.items()
        ),
    ]
)


@rule(compile)
def _inside(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    raise Break(
        "dovetail.compile is called inside of a compiled function",
        "call it outside: what a compiled function calls is compiled along with it",
    )
