"""Functions of the program that keep their results (``functools.lru_cache``, ``functools.cache``): objects, tensors, modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from dovetail.rules.python.callables import is_in_library
from tests.differential import same

#: The calls that were computed, in their order.
computed: list[tuple[str, int]] = []


class Config:
    """Hashed by its identity."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.items = [n]


@functools.lru_cache(maxsize=None)
def mask(n: int, *, fill: float = 1.0) -> torch.Tensor:
    computed.append(("mask", n))
    return torch.tril(torch.full((n, n), fill))


@functools.cache
def config(n: int) -> Config:
    computed.append(("config", n))
    return Config(n)


@functools.cache
def wider(narrow: Config) -> Config:
    return Config(narrow.n + 10)


@functools.cache
def doubled(of: Config) -> int:
    return of.n * 2


@functools.lru_cache(maxsize=2)
def of_two(n: int) -> Config:
    computed.append(("of_two", n))
    return Config(n)


@functools.cache
def weight(n: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((n,), 2.0))


@functools.cache
def layer(n: int) -> torch.nn.Linear:
    torch.manual_seed(n)
    return torch.nn.Linear(n, n)


@functools.cache
def noise(n: int) -> torch.Tensor:
    return torch.randn(n, n)


@functools.cache
def exponential(of: torch.Tensor, times: int = 1) -> torch.Tensor:
    computed.append(("exponential", times))
    return of.exp() * times


@functools.lru_cache(maxsize=1)
def of_one(n: int) -> int:
    computed.append(("of_one", n))
    return n + 1


@functools.lru_cache(maxsize=0)
def of_none(n: int) -> int:
    computed.append(("of_none", n))
    return n + 2


@functools.cache
def items(n: int) -> list[int]:
    return [n, n + 1]


class Biased(torch.nn.Module):
    """Keeps what it makes for each size, as attention biases are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.step = 3

    @functools.lru_cache(maxsize=None)  # noqa: B019  (this is what is tested)
    def bias(self, n: int) -> torch.Tensor:
        computed.append(("bias", n))
        return torch.arange(n, dtype=torch.float32) * self.step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.bias(x.shape[-1])


module = Biased()
#: Looked up by a tensor; it is written to between calls.
looked_up = torch.zeros(3)
CACHES: tuple[Any, ...] = (
    *(mask, config, wider, doubled, of_two, weight, layer, noise, items, Biased.bias),
    *(exponential, of_one, of_none),
)


def _masked(x: torch.Tensor) -> torch.Tensor:
    return x @ mask(3) + mask(3, fill=2.0).sum()


def _written(x: torch.Tensor) -> torch.Tensor:
    mask(3).mul_(2)
    return x @ mask(3)


def _counted(x: torch.Tensor) -> torch.Tensor:
    kept = config(3)
    kept.n += 1
    kept.items.append(kept.n)
    items(2).append(kept.n)
    return x * kept.n + len(kept.items) + len(items(2))


def _one_object(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if config(3) is config(3) else x * 3


def _by_object(x: torch.Tensor) -> torch.Tensor:
    return x * wider(config(2)).n + doubled(config(2))


def _learned(x: torch.Tensor) -> torch.Tensor:
    return x * weight(3)


def _lazy_layer(x: torch.Tensor) -> torch.Tensor:
    return layer(3)(x)


def _drawn(x: torch.Tensor) -> torch.Tensor:
    return x @ noise(3) * torch.rand(3)


def _of_module(x: torch.Tensor) -> torch.Tensor:
    return module(x)


def _change(number: int) -> None:
    """What the program does to its caches between calls."""
    config(3).n += 1
    looked_up.add_(1)
    if number == 1:
        mask.cache_clear()
        config.cache_clear()
    if number == 2:
        mask(3).add_(1)
        module.step = 5
        Biased.bias.cache_clear()


def _outcomes(function: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    computed.clear()
    module.step, module.scale.grad = 3, None
    looked_up.zero_()
    for cache in CACHES:
        cache.cache_clear()
    torch.manual_seed(0)
    found: list[Any] = []
    for number in range(5):
        x = torch.randn(2, 3, requires_grad=True)
        result = function(x)
        result.sum().backward()
        kept = config(3)
        found += [result.detach().clone(), x.grad, kept.n, list(kept.items), list(items(2)), mask(3).clone()]
        found += [weight(3).grad, torch.get_rng_state()]
        _change(number)
    return [*found, list(computed)]


ONE_GRAPH = (_masked, _written, _counted, _one_object, _by_object, _learned, _lazy_layer, _drawn, _of_module)


@pytest.mark.parametrize("program", ONE_GRAPH, ids=lambda program: program.__name__.strip("_"))
def test_results_of_caches_are_read_where_they_are_kept(program: Any) -> None:
    expected = _outcomes(program)
    same(expected, _outcomes(dovetail.compile(program, backend="aten", fullgraph=True)))


def _drawn_before(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(3) * x @ noise(3)


def _too_many(x: torch.Tensor) -> torch.Tensor:
    return x * of_two(1).n + of_two(2).n + of_two(3).n


def _object_of_its_own(x: torch.Tensor) -> torch.Tensor:
    return x * doubled(Config(4))


def _by_tensor(x: torch.Tensor) -> torch.Tensor:
    # What was computed from the numbers of before stays in the cache.
    again = exponential(looked_up)
    return x * exponential(looked_up) + (2 if again is exponential(looked_up) else 3)


def _by_own_tensor(x: torch.Tensor) -> torch.Tensor:
    return exponential(x * 2, times=2)


def _forgotten(x: torch.Tensor) -> torch.Tensor:
    return x * of_one(x.shape[0]) + of_one(7)


def _never_kept(x: torch.Tensor) -> torch.Tensor:
    return x * of_none(3)


BREAKS = {
    _drawn_before: "draws random numbers",
    _too_many: "no constant",
    _object_of_its_own: "asked for an object",
    _by_tensor: "asked for a tensor",
    _by_own_tensor: "asked for a tensor",
    _forgotten: "no room left",
    _never_kept: "no room left",
}


@pytest.mark.parametrize("program", BREAKS, ids=lambda program: program.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def test_a_cache_that_cannot_be_asked_again_breaks_the_graph(program: Any) -> None:
    expected = _outcomes(program)
    same(expected, _outcomes(dovetail.compile(program, backend="aten")))
    for cache in CACHES:
        cache.cache_clear()
    with pytest.raises(GraphBreakError, match=BREAKS[program]):
        dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2, 3))


def test_a_folder_into_which_packages_were_installed_is_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages" / "thing-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "packages"), str(tmp_path / "own")])
    assert is_in_library(str(tmp_path / "packages" / "thing.py"))
    assert is_in_library(torch.__file__)
    assert not is_in_library(str(tmp_path / "own" / "thing.py"))
    assert not is_in_library(None)


# --- what is asked, and when ------------------------------------------------------------------------------------------


def test_a_cache_is_not_asked_for_what_another_call_wanted():
    """Why an entry does not take a call is looked up without asking the cache for the key of that entry."""

    def results(compile):
        seen: list[int] = []
        factor = [1]

        @functools.lru_cache(maxsize=2)
        def scaled(n):
            seen.append(n)
            return n * factor[0]

        function = compile(lambda x, n: x * scaled(n))
        found = []
        for n in (1, 2, 1, 3, 1, 2):
            found.append((function(torch.ones(1), n).item(), list(seen)))
            factor[0] += 1
            if n == 3:
                scaled.cache_clear()
        return found

    assert results(lambda function: dovetail.compile(function, backend="aten")) == results(lambda function: function)
