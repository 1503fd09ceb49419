"""Writes to a part of a complex tensor, which Inductor orders wrongly, become writes to its real form.

``diagonal_scatter`` and its kin are made in place: a view of a copy is written to. Inductor runs views of complex tensors as calls
whose result it takes for memory of its own, so that a kernel that reads the copy may run before the write (torch 2.13,
``torch.compile`` as well). The first gradient of ``torch.linalg.qr`` of a complex matrix was silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dovetail.backends.inductor.job import WORKAROUNDS, Job
from dovetail.errors import BackendError
from dovetail.quirks.registry import Example, quirk

_aten = torch.ops.aten


def _positive(names: tuple[str, ...], given: dict[str, Any], dims: int) -> dict[str, Any]:
    return {**given, **{name: given[name] % dims for name in names}}


def _diagonals_last(emit: Callable[..., torch.fx.Node], part: torch.fx.Node) -> torch.fx.Node:
    """The dimension of a diagonal is the last one of the part, behind that of real and imaginary parts."""
    dims = part.meta["val"].dim()
    return emit(_aten.permute.default, part, [*range(dims - 2), dims - 1, dims - 2])


#: By operator: its arguments that count dimensions, and how the real form of the part is arranged.
_SCATTERS: dict[Any, tuple[tuple[str, ...], Callable[..., torch.fx.Node]]] = {
    _aten.diagonal_scatter.default: (("dim1", "dim2"), _diagonals_last),
    _aten.select_scatter.default: (("dim",), lambda emit, part: part),
    _aten.slice_scatter.default: (("dim",), lambda emit, part: part),
}


def _triangle(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(x)[1].abs().sum()


def _matrix() -> torch.Tensor:
    x = (torch.arange(16.0) * 7).sin().reshape(4, 4)
    return torch.complex(x, x.t() * 2 + 1)


@quirk(
    WORKAROUNDS,
    example=lambda: Example(_triangle, [(_matrix(),)], exact=False, options={"backend": "inductor"}),
    until="2.14",
)
def scatter_complex_as_real(job: Job) -> None:
    """Write parts of complex tensors as parts of their real form, whose memory Inductor knows."""
    graph = job.graph.graph
    for node in list(graph.nodes):
        value: Any = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_complex():
            continue
        if node.target is _aten.as_strided_scatter.default:
            raise BackendError("a strided part of a complex tensor is written to", advice='use backend="aten"')
        if node.target in _SCATTERS:
            _rewrite(graph, node, value)


def _rewrite(graph: torch.fx.Graph, node: torch.fx.Node, value: Any) -> None:
    schema: Any = node.target
    arguments = schema._schema.arguments
    given = {item.name: item.default_value for item in arguments}
    given |= dict(zip(given, node.args, strict=False)) | dict(node.kwargs)
    names, arrange = _SCATTERS[node.target]
    whole, part = given.pop("self"), given.pop("src")
    given = _positive(names, given, value.dim())

    def emit(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        made = graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        with value.fake_mode:
            made.meta["val"] = target(*values[0], **values[1])
        return made

    with graph.inserting_before(node):
        if not part.meta["val"].is_complex():
            part = emit(torch.ops.prims.convert_element_type.default, part, value.dtype)
        real = arrange(emit, emit(_aten.view_as_real.default, part))
        written = emit(node.target, emit(_aten.view_as_real.default, whole), real, **given)
        result = emit(_aten.view_as_complex.default, written)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
