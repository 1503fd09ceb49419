"""Python scripts that show a backend's fault on a small graph, with its inputs."""

from __future__ import annotations

import inspect
import math
import operator
import pprint
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dovetail.backends.debug.subgraphs import Fault, Subgraph, line_of
from dovetail.backends.debug.values import memory_of
from dovetail.backends.protocol import Backend
from dovetail.errors import BackendError
from dovetail.torch_private import operators as private_operators

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
        function="\n".join(_function(subgraph)),
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


def _function(subgraph: Subgraph) -> list[str]:
    graph = subgraph.graph.graph
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    lines = [f"def graph({', '.join(names)}):"]
    for node in graph.nodes:
        if node.op == "call_function":
            where = line_of(node)
            lines.append(f"    {node.name} = {_call(node)}" + (f"  # {where}".replace("\n", " ") if where else ""))
    entries: Any = graph.output_node().args[0]
    lines.append(f"    return [{', '.join(_argument(entry) for entry in entries)}]")
    return lines


def _call(node: torch.fx.Node) -> str:
    arguments = [_argument(value) for value in node.args]
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if not isinstance(node.target, private_operators.OpOverload):
        raise BackendError(f"{node.target} cannot be written into a script", advice="look at the graph with capture()")
    arguments += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return f'torch.device("{value}")' if isinstance(value, torch.device) else repr(value)


def _tensor(value: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Return an expression for the tensor; a large one that does not repeat one value goes to ``tensors``."""
    shape, dtype = tuple(value.shape), value.dtype
    if value.is_contiguous() and value.numel() and bool((value == value.flatten()[0]).all()):
        text = f"torch.full({shape}, {_argument(value.flatten()[0].item())}, dtype={dtype})"
    elif value.is_contiguous() and value.numel() <= _WRITTEN_OUT and not dtype.is_complex:
        numbers = [_argument(number) for number in value.flatten().tolist()]
        text = f"torch.tensor([{', '.join(numbers)}], dtype={dtype}).reshape({shape})"
    else:
        tensors[name] = memory_of(value).clone().cpu() if value.numel() else value.detach().cpu()
        text = f'tensors["{name}"].as_strided({shape}, {value.stride()})'
    return text if value.device.type == "cpu" else f'{text}.to("{value.device}")'
