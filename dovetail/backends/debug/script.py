"""Writing a piece of a graph, with its inputs, as a Python script that shows what a backend does with it."""

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

from dovetail.backends.debug.pieces import Finding, Piece, line_of, memory_of
from dovetail.backends.protocol import Backend
from dovetail.errors import BackendError
from dovetail.torch_private import operators as private_operators

#: A tensor of at most so many numbers is written out; a larger one that is not made of one value goes to a file.
_WRITTEN_OUT = 64


def write_script(path: Path, piece: Piece, finding: Finding, backend: Backend, options: Mapping[str, Any]) -> Path:
    """Write the script, and a file of tensors beside it if it needs one; the path of the script.

    An earlier script is kept: the new one gets a number.
    """
    target, number = path, 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.stem}-{number}{path.suffix}")
    tensors: dict[str, torch.Tensor] = {}
    names = [node.name for node in piece.graph.graph.nodes if node.op == "placeholder"]
    inputs = [
        f"    {_tensor(value, name, tensors)},  # {name}" for name, value in zip(names, piece.inputs, strict=True)
    ]
    saved = target.with_suffix(".safetensors")
    lines = [
        f'"""Backend {backend.name!r} {finding.category} on this {piece.kind} graph. Written by Dovetail\'s backend "bisect".',
        "",
        *(
            f"    {line}".rstrip().replace("\\", "\\\\").replace('"""', "'''")
            for line in str(finding).splitlines()[:20]
        ),
        '"""',
        "",
        *(["from pathlib import Path", ""] if tensors else []),
        "import torch",
        *(["from safetensors.torch import load_file"] if tensors else []),
        "",
        "from dovetail.testing import compare_graph",
        *_where_it_is_registered(backend),
        "",
        "",
        *_function(piece),
        "",
        "",
        *([f'tensors = load_file(Path(__file__).with_name("{saved.name}"))'] if tensors else []),
        "inputs = [",
        *inputs,
        "]",
        "",
        'if __name__ == "__main__":',
        f"    options = {pprint.pformat(dict(options))}",
        f'    problem = compare_graph(graph, inputs, backend="{backend.name}", kind="{piece.kind}", options=options)',
        '    print(problem or "no difference")',
        "    raise SystemExit(bool(problem))",
    ]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if tensors:
        save_file(tensors, saved)
    return target


def _where_it_is_registered(backend: Backend) -> list[str]:
    module = inspect.getmodule(backend.compile)
    name = getattr(module, "__name__", "__main__")
    if name.startswith("dovetail.") and name != "dovetail.backends.foreign.torch_registered":
        return []
    if name in ("__main__", "dovetail.backends.foreign.torch_registered"):
        return [f"# If {backend.name!r} is registered in code, register it here."]
    return [f"import {name}  # registers the backend"]


def _function(piece: Piece) -> list[str]:
    graph = piece.graph.graph
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
    """An expression for the tensor; one that is large and not of one value is put into ``tensors``."""
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
