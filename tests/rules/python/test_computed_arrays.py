"""NumPy on tensors that a graph computes, under ``fullgraph=True``: NumPy's numbers to the last bit, its types and its views."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from tests.differential import entries_of, same

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "reductions": lambda x: (np.sum(x.numpy(), axis=0), x.numpy().sum(), x.numpy().mean(1), np.std(x.numpy())),
    "operators": lambda x: ((a := x.numpy()) * 2 + 1, -a, a > 0, a @ a.T, a / np.float64(3), 1 - a),
    "views": lambda x: ((a := x.numpy())[0], a[1, 2], a[:, 1:3], a.T, a.reshape(-1), np.transpose(a), a.swapaxes(0, 1)),
    "numbers": lambda x: (
        (s := (x + 1).numpy().sum()) * 2,
        s > 0,
        np.sqrt(np.abs(s)),
        torch.tensor(s),
        s.item(),
        np.asarray(s),
    ),
    "facts": lambda x: ((a := x.numpy()).shape, a.ndim, a.dtype, a.size, a.nbytes, len(a), isinstance(a, np.ndarray)),
    "several": lambda x: (np.concatenate([(a := x.numpy()), a * 2]), np.stack([a, a]), np.meshgrid(a[0], a[1])),
    "back": lambda x: (torch.from_numpy(x.numpy() * 2).sin(), torch.as_tensor(np.tanh(x.numpy())) * x),
    "libraries": lambda x: (np.linalg.norm(x.numpy(), axis=0), np.fft.fftshift(x.numpy()), np.argmax(x.numpy(), 1)),
    "types": lambda x: (x.numpy().astype(np.float64) + 1, x.to(torch.int64).numpy() // 2, (x > 0).numpy().all()),
    "rows": lambda x: [row * 2 for row in x.numpy()],
}


def _seen(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return [type(value), *map(_seen, value)]
    return value


@pytest.mark.parametrize("name", PROGRAMS)
def test_numpy_computes_in_one_graph(name: str) -> None:
    program = PROGRAMS[name]
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        same(_seen(compiled(x)), _seen(program(x)))
    assert entries_of(compiled) == 1


def test_an_array_shares_the_memory_of_its_tensor() -> None:
    def program(x: torch.Tensor) -> Any:
        array = x.numpy()
        x.add_(1)
        torch.from_numpy(array).mul_(2)
        return array, array[1]

    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    array, row = dovetail.compile(program, backend="aten", fullgraph=True)(ours)
    same(_seen((array, row)), _seen(program(theirs)))
    same(ours, theirs)
    assert np.shares_memory(array, ours.numpy()) and np.shares_memory(row, array)


def test_arrays_that_change_are_inputs_of_the_graph() -> None:
    def program(x: torch.Tensor, array: Any) -> Any:
        return x * torch.from_numpy(np.exp(array)), array.sum(), np.maximum(array, 0.5)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for seed in range(3):
        x, array = torch.ones(3), np.random.default_rng(seed).random(3)
        same(_seen(compiled(x, array)), _seen(program(x, array)))
    assert entries_of(compiled) <= 2


def test_each_size_has_a_graph_of_its_own() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.from_numpy(np.cumsum(x.numpy(), axis=0)) + x

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for size in (3, 5, 7, 5):
        x = torch.randn(size, 2)
        same(compiled(x), program(x))
    assert entries_of(compiled) == 3


def test_numpy_warns_of_the_numbers_of_the_call() -> None:
    compiled = dovetail.compile(lambda x: np.log(x.numpy()), backend="aten", fullgraph=True)
    for value, count in ((1.0, 0), (-1.0, 1), (2.0, 0)):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            compiled(torch.full((2,), value))
        assert len(given) == count


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.numpy()[x.numpy() > 0],
        lambda x: np.nonzero(x.numpy()),
        lambda x: np.flip(x.numpy(), 0),
        lambda x: np.add(x.numpy(), 1, out=np.zeros((3, 4), np.float32)),
        lambda x: np.add(x.numpy(), 1, np.zeros((3, 4), np.float32)),
        lambda x: (np.add(x.numpy(), 1, x.numpy()), x),
        lambda x: (np.dot(x.numpy(), x.numpy().T, np.zeros((3, 3), np.float32)), x),
        lambda x: (np.cumsum(x.numpy(), 0, None, x.numpy()), x),
        lambda x: x.numpy().fill(1),
        lambda x: float(x.numpy().sum()) if x.numpy().any() else 0,
        lambda x: x.requires_grad_().numpy(),
        lambda x: x.numpy().strides,
        lambda x: x.numpy().squeeze(1),
        lambda x: np.asarray(x.numpy(), dtype=np.float64),
        lambda x: np.ravel(x.numpy(), order="F"),
        lambda x: torch.from_numpy(x.numpy().sum()),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_and_runs_for_real(program: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(dovetail.errors.GraphBreakError):
        dovetail.compile(program, backend="aten", fullgraph=True)(x.clone())
    compiled = dovetail.compile(program, backend="aten")
    results = []
    for function in (program, compiled):
        try:
            results.append(_seen(function(x.clone())))
        except (RuntimeError, TypeError, ValueError) as error:
            results.append(str(error))
    same(*results)
