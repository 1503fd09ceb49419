"""Makes the nodes of a graph from their data, and runs each on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.artefacts.allow_list import check_arguments, name_of_operator, operator_by_name
from dovetail.artefacts.arguments import decode_argument, device_named, value_named
from dovetail.artefacts.size_expressions import evaluate
from dovetail.errors import ArtefactError
from dovetail.quirks.functionalisation import SAME_DTYPE
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing


class GraphReader:
    """Reads nodes in their order; each gets its fake value. The calling tree::

    add
    +-- _placeholder
    +-- _constant
    +-- _call
        +-- operator_by_name     from the allow-list
        +-- decode_argument
        +-- check_arguments      against the operator's schema
    """

    def __init__(self, fake_mode: Any, symbols: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self._fake_mode = fake_mode
        self._symbols = symbols
        self._tensors = tensors
        self._known: dict[str, torch.fx.Node] = {}
        self._has_operators = False

    def node(self, name: str) -> torch.fx.Node:
        """The node with a name; raises :class:`ArtefactError` unless it came before."""
        found = self._known.get(name)
        if found is None:
            raise ArtefactError(f"the artefact reads {name!r} before it is computed")
        return found

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add one node; raises :class:`ArtefactError` for one that no graph can have."""
        name = entry["name"]
        if name in self._known:
            raise ArtefactError(f"the artefact has two nodes named {name!r}")
        if entry["op"] == "placeholder" and self._has_operators:
            raise ArtefactError(f"the input {name} comes after an operator")
        self._has_operators = entry["op"] != "placeholder"
        make = {"placeholder": self._placeholder, "call_function": self._call, "get_attr": self._constant}[entry["op"]]
        node, value = make(entry)
        if node.name != name:
            raise ArtefactError(f"{name!r} is not a name that a node can have")
        node.meta["val"] = value
        node.meta["phase"] = entry.get("phase", "forward")
        self._known[name] = node

    def _placeholder(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        shape = [evaluate(item, self._symbols) for item in entry["shape"]]
        stride = [evaluate(item, self._symbols) for item in entry["stride"]]
        if len(shape) != len(stride) or any(private_sizes.hint(item) < 0 for item in (*shape, *stride)):
            raise ArtefactError(f"{entry['name']} has no shape that a tensor can have")
        dtype, device = value_named("dtype", entry["dtype"]), device_named(entry["device"])
        with private_tracing.disable_current_modes(), self._fake_mode, torch.no_grad():
            value = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return self.graph.create_node("placeholder", entry["name"], (), {}, name=entry["name"]), value

    def _constant(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        name = entry["target"]
        key = f"constant.{name}"
        if key not in self._tensors or hasattr(torch.nn.Module, name):
            raise ArtefactError(f"the artefact has no constant {name!r}")
        self.root.register_buffer(name, self._tensors[key])
        value = self._fake_mode.from_tensor(self._tensors[key], static_shapes=True)
        return self.graph.create_node("get_attr", name, (), {}, name=entry["name"]), value

    def _call(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        target = operator_by_name(entry["target"])
        args = tuple(decode_argument(item, self.node) for item in entry["args"])
        names = [key for key, _ in entry["kwargs"] if isinstance(key, str)]
        if len(names) != len(entry["kwargs"]):
            raise ArtefactError(f"{entry['name']} has an argument without a name")
        check_arguments(target, len(args), names)
        kwargs = {key: decode_argument(item, self.node) for key, item in entry["kwargs"]}
        node = self.graph.create_node("call_function", target, args, kwargs, name=entry["name"])
        values: Any = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        dtypes = {item.dtype for item in values[0] if isinstance(item, torch.Tensor)}
        if target in SAME_DTYPE and len(dtypes) > 1:
            raise ArtefactError(f"{name_of_operator(target)} got operands of different dtypes")
        with private_tracing.disable_current_modes(), self._fake_mode, torch.no_grad():
            value = target(*values[0], **values[1])
        return node, value
