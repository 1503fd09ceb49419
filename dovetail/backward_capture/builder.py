"""The object that the autograd engine calls while it walks a graph: each visit of a node becomes calls in an ``fx`` graph.

Nothing is computed here. Tensors are empty stand-ins and sizes are objects that report who looks at them, so no size, stride or
scalar becomes part of the graph.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from dovetail.backward_capture import accumulation, functions, hooks, node_functions
from dovetail.backward_capture.node_functions import NodeFunction, OutputCheck
from dovetail.backward_capture.numbers import LiftedNumber
from dovetail.errors import CaptureError
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import engine as private_engine
from dovetail.torch_private import tracing as private_tracing


def _hooked_on_the_way() -> bool:
    """Whether the gradient of a tensor with a hook is asked for, and that of one from which it was computed too."""
    wanted = [item for item in private_autograd.wanted_gradients() if isinstance(item, torch.Tensor)]
    for tensor in [item for item in wanted if item.grad_fn is not None and item._backward_hooks]:
        stack, seen = [tensor.grad_fn], set()
        while stack:
            for node, _ in getattr(stack.pop(), "next_functions", ()):
                if node is None or node in seen:
                    continue
                if any(item.grad_fn is node or item is getattr(node, "variable", None) for item in wanted):
                    return True
                seen.add(node)
                stack.append(node)
    return False


def _needs_other_summands(call: Any) -> bool:
    """Whether a call's backward would get a part of its gradients only, the rest by its derivative, and has to refuse that."""
    return call.is_partial and call.graph.derivatives.differs.takes_whole_gradients(itertools.repeat(True))  # type: ignore[no-any-return]


class Collected(NamedTuple):
    """The values that the engine collects from the nodes of an autograd graph; a captured backward is called with them."""

    tensors: Sequence[torch.Tensor]
    sizes: Sequence[int]
    scalars: Sequence[float]
    #: Hooks, and the contexts of ``torch.autograd.Function``.
    hooks: Sequence[Any]
    #: Values that saved-tensor hooks have packed.
    packed: Sequence[Any]


ARGUMENTS = Collected._fields


class _RecordOperators(private_tracing.TorchDispatchMode):
    """Adds the engine's own computations between two nodes to the graph, such as zeros for a gradient that nobody gave."""

    def __init__(self, builder: GraphBuilder) -> None:
        super().__init__()
        self._builder = builder

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._builder.record_operator(function, args, kwargs or {})


class GraphBuilder:
    """Builds one graph of node calls. The engine decides the names and arguments of the methods that it calls::

        begin_capture                    stand-ins for what the nodes have saved
        for each node
            set_node_origin
            tensor_pre_hook, cpp_tensor_pre_hook, pre_hook
            one of
                apply_functional         a native node: its formula (bind_function once in a process)
                proxy_call_backward      a torch.autograd.Function; for one of Dovetail's own, its backward graph
                call_copy_slices_prologue, apply_functional, call_copy_slices_epilogue
                                         an in-place write to a view
                accumulate_grad          a leaf
            unpack_hook                  for values saved through saved-tensor hooks
            validate_outputs
            post_hook, post_acc_grad_hook
            accumulate                   where gradients meet
        end_capture                      calls finish(builder)

    The engine gets stand-ins for all values. The node of a stand-in is found by its identity.
    """

    def __init__(self, finish: Callable[[GraphBuilder], Any], roots: Sequence[Any] = ()) -> None:
        self._finish = finish
        self.roots = tuple(roots)
        self.failure: str | None = None
        #: Whether the engine is on its walk; an error then leaves stand-ins in a node.
        self.walking = False
        self.graph = fx.Graph()
        self.call_names: dict[int, str] = {}
        self.call = -1
        self.outputs: list[fx.Node | None] = []
        self._node_of: dict[int, fx.Node] = {}
        # None may be freed, or its address would be used again.
        self._alive: list[Any] = []
        self._accumulated: Any = None
        self._mode = _RecordOperators(self)
        self._mode_is_on = False
        self._arguments = {name: self.graph.placeholder(name) for name in ARGUMENTS}

    def fail(self, reason: str) -> None:
        """Give the graph up, and go on: an engine that is stopped half way leaves stand-ins in the node that it is at."""
        self.failure = self.failure or reason

    # --- stand-ins ---------------------------------------------------------------------------------------------------

    def _stand_in(self, node: fx.Node, like: torch.Tensor | None = None) -> torch.Tensor:
        with private_tracing.disable_current_modes() if self._mode_is_on else contextlib.nullcontext():
            value = torch.empty(0, dtype=like.dtype if like is not None else None)
        self._alive.append(value)
        self._node_of[id(value)] = node
        return value

    def _reference(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._node_of:
                self.fail("an autograd node uses a tensor that the engine has not handed over")
            return self._node_of.get(id(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            if not isinstance(value.node, LiftedNumber):
                self.fail("an autograd node has saved a symbolic number of another trace")
                return None
            return value.node.node
        if type(value) in (list, tuple):
            return type(value)(self._reference(item) for item in value)
        if type(value) is torch.Size:
            return [self._reference(item) for item in value]
        if type(value) is dict:
            return {key: self._reference(item) for key, item in value.items()}
        return value

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a step whose arguments are stand-ins."""
        return self._step(target, *self._reference(args), **self._reference(kwargs))

    def _step(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a step of this visit whose arguments are nodes."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["call"] = self.call
        return node

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (node, index))
        if node.op != "placeholder":
            item.meta["call"] = self.call
        return item

    def _call_list(self, target: Callable[..., Any], count: int, *args: Any) -> list[torch.Tensor]:
        node = self._emit(target, *args)
        return [self._stand_in(self._item(node, index)) for index in range(count)]

    # --- called by the engine ----------------------------------------------------------------------------------------

    def begin_capture(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        origins: Any,
        accumulate_grad: bool,
        check_nans: bool,
    ) -> tuple[str, list[torch.Tensor], list[Any], list[Any]]:
        """Give the engine stand-ins for everything that the nodes have saved."""
        tensors = [
            self._stand_in(self._item(self._arguments["tensors"], index), value) for index, value in enumerate(inputs)
        ]
        size_numbers = [self._number("sizes", index, value) for index, value in enumerate(sizes)]
        scalar_numbers = [self._number("scalars", index, value) for index, value in enumerate(scalars)]
        self._alive += [size_numbers, scalar_numbers]
        self._mode.__enter__()
        self._mode_is_on = self.walking = True
        return "dovetail", tensors, size_numbers, scalar_numbers

    def _number(self, argument: str, index: int, value: Any) -> Any:
        if type(value) not in (int, float):
            raise CaptureError(f"an autograd node has saved a number of type {type(value).__name__}")
        node = self._item(self._arguments[argument], index)
        # Before torch 2.13 the engine keeps the numbers for ever; this object, which knows the nodes, must not live as long.
        fail = weakref.WeakMethod(self.fail)

        def looked_at(question: str) -> None:
            if (builder_fails := fail()) is not None:
                builder_fails(f"torch looks at a saved size or number ({question}) while the backward is captured")

        return LiftedNumber(self.graph, node, type(value), value, looked_at).number()

    def close(self) -> None:
        """End the recording; the engine calls this whether or not the capture succeeded."""
        if self._mode_is_on:
            self._mode_is_on = False
            self._mode.__exit__(None, None, None)

    def set_node_origin(self, name: str, index: int, context: Any) -> None:
        """Begin the engine's visit number ``index``."""
        self.call = index
        self.call_names[index] = name

    def log_compile_reasons(self, reasons: Sequence[str]) -> None:
        """Ignore torch's reasons for a capture; the events of the session give Dovetail's own."""

    def bind_function(self, name: str, function: Callable[..., Any], is_custom: bool, is_traceable: bool) -> str:
        """Remember the formula of a kind of node; the engine hands each over once in a process."""
        return private_engine.bind_node_function(name, function, is_custom, is_traceable)

    def apply_functional(
        self, name: str, gradients: Sequence[Any], args: Any, output_metadata: Sequence[Any]
    ) -> Sequence[torch.Tensor | None]:
        """Record a native node: its formula on the gradients and the saved values."""
        if "CppNode" not in name and all(value is None for value in gradients):
            return [None] * len(output_metadata)  # as its formula does; that of an extension may make zeros of it
        return self._call_list(NodeFunction.named(name), len(output_metadata), gradients, *args)

    def validate_outputs(
        self, _: Any, outputs: Sequence[Any], args: Any, output_metadata: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Record the check of a node's gradients, which brings them to the shape, type and device of the differentiated values."""
        return self._arrivals(self._emit(OutputCheck(self.call_names.get(self.call, "")), outputs, *args), outputs)

    def _arrivals(self, node: fx.Node, outputs: Sequence[Any]) -> list[torch.Tensor | None]:
        """Stand-ins for the outputs of a visit. Each notes the edge along which it leaves: the visit and the output's number."""
        results: list[torch.Tensor | None] = []
        for index, value in enumerate(outputs):
            item = None if value is None else self._item(node, index)
            if item is not None:
                item.meta["arrival"] = (self.call, index)
            results.append(None if item is None else self._stand_in(item))
        return results

    def _arrived(self, node: fx.Node, *values: Any) -> None:
        """Mark a step between two visits: it belongs to the node at which the values have arrived."""
        for value in values:
            arrival = None if value is None else self._node_of[id(value)].meta.get("arrival")
            if arrival is not None:
                node.meta["arrival_of_input"] = node.meta["arrival"] = arrival
                return

    def accumulate(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Record the sum of gradients that meet at one input of a node: one step, whichever the engine adds up first."""
        first, last = self._reference([old, new])
        if first is not None and first.target is accumulation.add_gradients:
            node = self._step(accumulation.add_gradients, *first.args, last)
            self.graph.erase_node(first)
        else:
            node = self._step(accumulation.add_gradients, first, last)
        self._arrived(node, old)
        return self._stand_in(node)

    def accumulate_grad(self, variable: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """Record a gradient that arrives at a leaf. Before torch 2.13 the leaf's own gradient was not an argument."""
        gradient = rest[1] if len(rest) == 3 else rest[0]
        self._emit(accumulation.accumulate_grad, variable, gradient)
        self._accumulated = gradient
        return self._stand_in(self._node_of[id(variable)]) if len(rest) == 3 else None

    def proxy_call_backward(
        self,
        inputs: Sequence[Any],
        output_metadatas: Sequence[Any],
        saved_tensors: Sequence[Any],
        backward_index: int,
        context: Any,
        backward_state_index: int | None,
        opaque_indices: Sequence[int] = (),
    ) -> tuple[torch.Tensor | None, ...]:
        """Record the backward of a ``torch.autograd.Function`` as one call."""
        kind = context._forward_cls
        if backward_state_index is not None or opaque_indices or hasattr(kind, "_aot_id"):
            self.fail(f"{kind.__name__} was compiled by torch.compile, whose own compiled autograd is for it")
        if getattr(kind, "boxed_grads_call", False):
            self.fail(f"{kind.__name__} takes its gradients as one list (boxed_grads_call)")
        hook = self._item(self._arguments["hooks"], backward_index)
        is_tensor = [metadata is not None for metadata in output_metadatas]
        if hasattr(kind, "divides"):
            if kind.divides(context):
                self.fail(
                    "the gradient of an output is asked for, and another output of the same graph was computed from it"
                )
            is_tensor[1:] = [False] * len(is_tensor[1:])
        defined = [value is not None for value in inputs]
        given = (defined, self._reference(list(saved_tensors)), *self._reference(list(inputs)))
        whole = self._step(functions.call_backward, hook, is_tensor, *given)
        has_graph = hasattr(kind, "backward_graph") and not _needs_other_summands(context.call)
        own: Any = kind.backward_graph(context, inputs) if has_graph else None
        whole.meta["as_it_is"] = has_graph and own is None
        if own is None or any(node.op in ("get_attr", "call_module") for node in own[0].graph.nodes):
            results = [self._item(whole, index) if flag else None for index, flag in enumerate(is_tensor)]
        else:
            # With create_graph=True it is the function's own backward, whose derivative is another compiled function.
            whole.meta["create_graph"] = True
            values = self._step(functions.compiled_prologue, hook, *given)
            values.meta["create_graph"] = False
            copied = self._copied(own[0], [self._item(values, place) for place in own[1]])
            first_order = kind.epilogue(context, copied)
            results = [
                self._step(functions.of_either_order, result, self._item(whole, index)) if flag and result else None
                for index, (flag, result) in enumerate(zip(is_tensor, first_order, strict=True))
            ]
        return tuple(None if node is None else self._stand_in(node) for node in results)

    def _copied(self, graph_module: fx.GraphModule, inputs: Sequence[fx.Node]) -> list[fx.Node | None]:
        """Add the nodes of a graph to this visit, on other inputs; returns its outputs."""
        new = dict(zip(graph_module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        outputs: Any = self.graph.graph_copy(graph_module.graph, new)
        for node, copied in new.items():
            if node.op != "placeholder":
                copied.meta = {"call": self.call, **{key: node.meta[key] for key in ("user_line",) if key in node.meta}}
        return list(outputs)

    def call_copy_slices_prologue(self, inputs: Sequence[Any], *geometry: Any) -> list[torch.Tensor]:
        """Record the first half of an in-place write to a view, which splits the gradient of the base."""
        return self._call_list(node_functions.copy_slices_prologue, 3, inputs, *geometry)

    def call_copy_slices_epilogue(
        self, needs_input_grad: Sequence[bool], result: Any, gradients: Sequence[Any], part: Any
    ) -> list[torch.Tensor]:
        """Record the other half, which puts together the gradients after the write's own node."""
        return self._call_list(
            node_functions.copy_slices_epilogue, len(needs_input_grad), list(needs_input_grad), result, gradients, part
        )

    def unpack_hook(self, hook_index: int, data_index: int) -> torch.Tensor:
        """Record that a value saved through saved-tensor hooks is unpacked; a checkpoint has such hooks."""
        hook = self._item(self._arguments["hooks"], hook_index)
        data = self._item(self._arguments["packed"], data_index)
        return self._stand_in(self._step(hooks.unpack_saved, hook, data))

    def _hook(self, target: Callable[..., Any], hook_index: int, *args: Any) -> fx.Node:
        hook = self._item(self._arguments["hooks"], hook_index)
        return self._step(target, hook, *self._reference(args))

    def tensor_pre_hook(self, inputs: list[Any], hook_index: int, position: int) -> list[Any]:
        """Record a hook of ``Tensor.register_hook``."""
        inputs = list(inputs)
        if _hooked_on_the_way():
            self.fail("the gradient of a tensor with a hook is asked for, which eager gives as it is before the hook")
        node = self._hook(hooks.call_tensor_hook, hook_index, inputs[position])
        # A hook is called without a gradient too, where the node has other results; it cannot make one.
        if inputs[position] is not None:
            self._arrived(node, inputs[position])
            inputs[position] = self._stand_in(node)
        return inputs

    def cpp_tensor_pre_hook(self, inputs: list[Any], hook_index: int, position: int) -> list[Any]:
        """Refuse hooks of native code on a tensor."""
        self.fail("a tensor has hooks of native code (retain_grad is one)")
        return list(inputs)

    def pre_hook(self, inputs: Sequence[Any], hook_index: int) -> list[Any]:
        """Record a hook of ``Node.register_prehook``."""
        node = self._hook(hooks.call_node_pre_hook, hook_index, list(inputs))
        self._arrived(node, *inputs)
        items = [self._item(node, index) for index in range(len(inputs))]
        for item in items:
            item.meta.update(node.meta)
        return list(map(self._stand_in, items))

    def post_hook(self, outputs: Sequence[Any], inputs: Sequence[Any], hook_index: int) -> list[Any]:
        """Record a hook of ``Node.register_hook``."""
        return self._arrivals(self._hook(hooks.call_node_post_hook, hook_index, list(outputs), list(inputs)), outputs)

    def post_acc_grad_hook(self, variable: torch.Tensor, hook_index: int) -> list[Any]:
        """Record a hook of ``Tensor.register_post_accumulate_grad_hook``."""
        self._hook(hooks.call_post_accumulate_hook, hook_index, variable, self._accumulated)
        return [variable]

    def record_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator that the engine runs by itself."""
        returns = function._schema.returns
        if any(str(entry.type) != "Tensor" for entry in returns) or not returns:
            self.fail(f"the engine runs {function} while it hands over the graph")
            with private_tracing.disable_current_modes():
                return function(*args, **kwargs)
        if any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in function._schema.arguments
        ):
            self.fail(f"the engine runs {function}, which writes to a tensor, while it hands over the graph")
        node = self._emit(function, *args, **kwargs)
        if len(returns) == 1:
            return self._stand_in(node)
        return tuple(self._stand_in(self._item(node, index)) for index in range(len(returns)))

    def end_capture(self, outputs: Sequence[Any]) -> Any:
        """End the walk; ``outputs`` are the gradients that were asked for."""
        self.close()
        self.walking = False
        if self.failure is not None:
            raise CaptureError(self.failure)
        self.outputs = [None if value is None else self._node_of[id(value)] for value in outputs]
        return self._finish(self)
