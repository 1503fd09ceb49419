"""What a program depends on may lie where nobody looks: in a descriptor, in a class of torch's, behind a tuple of classes."""

from __future__ import annotations

import functools
import operator
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import dovetail
from tests.differential import same


class Scaled:
    """A descriptor that looks at itself."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __get__(self, owner: Any, kind: type | None = None) -> float:
        return self.scale * (1.0 if owner is None else owner.factor)

    def __set__(self, owner: Any, value: float) -> None:
        owner.__dict__["kept"] = value * self.scale


class Quiet:
    """A descriptor that can be hidden by what the object has itself."""

    def __get__(self, owner: Any, kind: type | None = None) -> float:
        return float(getattr(self, "scale", 1.0))


class Counting:
    """A decorator that is an object, and binds like a method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.scale = 1.0

    def __call__(self, *args: Any) -> Any:
        return self.function(*args) * self.scale

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else functools.partial(self, owner)


def owner() -> Any:
    """An object of a class with such descriptors; the class is a new one."""

    class Owner:
        scaled = Scaled()
        quiet = Quiet()
        factor = 1.0

        @Counting
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    return Owner()


def descriptor(target: Any, name: str) -> Any:
    """The descriptor itself."""
    return vars(target if isinstance(target, type) else type(target))[name]


def written(state: Any, x: torch.Tensor) -> torch.Tensor:
    """The setter of a descriptor runs inside."""
    state.scaled = 5.0
    return x * state.kept


def trained() -> SimpleNamespace:
    """A parameter and its optimizer."""
    parameter = nn.Parameter(torch.ones(3))
    return SimpleNamespace(parameter=parameter, optimizer=torch.optim.SGD([parameter], 0.1))


def step(state: Any, x: torch.Tensor) -> torch.Tensor:
    """One step of training."""
    state.optimizer.zero_grad()
    (state.parameter * x).sum().backward()
    state.optimizer.step()
    return state.parameter.detach().clone()


def hook_all_optimizers(state: Any) -> None:
    """Affects every optimizer there is."""
    state.handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: state.parameter.data.mul_(2))


Program = tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any], list[Callable[[Any], Any]]]


def put_module(scale: float) -> None:
    """A module as it is after a reload that makes it anew."""
    module = types.ModuleType("dovetail_test_module")
    module.scale = scale  # type: ignore[attr-defined]
    sys.modules["dovetail_test_module"] = module


def imported(state: Any, x: torch.Tensor) -> torch.Tensor:
    """Imports inside."""
    import dovetail_test_module  # type: ignore[import-not-found]

    return x * dovetail_test_module.scale


PROGRAMS: dict[str, Program] = {
    "a module in the place of another": (lambda: put_module(1.0), imported, [lambda state: put_module(4.0)]),
    "a descriptor's own state": (
        owner,
        lambda state, x: x * state.scaled,
        [lambda state: setattr(descriptor(state, "scaled"), "scale", 4.0), lambda state: setattr(state, "factor", 7.0)],
    ),
    "a descriptor asked by the class": (
        lambda: type(owner()),
        lambda state, x: x * state.quiet * state.scaled,
        [
            lambda state: setattr(descriptor(state, "quiet"), "scale", 5.0),
            lambda state: setattr(descriptor(state, "scaled"), "scale", 5.0),
        ],
    ),
    "a descriptor that is hidden": (
        owner,
        lambda state, x: x * state.quiet,
        [
            lambda state: setattr(descriptor(state, "quiet"), "scale", 5.0),
            lambda state: vars(state).update(quiet=9.0),
            lambda state: vars(state).clear(),
        ],
    ),
    "a descriptor that is written": (
        owner,
        written,
        [lambda state: setattr(descriptor(state, "scaled"), "scale", 4.0)],
    ),
    "a decorator's own state": (
        owner,
        lambda state, x: state.method(x),
        [lambda state: setattr(descriptor(state, "method"), "scale", 5.0)],
    ),
    "a pattern": (
        lambda: SimpleNamespace(pattern=re.compile("a+"), text="aabaa"),
        lambda state, x: x * len(state.pattern.findall(state.text)) * len(state.pattern.sub("b", state.text)),
        [lambda state: setattr(state, "pattern", re.compile("a")), lambda state: setattr(state, "text", "ba")],
    ),
    "a match": (
        lambda: SimpleNamespace(match=re.match("a+", "aab")),
        lambda state, x: x * len(state.match.group(0)),
        [lambda state: setattr(state, "match", re.match("a+", "aaaab"))],
    ),
    "a key to compare by": (
        lambda: SimpleNamespace(key=functools.cmp_to_key(operator.sub)),
        lambda state, x: x * sorted([3, 1, 2], key=state.key)[0],
        [lambda state: setattr(state, "key", functools.cmp_to_key(lambda left, right: right - left))],
    ),
    "a tuple of classes": (
        lambda: SimpleNamespace(kinds=(int,)),
        lambda state, x: x * (2 if isinstance(1, state.kinds) else 3) * (5 if issubclass(bool, state.kinds) else 7),
        [
            lambda state: setattr(state, "kinds", (str, float)),
            lambda state: setattr(state, "kinds", (str, (bool, int))),
        ],
    ),
    "a union of classes": (
        lambda: SimpleNamespace(kinds=int | str),
        lambda state, x: x * (2 if isinstance(1, state.kinds) else 3),
        [lambda state: setattr(state, "kinds", str | float)],
    ),
    "hooks of all optimizers": (trained, step, [hook_all_optimizers, lambda state: state.handle.remove()]),
    "a switch in a class of torch's": (
        lambda: torch.distributions.Distribution.set_default_validate_args(True),
        lambda state, x: x * (2 if torch.distributions.Distribution._validate_args else 3),
        [
            lambda state: torch.distributions.Distribution.set_default_validate_args(False),
            lambda state: torch.distributions.Distribution.set_default_validate_args(True),
        ],
    ),
    "what the user puts into torch": (
        lambda: (setattr(torch, "scale_of_ours", 1.0), setattr(nn.Linear, "scale_of_ours", 1.0)),
        lambda state, x: x * torch.scale_of_ours * nn.Linear.scale_of_ours,  # type: ignore[attr-defined,operator]
        [lambda state: setattr(torch, "scale_of_ours", 2.0), lambda state: setattr(nn.Linear, "scale_of_ours", 3.0)],
    ),
    "the fast path of attention": (
        lambda: torch.backends.mha.set_fastpath_enabled(True),
        lambda state, x: x * (2 if torch.backends.mha.get_fastpath_enabled() else 3),
        [
            lambda state: torch.backends.mha.set_fastpath_enabled(False),
            lambda state: torch.backends.mha.set_fastpath_enabled(True),
        ],
    ),
    "whether a gradient is kept": (
        lambda: SimpleNamespace(tensor=torch.ones(3, requires_grad=True) * 2),
        lambda state, x: x * (2 if state.tensor.retains_grad else 3),
        [lambda state: state.tensor.retain_grad()],
    ),
    "whether there are hooks": (
        lambda: SimpleNamespace(tensor=torch.ones(3, requires_grad=True)),
        lambda state, x: x * (2 if state.tensor._backward_hooks else 3),
        [lambda state: state.tensor.register_hook(lambda gradient: gradient)],
    ),
    "the name of a function": (
        lambda: SimpleNamespace(name="relu"),
        lambda state, x: getattr(F, state.name)(x - 2) + getattr(torch, state.name)(x),
        [lambda state: setattr(state, "name", "tanh")],
    ),
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for place in (torch, nn.Linear):
        if "scale_of_ours" in vars(place):
            delattr(place, "scale_of_ours")
    sys.modules.pop("dovetail_test_module", None)
    torch.distributions.Distribution.set_default_validate_args(__debug__)
    torch.backends.mha.set_fastpath_enabled(True)


def results(program: Program, compile: Callable[[Any], Any]) -> list[Any]:
    """What the program returns twice at the start, and twice after each change."""
    make, read, changes = program
    state = make()
    function = compile(lambda x: read(state, x))
    found = [function(torch.ones(3)), function(torch.ones(3))]
    for change in changes:
        change(state)
        found += [function(torch.ones(3)), function(torch.ones(3))]
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_change_is_seen(name: str) -> None:
    expected = results(PROGRAMS[name], lambda function: function)
    actual = results(PROGRAMS[name], lambda function: dovetail.compile(function, backend="aten"))
    same(expected, actual)
    assert any(not torch.equal(expected[0], other) for other in expected)


def test_a_random_generator_of_an_extension_is_asked() -> None:
    numpy = pytest.importorskip("numpy")

    def draw(generator: Any, x: torch.Tensor) -> torch.Tensor:
        return x * float(generator.random())

    compiled = dovetail.compile(draw, backend="aten")
    mine, other = numpy.random.default_rng(3), numpy.random.default_rng(3)
    for _ in range(3):
        same(draw(mine, torch.ones(2)), compiled(other, torch.ones(2)))
