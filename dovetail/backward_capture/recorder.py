"""The object that the autograd engine talks to while it walks a graph: every visit of a node becomes calls on an ``fx`` graph.

Nothing is computed here. Tensors are empty stand-ins and sizes are objects that refuse to be looked at, so no size, stride or
scalar can become part of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dovetail.backward_capture import operations
from dovetail.backward_capture.numbers import LiftedNumber
from dovetail.backward_capture.operations import NodeFunction, OutputCheck
from dovetail.errors import CaptureError
from dovetail.torch_private import engine as private_engine
from dovetail.torch_private import tracing as private_tracing

#: What a captured backward is called with: tensors, sizes, numbers, hooks and contexts, and what saved-tensor hooks packed.
ARGUMENTS = ("tensors", "sizes", "scalars", "hooks", "packed")


class _RecordOperators(private_tracing.TorchDispatchMode):
    """What the engine computes by itself between two nodes (zeros for a gradient that nobody gave) is recorded too."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._recorder.record_operator(function, args, kwargs or {})


class Recorder:
    """Builds one graph of node calls; ``finish(recorder)`` gets it when the engine has seen the last node.

    The methods are called by the engine, which decides their names and arguments.
    """

    def __init__(self, finish: Callable[[Recorder], Any], roots: Sequence[Any] = ()) -> None:
        self._finish = finish
        self.roots = tuple(roots)
        self.failure: str | None = None
        #: Whether the engine has begun and not ended to walk; an error then leaves a node with stand-ins.
        self.walking = False
        self.graph = fx.Graph()
        self.call_names: dict[int, str] = {}
        self.call = -1
        self.outputs: list[fx.Node | None] = []
        self._node_of: dict[int, fx.Node] = {}
        # Identity is all there is to a stand-in: none may be freed and its address used again.
        self._alive: list[Any] = []
        self._accumulated: Any = None
        self._mode = _RecordOperators(self)
        self._mode_is_on = False
        self._arguments = {name: self.graph.placeholder(name) for name in ARGUMENTS}

    def fail(self, reason: str) -> None:
        """The graph will be of no use, and the capture goes on: an engine that is stopped half way leaves stand-ins in the
        node that it is at.
        """
        self.failure = self.failure or reason

    # --- stand-ins ---------------------------------------------------------------------------------------------------

    def _stand_in(self, node: fx.Node, like: torch.Tensor | None = None) -> torch.Tensor:
        with operations.outside_of(self._mode if self._mode_is_on else None):
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
        node = self.graph.call_function(target, self._reference(args), self._reference(kwargs))
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

    # --- what the engine calls ---------------------------------------------------------------------------------------

    def begin_capture(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        origins: Any,
        accumulate_grad: bool,
        check_nans: bool,
    ) -> tuple[str, list[torch.Tensor], list[Any], list[Any]]:
        """Stand-ins for everything that the nodes have saved."""
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

        def looked_at(question: str) -> None:
            self.fail(f"torch looks at a saved size or number ({question}) while the backward is captured")

        return LiftedNumber(self.graph, node, type(value), value, looked_at).number()

    def close(self) -> None:
        """The engine is done with this object, whether or not the capture succeeded."""
        if self._mode_is_on:
            self._mode_is_on = False
            self._mode.__exit__(None, None, None)

    def set_node_origin(self, name: str, index: int, context: Any) -> None:
        """What follows belongs to the engine's visit number ``index``."""
        self.call = index
        self.call_names[index] = name

    def log_compile_reasons(self, reasons: Sequence[str]) -> None:
        """Why the engine asks for another capture; the events of the session say it in Dovetail's words."""

    def bind_function(self, name: str, function: Callable[..., Any], is_custom: bool, is_traceable: bool) -> str:
        """The functional form of a kind of node, told once in a process."""
        return private_engine.bind_node_function(name, function, is_custom, is_traceable)

    def apply_functional(
        self, name: str, gradients: Sequence[Any], args: Any, output_metadata: Sequence[Any]
    ) -> list[torch.Tensor]:
        """A native node: its formula on the gradients and on what it saved."""
        return self._call_list(NodeFunction.named(name), len(output_metadata), gradients, *args)

    def validate_outputs(
        self, _: Any, outputs: Sequence[Any], args: Any, output_metadata: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Each gradient is brought to the shape, type and device of what it is the gradient of."""
        return self._arrivals(self._emit(OutputCheck(self.call_names.get(self.call, "")), outputs, *args), outputs)

    def _arrivals(self, node: fx.Node, outputs: Sequence[Any]) -> list[torch.Tensor | None]:
        """The outputs of a visit on their way along the node's edges, which their numbers say."""
        results: list[torch.Tensor | None] = []
        for index, value in enumerate(outputs):
            item = None if value is None else self._item(node, index)
            if item is not None:
                item.meta["arrival"] = (self.call, index)
            results.append(None if item is None else self._stand_in(item))
        return results

    def _arrived(self, node: fx.Node, *values: Any) -> None:
        """A step between the visits: it belongs to the node at which the values have arrived."""
        for value in values:
            arrival = None if value is None else self._node_of[id(value)].meta.get("arrival")
            if arrival is not None:
                node.meta["arrival_of_input"] = node.meta["arrival"] = arrival
                return

    def accumulate(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Two gradients arrive at the same input of a node."""
        node = self._emit(operations.add_gradients, old, new)
        self._arrived(node, old)
        return self._stand_in(node)

    def accumulate_grad(self, variable: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """A gradient arrives at a leaf. Before torch 2.13 the leaf's own gradient was not an argument."""
        gradient = rest[1] if len(rest) == 3 else rest[0]
        self._emit(operations.accumulate_grad, variable, gradient)
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
        """A ``torch.autograd.Function``: its backward is one call in the graph."""
        kind = context._forward_cls
        if backward_state_index is not None or opaque_indices or hasattr(kind, "_aot_id"):
            self.fail(f"{kind.__name__} was compiled by torch.compile, whose own compiled autograd is for it")
        if getattr(kind, "boxed_grads_call", False):
            self.fail(f"{kind.__name__} takes its gradients as one list (boxed_grads_call)")
        hook = self._item(self._arguments["hooks"], backward_index)
        found: Any = kind.backward_graph(inputs) if hasattr(kind, "backward_graph") else None
        if found is not None and not any(node.op in ("get_attr", "call_module") for node in found[0].graph.nodes):
            graph_module, order = found
            return self._compiled_function(hook, kind, graph_module, order, inputs, output_metadatas, saved_tensors)
        node = self._call_backward(hook, inputs, output_metadatas, saved_tensors)
        return tuple(
            None if metadata is None else self._stand_in(self._item(node, index))
            for index, metadata in enumerate(output_metadatas)
        )

    def _call_backward(
        self, hook: fx.Node, inputs: Sequence[Any], output_metadatas: Sequence[Any], saved_tensors: Sequence[Any]
    ) -> fx.Node:
        is_tensor = [metadata is not None for metadata in output_metadatas]
        node = self.graph.call_function(
            operations.call_backward,
            (
                hook,
                is_tensor,
                [value is not None for value in inputs],
                self._reference(list(saved_tensors)),
                *self._reference(list(inputs)),
            ),
        )
        node.meta["call"] = self.call
        return node

    def _compiled_function(
        self,
        hook: fx.Node,
        kind: Any,
        graph_module: fx.GraphModule,
        order: Sequence[int],
        inputs: Sequence[Any],
        output_metadatas: Sequence[Any],
        saved_tensors: Sequence[Any],
    ) -> tuple[torch.Tensor | None, ...]:
        """A function that Dovetail has compiled: one call that prepares, then its backward graph, node by node.

        With ``create_graph=True`` it is the function's own backward, whose derivative is another compiled function.
        """
        whole = self._call_backward(hook, inputs, output_metadatas, saved_tensors)
        whole.meta["create_graph"] = True
        values = self.graph.call_function(
            operations.compiled_prologue,
            (
                hook,
                [value is not None for value in inputs],
                self._reference(list(saved_tensors)),
                *self._reference(list(inputs)),
            ),
        )
        values.meta["call"] = self.call
        values.meta["create_graph"] = False
        places = iter(order)
        new: dict[fx.Node, fx.Node] = {}
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                new[node] = self._item(values, next(places))
            elif node.op != "output":
                copied = new[node] = self.graph.create_node(
                    node.op,
                    node.target,
                    fx.map_arg(node.args, new.__getitem__),  # type: ignore[arg-type]
                    fx.map_arg(node.kwargs, new.__getitem__),  # type: ignore[arg-type]
                    name=node.name,
                )
                copied.meta["call"] = self.call
                if "user_line" in node.meta:
                    copied.meta["user_line"] = node.meta["user_line"]
        results = kind.arranged(graph_module.graph.output_node().args[0])
        found: list[torch.Tensor | None] = []
        for index, (metadata, result) in enumerate(zip(output_metadatas, results, strict=True)):  # type: ignore[arg-type]
            if metadata is None or result is None:
                found.append(None)
                continue
            node = self.graph.call_function(operations.of_either_order, (new[result], self._item(whole, index)))  # type: ignore[index]
            node.meta["call"] = self.call
            found.append(self._stand_in(node))
        return tuple(found)

    def call_copy_slices_prologue(self, inputs: Sequence[Any], *geometry: Any) -> list[torch.Tensor]:
        """An in-place write to a view: the gradient of the base is split."""
        return self._call_list(operations.copy_slices_prologue, 3, inputs, *geometry)

    def call_copy_slices_epilogue(
        self, needs_input_grad: Sequence[bool], result: Any, gradients: Sequence[Any], part: Any
    ) -> list[torch.Tensor]:
        """An in-place write to a view: the gradients after the write's own node."""
        return self._call_list(
            operations.copy_slices_epilogue, len(needs_input_grad), list(needs_input_grad), result, gradients, part
        )

    def unpack_hook(self, hook_index: int, data_index: int) -> torch.Tensor:
        """A tensor that was saved through saved-tensor hooks (checkpointing is one of them)."""
        hook = self._item(self._arguments["hooks"], hook_index)
        data = self._item(self._arguments["packed"], data_index)
        node = self.graph.call_function(operations.unpack_saved, (hook, data))
        node.meta["call"] = self.call
        return self._stand_in(node)

    def _hook(self, target: Callable[..., Any], hook_index: int, *args: Any) -> fx.Node:
        hook = self._item(self._arguments["hooks"], hook_index)
        node = self.graph.call_function(target, (hook, *self._reference(args)))
        node.meta["call"] = self.call
        return node

    def tensor_pre_hook(self, inputs: list[Any], hook_index: int, position: int) -> list[Any]:
        """``Tensor.register_hook``."""
        inputs = list(inputs)
        node = self._hook(operations.call_tensor_hook, hook_index, inputs[position])
        if inputs[position] is None:
            # A hook is called without a gradient too, where the node has other results, and cannot make one.
            return inputs
        self._arrived(node, inputs[position])
        inputs[position] = self._stand_in(node)
        return inputs

    def cpp_tensor_pre_hook(self, inputs: list[Any], hook_index: int, position: int) -> list[Any]:
        """A hook of native code, ``retain_grad`` for example."""
        inputs = list(inputs)
        node = self._emit(operations.call_native_tensor_hooks, hook_index, inputs[position])
        self._arrived(node, inputs[position])
        inputs[position] = self._stand_in(node)
        return inputs

    def pre_hook(self, inputs: Sequence[Any], hook_index: int) -> list[Any]:
        """``Node.register_prehook``."""
        node = self._hook(operations.call_node_pre_hook, hook_index, list(inputs))
        self._arrived(node, *inputs)
        results = []
        for index in range(len(inputs)):
            item = self._item(node, index)
            item.meta.update(node.meta)
            results.append(self._stand_in(item))
        return results

    def post_hook(self, outputs: Sequence[Any], inputs: Sequence[Any], hook_index: int) -> list[Any]:
        """``Node.register_hook``."""
        return self._arrivals(
            self._hook(operations.call_node_post_hook, hook_index, list(outputs), list(inputs)), outputs
        )

    def post_acc_grad_hook(self, variable: torch.Tensor, hook_index: int) -> list[Any]:
        """``Tensor.register_post_accumulate_grad_hook``."""
        self._hook(operations.call_post_accumulate_hook, hook_index, variable, self._accumulated)
        return [variable]

    def record_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that the engine runs by itself."""
        returns = function._schema.returns
        if any(str(entry.type) != "Tensor" for entry in returns) or not returns:
            self.fail(f"the engine runs {function} while it hands over the graph")
            with operations.outside_of(self._mode):
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
        """The last node was seen; ``outputs`` are the gradients that were asked for."""
        self.close()
        self.walking = False
        if self.failure is not None:
            raise CaptureError(self.failure)
        self.outputs = [None if value is None else self._node_of[id(value)] for value in outputs]
        return self._finish(self)
