"""A flat graph on its way to a backend as data, so that another process can compile it: JSON, no pickle.

It holds the nodes with the fake values that they have here, and what the backend is called with besides. Arguments have the
form of an artefact (:mod:`dovetail.artefacts`). An artefact may come from anywhere, and names operators of a short list only; a
flat graph comes from the process itself, and may have any functional operator of torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.artefacts.allow_list import NAMESPACES, check_arguments, name_of_operator, operator_by_name
from dovetail.artefacts.arguments import decode_argument, encode_argument, value_named
from dovetail.backends.common.constants import decode_constant, encode_constant
from dovetail.backends.common.sizes_elsewhere import SizesHere, SizesThere, new_fake_mode
from dovetail.backends.protocol import Kind, output_arguments
from dovetail.cache.unportable import UnportableError
from dovetail.errors import ArtefactError
from dovetail.torch_private import inductor_code as private_code
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace.shapes import RecordingShapeEnv


def encode(
    graph: torch.fx.GraphModule, kind: Kind, options: Mapping[str, Any], sizes: SizesHere | None = None
) -> dict[str, Any]:
    """The graph as data, with symbolic ``sizes`` where it has some; raises :class:`UnportableError`."""
    try:
        nodes = [_encode_node(graph, node, sizes) for node in graph.graph.nodes if node.op != "output"]
        outputs = [encode_argument(item) for item in output_arguments(graph)]
    except ArtefactError as error:
        raise UnportableError(error.what) from error
    given = {name: value for name, value in options.items() if name != "write_backs"}
    if not is_plain(given):
        raise UnportableError("an option of the backend is no plain value")
    write_backs = None if "write_backs" not in options else sorted(map(list, options["write_backs"].items()))
    return {"kind": kind, "nodes": nodes, "outputs": outputs, "options": given, "write_backs": write_backs}


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, texts and what holds them by name or place."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(type(name) is str and is_plain(item) for name, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _encode_node(graph: torch.fx.GraphModule, node: torch.fx.Node, sizes: SizesHere | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"op": node.op, "name": node.name}
    if "val" in node.meta:
        entry["value"] = encode_value(node.meta["val"], sizes)
    if node.op == "placeholder":
        return entry
    if node.op == "get_attr":
        constant = encode_constant(getattr(graph, str(node.target), None))
        if constant is None:
            raise UnportableError("a constant is large, or no plain tensor of the CPU")
        return entry | {"target": str(node.target), "constant": constant}
    if node.op != "call_function":
        raise UnportableError(f"{node.name} is a node of kind {node.op}")
    args = [encode_argument(item) for item in node.args]
    kwargs = [[name, encode_argument(item)] for name, item in node.kwargs.items()]
    return entry | {"target": name_of(node.target), "args": args, "kwargs": kwargs}


def name_of(target: Any) -> str:
    """The name of an operator of torch's; raises :class:`UnportableError` for others."""
    if not isinstance(target, private_operators.OpOverload):
        return name_of_operator(target)
    if target.namespace not in NAMESPACES or target._schema.is_mutable:
        raise UnportableError(f"another process does not know the operator {target}")
    return f"{target._schema.name}.{target._overloadname}"


def operator_named(name: str) -> Any:
    """The operator with a name that :func:`name_of` has given."""
    namespace, is_torch, rest = name.partition("::")
    if not is_torch:
        return operator_by_name(name)
    base, _, overload = rest.rpartition(".")
    if namespace == "prims" and not hasattr(torch.ops.prims, base):
        private_code.define_prims()
    return getattr(getattr(getattr(torch.ops, namespace), base), overload)


def encode_value(value: Any, sizes: SizesHere | None = None) -> Any:
    """A description of a graph's value, as data; raises :class:`UnportableError`. ``sizes`` are those that may be symbolic."""
    if isinstance(value, (list, tuple)):
        return [encode_value(item, sizes) for item in value]
    if value is None or type(value) in (bool, int, float):
        return value
    encoded = (lambda number: number) if sizes is None else sizes.encode
    if sizes is not None and isinstance(value, (torch.SymInt, torch.SymBool)):
        return {"number": encoded(value)}
    if not isinstance(value, torch.Tensor) or (sizes is None and private_sizes.has_symbols(value)):
        raise UnportableError(f"a value is a {type(value).__name__} that has no fixed sizes")
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_conj() or value.is_neg():
        raise UnportableError("a value is no plain tensor of the CPU")
    return {
        "shape": list(map(encoded, value.shape)),
        "stride": list(map(encoded, value.stride())),
        "offset": encoded(value.storage_offset()),
        "bytes": encoded(value.untyped_storage().nbytes()),
        "dtype": str(value.dtype),
        "requires_grad": value.requires_grad,
        "inference": value.is_inference(),
    }


class DecodedGraph:
    """The graph that :func:`encode` has written, with its fake values, and what a backend is called with."""

    def __init__(self, data: Mapping[str, Any], sizes: SizesThere | None = None) -> None:
        self.kind: Kind = data["kind"]
        self.options: dict[str, Any] = dict(data["options"])
        if data["write_backs"] is not None:
            self.options["write_backs"] = dict(data["write_backs"])
        self._sizes = sizes
        self.fake_mode: Any = new_fake_mode(RecordingShapeEnv()) if sizes is None else sizes.fake_mode
        self._graph = torch.fx.Graph()
        self._root = torch.nn.Module()
        self._known: dict[str, torch.fx.Node] = {}
        self._values: dict[torch.fx.Node, Any] = {}
        for entry in data["nodes"]:
            self._add(entry)
        self._graph.output([decode_argument(item, self._known.__getitem__) for item in data["outputs"]])
        self.graph = private_tracing.lazy_graph_module(self._root, self._graph)

    @property
    def examples(self) -> list[Any]:
        """The values of the inputs."""
        return [node.meta["val"] for node in self._graph.find_nodes(op="placeholder")]

    def _add(self, entry: Mapping[str, Any]) -> None:
        name, op = entry["name"], entry["op"]
        if op == "placeholder":
            node = self._graph.create_node("placeholder", name, (), {}, name=name)
            value = self._declared(entry.get("value"))
        elif op == "get_attr":
            constant = decode_constant(entry["constant"])
            self._root.register_buffer(entry["target"], constant)
            node = self._graph.create_node("get_attr", entry["target"], (), {}, name=name)
            value = self.fake_mode.from_tensor(constant, static_shapes=True)
        else:
            node, value = self._call(entry)
        if node.name != name:
            raise UnportableError(f"{name!r} is not a name that a node can have")
        if "value" in entry:
            node.meta["val"] = value
        self._known[name], self._values[node] = node, value

    def _call(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        target = operator_named(entry["target"])
        args = tuple(decode_argument(item, self._known.__getitem__) for item in entry["args"])
        kwargs = {name: decode_argument(item, self._known.__getitem__) for name, item in entry["kwargs"]}
        check_arguments(target, len(args), list(kwargs))
        node = self._graph.create_node("call_function", target, args, kwargs, name=entry["name"])
        values: Any = torch.fx.node.map_arg((args, kwargs), self._values.__getitem__)
        with private_tracing.disable_current_modes(), self.fake_mode, torch.no_grad():
            value = target(*values[0], **values[1])
        return node, self._as_declared(value, entry.get("value"))

    def _as_declared(self, value: Any, declared: Any) -> Any:
        """The value that the operator's fake kernel gives here; where the other process had another one, that."""
        if isinstance(declared, list):
            return type(value)(map(self._as_declared, value, declared)) if len(value) == len(declared) else None
        if not isinstance(declared, dict):
            return value
        if not isinstance(value, torch.Tensor):
            return self._declared(declared)
        wanted = {**declared, "requires_grad": False, "inference": False, "bytes": 0}
        found = {**encode_value(value, self._sizes), "requires_grad": False, "inference": False, "bytes": 0}
        return value if found == wanted else self._declared(declared)

    def _declared(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "number" in data:
            return self._size(data["number"])
        dtype = value_named("dtype", data["dtype"])
        shape, stride = [list(map(self._size, data[name])) for name in ("shape", "stride")]
        inference = torch.inference_mode(data["inference"])
        with private_tracing.disable_current_modes(), inference, self.fake_mode, torch.no_grad():
            value = torch.empty_strided(shape, stride, dtype=dtype)
            nbytes = value.untyped_storage().nbytes()
            known = nbytes if self._sizes is None else self._sizes.encode(nbytes)
            if data["offset"] != 0 or data["bytes"] != known:
                whole = torch.empty(self._size(data["bytes"]) // dtype.itemsize, dtype=dtype)
                value = whole.as_strided(shape, stride, self._size(data["offset"]))
        return value.requires_grad_() if data["requires_grad"] else value

    def _size(self, data: Any) -> Any:
        return data if self._sizes is None else self._sizes.decode(data)
