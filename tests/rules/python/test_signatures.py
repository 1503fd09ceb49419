"""``inspect.Signature`` in a compiled function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


def update(a: Any, b: int = 2, *, c: int = 3, **rest: Any) -> None:
    """What the signatures are of."""


class Metric:
    def __init__(self) -> None:
        self.signature = inspect.signature(update)


def bound(metric: Metric, x: torch.Tensor) -> Any:
    found = metric.signature.bind(x, c=4)
    found.apply_defaults()
    return found.args, found.kwargs, found.arguments["a"] * found.arguments["b"]


def filtered(metric: Metric, x: torch.Tensor) -> Any:
    parameters = metric.signature.parameters
    given = {"b": 1, "c": 2, "d": 3}
    known = {name: item for name, item in given.items() if name in parameters}
    kinds = [item.kind.name for item in parameters.values()]
    return known, kinds, parameters["c"].default, str(metric.signature.parameters["b"]), x * len(known)


def refused(metric: Metric, x: torch.Tensor) -> Any:
    try:
        metric.signature.bind()
    except TypeError as error:
        return str(error), x + 1
    return x


def known(metric: Metric, x: torch.Tensor) -> Any:
    signature = metric.signature
    found = signature.bind(x)
    same_parts = [item is signature.parameters[name] for name, item in signature.parameters.items()]
    return found.signature is signature, same_parts, x + 1


@pytest.mark.parametrize("program", [bound, filtered, refused, known])
def test_one_graph(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    metric = Metric()
    for _ in range(2):
        same(program(metric, torch.ones(2)), compiled(metric, torch.ones(2)))
    metric.signature = inspect.signature(lambda a, b=5, c=7: None)
    same(program(metric, torch.ones(2)), compiled(metric, torch.ones(2)))


@pytest.mark.filterwarnings("ignore")
def test_a_default_that_changes_breaks_the_graph() -> None:
    kept: list[int] = []

    def changed(a: Any, b: list[int] = kept) -> None:
        """Its default is read at each call."""

    metric = Metric()
    metric.signature = inspect.signature(changed)

    def program(metric: Metric, x: torch.Tensor) -> Any:
        return x * len(metric.signature.parameters["b"].default)

    compiled = dovetail.compile(program, backend="aten")
    for _ in range(3):
        same(program(metric, torch.ones(2)), compiled(metric, torch.ones(2)))
        kept.append(1)


def test_parts_that_leave_the_function_are_eagers() -> None:
    metric = Metric()

    def program(metric: Metric, x: torch.Tensor) -> Any:
        return metric.signature.parameters["a"], metric.signature.bind(x)

    parameter, found = dovetail.compile(program, backend="aten", fullgraph=True)(metric, torch.ones(2))
    assert parameter is metric.signature.parameters["a"]
    assert found.signature is metric.signature
    assert torch.equal(found.arguments["a"], torch.ones(2))


class Setting:
    value = 1


SETTING = Setting()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", [Setting, SETTING])
def test_an_annotation_that_changes(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def annotated(a: Any) -> None:
        """Its annotation is read at each call."""

    annotated.__annotations__["a"] = setting
    metric = Metric()
    metric.signature = inspect.signature(annotated)

    def program(metric: Metric, x: torch.Tensor) -> Any:
        return x * metric.signature.parameters["a"].annotation.value

    compiled = dovetail.compile(program, backend="aten")
    for value in (1, 7):
        monkeypatch.setattr(setting, "value", value)
        same(program(metric, torch.ones(2)), compiled(metric, torch.ones(2)))


def test_the_signature_of_a_module(quiet: None) -> None:
    net = torch.nn.Linear(2, 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        return net(x) * len(inspect.signature(net).parameters)

    compiled = dovetail.compile(function, backend="aten")
    for size in (2, 3, 4, 5):
        x = torch.ones(size, 2)
        same(function(x), compiled(x))
    events = dovetail.events_of(compiled)
    assert (events.count("capture"), events.count("graph break")) == (2, 0)
    for said in (inspect.signature(update), inspect.signature(bound), None):
        net.__dict__["__signature__"] = said
        if said is None:
            del net.__dict__["__signature__"]
        same(function(x), compiled(x))
