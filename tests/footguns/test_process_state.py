"""State of torch that changes between two calls: every call is eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

import dovetail


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def warn_always() -> Iterator[None]:
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


@contextlib.contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def averaged(x: Tensor) -> Tensor:
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
        return x / (dist.get_world_size() + 1)
    return x * 100


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "a process group": (process_group, averaged),
    "its size": (process_group, lambda x: x * (dist.get_world_size() + 1 if dist.is_initialized() else 5)),
    "its backend": (process_group, lambda x: (x * 2, dist.get_backend() if dist.is_initialized() else "none")),
    "warn always": (warn_always, lambda x: x * (2 if torch.is_warn_always_enabled() else 3)),
    "threads": (threads, lambda x: x * torch.get_num_threads()),
    "multithreading": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda x: x * (2 if torch.autograd.is_multithreading_enabled() else 3),
    ),
}


@pytest.mark.parametrize("inside_first", [False, True])
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.filterwarnings("ignore")
def test_a_switch_between_two_calls(name: str, inside_first: bool) -> None:
    switch, program = SWITCHES[name]

    def run(call: Callable[[Tensor], Any]) -> list[str]:
        found = []
        for inside in (inside_first, not inside_first, inside_first, not inside_first):
            with switch() if inside else contextlib.nullcontext():
                found.append(str(call(torch.ones(2))))
        return found

    assert run(dovetail.compile(program, backend="aten")) == run(program)


class Noise(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


@pytest.mark.parametrize("outside_first", [False, True])
@pytest.mark.parametrize("kind", [Noise, Symmetric])
@pytest.mark.filterwarnings("ignore")
def test_cached_parametrizations(kind: type[nn.Module], outside_first: bool) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        parametrize.register_parametrization(layer, "weight", kind())
        call, x, found = wrap(layer), torch.ones(3, 4), []
        if outside_first:
            found.append(call(x))
        with parametrize.cached():
            found.append(call(x))
            with torch.no_grad():
                layer.parametrizations.weight.original.mul_(2)  # type: ignore[union-attr, operator]
            found += [call(x), torch.tensor(len(parametrize._cache))]
        return [*found, call(x), torch.tensor(len(parametrize._cache)), torch.rand(1)]

    expected = run(lambda layer: layer)
    assert all(map(torch.equal, run(lambda layer: dovetail.compile(layer, backend="aten")), expected))
