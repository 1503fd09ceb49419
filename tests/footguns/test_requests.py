"""Requests that have their effect, or are refused: options, the stance of torch.compile, marks of sizes, hooks on all modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import OptionError, RecompileLimitWarning
from tests.differential import same


@pytest.mark.parametrize("backend", ("aten", "eager"))
def test_an_option_that_the_backend_does_not_have(backend: str) -> None:
    with pytest.raises(OptionError, match="no_such_option"):
        dovetail.compile(torch.sin, backend=backend, backend_options={"no_such_option": 3})


def test_a_marked_size_that_the_program_fixes() -> None:
    weight = torch.randn(3, 4)
    compiled = dovetail.compile(lambda values: values.t() @ weight, backend="aten")
    with pytest.warns(RecompileLimitWarning, match=r"dimension 0 of .*values.* was marked .* holds it to 3"):
        compiled(dovetail.mark_dynamic(torch.randn(3, 8), 0, minimum=2, maximum=64))
    free = dovetail.compile(lambda values: values * 2, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free(dovetail.mark_dynamic(torch.randn(3, 8), 0, minimum=2, maximum=64))


def _hooked(compiler: Callable[[Any], Any]) -> list[Any]:
    torch.manual_seed(0)
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    compiled, values = compiler(model), torch.randn(3, 4, requires_grad=True)
    register = nn.modules.module
    for called in range(3):
        handles = (
            []
            if called != 1
            else [
                register.register_module_full_backward_hook(
                    lambda module, inner, outer: seen.append(type(module).__name__)
                ),
                register.register_module_full_backward_pre_hook(lambda module, outer: (outer[0] * 2,)),
            ]
        )
        try:
            compiled(values).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        seen += [values.grad, model[0].weight.grad.clone()]
    return seen


@pytest.mark.parametrize("backend", ("aten", "eager"))
def test_backward_hooks_on_all_modules(backend: str) -> None:
    for left, right in zip(
        _hooked(lambda model: model), _hooked(lambda model: dovetail.compile(model, backend=backend)), strict=True
    ):
        same(left, right) if isinstance(left, Tensor) else None
        assert isinstance(left, Tensor) or left == right


class _Base:
    def __init__(self, tag: str = "default") -> None:
        self.tag = tag


class _Pretends(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Base)


class _Pretended(metaclass=_Pretends):
    def __new__(cls) -> Any:
        return _Base("made")

    def __init__(self) -> None:
        raise AssertionError("this is no object of the class")


class _Denies(type):
    def __instancecheck__(cls, value: object) -> bool:
        return False


class _Denied(metaclass=_Denies):
    def __init__(self, size: int) -> None:
        self.size = size

    def __new__(cls, size: int) -> Any:
        return object.__new__(cls)


class _Parent:
    def __new__(cls, *args: Any) -> Any:
        return object.__new__(_Child if cls is _Parent else cls)

    def __init__(self, *args: Any) -> None:
        self.name = "parent"


class _Child(_Parent):
    def __init__(self, name: str = "child") -> None:
        self.name = name * 2


def test_which_init_is_called_on_what() -> None:
    def program(values: Tensor) -> tuple[Tensor, str, str, str]:
        made = _Pretended()
        return values * _Denied(3).size, made.tag, _Parent().name, _Parent("own").name

    expected, actual = program(torch.ones(2)), dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2))
    assert torch.equal(expected[0], actual[0])
    assert expected[1:] == actual[1:] == ("made", "childchild", "ownown")
