"""Python scripts that show a backend's fault on a small graph, with its inputs."""

from __future__ import annotations

import inspect
import pprint
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dovetail.backends.aten import SourceWriter
from dovetail.backends.common.memory import memory_of
from dovetail.backends.debug.subgraphs import Fault, Subgraph, line_of
from dovetail.backends.protocol import Backend, output_arguments
from dovetail.errors import BackendError

#: Tensors with at most this many numbers are written out; larger ones that do not repeat one value go to a file.
_WRITTEN_OUT = 64
_SCRIPT = '''"""Backend {backend!r} {category} on this {kind} graph. Written by Dovetail's backend "bisect".

{problem}
"""

{paths}import torch
{load_file}
from dovetail.testing import compare_graph
{registration}

{function}


{tensors}inputs = [
{inputs}
]

if __name__ == "__main__":
    options = {options}
    problem = compare_graph(graph, inputs, backend="{backend}", kind="{kind}", options=options)
    print(problem or "no difference")
    raise SystemExit(bool(problem))
'''


def write_script(path: Path, subgraph: Subgraph, fault: Fault, backend: Backend, options: Mapping[str, Any]) -> Path:
    """Write the script, and a file of tensors beside it if it needs one; return the path of the script.

    An earlier script is kept: the new one gets a number.
    """
    target, number = path, 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.stem}-{number}{path.suffix}")
    saved = target.with_suffix(".safetensors")
    tensors: dict[str, torch.Tensor] = {}
    names = [node.name for node in subgraph.graph.graph.find_nodes(op="placeholder")]
    inputs = [
        f"    {_tensor(value, name, tensors)},  # {name}" for name, value in zip(names, subgraph.inputs, strict=True)
    ]
    problem = str(fault).replace("\\", "\\\\").replace('"""', "'''").splitlines()[:20]
    text = _SCRIPT.format(
        backend=backend.name,
        category=fault.category,
        kind=subgraph.kind,
        problem="\n".join(f"    {line}".rstrip() for line in problem),
        paths="from pathlib import Path\n\n" if tensors else "",
        load_file="from safetensors.torch import load_file\n" if tensors else "",
        registration=_registration(backend),
        function="\n".join(_function(subgraph.graph)),
        tensors=f'tensors = load_file(Path(__file__).with_name("{saved.name}"))\n' if tensors else "",
        inputs="\n".join(inputs),
        options=pprint.pformat(dict(options)),
    )
    target.write_text(text, encoding="utf-8")
    if tensors:
        save_file(tensors, saved)
    return target


def _registration(backend: Backend) -> str:
    """Return the line that registers the backend in a new interpreter; empty if its name is known there."""
    module = inspect.getmodule(backend.compile)
    name = getattr(module, "__name__", "__main__")
    if name in ("__main__", "dovetail.backends.foreign.torch_registered"):
        return f"# If {backend.name!r} is registered in code, register it here.\n"
    return "" if name.startswith("dovetail.") else f"import {name}  # registers the backend\n"


class _ScriptWriter(SourceWriter):
    """Names everything as a reader would; objects without a name of their own cannot be written."""

    def variable(self, node: torch.fx.Node) -> str:
        return node.name

    def operator(self, target: Any) -> str:
        return f"torch.ops.{target}"

    def bind(self, value: Any, prefix: str) -> str:
        if prefix in ("function", "module"):
            raise BackendError(f"{value} cannot be written into a script", advice="look at the graph with capture()")
        if isinstance(value, float):
            return f'float("{value}")'
        return f'torch.device("{value}")' if isinstance(value, torch.device) else repr(value)


def _function(graph: torch.fx.GraphModule) -> list[str]:
    writer = _ScriptWriter(graph)
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    lines = [f"def graph({', '.join(names)}):"]
    for node in graph.graph.nodes:
        if node.op == "call_function":
            where = line_of(node)
            lines.append(
                f"    {node.name} = {writer.call(node)}" + (f"  # {where}".replace("\n", " ") if where else "")
            )
    return [*lines, f"    return {writer.expression(output_arguments(graph))}"]


def _tensor(value: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Return an expression for the tensor; a large one that does not repeat one value goes to ``tensors``."""
    shape, dtype, writer = tuple(value.shape), value.dtype, _ScriptWriter(torch.fx.GraphModule({}, torch.fx.Graph()))
    if value.is_contiguous() and value.numel() and bool((value == value.flatten()[0]).all()):
        text = f"torch.full({shape}, {writer.expression(value.flatten()[0].item())}, dtype={dtype})"
    elif value.is_contiguous() and value.numel() <= _WRITTEN_OUT and not dtype.is_complex:
        numbers = writer.expression(value.flatten().tolist())
        text = f"torch.tensor({numbers}, dtype={dtype}).reshape({shape})"
    else:
        tensors[name] = memory_of(value).clone().cpu() if value.numel() else value.detach().cpu()
        text = f'tensors["{name}"].as_strided({shape}, {value.stride()})'
    return text if value.device.type == "cpu" else f'{text}.to("{value.device}")'
