"""Joint graphs in the operators of a backend, kept in the cache on disk: decomposing takes seconds, with the table for Inductor.

The key is a digest of the joint graph (operators, arguments, and all facts of each value, with the memory that it shares), the
backend, its settings, and the files and versions of the programs that decompose. The entry says for each new node from which old
one it comes, and what decomposing has assumed of symbolic sizes; marks on nodes, which no decomposition reads, are taken from the
live joint graph. An entry is written only where reading it gives the same graph again. What cannot be written into a key is
decomposed in each process: sizes that the data decides, large constants, operators that are not torch's own, tables with functions
of the program's.
"""

from __future__ import annotations

import contextlib
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
from dovetail.backends.common.sizes_elsewhere import SizesHere, sizes_of_mode
from dovetail.backends.inductor.float_inputs import NUMBER_FUNCTIONS
from dovetail.cache.unportable import UnportableError
from dovetail.errors import ArtefactError
from dovetail.passes.decompose import mark_read_by_gradients, origins_of
from dovetail.passes.equal_calls import ABOUT_THE_VALUE
from dovetail.quirks.registry import QUIRKS
from dovetail.tiers.flat_graph import encode_value, name_of, operator_named
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
    environment, sizes = joint.fake_mode.shape_env, sizes_of_mode(joint.fake_mode)
    before = private_assumptions.count_of_assumptions(environment)
    count = 0 if sizes is None else sizes.count
    for hook in reversed(list(steps.decomposes)):
        module = None if hook is decompose_once else hook(lowering, table)
        if module is not None:
            after = private_assumptions.count_of_assumptions(environment)
            # What is recorded of sizes goes into the entry.
            if after == before or (sizes is not None and after[1] == before[1]):
                _keep(key, joint, module, table, count)
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
        sizes = sizes_of_mode(lowering.joint.fake_mode)
        decides = sizes.decides() if sizes is not None and has_sizes(lowering.joint) else None
        graph = json.dumps([decides, encoded_graph(lowering.joint.graph, sizes)])
    except ArtefactError as error:
        raise UnportableError(error.what) from error
    state = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), private_state.kernel_flags())
    given = (sorted(lowering.write_backs.items()), lowering.backend.leaves_fused_updates, lowering.joint.num_primals)
    cpu = torch.backends.cpu.get_cpu_capability()
    return cache.key_of("graph", graph, given, backend, settings, hooks, sorted(QUIRKS), state, cpu, *software)


def is_unread(node: torch.fx.Node) -> bool:
    """Whether a node is an input with a symbolic size that nothing reads: a whole number of which only guards know."""
    return node.op == "placeholder" and not node.users and private_sizes.has_symbols(node.meta.get("val"))


def has_sizes(joint: JointGraph) -> bool:
    """Whether a graph computes with sizes or whole numbers that change from call to call."""
    values = ((node, node.meta.get("val")) for node in joint.graph.nodes)
    return any(
        private_sizes.has_symbols(value) and not isinstance(value, torch.SymFloat) and not is_unread(node)
        for node, value in values
    )


def encoded_graph(graph: torch.fx.Graph, sizes: SizesHere | None) -> list[Any]:
    """The nodes of a graph as data, with all facts of their values, in these ``sizes``; raises :class:`ArtefactError` or
    :class:`UnportableError`.
    """
    memories: dict[int, int] = {}
    *nodes, output = graph.nodes
    found = [[*_encoded_node(node), _facts_of(node, memories, sizes)] for node in nodes]
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


def _facts_of(node: torch.fx.Node, memories: dict[int, int], sizes: SizesHere | None) -> Any:
    return _UNREAD if is_unread(node) else _facts(node.meta.get("val"), memories, sizes)


def _facts(value: Any, memories: dict[int, int], sizes: SizesHere | None) -> Any:
    """All that a value is, with a number for the memory that it lies in."""
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_facts(item, memories, sizes) for item in value)]
    if type(value) is float:
        return value.hex()
    if isinstance(value, torch.SymFloat):
        return _CHANGES
    facts = encode_value(value, sizes)
    if isinstance(value, torch.Tensor):
        facts["memory"] = memories.setdefault(int(value.untyped_storage()._cdata), len(memories))
    return facts


# --- an entry -----------------------------------------------------------------------------------------------------------


def _keep(key: str, joint: JointGraph, module: torch.fx.GraphModule, table: Table, count: int) -> None:
    """Write a decomposed graph down, where reading it gives the same graph. ``count`` conditions on sizes were there before."""
    if not all(map(private_code.is_known, table.values())):
        return
    try:
        data = encoded(joint, module, count=count)
        again = decoded(joint, json.loads(json.dumps(data)))
        is_same = encoded(joint, again, module, count) == data
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


def encoded(
    joint: JointGraph, module: torch.fx.GraphModule, like: torch.fx.GraphModule | None = None, count: int | None = None
) -> list[Any]:
    """A decomposed graph as data; ``like`` is a graph with the same nodes that says from which nodes of the joint graph they
    come; what was recorded of sizes behind the first ``count`` conditions is assumed in it. Raises :class:`UnportableError`.
    """
    sizes = sizes_of_mode(joint.fake_mode)
    assumed = [] if sizes is None or count is None else sizes.recorded_since(count)
    origins = origins_of(module if like is None else like)
    memories: dict[int, int] = {}
    nodes: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "output":
            nodes.append([encode_argument(item) for item in node.args[0]])
        elif node.op == "placeholder":
            nodes.append([node.op, node.name, _facts_of(node, memories, sizes)])
        elif node.name not in origins:
            raise UnportableError(f"nobody knows where {node.name} comes from")
        else:
            nodes.append([*_encoded_node(node), origins[node.name], _facts(node.meta.get("val"), memories, sizes)])
    return [assumed, *nodes]


def decoded(joint: JointGraph, data: list[Any]) -> torch.fx.GraphModule:
    """The graph that :func:`encoded` has written down; raises whatever data that means nothing leads to."""
    assumed, *entries, outputs = data
    sizes = sizes_of_mode(joint.fake_mode)
    if sizes is not None:
        sizes.assume(assumed)
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
                node.meta["val"] = _value(joint, node, facts, memories, sizes)
            else:
                node = _decoded_call(graph, entry, old, known)
                if entry[6] == _CHANGES:
                    node.meta["val"] = _number(node, old[entry[5]])
                else:
                    node.meta["val"] = _value(joint, node, entry[6], memories, sizes)
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
        if node.target not in _NAMES or not any(isinstance(item, (torch.SymFloat, torch.SymInt)) for item in values):
            raise UnportableError(f"{node.name} computes no number that changes")
        value = node.target(*values)  # type: ignore[operator]
    if not isinstance(value, torch.SymFloat):
        raise UnportableError(f"{node.name} is no number that changes")
    return value


def _value(
    joint: JointGraph, node: torch.fx.Node, facts: Any, memories: dict[int, Any], sizes: SizesHere | None
) -> Any:
    if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        return node.args[0].meta["val"][node.args[1]]
    if isinstance(facts, list):
        items = [_value_of(joint, item, memories, sizes) for item in facts[1:]]
        return tuple(items) if facts[0] == "tuple" else items
    return _value_of(joint, facts, memories, sizes)


def _value_of(joint: JointGraph, facts: Any, memories: dict[int, Any], sizes: SizesHere | None) -> Any:
    """The fake value with these facts, in a memory that those of other nodes may share; or the number."""
    if facts is None:
        return None
    decode = (lambda number: number) if sizes is None else sizes.decode
    if "number" in facts:
        return decode(facts["number"])
    if facts["requires_grad"] or facts["inference"]:
        raise UnportableError("a value inside of the graph requires a gradient")
    dtype, nbytes = value_named("dtype", facts["dtype"]), decode(facts["bytes"])
    shape, stride, offset = (
        list(map(decode, facts["shape"])),
        list(map(decode, facts["stride"])),
        decode(facts["offset"]),
    )
    with contextlib.nullcontext() if sizes is None else sizes.unrecorded():
        memory = memories.get(facts["memory"])
        if memory is None:
            memory = memories[facts["memory"]] = _new_memory(nbytes)
        inside = torch.empty(0, dtype=dtype, device="meta")
        inside.set_(memory, offset, shape, stride)
    return private_tensors.FakeTensor(joint.fake_mode, inside, torch.device("cpu"))


def _new_memory(nbytes: Any) -> Any:
    """A memory of so many bytes; only an operator makes one of a symbolic size."""
    if type(nbytes) is int:
        return torch.UntypedStorage(nbytes, device="meta")
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
