"""Code as one call of the graph, after it has been watched while it ran without values.

The code is a function of tensors and returns any list of values: new tensors, arguments, numbers that follow from sizes, and values
that no size decides. When the graph runs, it runs for real with autograd around it, and everything that was found out is checked
again. It may draw random numbers, and write to its arguments; it may do nothing else than compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import OutgrownError
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.rules.sizes.size_probes import (
    NoRuleError,
    SizeFormula,
    Watch,
    are_plain,
    formula,
    probe,
    storage_of,
)
from dovetail.torch_private import tracing as private_tracing
from dovetail.whole_calls.whole import Whole

UNBOUND = object()
"""In place of the value of a variable that has none."""


@dataclass(frozen=True)
class _New:
    """A result that is a new tensor. ``depends``: it requires a gradient where an argument does."""

    shape: tuple[SizeFormula, ...]
    dtype: torch.dtype
    depends: bool


@dataclass(frozen=True)
class _Known:
    """A result that follows from the arguments: one of them, a number that follows from a size, or a value that no size decides."""

    of: Callable[[Sequence[torch.Tensor]], Any]

    def holds(self, value: Any, given: Sequence[torch.Tensor]) -> bool:
        """Whether a value is this result."""
        expected = self.of(given)
        if isinstance(expected, torch.Tensor) or expected is UNBOUND or value is UNBOUND:
            return value is expected
        return type(value) is type(expected) and bool(value == expected)


class ProbedCall:
    """Code at its place in a program: ``run(tensors)`` returns a list of values.

    Raises :class:`NoRuleError` for code that does something else than compute, or whose results have sizes without a formula.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], run: Callable[[Sequence[torch.Tensor]], Sequence[Any]]) -> None:
        self._tensors = list(tensors)
        self._run = run
        self._draws = False
        self._written: set[int] = set()
        if not are_plain(self._tensors):
            raise NoRuleError
        with private_tracing.disable_current_modes():
            arguments, found = probe(self._tensors, self._watched)
            containers = [id(value) for value in found[0] if type(value) in (list, dict)]
            if len(set(containers)) < len(containers) or len({len(item) for item in found}) > 1:
                raise NoRuleError
            self._forms = [_form(arguments, results) for results in zip(*found, strict=True)]
            self._like_written = [arguments[0][at].requires_grad for at in sorted(self._written)]
        if self._draws and self._tensors[0].device.type != "cpu":
            raise NoRuleError
        storages = list(map(storage_of, self._tensors))
        if any(storages.count(storages[at]) > 1 for at in self._written):
            raise NoRuleError

    @property
    def computes(self) -> bool:
        """Whether anything is run, and so checked, when the graph runs."""
        return bool(self._written) or any(isinstance(form, _New) for form in self._forms)

    def _watched(self, given: list[torch.Tensor]) -> Sequence[Any]:
        """Run without values, and note what happens."""
        memory = {storage_of(item): at for at, item in enumerate(given)}
        with Watch() as watch:
            found = self._run(given)
        self._draws = self._draws or watch.draws
        self._written |= {at for key, at in memory.items() if key in watch.written}
        new = [
            storage_of(item)
            for item in found
            if isinstance(item, torch.Tensor) and not any(item is one for one in given)
        ]
        is_apart = len(set(new)) == len(new)
        if watch.is_refused or watch.devices - {"meta"} or not is_apart:
            raise NoRuleError
        return found

    def record(self, interpreter: TracingInterpreter, name: str) -> list[Any]:
        """Record the call; its values in the program."""
        forms, written = self._forms, sorted(self._written)
        new = [form for form in forms if isinstance(form, _New)]
        given = list(self._tensors)
        for at in written:
            # The call keeps its arguments for its derivative.
            given[at] = interpreter.call_torch(torch.clone, (given[at],), {})

        def sizes(*tensors: torch.Tensor) -> list[Any]:
            made = [([size.of(tensors) for size in form.shape], form.dtype) for form in new]
            return [*made, *(tensors[at] for at in written)]

        results: list[torch.Tensor] = []
        if new or written:
            function = Whole(self._checked(written), sizes, draws=self._draws, name=name)
            depends = [*(form.depends for form in new), *self._like_written]
            results = [
                value if flag or not value.requires_grad else interpreter.call_torch(torch.detach, (value,), {})
                for value, flag in zip(function(*given), depends, strict=True)
            ]
        for at, value in zip(written, results[len(new) :], strict=True):
            interpreter.call_torch(torch.Tensor.copy_, (self._tensors[at], value), {})
        return [results.pop(0) if isinstance(form, _New) else form.of(self._tensors) for form in forms]

    def _checked(self, written: Sequence[int]) -> Callable[..., list[torch.Tensor]]:
        """The code as a function that returns its new tensors, then the written arguments.

        It raises :class:`OutgrownError` where the code does something else than it did without values.
        """
        forms, run, draws = self._forms, self._run, self._draws

        def function(*given: torch.Tensor) -> list[torch.Tensor]:
            before = None if draws else torch.get_rng_state()
            own = [item.clone() if at in written else item for at, item in enumerate(given)]
            found = run(own)
            if before is not None and not torch.equal(before, torch.get_rng_state()):
                raise _outgrown("has drawn random numbers, and had not before")
            for form, value in zip(forms, found, strict=True):
                if isinstance(form, _Known) and not form.holds(value, own):
                    raise _outgrown("has left another value than at capture")
                if isinstance(form, _New) and value.requires_grad and not form.depends:
                    raise _outgrown("has a result with a gradient, which had none at capture")
            new = [value for form, value in zip(forms, found, strict=True) if isinstance(form, _New)]
            return [*new, *(own[at] for at in written)]

        return function


def _outgrown(what: str) -> OutgrownError:
    return OutgrownError(f"code that runs as one call {what}", advice="keep this code out of the compiled function")


def _form(arguments: Sequence[Sequence[torch.Tensor]], results: Sequence[Any]) -> _New | _Known:
    """One result, at all sizes."""
    first = results[0]
    if isinstance(first, torch.Tensor) and not any(item is first for item in arguments[0]):
        return _new(arguments, results)
    if isinstance(first, torch.Tensor):
        index = next(at for at, item in enumerate(arguments[0]) if item is first)
        form = _Known(lambda given: given[index])
    elif all(type(result) is int for result in results) and len(set(results)) > 1:
        form = _Known(formula(arguments, results).of)
    elif type(first) in (list, dict, tuple) and not first:
        # Another one in each run of the program.
        form = _Known(lambda given: type(first)())
    elif first is UNBOUND or is_leaf_value(first):
        form = _Known(lambda given: first)
    else:
        raise NoRuleError
    if not all(form.holds(result, given) for given, result in zip(arguments, results, strict=True)):
        raise NoRuleError
    return form


def _new(arguments: Sequence[Sequence[torch.Tensor]], results: Sequence[torch.Tensor]) -> _New:
    first = results[0]
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise NoRuleError
    kind = (first.dtype, first.dim(), first.requires_grad)
    for given, result in zip(arguments, results, strict=True):
        is_new = storage_of(result) not in set(map(storage_of, given))
        is_alike = (result.dtype, result.dim(), result.requires_grad) == kind
        if not (is_new and is_alike and result.is_contiguous() and result.layout is torch.strided):
            raise NoRuleError
    sizes = zip(*(result.shape for result in results), strict=True)
    return _New(tuple(formula(arguments, item) for item in sizes), first.dtype, first.requires_grad)
