"""Classes with another method in the place of one that Python or torch asks for: ``__getattr__``, ``apply``, ``_call_impl``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check, compare_call, entries_of, leaf, same

pytestmark = pytest.mark.usefixtures("quiet")


class DotDict(dict[str, Any]):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__  # type: ignore[assignment]
    __delattr__ = dict.__delitem__  # type: ignore[assignment]


class Strict(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class WithDefault(dict[str, Any]):
    __getattr__ = dict.__getitem__

    def __missing__(self, key: str) -> Any:
        return Settings.scale


class Settings:
    scale = 2
    called = 0


KINDS: tuple[Any, ...] = (DotDict, Strict, WithDefault)


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_that_are_items_are_guarded(kind: Any) -> None:
    given = kind(scale=2, inner=kind(shift=3))

    def function(x: torch.Tensor) -> Any:
        return x * given.scale + given.inner.shift, len(given)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for key, value in (("scale", 2), ("scale", 2.5), ("inner", kind(shift=7)), ("other", 1)):
        given[key] = value
        compare_call(function, compiled, (leaf(2),))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_attributes_that_are_items_are_written(kind: Any) -> None:
    given = kind(count=0)

    def function(x: torch.Tensor) -> Any:
        given.count = given.count + x.shape[0]
        made = kind(first=x)
        made.second = x * given.count
        return made, made.first + made.second, dict(given)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    results = []
    for run in (function, compiled):
        given.count = 0
        results.append([run(torch.ones(size)) for size in (2, 3, 3)])
    same(*results)


def test_a_missing_item_as_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    given = WithDefault()

    def function(x: torch.Tensor) -> Any:
        return x * given.anything, WithDefault().other

    compiled = dovetail.compile(function, backend="aten")
    for scale in (2, 3, 2):
        monkeypatch.setattr(Settings, "scale", scale)
        compare_call(function, compiled, (leaf(2),))
    assert entries_of(compiled) <= 2


class Tripled(torch.autograd.Function):
    @classmethod
    def apply(cls, x: torch.Tensor) -> Any:
        Settings.called += 1
        return super().apply(x) * Settings.scale  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class Linear(torch.nn.Linear):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        Settings.called += 1
        return super()._call_impl(*args, **kwargs) * Settings.scale


LINEAR = Linear(2, 2)


@pytest.mark.parametrize("function", [lambda x: Tripled.apply(x), lambda x: LINEAR(x) + Linear.forward(LINEAR, x)])
def test_it_is_asked_once(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for scale in (2, 3, 2):
        monkeypatch.setattr(Settings, "scale", scale)
        counts = []
        for run in (function, compiled):
            monkeypatch.setattr(Settings, "called", 0)
            x = torch.ones(2, requires_grad=True)
            y = run(x)
            counts.append((y.detach(), torch.autograd.grad(y.sum(), x)[0], Settings.called))
        same(*counts)


def test_a_second_derivative_through_an_apply_of_its_own() -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.autograd.grad(Tripled.apply(x).sin().sum(), x, create_graph=True)[0]

    check(function, leaf(2))


class Marked(dict[str, Any]):
    @classmethod
    def fromkeys(cls, keys: Any, value: Any = None) -> Any:
        super().__init_subclass__()
        return super().fromkeys(keys, [value, super().__class_getitem__((str, int))])


@pytest.mark.parametrize("of", [Marked, Marked()], ids=["the class", "an object"])
def test_native_methods_of_a_base_class(of: Any) -> None:
    check(lambda x: of.fromkeys(["a", "b"], x * 2), leaf(2))


class Doubling(functools.partial):  # type: ignore[type-arg]
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


class Logged(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, (value, float(value.sum()) if isinstance(value, torch.Tensor) else value))

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)[0]


def test_a_method_of_the_base_across_a_graph_break() -> None:
    doubling, logged = Doubling(torch.mul, 3), Logged()

    def function(x: torch.Tensor) -> Any:
        logged["sum"] = x * 2
        setter = super(Logged, logged).__setitem__
        print(end="")
        setter("plain", (x.shape[0], 1))
        return doubling(x), logged["sum"], logged["plain"], dict.__getitem__(logged, "sum")[1]

    compiled = dovetail.compile(function, backend="aten")
    for _ in range(3):
        same(function(torch.ones(2)), compiled(torch.ones(2)))


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def _on_the_object(module: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_call_impl", lambda x: x * 5, raising=False)


def _on_its_class(module: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(module), "_call_impl", lambda self, x: x * 7, raising=False)


def _on_all_modules(module: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    before = torch.nn.Module._call_impl
    patch.setattr(torch.nn.Module, "_call_impl", lambda self, *args: before(self, *args) * 3)


@pytest.mark.parametrize("replace", [_on_the_object, _on_its_class, _on_all_modules])
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("calls_before", [0, 1, 4])
def test_call_impl_is_replaced_and_put_back(replace: Any, is_inside: bool, calls_before: int) -> None:
    inner = Doubled()
    outer = torch.nn.Sequential(inner) if is_inside else inner
    compiled = dovetail.compile(outer, backend="aten")
    x = torch.ones(2)
    for _ in range(calls_before):
        same(compiled(x), outer(x))
    with pytest.MonkeyPatch.context() as patch:
        replace(inner, patch)
        for _ in range(2):
            same(compiled(x), outer(x))
    same(compiled(x), outer(x))
