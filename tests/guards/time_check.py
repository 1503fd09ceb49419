"""Prints what a check costs: ``python tests/guards/time_check.py [modules]``. Not a test."""

from __future__ import annotations

import sys
import time
import timeit

import torch

from dovetail.guards import (
    AmbientState,
    ArgumentSource,
    CalleeSource,
    Equals,
    GuardSet,
    InstanceDictSource,
    ItemSource,
    NoHooks,
    Source,
    TypeIs,
    compile_checker,
)


def guard_module(guards: GuardSet, source: Source, module: torch.nn.Module) -> None:
    """The guards that calling a module and its children, one after the other, would add."""
    guards.add(source, TypeIs(type(module)), None, "")
    own = InstanceDictSource(source)
    guards.add(own, NoHooks(), None, "")
    guards.add(ItemSource(own, "training"), Equals(module.training), None, "")
    for table in ("_parameters", "_modules"):
        for name, value in getattr(module, table).items():
            item = ItemSource(ItemSource(own, table), name)
            if isinstance(value, torch.nn.Module):
                guard_module(guards, item, value)
            elif value is not None:
                guards.add_tensor(item, value)


def main(count: int) -> None:
    """Build a chain of modules, and time the check of a hit and of a miss by the argument's shape."""
    model = torch.nn.Sequential(*[torch.nn.LayerNorm(8) for _ in range(count)])
    guards = GuardSet()
    guards.add_tensor(ArgumentSource(0, "L['x']"), torch.zeros(8))
    guard_module(guards, CalleeSource(), model)
    start = time.perf_counter()
    checker = compile_checker(guards, AmbientState.snapshot())
    built = time.perf_counter() - start
    x, other = torch.zeros(8), torch.zeros(9)
    assert checker.check(model, (x,), {}) is not None and checker.check(model, (other,), {}) is None
    number = max(20, 20000 // (count + 1))
    hit = min(timeit.repeat(lambda: checker.check(model, (x,), {}), number=number, repeat=5)) / number
    miss = min(timeit.repeat(lambda: checker.check(model, (other,), {}), number=number, repeat=5)) / number
    print(
        f"{count} modules, {len(guards)} guards, {len(checker.guards.tensors)} tensors: hit {hit * 1e6:.1f} us, "
        f"miss by shape {miss * 1e6:.1f} us, generated in {built * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
