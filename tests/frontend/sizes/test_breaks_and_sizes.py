"""Graph breaks and sizes that change: each part is compiled at most once more, and the state of torch stays eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.torch_private import state as private_state
from tests.differential import compilations, same


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Breaks are what these tests are about; no test may leave a switch for kernels another way."""
    flags = private_state.kernel_flags()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    assert private_state.kernel_flags() == flags


def counts(program: Callable[..., Any], sizes: tuple[int, ...]) -> list[int]:
    """Call a program eager and compiled with each number of rows; returns the captures after each."""
    compiled = dovetail.compile(program, backend="aten")
    found = []
    for rows in sizes:
        values = torch.linspace(-1, 2, rows * 4).reshape(rows, 4)
        same(program(values), compiled(values))
        found.append(compilations(compiled))
    return found


def in_block_of_switches(values: torch.Tensor) -> torch.Tensor:
    """The graph breaks while a generator of torch's own is suspended."""
    with torch.backends.cudnn.flags(enabled=False):
        scaled = values * 2
        if scaled.sum() > -1e9:
            scaled = scaled + (3 if torch.backends.cudnn.enabled else 5)
        return scaled


def around_block_of_switches(values: torch.Tensor) -> torch.Tensor:
    result = in_block_of_switches(values.sin())
    return result.cos() * (3 if torch.backends.cudnn.enabled else 5)


def in_block_without_a_setter(values: torch.Tensor) -> torch.Tensor:
    """The state at the break cannot be kept: the block runs for real, the caller has its graphs."""
    with torch.backends.mkldnn.flags(enabled=False):
        scaled = values * 2
        return scaled if scaled.sum() > -1e9 else values


def around_block_without_a_setter(values: torch.Tensor) -> torch.Tensor:
    return in_block_without_a_setter(values.sin()).cos()


@pytest.mark.parametrize("program", [around_block_of_switches, around_block_without_a_setter])
def test_a_break_in_a_block_of_torch(program: Callable[..., Any]) -> None:
    _, second, *later = counts(program, (5, 6, 7, 8, 3))
    assert later == [second] * 3


def test_a_switch_for_kernels_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's testing utilities, which other tests import, forbid to set these switches.
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)

    def program(values: torch.Tensor, benchmark: bool) -> torch.Tensor:
        torch.backends.cudnn.benchmark = benchmark
        return values.sin() if values.sum() > -1e9 else values

    compiled = dovetail.compile(program, backend="aten")
    before = torch.backends.cudnn.benchmark
    values = torch.ones(3)
    try:
        for benchmark in (True, False, False, True, True, False):
            same(compiled(values, benchmark), values.sin())
            assert torch.backends.cudnn.benchmark is benchmark
    finally:
        torch.backends.cudnn.benchmark = before


class Calibrated(torch.nn.Module):
    """The first call takes another way than all others, as a quantised module does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("low", torch.zeros(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(values)
        if self.low.min() > -1e-6:
            self.low = hidden.detach().min().reshape(1)
        else:
            self.low = self.low * 0.9 + hidden.detach().min()
            hidden = hidden * 2 if self.low.sum() > -1e9 else hidden
        return (hidden - self.low).sin().sum()


def test_a_way_that_is_first_taken_after_the_sizes_have_changed() -> None:
    torch.manual_seed(0)
    module, twin = Calibrated(), Calibrated()
    twin.load_state_dict(module.state_dict())
    compiled = dovetail.compile(twin, backend="aten")
    found = []
    for rows in (5, 6, 7, 8, 4):
        values = torch.linspace(-1, 2, rows * 4).reshape(rows, 4)
        for callee in (module, compiled):
            callee.zero_grad()
            callee(values).backward()
        same(module(values), compiled(values))
        same(module.linear.weight.grad, twin.linear.weight.grad)
        same(module.low, twin.low)
        found.append(compilations(compiled))
    assert found[2:] == [found[1]] * 3


def raises_where_it_is_compiled(values: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        raise ValueError("the way for compilers is broken")
    if (values > -1e9).all():
        return values.sin() * (2 if torch.compiler.is_compiling() else 3)
    return values


def raises_everywhere(values: torch.Tensor) -> torch.Tensor:
    raise ValueError("compiled" if torch.compiler.is_compiling() else "eager")


def test_a_program_that_raises_only_where_it_is_compiled() -> None:
    _, second, *later = counts(raises_where_it_is_compiled, (5, 6, 7, 8))
    assert later == [second] * 2
    with pytest.raises(ValueError, match="eager"):
        dovetail.compile(raises_everywhere, backend="aten")(torch.ones(3))


def asks_what_is_not_there(values: torch.Tensor) -> torch.Tensor:
    """On a machine without a GPU the question itself raises, whatever the sizes are."""
    try:
        scale = 3 if torch.cuda.is_current_stream_capturing() else 2
    except RuntimeError:
        scale = 2
    return values.sin() * scale * values.shape[0]


def test_an_error_of_a_call_without_arguments_is_handled() -> None:
    assert counts(asks_what_is_not_there, (5, 6, 7)) == [1, 3, 5]


def prints(row: torch.Tensor) -> torch.Tensor:
    print(end="")
    return row.cos()


def maps_what_prints(values: torch.Tensor) -> torch.Tensor:
    """What vmap returns holds what the interpreter gave it in the place of the function; that must not leave the trace."""
    return torch.func.vmap(lambda row: prints(row) * 2)(values.sin()) + 1


def test_a_break_in_what_vmap_calls() -> None:
    _, second, *later = counts(maps_what_prints, (5, 6, 7))
    assert later == [second]
