"""Numbers of Python's and NumPy's own generators (``random.random()``, ``numpy.random.beta(a, b)``): drawn anew at each call.

A draw is a function of the generator's state. So the check of an entry computes the number from a copy of that state, as an input
of the graph like any number that changes; and the generator itself takes these steps as an effect, when the graph has run. A
branch on such a number (``if random.random() < 0.5``) is a guard, so that each side has an entry; at many, the graph breaks.

A number that the program must know exactly (an index, a key, a text) would make an entry of each call: there the graph breaks too,
and at numbers that are whole, of which 0 and 1 are no symbols. An array of NumPy's (``numpy.random.normal(0, 1, (n, 8))``) is drawn
in the same way, as a tensor that is an input of the graph.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, callable_rule, end_rule, rule
from dovetail.guards import CalleeSource, ComputedSource, Equals
from dovetail.guards.source import Step
from dovetail.rules.python.computed_arrays import ComputedArray, with_plain_sizes
from dovetail.rules.python.numpy_numbers import ARRAY, NUMPY
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import CaptureSettings, Retry
from dovetail.trace.shapes import can_be_symbolic

#: The strategy of this module; it is given up where the program needs to know a number exactly.
IN_THE_GRAPH = "random numbers of Python are inputs of the graph"
#: Each may double the entries.
MOST_BRANCHES = 2
#: Methods of Python's generator, and of NumPy's, that draw one float from a state.
_OF_PYTHON = (
    *("random", "uniform", "triangular", "betavariate", "expovariate", "gammavariate", "gauss", "lognormvariate"),
    *("normalvariate", "paretovariate", "vonmisesvariate", "weibullvariate"),
)
_OF_NUMPY = (
    *("rand", "randn", "random", "random_sample", "uniform", "normal", "beta", "exponential", "gamma", "laplace"),
    *("lognormal", "standard_normal", "triangular"),
)
#: Methods of NumPy's generator that draw an array where a size is among their arguments.
_ARRAYS = frozenset({*_OF_NUMPY, "randint", "permutation", "choice"})
_GENERATOR: Any = getattr(random.random, "__self__")  # noqa: B009  (typeshed knows a function)
_NUMPYS_GENERATOR: Any = getattr(NUMPY.random.mtrand, "_rand", None) if NUMPY is not None else None


#: A method, its arguments, and those that are given by name.
_Call = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def _twin(generator: Any) -> Any:
    """Another generator in the same state."""
    if isinstance(generator, random.Random):
        twin: Any = random.Random()
        twin.setstate(random.Random.getstate(generator))
        return twin
    twin = type(generator)()
    twin.set_state(generator.get_state(legacy=False))
    return twin


@dataclass(frozen=True)
class Draw(Step):
    """The number that a generator will draw last, if it draws by these methods with these arguments.

    >>> from dovetail.guards.source import ArgumentSource
    >>> source = Draw(ArgumentSource(0, "generator"), (("random", (), ()), ("uniform", (2, 3), ())))
    >>> generator = random.Random(0)
    >>> source.read(generator) == source.read(generator) == [generator.random(), generator.uniform(2, 3)][1]
    True
    """

    calls: tuple[_Call, ...]

    @property
    def name(self) -> str:
        """As the program writes it."""
        method, args, keywords = self.calls[-1]
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in keywords)]
        return f"{self.base.name}.{method}({', '.join(given)})[{len(self.calls) - 1}]"

    def read(self, value: Any) -> Any:
        """The number; the generator stays as it is."""
        if type(value) not in (type(_GENERATOR), type(_NUMPYS_GENERATOR)):
            raise TypeError("no generator of random numbers")
        twin = _twin(value)
        return [getattr(twin, method)(*args, **dict(keywords)) for method, args, keywords in self.calls][-1]


class ArrayDraw(Draw):
    """The array that a generator will draw last, as a tensor."""

    def read(self, value: Any) -> Any:
        """The tensor in the memory of the array."""
        return torch.from_numpy(super().read(value))


class Draws:
    """The numbers that are drawn in one capture."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self.numbers: list[Any] = []
        self._calls: dict[str, tuple[_Call, ...]] = {}
        interpreter.effects.defer(self._effects)

    def draw(self, library: str, method: str, args: tuple[Any, ...]) -> Any:
        """The next number of the generator of a library."""
        values, settings = self._interpreter.values, self._interpreter.trace.settings
        shapes, generator = settings.shapes, _generator_of(library)
        calls = (*self._calls.get(library, ()), (method, args, ()))
        may_be_plain = IN_THE_GRAPH in settings.observed
        if not (shapes.allowed or may_be_plain) or values.in_backward or not settings.allows(IN_THE_GRAPH):
            raise _refusal(library, method)
        if shapes.allowed and IN_THE_GRAPH not in shapes.numbers:
            self._interpreter.trace.findings.changing_numbers.add(IN_THE_GRAPH)
            self._interpreter.trace.findings.observed[IN_THE_GRAPH] = True
            raise Retry(f"{library}.{method}() is another number at each call", change=_with_symbols)
        source = Draw(values.pin(generator, library), calls)
        value = source.read(generator)
        if type(value) is not float or not can_be_symbolic(value):
            raise _refusal(library, method)
        self._calls[library] = calls
        # An attempt with symbols has failed: where the program itself raises, it does with plain numbers too.
        number = values.symbolic_number(value, source) if shapes.allowed else values.read(value, source)
        self.numbers.append(number)
        return number

    def draw_array(self, method: str, args: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> Any:
        """The next array of NumPy's generator; None where that is none."""
        values, library = self._interpreter.values, "numpy.random"
        if values.in_backward or not self._interpreter.trace.settings.allows(IN_THE_GRAPH):
            return None
        calls = (*self._calls.get(library, ()), (method, args, keywords))
        source = ArrayDraw(values.pin(_NUMPYS_GENERATOR, library), calls)
        with private_tracing.disable_current_modes():
            if type(Draw(source.base, calls).read(_NUMPYS_GENERATOR)) not in ARRAY:
                return None
            real = source.read(_NUMPYS_GENERATOR)
        self._calls[library] = calls
        return ComputedArray(values.read(real, source))

    def check(self) -> None:
        """The program has ended: no number may be held to what it is now, and few branches depend on them."""
        found = [(item.predicate.value, set(_draws(item.source))) for item in self._answers()]
        kinds, branches = {type(value) for value, draws in found if draws}, {one for _, draws in found for one in draws}
        if float in kinds or not all(map(_is_free, self.numbers)):
            raise Retry("the program needs to know a random number exactly", without=IN_THE_GRAPH)
        if not self._interpreter.trace.settings.one_graph and (len(branches) > MOST_BRANCHES or kinds - {bool}):
            raise Retry("many branches depend on random numbers", without=IN_THE_GRAPH)

    def _answers(self) -> Iterator[Any]:
        guards = self._interpreter.values.guards.so_far() if self.numbers else ()
        yield from (guard for guard in guards if isinstance(guard.predicate, Equals))

    def _effects(self) -> list[Effect]:
        return [Effect(CalleeSource(), "call", [advance, [*call], {}]) for call in self._calls.items()]


def _with_symbols(settings: CaptureSettings) -> CaptureSettings:
    numbers = settings.shapes.numbers | {IN_THE_GRAPH}
    return dataclasses.replace(settings, shapes=dataclasses.replace(settings.shapes, numbers=numbers))


def advance(library: str, calls: tuple[_Call, ...]) -> None:
    """Have a library's generator draw numbers that the check of an entry has computed already."""
    for method, args, keywords in calls:
        getattr(_generator_of(library), method)(*args, **dict(keywords))


def _generator_of(library: str) -> Any:
    return _GENERATOR if library == "random" else _NUMPYS_GENERATOR


def _is_free(number: Any) -> bool:
    return private_sizes.is_symbolic(number) and bool(private_sizes.expression_of(number).free_symbols)


def _draws(source: Any) -> Iterator[Draw]:
    """The draws that a source is computed from."""
    if isinstance(source, Draw):
        yield source
    elif isinstance(source, Step):
        yield from _draws(source.base)
    elif isinstance(source, ComputedSource):
        for item in source.arguments:
            yield from _draws(item)


def _refusal(library: str, method: str) -> Break:
    return Break(
        f"{library}.{method}() is another number at each call", "draw it outside of the function", is_clean=True
    )


def _are_numbers(args: Arguments) -> bool:
    return all(type(item) in (int, float) for item in args)


# --- rules ------------------------------------------------------------------------------------------------------------


@rule(random.random)
def _random(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if args or kwargs:
        return random.random(*args, **kwargs)  # raises
    frame = interpreter.frames[-1]
    if frame.globals is vars(random) and frame.code.co_name not in _OF_PYTHON:
        # Of a choice or a shuffle, which needs to know it exactly.
        raise _refusal("random", "random")
    return interpreter.state(Draws).draw("random", "random", ())


@rule(random.getrandbits)
def _whole(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    raise _refusal("random", "getrandbits")


def _register(method: str, function: Any) -> None:
    @rule(function)
    def call(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        # With a number that changes itself, the library's own code computes it from ``random()``.
        if not args or args[0] is not _GENERATOR or kwargs or not _are_numbers(args[1:]):
            return interpreter.run_function(function, args, kwargs)
        return interpreter.state(Draws).draw("random", method, tuple(args[1:]))


for _method in _OF_PYTHON[1:]:
    _register(_method, vars(random.Random)[_method])


#: An array is drawn in the graph for so many sizes or bounds that have changed.
_MOST_SIZES = 3


def _plain(interpreter: TracingInterpreter, value: Any) -> Any:
    """Sizes and bounds as they are now; another attempt begins where they are symbols, or the graph ends where they often were."""
    if type(value) in (tuple, list, torch.Size):
        interpreter.values.whole(value)
        return tuple(_plain(interpreter, item) for item in value)
    if private_sizes.is_symbolic(value) and interpreter.trace.settings.shapes.allowed:
        trace, frame = interpreter.trace, interpreter.frames[-1]
        key = "sizes for NumPy", frame.code, frame.position
        count = trace.findings.observed[key] = trace.settings.observed.get(key, 0) + 1
        if count > _MOST_SIZES and not trace.settings.one_graph:
            raise Break("NumPy is given a size that changes from call to call", "call it outside of the function")
        raise Retry("NumPy is given a size that changes", change=with_plain_sizes)
    return value


def _is_plain_data(value: Any) -> bool:
    """Whether these are numbers, texts and tuples of them."""
    if type(value) is tuple:
        return all(map(_is_plain_data, value))
    return type(value) in (int, float, bool, str, type(None))


def _of_numpy(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    method = getattr(function, "__name__", "")
    is_known = method in _OF_NUMPY and vars(type(_NUMPYS_GENERATOR)).get(method) is function
    # Arguments of ``rand`` are sizes.
    most = {"rand": 0, "randn": 0, "random": 0, "random_sample": 0, "standard_normal": 0, "triangular": 3}.get(
        method, 2
    )
    most = {"exponential": 1}.get(method, most)
    if is_known and args[0] is _NUMPYS_GENERATOR and not kwargs and len(args) <= most + 1 and _are_numbers(args[1:]):
        return interpreter.state(Draws).draw("numpy.random", method, tuple(args[1:]))
    if method in _ARRAYS and args[0] is _NUMPYS_GENERATOR:
        given = _plain(interpreter, args[1:]), tuple((name, _plain(interpreter, kwargs[name])) for name in kwargs)
        if _is_plain_data(given) and (found := interpreter.state(Draws).draw_array(method, *given)) is not None:
            return found
    raise Break(f"numpy's {method} is called", "call it outside of the function")


if _NUMPYS_GENERATOR is not None:
    callable_rule(type(vars(type(_NUMPYS_GENERATOR))["beta"]))(_of_numpy)


@end_rule
def _known_exactly(interpreter: TracingInterpreter) -> None:
    interpreter.state(Draws).check()
