"""Joint graphs in the operators of a backend, kept in the cache on disk: decomposing takes seconds, with the table for Inductor.

The key is a digest of the joint graph (operators, arguments, and all facts of each value, with the memory that it shares), the
backend, its settings, and the files and versions of the programs that decompose. The entry says for each new node from which old
one it comes; marks on nodes, which no decomposition reads, are taken from the live joint graph. An entry is written only where
reading it gives the same graph again. What cannot be written into a key is decomposed in each process: symbolic sizes, large
constants, operators that are not torch's own, tables with functions of the program's.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail import cache
from dovetail.aot import steps
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.steps import Lowering, Table, decomposes
from dovetail.artefacts.allow_list import check_arguments
from dovetail.artefacts.arguments import decode_argument, encode_argument, value_named
from dovetail.backends.common.constants import constant_of, decode_constant, encode_constant
from dovetail.backends.inductor.float_inputs import NUMBER_FUNCTIONS
from dovetail.errors import ArtefactError
from dovetail.passes.decompose import ABOUT_THE_VALUE, mark_read_by_gradients, origins_of
from dovetail.quirks.registry import QUIRKS
from dovetail.tiers.flat_graph import encode_value, name_of, operator_named
from dovetail.tiers.unportable import UnportableError
from dovetail.torch_private import assumptions as private_assumptions
from dovetail.torch_private import inductor_cache as private_cache
from dovetail.torch_private import inductor_code as private_code
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing

#: The value of a node is a float that changes from call to call.
_CHANGES = "changes"
#: It is a size that changes, and that nothing reads.
_UNREAD = "unread"
#: The names of functions of such numbers.
_NAMES: dict[Any, str] = {function: name for name, function in NUMBER_FUNCTIONS.items()}
#: Where the settings of a backend can be written down.
SETTINGS: dict[str, Callable[[], str | None]] = {"inductor": private_code.settings_as_text}


@decomposes
def decompose_once(lowering: Lowering, table: Table) -> torch.fx.GraphModule | None:
    """Take the decomposed graph from the cache, or make it as the hooks before this one do, and keep it."""
    try:
        key = key_of_graph(lowering)
    except UnportableError as error:
        private_cache.look_no_further(f"the graph is not kept, as {error}")
        return None
    joint, reason = lowering.joint, "this graph was not kept with these settings and versions, and for this CPU"
    content = cache.read("graphs", key)
    if content is not None:
        mark_read_by_gradients(joint)
        try:
            return decoded(joint, json.loads(content))
        except Exception:  # noqa: BLE001  (whatever lies under the key: the graph is decomposed, and the entry written anew)
            reason = "the entry of the graph cannot be read"
    private_cache.look_no_further(reason)
    environment = joint.fake_mode.shape_env
    before = private_assumptions.count_of_assumptions(environment)
    for hook in reversed(list(steps.decomposes)):
        module = None if hook is decompose_once else hook(lowering, table)
        if module is not None:
            if private_assumptions.count_of_assumptions(environment) == before:
                _keep(key, joint, module, table)
            return module
    return None


def key_of_graph(lowering: Lowering) -> str:
    """The key of the decomposed graph; raises :class:`UnportableError` with the reason where it is not kept."""
    backend, software = lowering.backend.name, cache.software()
    if not cache.is_on() or software is None or backend not in SETTINGS:
        raise UnportableError("the cache is off, or the backend has none")
    hooks = [f"{hook.__module__}.{hook.__qualname__}" for hook in steps.decomposes]
    settings = SETTINGS[backend]()
    if settings is None:
        raise UnportableError("a setting of the backend is an object, or asks for compilations to be shown")
    if not all(name.startswith("dovetail.") for name in hooks):
        raise UnportableError("a hook of the program's decomposes it")
    try:
        graph = json.dumps(encoded_graph(lowering.joint.graph))
    except ArtefactError as error:
        raise UnportableError(error.what) from error
    state = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), private_state.kernel_flags())
    given = (sorted(lowering.write_backs.items()), lowering.backend.leaves_fused_updates, lowering.joint.num_primals)
    cpu = torch.backends.cpu.get_cpu_capability()
    return cache.key_of("graph", graph, given, backend, settings, hooks, sorted(QUIRKS), state, cpu, *software)


def is_unread(node: torch.fx.Node) -> bool:
    """Whether a node is an input with a symbolic size that nothing reads: a whole number of which only guards know."""
    return node.op == "placeholder" and not node.users and private_sizes.has_symbols(node.meta.get("val"))


def encoded_graph(graph: torch.fx.Graph) -> list[Any]:
    """The nodes of a graph as data, with all facts of their values; raises :class:`ArtefactError` or :class:`UnportableError`."""
    memories: dict[int, int] = {}
    *nodes, output = graph.nodes
    found = [[*_encoded_node(node), _facts_of(node, memories)] for node in nodes]
    return [*found, [encode_argument(item) for item in output.args[0]]]


def _encoded_node(node: torch.fx.Node) -> list[Any]:
    if node.op == "get_attr":
        constant = encode_constant(constant_of(node))
        if constant is None:
            raise UnportableError("a constant is large, or no plain tensor of the CPU")
        return [node.op, node.name, str(node.target), [], [], constant]
    if node.op not in ("placeholder", "call_function"):
        raise UnportableError(f"{node.name} is a node of kind {node.op}")
    if node.op == "placeholder":
        target: Any = node.target
    else:
        target = _NAMES.get(node.target) or name_of(node.target)
    kwargs = [[name, encode_argument(item)] for name, item in node.kwargs.items()]
    return [node.op, node.name, target, [encode_argument(item) for item in node.args], kwargs]


def _facts_of(node: torch.fx.Node, memories: dict[int, int]) -> Any:
    return _UNREAD if is_unread(node) else _facts(node.meta.get("val"), memories)


def _facts(value: Any, memories: dict[int, int]) -> Any:
    """All that a value is, with a number for the memory that it lies in."""
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_facts(item, memories) for item in value)]
    if type(value) is float:
        return value.hex()
    if isinstance(value, torch.SymFloat):
        return _CHANGES
    facts = encode_value(value)
    if isinstance(value, torch.Tensor):
        facts["memory"] = memories.setdefault(int(value.untyped_storage()._cdata), len(memories))
    return facts


# --- an entry -----------------------------------------------------------------------------------------------------------


def _keep(key: str, joint: JointGraph, module: torch.fx.GraphModule, table: Table) -> None:
    """Write a decomposed graph down, where reading it gives the same graph."""
    if not all(map(private_code.is_known, table.values())):
        return
    try:
        data = encoded(joint, module)
        again = decoded(joint, json.loads(json.dumps(data)))
        is_same = encoded(joint, again, module) == data
    except Exception:  # noqa: BLE001  (what cannot be written down and read again is not kept)
        return
    if is_same and _means(again) == _means(module):
        cache.write("graphs", key, json.dumps(data).encode())


def _means(module: torch.fx.GraphModule) -> list[Any]:
    """The nodes of a graph and the facts known of them, but for the values."""
    return [
        [node.op, node.name, node.target, repr(node.args), repr(node.kwargs), *map(repr, sorted(_marks(node)))]
        for node in module.graph.nodes
    ]


def _marks(node: torch.fx.Node) -> list[tuple[str, int]]:
    return [(name, id(item)) for name, item in node.meta.items() if name not in ABOUT_THE_VALUE]


def encoded(joint: JointGraph, module: torch.fx.GraphModule, like: torch.fx.GraphModule | None = None) -> list[Any]:
    """A decomposed graph as data; ``like`` is a graph with the same nodes that says from which nodes of the joint graph they
    come. Raises :class:`UnportableError`.
    """
    origins = origins_of(module if like is None else like)
    memories: dict[int, int] = {}
    nodes: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "output":
            nodes.append([encode_argument(item) for item in node.args[0]])
        elif node.op == "placeholder":
            nodes.append([node.op, node.name, _facts_of(node, memories)])
        elif node.name not in origins:
            raise UnportableError(f"nobody knows where {node.name} comes from")
        else:
            nodes.append([*_encoded_node(node), origins[node.name], _facts(node.meta.get("val"), memories)])
    return nodes


def decoded(joint: JointGraph, data: list[Any]) -> torch.fx.GraphModule:
    """The graph that :func:`encoded` has written down; raises whatever data that means nothing leads to."""
    *entries, outputs = data
    graph, root = torch.fx.Graph(tracer_cls=private_tracing.PythonKeyTracer), torch.nn.Module()
    old = {node.name: node for node in joint.graph.nodes}
    known: dict[str, torch.fx.Node] = {}
    memories: dict[int, Any] = {}
    with private_tracing.disable_current_modes(), torch.no_grad():
        for entry in entries:
            if entry[0] == "placeholder":
                node = graph.create_node("placeholder", old[entry[1]].target, (), {}, name=entry[1])
                node.meta = dict(old[entry[1]].meta)
                if isinstance(value := node.meta.get("val"), torch.Tensor) and entry[2] != _UNREAD:
                    memories.setdefault(entry[2]["memory"], value.untyped_storage())
            elif entry[0] == "get_attr":
                _, name, target, _, _, constant, origin, facts = entry
                root.register_buffer(target, decode_constant(constant))
                node = graph.create_node("get_attr", target, (), {}, name=name)
                node.meta = {key: item for key, item in old[origin].meta.items() if key not in ABOUT_THE_VALUE}
                node.meta["val"] = _value(joint, node, facts, memories)
            else:
                node = _decoded_call(graph, entry, old, known)
                if entry[6] == _CHANGES:
                    node.meta["val"] = _number(node, old[entry[5]])
                else:
                    node.meta["val"] = _value(joint, node, entry[6], memories)
            if node.name != entry[1]:
                raise UnportableError(f"{entry[1]!r} is not a name that a node can have")
            known[node.name] = node
    output = graph.output([decode_argument(item, known.__getitem__) for item in outputs])
    output.meta = dict(joint.graph.output_node().meta)
    graph.lint()
    module = private_tracing.lazy_graph_module(root, graph)
    joint.with_graph(module).lint()
    return module


def _decoded_call(
    graph: torch.fx.Graph, entry: list[Any], old: Mapping[str, torch.fx.Node], known: Mapping[str, torch.fx.Node]
) -> torch.fx.Node:
    _, name, target, args, kwargs, origin, _ = entry
    arguments = tuple(decode_argument(item, known.__getitem__) for item in args)
    named = {key: decode_argument(item, known.__getitem__) for key, item in kwargs}
    operator_found = NUMBER_FUNCTIONS.get(target) or operator_named(target)
    check_arguments(operator_found, len(arguments), list(named))
    node = graph.create_node("call_function", operator_found, arguments, named, name=name)
    node.meta = {key: item for key, item in old[origin].meta.items() if key not in ABOUT_THE_VALUE}
    return node


def _number(node: torch.fx.Node, origin: torch.fx.Node) -> torch.SymFloat:
    """The number that a node computes: that of the joint graph's node, or one that a decomposition has made of other numbers."""
    value = origin.meta.get("val")
    if not isinstance(value, torch.SymFloat):
        values: Any = torch.fx.node.map_arg(node.args, lambda argument: argument.meta["val"])
        if node.target not in _NAMES or not any(isinstance(item, torch.SymFloat) for item in values):
            raise UnportableError(f"{node.name} computes no number that changes")
        value = node.target(*values)  # type: ignore[operator]
    if not isinstance(value, torch.SymFloat):
        raise UnportableError(f"{node.name} is no number that changes")
    return value


def _value(joint: JointGraph, node: torch.fx.Node, facts: Any, memories: dict[int, Any]) -> Any:
    if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        return node.args[0].meta["val"][node.args[1]]
    if isinstance(facts, list):
        items = [_value_of(joint, item, memories) for item in facts[1:]]
        return tuple(items) if facts[0] == "tuple" else items
    return _value_of(joint, facts, memories)


def _value_of(joint: JointGraph, facts: Any, memories: dict[int, Any]) -> Any:
    """The fake value with these facts, in a memory that those of other nodes may share."""
    if facts is None:
        return None
    if facts["requires_grad"] or facts["inference"]:
        raise UnportableError("a value inside of the graph requires a gradient")
    memory = memories.get(facts["memory"])
    if memory is None:
        memory = memories[facts["memory"]] = torch.UntypedStorage(facts["bytes"], device="meta")
    inside = torch.empty(0, dtype=value_named("dtype", facts["dtype"]), device="meta")
    inside.set_(memory, facts["offset"], facts["shape"], facts["stride"])
    return private_tensors.FakeTensor(joint.fake_mode, inside, torch.device("cpu"))
