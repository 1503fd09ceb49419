"""A suite that any backend can be run against: small graphs that cover what a backend has to get right.

>>> from dovetail.backends import ATEN
>>> from dovetail.backends.conformance import check_backend
>>> check_backend(ATEN)
()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail import torch_private as private
from dovetail.backends.aten import compile_aten
from dovetail.backends.protocol import Backend, Kind, compile_with
from dovetail.errors import DovetailError


@dataclass(frozen=True)
class Case:
    """One small program on tensors; it returns one flat list."""

    name: str
    function: Callable[..., list[Any]]
    inputs: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class Failure:
    """What a backend got wrong: the case, the kind of graph, and the problem in words."""

    case: str
    kind: Kind
    problem: str

    def __str__(self) -> str:
        return f"{self.case} ({self.kind}): {self.problem}"


def _normal(*sizes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
    def make() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(size, generator=generator) for size in sizes]

    return make


def _pointwise(x: torch.Tensor) -> list[Any]:
    return [torch.tanh(x) * 2 + x.exp()]


def _matrix(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[Any]:
    return [torch.addmm(b, x, w.t()).softmax(-1), x.sum(0), w.mean()]


def _several(x: torch.Tensor) -> list[Any]:
    values, places = x.sort(-1)
    return [values, None, places, 3, values]


def _handed_through(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    return [x, y + 1]


def _shared(x: torch.Tensor) -> list[Any]:
    whole = x.exp()
    return [whole, whole.view(-1), x.t()]


def _turned(x: torch.Tensor) -> list[Any]:
    return [(x + 1).t(), x.permute(1, 0).exp()]


def _empty(x: torch.Tensor) -> list[Any]:
    return [x[:0] * 2, x[:0].sum()]


def _random(x: torch.Tensor) -> list[Any]:
    first = torch.rand_like(x)
    return [first, torch.nn.functional.dropout(x.exp(), 0.5, True), torch.bernoulli(x.sigmoid()) + first]


def _numbers(x: torch.Tensor) -> list[Any]:
    return [x.to(torch.float64) / 3, (x > 0).logical_not(), torch.full_like(x, float("-inf")), x.long() // 2]


CASES: tuple[Case, ...] = (
    Case("pointwise operators", _pointwise, _normal((3, 4))),
    Case("matrix products and reductions", _matrix, _normal((5, 8), (6, 8), (6,))),
    Case("several results, None, a number, one value twice", _several, _normal((3, 4))),
    Case("an input handed through", _handed_through, _normal((2,), (2,))),
    Case("outputs that share memory", _shared, _normal((4, 4))),
    Case("outputs with turned strides", _turned, _normal((3, 4))),
    Case("tensors without elements", _empty, _normal((3, 4))),
    Case("random operators", _random, _normal((7, 5))),
    Case("dtypes", _numbers, _normal((3, 4))),
)


def check_backend(backend: Backend, cases: tuple[Case, ...] = CASES) -> tuple[Failure, ...]:
    """Run a backend on every case and kind of graph; the failures, none for a backend that conforms.

    Values are compared with the ATen operators' own (to the last bit if the backend says "bitwise"), over two calls; so
    are dtypes, shapes and strides. Outputs must be no views, require no gradient, share version counters where they
    share memory, and an input that is handed through must be the same object.
    """
    kinds: tuple[Kind, ...] = ("forward", "backward", "inference")
    found: list[Failure] = []
    for case in cases:
        for kind in kinds:
            try:
                with torch.random.fork_rng(devices=[]):
                    problem = _check(backend, case, kind)
            except DovetailError as error:
                problem = str(error)
            if problem:
                found.append(Failure(case.name, kind, problem))
    return tuple(found)


def _check(backend: Backend, case: Case, kind: Kind) -> str:
    inputs = case.inputs()
    fake_mode = private.FakeTensorMode()
    fakes = [fake_mode.from_tensor(value, static_shapes=True) for value in inputs]
    table = backend.decompositions()
    with fake_mode, torch.no_grad():
        graph = make_fx(torch.func.functionalize(case.function))(*fakes)
        reference = compile_aten(graph, fakes, kind=kind)
        written = make_fx(graph, decomposition_table=table)(*fakes) if table else graph
    before = str(written.graph)
    compiled = compile_with(backend, written, fakes, kind, {})
    for _ in range(2):
        torch.manual_seed(1)
        wanted = reference(list(inputs))
        torch.manual_seed(1)
        outputs = compiled(list(inputs))
        for index, (output, want) in enumerate(zip(outputs, wanted, strict=True)):
            problem = _compare(output, want, inputs, backend.numerics == "bitwise")
            if problem:
                return f"output {index} {problem}"
        problem = _version_problem(outputs)
        if problem:
            return problem
    return "the graph handed in was changed" if str(written.graph) != before else ""


def _compare(output: Any, want: Any, inputs: list[torch.Tensor], bitwise: bool) -> str:
    if not isinstance(want, torch.Tensor):
        return "" if type(output) is type(want) and output == want else f"is {output!r} instead of {want!r}"
    if any(want is value for value in inputs):
        return "" if output is want else "is not the input object that is handed through"
    if private.is_tensor_view(output) or output.requires_grad:
        return "is a view or requires a gradient"
    if output.stride() != want.stride():
        return f"has strides {output.stride()} instead of {want.stride()}"
    same = torch.equal(output, want) if bitwise else torch.allclose(output, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    return "" if same else "has other values than the ATen operators give"


def _version_problem(outputs: list[Any]) -> str:
    tensors = [(index, value) for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
    for place, (index, value) in enumerate(tensors):
        for other_index, other in tensors[place + 1 :]:
            address = value.untyped_storage().data_ptr()
            if value is other or not address or address != other.untyped_storage().data_ptr():
                continue
            before = other._version
            with torch.no_grad():
                value.mul_(1)
            if other._version == before:
                return f"outputs {index} and {other_index} share memory, but a write to one is not noticed by the other"
    return ""
