"""How many writes autograd has counted after a call: eager's number for each input, 0 for what the function has made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

Tensor = torch.Tensor
F = torch.nn.functional

PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "one": lambda x: x.add_(1),
    "three": lambda x: x.add_(1).mul_(2).sub_(3).sum(),
    "items": lambda x: (x.__setitem__(0, 1.0), x.__setitem__(x > 0.5, 2.0), x[:, 1].fill_(3)),
    "parts": lambda x: [part.add_(1) for part in x.split(1)],
    "data": lambda x: x.data.add_(1),
    "data and more": lambda x: (x.data.add_(1), x.mul_(2), x.detach().add_(3)),
    "out": lambda x: (torch.add(x, 1, out=x), torch.mm(x.clone(), x.clone(), out=x)),
    "lists": lambda x: (torch._foreach_add_([x, x], 1), torch._foreach_mul_([x], 2)),
    "functions": lambda x: (F.relu(x, inplace=True), F.dropout(x, 0.5, True, True), torch.nn.init.zeros_(x)),
    "sizes": lambda x: (x.t_(), x.add_(1), x.unsqueeze_(0), x.squeeze_(0), x.mul_(2)),
    "sizes past autograd": lambda x: (x.t_(), x.data.add_(1)),
    "nothing changes": lambda x: (x.add_(0), x.copy_(x.clone())),
    "two graphs": lambda x: (x.add_(1), torch._dynamo.graph_break(), x.mul_(2).add_(1)),
    "reads only": lambda x: x + 1,
}


#: Programs that autograd does not record.
UNRECORDED = {"parts", "out", "functions"}


@pytest.mark.parametrize(
    ("name", "recorded"),
    [(name, flag) for flag in (False, True) for name in PROGRAMS if not flag or name not in UNRECORDED],
)
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def test_writes_to_an_input_are_counted_as_in_eager(name: str, recorded: bool) -> None:
    def versions(run: Callable[[Tensor], Any]) -> list[tuple[int, int]]:
        found = []
        for is_view in (False, True, True):
            base = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(2))
            weight = torch.ones(2, 3, 3, requires_grad=recorded)
            base = base * weight
            x = base[1] if is_view else base[1].clone()
            run(x)
            found.append((x._version, base._version))
        return found

    compiled = dovetail.compile(PROGRAMS[name], backend="aten")
    assert versions(compiled) == versions(PROGRAMS[name])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam])
def test_writes_of_a_whole_step(kind: type[torch.optim.Optimizer]) -> None:
    def versions(compiler: Callable[[Any], Any]) -> list[int]:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1)  # type: ignore[call-arg]

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()

        run, found = compiler(step), []
        for _ in range(3):
            run(torch.ones(3))
            found.append(weight._version)
        return found

    assert versions(lambda step: dovetail.compile(step, backend="aten", fullgraph=True)) == versions(lambda step: step)


def test_a_backward_after_several_writes_sees_one_more() -> None:
    def program(x: Tensor) -> Tensor:
        x.mul_(2)
        x.add_(1)
        return x.exp() * x

    for write, run in [(w, r) for w in (False, True) for r in (program, dovetail.compile(program, backend="aten"))]:
        x = torch.ones(3, requires_grad=True)
        y = x * 1
        result = run(y)
        if write:
            with torch.no_grad():
                y.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()
        else:
            result.sum().backward()
            torch.testing.assert_close(x.grad, 2 * torch.exp(torch.tensor(3.0)) * 4 * torch.ones(3))


def test_results_begin_at_0() -> None:
    """A limit: eager counts what the program has written to them."""

    def program(x: Tensor) -> Tensor:
        return (x * 1).add_(1).mul_(2)

    assert program(torch.ones(2))._version == 2
    assert dovetail.compile(program, backend="aten")(torch.ones(2))._version == 0


def _product(x: Tensor, written: Tensor) -> Any:
    written[0] = x[0]
    return (x @ written).sum(), x * 2, (x @ written).cos()


@pytest.mark.parametrize("source", ["product", "double", "cosine", "written"])
def test_a_backward_that_does_not_read_the_written_input(source: str) -> None:
    found = []
    for run in (_product, dovetail.compile(_product, backend="aten")):
        x, leaf = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        written = leaf * 1
        product, double, cosine = run(x, written)
        written.add_(1)
        root = {"product": product, "double": double, "cosine": cosine, "written": written}[source]
        try:
            found.append(torch.autograd.grad(root.sum(), [x, leaf], allow_unused=True))
        except RuntimeError as error:
            found.append("modified by an inplace operation" in str(error))
    torch.testing.assert_close(*found)
