"""Writing a flat ATen graph in terms of other operators: the decompositions that a backend asks for.

The core's own backends ask for none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import needed_for, writes_in_place
from dovetail.aot.steps import Lowering, Table, decomposes
from dovetail.errors import GraphInvalidError
from dovetail.passes.decomposed_again import Repeats
from dovetail.passes.equal_calls import ABOUT_THE_VALUE, IN_GRADIENTS, EqualCalls
from dovetail.torch_private import numbers as private_numbers
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing

# Their results depend on the strides of their arguments, or they refuse other strides.
_READ_STRIDES = frozenset({torch.ops.aten.view.default, torch.ops.aten.view.dtype, torch.ops.aten.as_strided.default})

_ORIGINS = "dovetail_origins"


def stays_whole(*args: Any, **kwargs: Any) -> Any:
    """As a rule of a table: the operator stays, also where torch has a formula in the place of autograd's kernel for it."""
    return NotImplemented


@decomposes
def decompose_joint(lowering: Lowering, table: Table) -> torch.fx.GraphModule:
    """Apply all of the backend's table."""
    mark_read_by_gradients(lowering.joint)
    return decompose_graph(lowering.joint.graph_module, table, lowering.joint.fake_mode)


def mark_read_by_gradients(joint: JointGraph) -> None:
    """Set :data:`IN_GRADIENTS`: the second derivative of such an input is zeros in eager, not None."""
    for node in needed_for(joint.gradients) & set(joint.primals):
        node.meta[IN_GRADIENTS] = True


def origins_of(module: torch.fx.GraphModule) -> dict[str, str]:
    """For each node of a graph that was decomposed, by name: the node that it comes from."""
    found: dict[str, str] = module.meta.get(_ORIGINS, {})
    return found


class _Tracer(private_tracing.PythonKeyTracer):
    """Gives each new node the meta of the node that is being decomposed."""

    origin: torch.fx.Node | None = None
    origins: dict[str, str]

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node: torch.fx.Node = super().create_node(*args, **kwargs)
        self.inherit(node)
        return node

    def inherit(self, node: torch.fx.Node) -> None:
        """Note where a new node comes from."""
        if self.origin is not None:
            node.meta.update({key: value for key, value in self.origin.meta.items() if key not in ABOUT_THE_VALUE})
            self.origins[node.name] = self.origin.name


class _Decomposer(torch.fx.Interpreter):
    """Runs the old graph on fake tensors while the new one is recorded."""

    def __init__(self, module: torch.fx.GraphModule, tracer: _Tracer, fake_mode: Any, table: Table) -> None:
        super().__init__(module)
        self.table = table
        self.old_entries = _entries(module)
        self.tracer = tracer
        self.fake_mode = fake_mode
        self.extra_traceback = False
        self._attributes: dict[str, Any] = {}
        self._repeats = Repeats(tracer, fake_mode, tracer.inherit)
        self._equal = EqualCalls(module.graph)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Decompose and record, copy what was recorded for such a call, or take the value of an equal one."""
        assert self.tracer.origin is not None
        key, value = self._equal.find(self.tracer.origin, args, kwargs)
        if value is None:
            is_whole = self.table.get(target) is stays_whole
            with private_operators.BelowAutograd() if is_whole else contextlib.nullcontext():
                value = self._repeats.run(target, args, kwargs)
            self._equal.note(key, value, args, kwargs)
        return value

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node; all nodes that it records belong to it."""
        self.tracer.origin = n
        if n.op == "placeholder":
            return self._tracked(n, n.meta.get("val"), "placeholder")
        if n.op == "get_attr":
            return self._attribute(n)
        if isinstance(n.meta.get("val"), torch.SymFloat) and not isinstance(n.target, private_operators.OpOverload):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if callable(n.target) and not kwargs and any(map(private_sizes.is_data_number, args)):
                # ``max`` or a square root would ask a symbol for its value.
                return private_numbers.recorded_number(n.target, args, self.tracer)
        if n.target in _READ_STRIDES and isinstance(n.args[0], torch.fx.Node):
            return self._on_old_strides(n, n.args[0])
        return super().run_node(n)

    def _on_old_strides(self, n: torch.fx.Node, base: torch.fx.Node) -> Any:
        """A view that was recorded for the strides that its base had; a decomposition may have laid the base out anew."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args = (self._as_laid_out(args[0], base), *args[1:])
        self.tracer.origin = n
        return self.call_function(n.target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Keep the strides that the old outputs had; a decomposition may lay its result out in another way."""
        return [self._as_laid_out(value, node) for value, node in zip(args[0], self.old_entries, strict=True)]

    def _tracked(self, node: torch.fx.Node, value: Any, kind: str) -> Any:
        if value is None and node.users:
            raise GraphInvalidError(
                f"the graph's {kind} {node.name!r} carries no value", advice='set node.meta["val"] to a fake tensor'
            )
        with private_tracing.disable_current_modes():
            proxy = self.tracer.create_proxy(kind, str(node.target), (), {}, name=node.name)
            if value is not None:
                private_tracing.track_tensor_tree(value, proxy, constant=None, tracer=self.tracer)
        proxy.node.meta = dict(node.meta)
        if value is not None:
            proxy.node.meta["val"] = value
        return value

    def _attribute(self, node: torch.fx.Node) -> Any:
        target = str(node.target)
        if target in self._attributes:
            return self._attributes[target]
        value = self.fetch_attr(target)
        if isinstance(value, torch.Tensor):
            fake = node.meta.get("val")
            if not private_tensors.is_fake(fake):
                with private_tracing.disable_current_modes():
                    fake = self.fake_mode.from_tensor(value.detach(), static_shapes=True)
            _copy_attribute(self.module, self.tracer.root, target)
            value = self._tracked(node, fake, "get_attr")
        self._attributes[target] = value
        return value

    def _as_laid_out(self, value: Any, node: Any) -> Any:
        wanted = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor) or not isinstance(wanted, torch.Tensor):
            return value
        self.tracer.origin = node
        strides, sizes = wanted.stride(), value.shape
        if any(map(private_sizes.is_data_number, (*strides, *sizes, *value.stride()))):
            return value
        # Expressions, not numbers: a comparison of symbolic numbers would become a guard.
        steps, actual, small = (
            [private_sizes.expression_of(item) for item in numbers]
            for numbers in (strides, value.stride(), [torch.sym_max(size, 1) for size in sizes])
        )
        if all(size == 1 or a == b for size, a, b in zip(small, steps, actual, strict=True)):
            return value
        order = sorted(
            range(value.dim()), key=lambda dim: (private_sizes.hint(strides[dim]), small[dim] != 1), reverse=True
        )
        step = 1
        for dim in reversed(order):
            if small[dim] != 1 and steps[dim] != step:
                # Gaps or overlaps: only a view has such strides, and views are laid out by their base.
                return value
            step *= small[dim]
        aten = torch.ops.aten
        packed = aten.clone.default(aten.permute.default(value, order), memory_format=torch.contiguous_format)
        back = [order.index(dim) for dim in range(value.dim())]
        return aten.permute.default(packed, back)


def decompose_graph(
    graph_module: torch.fx.GraphModule, table: Mapping[Any, Callable[..., Any]] | None, fake_mode: Any
) -> torch.fx.GraphModule:
    """Write a graph in terms of the operators that ``table`` leaves over, as a new graph module.

    ``graph_module`` is a flat, functional ATen graph whose placeholders carry fake values of ``fake_mode`` and whose
    output is one list. Placeholders keep their names and meta; a new node gets the meta (``phase``, ``user_line`` …) of
    the node that it comes from; outputs keep their strides; None stays None. Raises :class:`GraphInvalidError` if the
    result is not functional.
    """
    old_output = graph_module.graph.output_node()
    mutations_before = {node.target for node in graph_module.graph.nodes if writes_in_place(node)}
    tracer = _Tracer()
    graph = torch.fx.Graph(tracer_cls=private_tracing.PythonKeyTracer)
    tracer.graph = graph
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    tracer.origins = {}
    with _recording(tracer, table or {}, fake_mode):
        values = _Decomposer(graph_module, tracer, fake_mode, table or {}).run(enable_io_processing=False)
        tracer.origin = None
        entries = [_entry(value, old, tracer) for value, old in zip(values, _entries(graph_module), strict=True)]
    output = graph.output(entries)
    output.meta = dict(old_output.meta)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        # `torch.tensor` inside a decomposition ends in this; it writes nothing.
        if node.target not in mutations_before:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    clean_views(graph)
    made = [node for node in graph.nodes if writes_in_place(node) and node.target not in mutations_before]
    if made:
        raise GraphInvalidError(
            f"a decomposition writes in place: {made[0].format_node()}",
            where=made[0].meta.get("user_line"),
            advice="take this operator's decomposition out of the backend's table",
        )
    graph.lint()
    module = private_tracing.lazy_graph_module(tracer.root, graph)
    module.meta[_ORIGINS] = tracer.origins
    return module


@contextlib.contextmanager
def _recording(tracer: _Tracer, table: Mapping[Any, Callable[..., Any]], fake_mode: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(private_tracing.disable_autocast_cache())
        stack.enter_context(private_tracing.enable_python_dispatcher())
        stack.enter_context(fake_mode)
        stack.enter_context(private_tracing.ProxyTorchDispatchMode(tracer, "symbolic"))
        stack.enter_context(private_tracing.decompose(table))
        yield


def _entry(value: Any, old: Any, tracer: _Tracer) -> Any:
    if not isinstance(old, torch.fx.Node):
        return old
    slot = private_tracing.get_proxy_slot(value, tracer, None)
    if slot is None:
        raise GraphInvalidError(f"the output {old.name!r} was lost in decomposition")
    if isinstance(value, torch.Tensor):
        return slot.proxy.node
    return slot.force().node


def _copy_attribute(old: torch.nn.Module, new: torch.nn.Module, target: str) -> None:
    *path, last = target.split(".")
    for part in path:
        if not hasattr(new, part):
            new.add_module(part, torch.nn.Module())
        old, new = getattr(old, part), getattr(new, part)
    setattr(new, last, getattr(old, last))


def _entries(graph_module: torch.fx.GraphModule) -> list[Any]:
    entries = graph_module.graph.output_node().args[0]
    if not isinstance(entries, (list, tuple)):
        raise GraphInvalidError("the graph does not return one flat list", advice="end it with graph.output([...])")
    return list(entries)


_IDENTITIES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("alias", "detach", "view", "_unsafe_view", "reshape", "expand", "permute")
) | {torch.ops.aten.slice.Tensor}


def clean_views(graph: torch.fx.Graph) -> None:
    """Drop views that change nothing, then everything that nobody reads; random operators stay, as eager draws too.

    A view that the graph returns is kept: it is another tensor than its base. So is every view in a graph that writes
    in place.
    """
    if not any(map(writes_in_place, graph.nodes)):
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in _IDENTITIES:
                continue
            base = node.args[0]
            if any(user.op == "output" for user in node.users) or not _same_layout(node, base):
                continue
            node.replace_all_uses_with(base)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _same_layout(node: torch.fx.Node, base: Any) -> bool:
    one, other = node.meta.get("val"), base.meta.get("val") if isinstance(base, torch.fx.Node) else None
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if node.target is torch.ops.aten.permute.default and tuple(node.args[1]) != tuple(range(one.dim())):  # type: ignore[arg-type]
        return False
    if one.dtype != other.dtype or one.dim() != other.dim():
        return False
    numbers = (*one.shape, *other.shape, *one.stride(), *other.stride(), one.storage_offset(), other.storage_offset())
    if any(type(item) is not int for item in numbers):
        return False
    return (
        one.shape == other.shape and one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
    )
