"""The suite's cases on operators: small graphs, compiled one by one as each kind of graph and compared with ATen.

Outputs must be no views, require no gradient and share version counters where they share memory; an input that is handed
through must be the same object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dovetail.backends import Backend, Kind, compile_with
from dovetail.backends.aten import compile_aten
from dovetail.testing.cases import Case, deep_difference
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing

Function = Callable[..., list[Any]]
Size = tuple[int, ...]


def _several(x: Tensor) -> list[Any]:
    values, places = x.sort(-1)
    return [values, None, places, 3, values]


def _shared(x: Tensor) -> list[Any]:
    whole = x.exp()
    return [whole, whole.view(-1), x.t()]


def _random(x: Tensor) -> list[Any]:
    first = torch.rand_like(x)
    return [first, F.dropout(x.exp(), 0.5, True), torch.bernoulli(x.sigmoid()) + first]


def _numbers(x: Tensor) -> list[Any]:
    return [x.to(torch.float64) / 3, (x > 0).logical_not(), torch.full_like(x, float("-inf")), x.long() // 2]


def _layers(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    convolved = F.conv2d(x, w, b, padding=1)
    return [F.max_pool2d(convolved, 2), F.avg_pool2d(convolved, 2), F.group_norm(convolved, 2)]


def _indexing(x: Tensor) -> list[Any]:
    index = x.argsort(-1)
    table = F.embedding(index, x.t().contiguous())
    written = torch.zeros_like(x).scatter_add(-1, index, x)
    return [x.gather(-1, index), table, written, x[index[:, 0] % 3], x.index_add(0, index[0] % 3, x[index[0] % 3])]


def _joining(x: Tensor) -> list[Any]:
    one, two = x.chunk(2, -1)
    return [torch.cat([two, one], -1), torch.stack([one, two]), x.flip(0).roll(1, -1), x.tril(), x.repeat(2, 1)]


def _reductions(x: Tensor) -> list[Any]:
    largest, where = x.max(-1)
    variance, mean = torch.var_mean(x, 0)
    return [largest, where, variance, mean, x.cumsum(-1), x.logsumexp(-1), x.argmin(), (x > 0).any(), x.norm()]


def _masks(x: Tensor) -> list[Any]:
    mask = x > 0
    return [torch.where(mask, x, -x), x.masked_fill(mask, float("inf")), mask & (x < 1), x.clamp(-0.5, 0.5), mask.sum()]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
    return [torch.baddbmm(q, q, k).softmax(-1) @ v, torch.einsum("bij,bkj->bik", q, v), torch.bmm(q, k).log_softmax(1)]


def _low_precision(x: Tensor) -> list[Any]:
    short = x.to(torch.bfloat16)
    return [short @ short.t(), (short * 2 + 1).relu(), short.float().to(torch.float16), short.exp()]


def _extremes(x: Tensor) -> list[Any]:
    infinite = x / torch.zeros_like(x)
    return [infinite, infinite - infinite, torch.log(-x.abs()), infinite.nan_to_num(1.0), infinite.isnan()]


def _integers(x: Tensor) -> list[Any]:
    whole = (x * 10).long()
    floored = torch.div(x, 0.3, rounding_mode="floor")
    return [whole // 3, whole % 3, whole.bitwise_and(5), floored, whole.float() / 7]


#: Functions by name, with the sizes of their arguments.
_FUNCTIONS: dict[str, tuple[Function, Sequence[Size]]] = {
    "pointwise operators": (lambda x: [torch.tanh(x) * 2 + x.exp()], [(3, 4)]),
    "matrix products and reductions": (
        lambda x, w, b: [torch.addmm(b, x, w.t()).softmax(-1), x.sum(0), w.mean()],
        [(5, 8), (6, 8), (6,)],
    ),
    "several results, None, a number, one value twice": (_several, [(3, 4)]),
    "an input handed through": (lambda x, y: [x, y + 1], [(2,), (2,)]),
    "outputs that share memory": (_shared, [(4, 4)]),
    "outputs with turned strides": (lambda x: [(x + 1).t(), x.permute(1, 0).exp()], [(3, 4)]),
    "tensors without elements": (lambda x: [x[:0] * 2, x[:0].sum()], [(3, 4)]),
    "random operators": (_random, [(7, 5)]),
    "dtypes": (_numbers, [(3, 4)]),
    "convolution, pooling, norm": (_layers, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    "gather, scatter, lookup": (_indexing, [(3, 4)]),
    "joining, cutting, turning": (_joining, [(4, 4)]),
    "reductions and scans": (_reductions, [(5, 6)]),
    "masks and choices": (_masks, [(5, 6)]),
    "batched matrix products": (_attention, [(2, 4, 4)] * 3),
    "bfloat16 and float16": (_low_precision, [(4, 4)]),
    "infinities and NaN": (_extremes, [(3, 4)]),
    "whole numbers": (_integers, [(3, 4)]),
}


def operator_cases(kinds: Sequence[Kind]) -> list[Case]:
    """Return the cases for these kinds of graphs."""
    return [
        Case("operators", f"{name} ({kind})", functools.partial(_check, function, sizes, kind))
        for name, (function, sizes) in _FUNCTIONS.items()
        for kind in kinds
    ]


def _check(
    function: Function, sizes: Sequence[Size], kind: Kind, backend: Backend, options: Mapping[str, Any], device: str
) -> str:
    backend = backend.with_options(options)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, generator=generator).to(device) for size in sizes]
    fake_mode = private_tracing.FakeTensorMode()
    fakes = [fake_mode.from_tensor(value, static_shapes=True) for value in inputs]
    table = backend.decompositions()
    with fake_mode, torch.no_grad():
        graph = make_fx(torch.func.functionalize(function))(*fakes)
        reference = compile_aten(graph, fakes, kind=kind)
        written = make_fx(graph, decomposition_table=table)(*fakes) if table else graph
    before = str(written.graph)
    compiled = compile_with(backend, written, fakes, kind, options)
    for _ in range(2):
        torch.manual_seed(1)
        wanted = reference(list(inputs))
        torch.manual_seed(1)
        outputs = compiled(list(inputs))
        problems = (
            _output_problem(f"output {index}", output, want, inputs, backend)
            for index, (output, want) in enumerate(zip(outputs, wanted, strict=True))
        )
        problem = next(filter(None, problems), "") or _version_problem(outputs)
        if problem:
            return problem
    return "the graph handed in was changed" if str(written.graph) != before else ""


def _output_problem(name: str, output: Any, want: Any, inputs: list[Tensor], backend: Backend) -> str:
    if any(want is value for value in inputs):
        return "" if output is want else f"{name} is not the input object that is handed through"
    if isinstance(output, Tensor) and private_tensors.is_tensor_view(output):
        return f"{name} is a view"
    return deep_difference(output, want, backend, name)


def _version_problem(outputs: list[Any]) -> str:
    tensors = [(index, value) for index, value in enumerate(outputs) if isinstance(value, Tensor)]
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
