"""A suite that any backend can be run against: small graphs that cover what a backend has to get right.

>>> from dovetail.backends import ATEN
>>> from dovetail.backends.debug.conformance import check_backend
>>> check_backend(ATEN)
()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.backends.aten import compile_aten
from dovetail.backends.protocol import Backend, Kind, compile_with
from dovetail.errors import DovetailError, UnsupportedGraphError
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing


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


def _layers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[Any]:
    functional = torch.nn.functional
    convolved = functional.conv2d(x, w, b, padding=1)
    return [
        functional.max_pool2d(convolved, 2),
        functional.avg_pool2d(convolved, 2),
        functional.group_norm(convolved, 2),
    ]


def _places(x: torch.Tensor) -> list[Any]:
    index = x.argsort(-1)
    table = torch.nn.functional.embedding(index, x.t().contiguous())
    written = torch.zeros_like(x).scatter_add(-1, index, x)
    return [x.gather(-1, index), table, written, x[index[:, 0] % 3], x.index_add(0, index[0] % 3, x[index[0] % 3])]


def _parts(x: torch.Tensor) -> list[Any]:
    one, two = x.chunk(2, -1)
    return [torch.cat([two, one], -1), torch.stack([one, two]), x.flip(0).roll(1, -1), x.tril(), x.repeat(2, 1)]


def _reductions(x: torch.Tensor) -> list[Any]:
    largest, where = x.max(-1)
    variance, mean = torch.var_mean(x, 0)
    return [largest, where, variance, mean, x.cumsum(-1), x.logsumexp(-1), x.argmin(), (x > 0).any(), x.norm()]


def _masks(x: torch.Tensor) -> list[Any]:
    mask = x > 0
    return [torch.where(mask, x, -x), x.masked_fill(mask, float("inf")), mask & (x < 1), x.clamp(-0.5, 0.5), mask.sum()]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Any]:
    return [torch.baddbmm(q, q, k).softmax(-1) @ v, torch.einsum("bij,bkj->bik", q, v), torch.bmm(q, k).log_softmax(1)]


def _low_precision(x: torch.Tensor) -> list[Any]:
    short = x.to(torch.bfloat16)
    return [short @ short.t(), (short * 2 + 1).relu(), short.float().to(torch.float16), short.exp()]


def _extremes(x: torch.Tensor) -> list[Any]:
    infinite = x / torch.zeros_like(x)
    return [infinite, infinite - infinite, torch.log(-x.abs()), infinite.nan_to_num(1.0), infinite.isnan()]


def _indivisible(x: torch.Tensor) -> list[Any]:
    numbers = (x * 10).long()
    return [
        numbers // 3,
        numbers % 3,
        numbers.bitwise_and(5),
        torch.div(x, 0.3, rounding_mode="floor"),
        numbers.float() / 7,
    ]


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
    Case("convolution, pooling, norm", _layers, _normal((2, 3, 8, 8), (4, 3, 3, 3), (4,))),
    Case("gather, scatter, lookup", _places, _normal((3, 4))),
    Case("joining, cutting, turning", _parts, _normal((4, 4))),
    Case("reductions and scans", _reductions, _normal((5, 6))),
    Case("masks and choices", _masks, _normal((5, 6))),
    Case("batched matrix products", _attention, _normal((2, 4, 4), (2, 4, 4), (2, 4, 4))),
    Case("bfloat16 and float16", _low_precision, _normal((4, 4))),
    Case("infinities and NaN", _extremes, _normal((3, 4))),
    Case("whole numbers", _indivisible, _normal((3, 4))),
)


def check_backend(backend: Backend, cases: tuple[Case, ...] = CASES) -> tuple[Failure, ...]:
    """Run a backend on every case and on every kind of graph that it takes; the failures, none for one that conforms.

    Values are compared with the ATen operators' own (to the last bit if the backend says "bitwise"), over two calls; so
    are dtypes, shapes and strides. Outputs must be no views, require no gradient, share version counters where they
    share memory, and an input that is handed through must be the same object.
    """
    return tuple(
        Failure(case.name, kind, problem)
        for case in cases
        for kind in backend.kinds
        if (problem := check_case(backend, case, kind))
    )


def check_case(
    backend: Backend, case: Case, kind: Kind, options: Mapping[str, Any] | None = None, device: str = "cpu"
) -> str:
    """What is wrong with one case as one kind of graph, in words; empty if nothing is.

    Raises :class:`UnsupportedGraphError` if the backend says that it cannot take the graph.
    """
    backend = backend.with_options(options or {})
    with private_state.preserved_rng_state():
        try:
            return _check(backend, case, kind, dict(options or {}), device)
        except UnsupportedGraphError:
            raise
        except DovetailError as error:
            return str(error)


def _check(backend: Backend, case: Case, kind: Kind, options: dict[str, Any], device: str) -> str:
    inputs = [value.to(device) for value in case.inputs()]
    fake_mode = private_tracing.FakeTensorMode()
    fakes = [fake_mode.from_tensor(value, static_shapes=True) for value in inputs]
    table = backend.decompositions()
    with fake_mode, torch.no_grad():
        graph = make_fx(torch.func.functionalize(case.function))(*fakes)
        reference = compile_aten(graph, fakes, kind=kind)
        written = make_fx(graph, decomposition_table=table)(*fakes) if table else graph
    before = str(written.graph)
    compiled = compile_with(backend, written, fakes, kind, options)
    for _ in range(2):
        torch.manual_seed(1)
        wanted = reference(list(inputs))
        torch.manual_seed(1)
        outputs = compiled(list(inputs))
        for index, (output, want) in enumerate(zip(outputs, wanted, strict=True)):
            problem = _compare(output, want, inputs, backend)
            if problem:
                return f"output {index} {problem}"
        problem = _version_problem(outputs)
        if problem:
            return problem
    return "the graph handed in was changed" if str(written.graph) != before else ""


def _compare(output: Any, want: Any, inputs: list[torch.Tensor], backend: Backend) -> str:
    if not isinstance(want, torch.Tensor):
        return "" if type(output) is type(want) and output == want else f"is {output!r} instead of {want!r}"
    if any(want is value for value in inputs):
        return "" if output is want else "is not the input object that is handed through"
    if private_tensors.is_tensor_view(output) or output.requires_grad:
        return "is a view or requires a gradient"
    if output.dtype != want.dtype or output.shape != want.shape:
        return f"is {output.dtype} of shape {tuple(output.shape)} instead of {want.dtype} of shape {tuple(want.shape)}"
    if output.stride() != want.stride() and want.numel():
        return f"has strides {output.stride()} instead of {want.stride()}"
    return "" if values_agree(output, want, backend) else "has other values than the ATen operators give"


def values_agree(found: torch.Tensor, wanted: torch.Tensor, backend: Backend) -> bool:
    """Whether values agree as far as the backend promises: to the last bit, or up to its tolerances.

    Half-precision numbers get the tolerance that their eight to eleven bits need, and float64 one that float32 cannot keep.
    """
    if backend.numerics == "bitwise" or not (wanted.is_floating_point() or wanted.is_complex()):
        return bool(torch.equal(found.isnan(), wanted.isnan()) and torch.equal(_no_nan(found), _no_nan(wanted)))
    relative, absolute = backend.tolerances
    if wanted.dtype in (torch.bfloat16, torch.float16):
        relative, absolute = max(relative, 2e-2), max(absolute, 1e-3)
    elif wanted.dtype in (torch.float64, torch.complex128):
        relative, absolute = min(relative, 1e-7), min(absolute, 1e-8)
    return torch.allclose(found, wanted, rtol=relative, atol=absolute, equal_nan=True)


def _no_nan(value: torch.Tensor) -> torch.Tensor:
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return torch.where(value.isnan(), torch.zeros((), dtype=value.dtype), value)


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
