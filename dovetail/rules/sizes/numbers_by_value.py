"""Floats that torch's C++ takes by value, as numbers that change from call to call: a scheduled dropout, ``delta``, ``eps``.

Torch asks a symbolic number for its value where C++ wants a ``double``, which would hold the graph to it. So for the functions of
:mod:`.functions_by_value` C++ is given a stand-in: a float near the number whose last bits are nowhere else in the program. Where a
stand-in arrives at an operator of the trace, in the forward or in autograd's own formulas, the number is put in its place. That
is right for functions that do nothing with the float but hand it on, or compute from it what their entry says: what they compute
is computed by Python, at every call, and has a stand-in too. What they ask of it is a guard. A call of which
:func:`.dependent_floats` finds that it hands on something else is left to the rule that holds a number to its value.

An operator whose schema has a ``float`` is recorded as that of :mod:`.scalar_operators`, which calls it with the number.
"""

from __future__ import annotations

import functools
import itertools
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule
from dovetail.rules.sizes.floats_given_on import dependent_floats
from dovetail.rules.sizes.number_tensors import with_owner
from dovetail.rules.sizes.scalar_operators import takes_numbers
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import kernels as private_kernels
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace.overrides import EVERY, GRAPHS, Run
from dovetail.trace.program import RESOLVE
from dovetail.trace.settings import CaptureSettings, Retry
from dovetail.trace.trace import Trace, open_trace

_aten = torch.ops.aten
#: Operators that take any number, and whose form for fake tensors asks what it is.
_ASKING = frozenset(
    {
        *(_aten.lerp.Scalar, _aten._foreach_lerp.Scalar, _aten.pow.Tensor_Scalar, _aten.pow.Scalar),
        _aten.linalg_vector_norm.default,
        *(_aten.multi_margin_loss.default, _aten.multi_margin_loss_backward.default),
    }
)
#: The recorded forms of operators that write, where their names do not say it.
_RETURNING = {_aten.bernoulli_.float: _aten.bernoulli.p, _aten.normal_.default: _aten.normal_functional.default}
_NEW: frozenset[Any] = frozenset({_aten.empty.memory_format, _aten.empty_like.default})
_LOW_BITS = (1 << 24) - 1
_COUNTER = itertools.count(0x5EED)


class UnknownCallError(Exception):
    """Nothing is known of these arguments."""


@dataclass(frozen=True)
class Computed:
    """A number that is computed of others, as C++ computes it: ``function(*of)``."""

    function: Callable[..., Any]
    of: tuple[Any, ...]


@dataclass(frozen=True)
class Needs:
    """The work of a function on its floats beside handing them on.

    ``holds`` are conditions under which it takes the same way for all of them. ``computed`` are numbers that it computes, which all
    arrive in the forward; ``in_backward`` may arrive there alone, and where a gradient is differentiated again there are others.
    ``hands_on``: the floats themselves arrive, too.
    """

    holds: tuple[Computed, ...] = ()
    computed: tuple[Computed, ...] = ()
    in_backward: tuple[Computed, ...] = ()
    hands_on: bool = True


#: By the name of a function: it is called with the function's arguments, and raises TypeError or UnknownCallError for others.
Entry = Callable[..., Needs]


@dataclass
class _StandIns:
    """The stand-ins of one trace."""

    numbers: dict[float, Any] = field(default_factory=dict)
    given: dict[Any, float] = field(default_factory=dict)
    arrived: set[float] = field(default_factory=set)
    #: Calls that were looked at by :func:`dependent_floats`, and what it has found.
    checked: dict[Any, set[float] | None] = field(default_factory=dict)
    #: The function that the next call means, where it is called with stand-ins.
    called: Any = None
    #: Strategies that the next capture gives up where a stand-in has come into the graph.
    strategies: set[str] = field(default_factory=set)

    #: Whether a formula of autograd's computes with a float, as a gradient of that again would.
    is_once: bool = False

    def give_up(self, reason: str) -> Retry:
        """The error that begins the capture anew, without stand-ins."""
        return Retry(
            reason, change=lambda settings: functools.reduce(CaptureSettings.giving_up, self.strategies, settings)
        )

    def of(self, number: Any) -> Any:
        """The stand-in of a number; anything else is returned."""
        if not _changes(number):
            return number
        key = private_sizes.first_expression(number)
        if key not in self.given:
            bits = struct.unpack("<q", struct.pack("<d", number.node.hint))[0] & ~_LOW_BITS
            mark = (next(_COUNTER) * 0x9E3779B1) & _LOW_BITS
            self.put(stand_in := struct.unpack("<d", struct.pack("<q", bits | mark))[0], number)
            self.given[key] = stand_in
        return self.given[key]

    def is_known(self, number: Any) -> bool:
        """Whether there is a stand-in for a number: a region that is computed again in the backward has no other."""
        return private_sizes.first_expression(number) in self.given

    def put(self, stand_in: float, number: Any) -> None:
        """Have a float stand for a number."""
        self.numbers[stand_in] = number

    def number(self, value: Any) -> Any:
        """The number that a float stands for; anything else is returned."""
        if type(value) is not float or value not in self.numbers:
            return value
        self.arrived.add(value)
        return self.numbers[value]


_STAND_INS: weakref.WeakKeyDictionary[Trace, _StandIns] = weakref.WeakKeyDictionary()


def _changes(value: Any) -> bool:
    return type(value) is torch.SymFloat and value.node.hint is not None and not private_sizes.is_data_number(value)


def changing(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The floats among the arguments of a call that change from call to call."""
    return [item for item in (*args, *kwargs.values()) if _changes(item)]


class _Called:
    """A function of torch's, in a trace called with stand-ins; a replay calls it with numbers."""

    def __init__(self, function: Any) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace = open_trace()
        found = _STAND_INS.get(trace) if trace is not None else None
        if found is None:
            return self.function(*args, **kwargs)
        return self.function(*map(found.of, args), **{name: found.of(item) for name, item in kwargs.items()})

    def __eq__(self, other: object) -> bool:
        return self.function == (other.function if isinstance(other, _Called) else other)

    def __hash__(self) -> int:
        return hash(self.function)


def _resolve(function: Any) -> Any:
    trace = open_trace()
    found = _STAND_INS.get(trace) if trace is not None else None
    if found is None or found.called is None or found.called != getattr(function, "__name__", ""):
        return function
    found.called = None
    return _Called(function)


RESOLVE.append(_resolve)


def by_value(*names: str) -> Callable[[Entry], Entry]:
    """A decorator: functions and methods of torch of these names take their floats by value, as the decorated function says."""

    def register(entry: Entry) -> Entry:
        @method_rule(*names)
        def call(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
            if (
                not changing(args, kwargs)
                or (getattr(function, "__module__", None) or "torch").partition(".")[0] != "torch"
            ):
                return NotImplemented
            return _call(interpreter, function, args, kwargs, entry)

        return entry

    return register


def _call(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, entry: Entry) -> Any:
    trace, name = interpreter.trace, getattr(function, "__name__", "")
    strategy, given = f"{name} by value", with_owner(function, args)
    if not trace.settings.allows(strategy) or not _is_plain((given, kwargs)):
        return NotImplemented
    found = _STAND_INS.setdefault(trace, _StandIns())
    if interpreter.values.in_backward and not all(map(found.is_known, changing(args, kwargs))):
        return NotImplemented
    try:
        needs = entry(*given, **kwargs)
    except (TypeError, UnknownCallError):
        return NotImplemented
    if not all(interpreter.truth(_symbolic(interpreter, condition)) for condition in needs.holds):
        return NotImplemented
    forward = [found.of(number) for number in changing(args, kwargs)] if needs.hands_on else []
    for item in (*needs.computed, *needs.in_backward):
        # A number that is 0 here does not change, and has a stand-in that is not 0.
        found.put(stand_in := _plain(found, item), _symbolic(interpreter, item))
        forward += [stand_in] if item in needs.computed else []
    if not _is_all_known(found, function, given, kwargs):
        return NotImplemented
    found.is_once |= bool(needs.in_backward)
    found.arrived.clear()
    found.called = name
    try:
        # In the backward nobody records the calls, and asks what they mean.
        meant = _Called(function) if interpreter.values.in_backward else function
        result = interpreter.native(meant, args, kwargs)
    except (RuntimeError, ValueError) as error:
        # Eager's own message has the number in it.
        raise Retry(f"{name} has failed with a float that changes", without=strategy) from error
    finally:
        found.called = None
    found.strategies.add(strategy)
    if not found.arrived.issuperset(forward):
        raise Retry(f"{name} computes with a float in another way", without=strategy)
    return result


def _is_all_known(found: _StandIns, function: Any, args: Arguments, kwargs: Keywords) -> bool:
    """Whether torch hands nothing to its operators that depends on a float of the call and has no number in its place."""
    is_bound = isinstance(getattr(function, "__self__", None), torch.Tensor)
    callee = getattr(torch.Tensor, function.__name__) if is_bound else function
    leaves, structure = private_trees.tree_flatten((args, kwargs))
    key = callee, str(structure), *map(_facts, leaves)
    if key not in found.checked:
        floats = {id(number): found.of(number) for number in changing(args, kwargs)}
        found.checked[key] = dependent_floats(callee, args, kwargs, floats)
    dependent = found.checked[key]
    return dependent is not None and dependent <= found.numbers.keys()


def _facts(value: Any) -> Any:
    """All that a function may choose its way by."""
    if isinstance(value, torch.Tensor):
        return tuple(map(private_sizes.hint, value.shape)), value.dtype, value.device, value.requires_grad
    return private_sizes.first_expression(value) if private_sizes.is_symbolic(value) else repr(value)


def _is_plain(values: Any) -> bool:
    """Whether no transform, and no class of tensors, does something else with the float."""
    tensors = [item for item in private_trees.tree_leaves(values) if isinstance(item, torch.Tensor)]
    is_transformed = private_state.forward_ad_level() >= 0 or any(map(private_tensors.is_functorch_wrapped, tensors))
    return not is_transformed and not any(map(private_tensors.is_wrapper, tensors))


def _symbolic(interpreter: TracingInterpreter, item: Any) -> Any:
    if not isinstance(item, Computed):
        return item
    operands = tuple(_symbolic(interpreter, operand) for operand in item.of)
    if (number := interpreter.derive(item.function, operands)) is not NotImplemented:
        return number
    return interpreter.operate(item.function, *operands)


def _plain(found: _StandIns, item: Any) -> Any:
    return (
        item.function(*[_plain(found, operand) for operand in item.of])
        if isinstance(item, Computed)
        else found.of(item)
    )


def with_numbers(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put numbers into the place of their stand-ins among the arguments of an operator."""
    trace = open_trace()
    found = _STAND_INS.get(trace) if trace is not None else None
    if trace is None or found is None or not _is_any_in(found, (*args, *kwargs.values())):
        return NotImplemented
    if found.is_once and torch.is_grad_enabled() and private_autograd.current_backward() >= 0:
        raise found.give_up("a gradient is differentiated again")
    schema = operator._schema
    is_asked = operator in _ASKING or any(
        "float" in str(item.type) for item in schema.arguments if _is_any_in(found, _given(item, args, kwargs, schema))
    )
    args = [found.number(item) for item in args]
    kwargs = {name: found.number(item) for name, item in kwargs.items()}
    if operator is _aten.native_batch_norm.default:
        return _batch_norm(run, *args)
    if not is_asked:
        return run(operator, args, kwargs)
    if not schema.is_mutable:
        return run(takes_numbers(operator), args, kwargs)
    functional = _RETURNING.get(operator) or private_kernels.functional_form(operator)
    if functional is None:
        raise found.give_up(f"{operator} has no form that returns")
    target, value = args[0], run(takes_numbers(functional), args, kwargs)
    if trace.node_of(target).target in _NEW:
        # Nothing to copy to: it is that memory.
        target.replace_(private_tracing.from_fun(value))
        target.commit_update()
        target.sync()
    else:
        run(_aten.copy_.default, (target, value), {})
    return target


def _batch_norm(run: Run, *args: Any) -> Any:
    """The operator by forms of it whose schemas say what they write to, as torch functionalises it."""
    averages, training = args[3:5], args[5]
    if not training:
        return run(takes_numbers(_aten.native_batch_norm.default), args, {})
    if averages == (None, None):
        return run(takes_numbers(_aten._native_batch_norm_legit.no_stats), (*args[:3], *args[5:]), {})
    *results, mean, variance = run(takes_numbers(_aten._native_batch_norm_legit_functional.default), args, {})
    for average, value in zip(averages, (mean, variance), strict=True):
        run(_aten.copy_.default, (average, value), {})
    return tuple(results)


def _is_any_in(found: _StandIns, values: Iterable[Any]) -> bool:
    return any(type(item) is float and item in found.numbers for item in values)


def _given(argument: Any, args: Sequence[Any], kwargs: Mapping[str, Any], schema: Any) -> tuple[Any, ...]:
    place = schema.arguments.index(argument)
    return (args[place] if place < len(args) else kwargs.get(argument.name),)


# Before operators are recorded as they were the last time.
EVERY.insert(0, with_numbers)


@GRAPHS.append
def no_stand_in_is_left(graph: torch.fx.Graph) -> None:
    """Begin the capture anew where a stand-in has come into the graph."""
    trace = open_trace()
    found = _STAND_INS.get(trace) if trace is not None else None
    if found is None:
        return
    for node in graph.nodes:
        if _is_any_in(found, private_trees.tree_leaves((node.args, node.kwargs))):
            raise found.give_up(f"{node.target} is given a float in another way")
