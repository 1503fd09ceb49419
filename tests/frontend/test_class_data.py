"""Data in classes that the program writes to: counters, last values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


class _Base:
    count = 0
    last: torch.Tensor | None = None


class _Derived(_Base):
    pass


class _Model(torch.nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        self.__class__.calls += 1
        return self.layer(x) * _Model.calls


def _counts(x: torch.Tensor) -> torch.Tensor:
    _Base.count += 1
    x = x * _Base.count
    _Base.count += 1
    return x + _Derived().count + _Derived.count


def _keeps_the_last(x: torch.Tensor) -> torch.Tensor:
    _Base.last = x * 2 if _Base.last is None else _Base.last + x
    return _Base.last * 2


def _raises(x: torch.Tensor) -> torch.Tensor:
    _Base.count += 1
    if _Base.count == 3:
        raise ValueError("three")
    return x * _Base.count


def _in_a_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    class Local:
        count = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        Local.count += 1
        return x * Local.count

    return count


def _outcome(function: Callable[..., Any], x: torch.Tensor) -> Any:
    try:
        return function(x), _Base.count, _Base.last, _Model.calls
    except ValueError as error:
        return str(error), _Base.count


_PROGRAMS: dict[str, Callable[[], Callable[..., Any]]] = {
    "counter": lambda: _counts,
    "tensor": lambda: _keeps_the_last,
    "error": lambda: _raises,
    "closure": _in_a_closure,
    "module": _Model,
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_it_is_an_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for options in (None, {"backend": "aten", "fullgraph": True}):
        for owner, attribute, start in ((_Base, "count", 0), (_Base, "last", None), (_Model, "calls", 0)):
            monkeypatch.setattr(owner, attribute, start)
        torch.manual_seed(0)
        program = _PROGRAMS[name]()
        function = program if options is None else dovetail.compile(program, **options)
        found.append([_outcome(function, torch.ones(2) * number) for number in range(1, 6)])
    same(*found)
    assert name == "error" or dovetail.events_of(function).count("compile") <= 3


class _Watching(type):
    seen: list[str] = []

    def __setattr__(cls, name: str, value: Any) -> None:
        _Watching.seen.append(name)
        type.__setattr__(cls, name, value)


class _Watched(metaclass=_Watching):
    count = 0


class _WithProperty:
    @property
    def size(self) -> int:
        return 2


def _new_name(x: torch.Tensor) -> torch.Tensor:
    _Derived.fresh = 3  # type: ignore[attr-defined]
    return x * _Derived.fresh  # type: ignore[attr-defined]


def _method(x: torch.Tensor) -> torch.Tensor:
    _Derived.scale = lambda self: 7  # type: ignore[attr-defined]
    return x * _Derived().scale()  # type: ignore[attr-defined]


def _watched(x: torch.Tensor) -> torch.Tensor:
    _Watched.count += 1
    return x * _Watched.count


def _over_a_property(x: torch.Tensor) -> torch.Tensor:
    _WithProperty.size = 3  # type: ignore[assignment, method-assign]
    return x * _WithProperty().size


@pytest.mark.parametrize("program", [_new_name, _method, _watched, _over_a_property])
def test_more_than_plain_data_breaks_the_graph(program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = vars(_WithProperty)["size"]
    with pytest.warns(dovetail.errors.EagerFallbackWarning):
        compiled = dovetail.compile(program, backend="aten")
        for number in range(1, 4):
            type.__setattr__(_Watched, "count", number)
            _Watching.seen.clear()
            found = []
            for function in (program, compiled):
                _WithProperty.size = original  # type: ignore[method-assign]
                type.__setattr__(_Watched, "count", number)
                if "fresh" in vars(_Derived):
                    del _Derived.fresh  # type: ignore[attr-defined]
                found.append((function(torch.ones(2)), list(_Watching.seen)))
                _Watching.seen.clear()
            same(*found)
