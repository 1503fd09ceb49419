"""``map``, ``scan`` and ``while_loop`` of torch's control flow are one node of the graph each.

Torch's own functions are interpreted down to the operator that they call: they check and flatten what they are given. The
operator's functions are interpreted once, for one round, and the node runs them for real in a loop. Its derivatives have eager's
order of additions: those of a round first, then those of the rounds before it. Torch's derivative of ``scan`` is of a graph that
copies transposed weights, so that a linear layer in it may differ in the last bit.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import HigherOrderGradientError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, callable_rule, interpreted_rule, rule
from dovetail.rules.torch.control_flow import ADVICE, Traced, trace_branch, without_symbols
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import trees as private_trees
from dovetail.trace.program import Program
from dovetail.whole_calls.whole import Whole

_Tensors = Sequence[torch.Tensor]
_Round = Callable[[_Tensors, _Tensors], list[torch.Tensor]]


# --- derivatives ------------------------------------------------------------------------------------------------------


class _Together(torch.autograd.Function):
    """Tensors as they are: their gradients arrive together, zeros where there is none."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`torch.autograd.Function`."""
        found = tuple(item.view_as(item) for item in tensors)
        ctx.mark_non_differentiable(*[item for item in found if not item.is_floating_point()])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """See :class:`torch.autograd.Function`."""
        return gradients


class _Once(_Together):
    """The same where torch's second derivative is not the derivative of the first."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`torch.autograd.Function`."""
        ctx.save_for_backward(*tensors)
        return _Together.forward(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """See :class:`torch.autograd.Function`."""
        return _Last.apply(len(gradients), *gradients, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _Last(torch.autograd.Function):
    """Gradients, functions of ``tensors``, that have no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`torch.autograd.Function`."""
        return tuple(item.view_as(item) for item in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """See :class:`torch.autograd.Function`."""
        raise HigherOrderGradientError(
            "scan and while_loop have no second derivative",
            advice="write the loop in Python, or take one derivative only",
        )


class _WithDerivativesOf(torch.autograd.Function):
    """Values with the derivatives of others."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`torch.autograd.Function`."""
        found = tuple(item.clone() for item in tensors[:count])
        ctx.mark_non_differentiable(*[item for item in found if not item.is_floating_point()])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """See :class:`torch.autograd.Function`."""
        return None, *[None] * len(gradients), *gradients


def _together(tensors: _Tensors, kind: Any = _Together) -> list[torch.Tensor]:
    return list(kind.apply(*tensors)) if tensors else []


# --- what the nodes compute -------------------------------------------------------------------------------------------


def _map(step: _Round, items: _Tensors, more: _Tensors, lifted: _Tensors) -> list[torch.Tensor]:
    count = len(items[0])
    # The gradients of what all rounds share are added up at the end.
    shared = [item.expand(count, *item.shape) for item in (*more, *lifted)]
    columns = [item.unbind() for item in (*items, *shared)]
    found = [_together(step(row, ())) for row in zip(*columns, strict=True)]
    return _together([torch.stack(column) for column in zip(*found, strict=True)])


def _scan(step: _Round, carry: _Tensors, items: _Tensors, lifted: _Tensors) -> list[torch.Tensor]:
    carry, items, lifted = (_together(given, _Once) for given in (carry, items, lifted))
    rows: list[_Tensors] = []
    for own in zip(*map(torch.unbind, items), strict=True):
        found = step([*carry, *own], _together(lifted))
        carry = found[: len(carry)]
        rows.append(found[len(carry) :])
    return _together([*carry, *[torch.stack(column) for column in zip(*rows, strict=True)]])


def _while_loop(goes_on: _Round, step: _Round, carry: _Tensors, lifted: _Tensors) -> list[torch.Tensor]:
    needs_gradient = torch.is_grad_enabled() and any(item.requires_grad for item in (*carry, *lifted))
    carry, lifted = (_together(given, _Once) for given in (carry, lifted))
    if not goes_on(carry, lifted)[0].item():
        if not needs_gradient:
            return [item.clone() for item in carry]
        # Torch differentiates one round where there was none.
        return list(_WithDerivativesOf.apply(len(carry), *carry, *step(carry, _together(lifted))))  # type: ignore[no-untyped-call]
    while True:
        carry = step(carry, _together(lifted))
        if not goes_on(carry, lifted)[0].item():
            return _together(carry)


# --- nodes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loop:
    """A call of one of the operators: the tensors that it is given, those of one round, and what happens to a round's results.

    The first ``carried`` ones are handed to the next round; of the others one row is kept for each of the ``rows`` rounds.
    """

    name: str
    functions: Sequence[Any]
    groups: Sequence[_Tensors]
    operands: _Tensors
    carried: int
    rows: tuple[int, ...]
    compute: Callable[..., list[torch.Tensor]]

    def node(self, interpreter: TracingInterpreter) -> Any:
        """Record the call. Raises :class:`Break` for one that cannot be a node."""
        recorder = interpreter.trace.recorder
        own = [recorder.number(item) for item in self.operands]
        bodies = [trace_branch(interpreter, self.name, function, self.operands) for function in self.functions]
        numbers = list(dict.fromkeys(number for body in bodies for number in body.given if number not in own))
        lifted = [recorder.tensors[number] for number in numbers]
        needs_gradient = torch.is_grad_enabled() and any(
            item.requires_grad for group in (*self.groups, lifted) for item in group
        )
        self._check(bodies, lifted, needs_gradient)
        programs = [Program((*own, *numbers), item.calls, tuple(map(recorder.number, item.results))) for item in bodies]
        rounds = [lambda own, others, item=item: item.run([*own, *others]) for item in programs]
        counts = [*map(len, self.groups), len(lifted)]

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(tensors)
            return self.compute(*rounds, *[list(itertools.islice(rest, count)) for count in counts])

        rows = [((*self.rows, *item.shape), item.dtype) for item in bodies[-1].results[self.carried :]]
        run.may_not_end = self.compute is _while_loop or any(item.may_not_end for item in bodies)  # type: ignore[attr-defined]
        whole = Whole(run, lambda *tensors: [*tensors[: self.carried], *rows], name=self.name)
        given = [item for group in self.groups for item in group]
        return private_trees.tree_unflatten(list(whole(*given, *lifted)), bodies[-1].spec)

    def _check(self, bodies: Sequence[Traced], lifted: _Tensors, needs_gradient: bool) -> None:
        """Raise :class:`Break` for what torch refuses when it runs, or differentiates otherwise."""
        results, given = bodies[-1].results, [*(item for group in self.groups for item in group), *lifted]
        if list(map(_facts, self.operands[: self.carried])) != list(map(_facts, results[: self.carried])):
            raise Break(f"the function that {self.name} is given returns other kinds of tensors than it takes", ADVICE)
        if len({item.device for item in (*given, *results)}) > 1:
            raise Break(f"{self.name} is given tensors on several devices", ADVICE)
        if len(bodies) == 2 and (bodies[0].results[0].dtype, *bodies[0].results[0].shape) != (torch.bool,):
            raise Break(f"the condition of {self.name} is no boolean without dimensions", ADVICE)
        if needs_gradient and self.compute is _scan and not private_libraries.DIFFERENTIATES_SCANS:
            raise Break("this version of torch computes other gradients of scan", "use torch 2.13 or a newer one")
        if needs_gradient and self.compute is not _while_loop and not all(map(torch.is_floating_point, results)):
            raise Break(f"a result of {self.name} has no gradient", ADVICE)
        if needs_gradient and self.compute is _while_loop and not all(item.is_contiguous() for item in results):
            # Torch stacks what the rounds return, and not what no round has returned.
            raise Break(f"{self.name} carries a tensor that is not contiguous", ADVICE)
        if private_state.is_any_autocast_on():
            raise Break(f"{self.name} cannot be kept whole under autocast", ADVICE)


def _facts(value: torch.Tensor) -> Any:
    return value.dtype, tuple(value.shape), value.stride(), value.device


def _plain(interpreter: TracingInterpreter, name: str, *groups: Any) -> list[list[torch.Tensor]]:
    """The arguments of a loop, tensors of known sizes. Raises :class:`Break` for others."""
    if private_state.functorch_level() is not None:
        raise Break(f"{name} is called inside of torch.func", ADVICE)
    if not all(isinstance(item, torch.Tensor) for group in groups for item in group):
        raise Break(f"{name} is given something else than tensors", ADVICE)
    if any(private_sizes.has_symbols(item) for group in groups for item in group):
        raise without_symbols(interpreter, f"{name} is given tensors of symbolic sizes")
    return list(map(list, groups))


def _first(items: _Tensors) -> list[torch.Tensor]:
    return [item.select(0, 0) for item in items]


def _own(items: _Tensors) -> list[torch.Tensor]:
    """A tensor for each thing that a round is given, though one is given twice."""
    return [item.view_as(item) for item in items]


_MAP, _SCAN, _WHILE_LOOP = private_libraries.loop_operators()


@callable_rule(type(_MAP))
def _map_rule(interpreter: TracingInterpreter, operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    function, *given = args
    items, more = _plain(interpreter, "map", *given)
    return _Loop("map", [function], [items, more], [*_first(items), *_own(more)], 0, (len(items[0]),), _map).node(
        interpreter
    )


@callable_rule(type(_SCAN))
def _scan_rule(interpreter: TracingInterpreter, operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    function, *given = args
    carry, items = _plain(interpreter, "scan", *given[:2])
    operands, rows = [*_own(carry), *_first(items)], (len(items[0]),)
    return _Loop("scan", [function], [carry, items], operands, len(carry), rows, _scan).node(interpreter)


@callable_rule(type(_WHILE_LOOP))
def _while_rule(interpreter: TracingInterpreter, operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    goes_on, step, *given = args
    (carry, _) = _plain(interpreter, "while_loop", *given)
    return _Loop("while_loop", [goes_on, step], [carry], _own(carry), len(carry), (), _while_loop).node(interpreter)


_FUNCTIONS = private_libraries.loop_functions()
_MODULES = {item.__module__ for item in _FUNCTIONS}


def _runs_alone(hands_on: Any, split: Callable[..., Any]) -> None:
    @rule(hands_on)
    def compiled(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        """Torch hands a function that calls the operator to torch.compile, which cannot read a trace of Dovetail's."""
        function, given = split(*args)
        if function.__module__ not in _MODULES:
            return interpreter.call_torch(hands_on, args, kwargs)
        return interpreter.call(function, tuple(given), {})


@interpreted_rule
def _is_interpreted(function: types.FunctionType, args: Arguments, kwargs: Keywords) -> bool:
    """Torch's own functions, which hand on the program's."""
    return function.__module__ in _MODULES


_WITH_TUPLE, _WITH_ARGUMENTS = private_libraries.compiling_functions()
_runs_alone(_WITH_ARGUMENTS, lambda function, *given: (function, given))
if _WITH_TUPLE is not None:
    _runs_alone(_WITH_TUPLE, lambda function, given: (function, given))
