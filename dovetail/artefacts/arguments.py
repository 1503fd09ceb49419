"""Arguments of operators as data, and back.

>>> encode_argument([1, 0.5, torch.float32, None])
[1, {'float': '0x1.0000000000000p-1'}, {'dtype': 'torch.float32'}, None]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dovetail.errors import ArtefactError

_CLASSES: dict[str, type[Any]] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
#: By kind and name: a file names a value and never spells an attribute of torch.
_NAMED = {
    kind: {str(value): value for value in vars(torch).values() if isinstance(value, cls)}
    for kind, cls in _CLASSES.items()
}
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def encode_argument(value: Any) -> Any:
    """An argument of an operator as data; raises :class:`ArtefactError`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    for kind, cls in _CLASSES.items():
        if isinstance(value, cls):
            return {kind: str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (list, tuple)):
        return [encode_argument(item) for item in value]
    raise ArtefactError(f"a {type(value).__name__} in the graph cannot be written to an artefact")


def decode_argument(data: Any, node: Callable[[str], torch.fx.Node]) -> Any:
    """The argument in data that has the form of the schema; ``node(name)`` finds a node."""
    if isinstance(data, list):
        return [decode_argument(item, node) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "node":
        return node(content)
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(float.fromhex(content[0]), float.fromhex(content[1]))
    return device_named(content) if kind == "device" else value_named(kind, content)


def value_named(kind: str, name: str) -> Any:
    """The dtype, layout or memory format with a name; raises :class:`ArtefactError`."""
    found = _NAMED[kind].get(name)
    if found is None:
        raise ArtefactError(f"there is no {kind} {name!r}")
    return found


def device_named(name: str) -> torch.device:
    """The device with a name; raises :class:`ArtefactError` for one on which no tensor can be loaded."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArtefactError(f"there is no device {name!r}") from error
    if device.type not in _DEVICES:
        raise ArtefactError(f"a tensor on the device {name!r} cannot be loaded")
    return device
