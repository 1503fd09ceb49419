"""A program that type checkers check: each line with an error in it ends in ``# error``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import dovetail


def plain(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


compiled = dovetail.compile(plain, backend="aten", mode="default", dynamic=None)
result: Tensor = compiled(torch.ones(2), scale=2.0)
compiled(torch.ones(2), "three")  # error
compiled(torch.ones(2), scales=2.0)  # error
number: int = compiled(torch.ones(2))  # error
dovetail.compile(plain, full_graph=True)  # error
dovetail.compile(plain, fullgraph="yes")  # error
dovetail.compile(plain, options={"max_autotune": True}, disable=True)
print(compiled.entries, compiled.events.count("compile"), compiled.original)
flops: int = compiled.cost(measure=False).flops
compiled.costs()  # error


@dovetail.compile(backend="aten", fullgraph=True)
def decorated(x: Tensor) -> int:
    return len(x)


length: int = decorated(torch.ones(1))
decorated(3)  # error


@dovetail.compile
def bare(x: Tensor) -> Tensor:
    return x


bare()  # error


class Model(nn.Module):
    @dovetail.compile
    def part(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Derived(Model):
    @dovetail.compile(backend="aten")
    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    @dovetail.compile
    def part(self, x: Tensor) -> Tensor:
        return x

    @classmethod
    @dovetail.compile
    def made(cls, x: Tensor) -> Derived:
        return cls()

    @staticmethod
    @dovetail.compile
    def alone(x: Tensor) -> Tensor:
        return x


class Wrong(Derived):
    @dovetail.compile(backend="aten")
    def forward(self, x: str) -> Tensor:  # error
        return torch.ones(len(x))


class Plain(Derived):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


Derived().forward("x")  # error
Derived().part(3)  # error
Derived.made(torch.ones(1)).alone(torch.ones(1))
Derived.made(3)  # error
Derived.alone(3)  # error


@dovetail.compile
class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Wider(Net):
    pass


net: Net = Wider(3)
Net("three")  # error
net.forward("x")  # error
whatever: Callable[..., Tensor] = plain
print(dovetail.compile(whatever)(1, 2).shape, dovetail.compile(whatever).entries)


def moved(model: nn.Module, x: Tensor) -> Tensor:
    return x


print(dovetail.compile(moved)(model=Model(), x=torch.ones(1)), dovetail.compile(moved).events)
model: Model = dovetail.compile(Model(), backend="aten")
model.part(torch.ones(1))
model.part("x")  # error


@dovetail.disable(reason="it logs")
def logged(x: Tensor) -> Tensor:
    return x


@dovetail.disable
def silent(x: Tensor) -> Tensor:
    return x


logged(3)  # error
silent(3)  # error
with dovetail.set_stance("force_eager"), dovetail.disable():
    model(torch.ones(1))
names: list[str] = dovetail.list_backends()
