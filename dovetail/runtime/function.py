"""One captured function as one node of autograd, and the runtime function around it.

>>> # run(inputs)                        made by make_runtime_function
>>> #     change_metadata, Epilogue.check
>>> #     DifferentiableGraph(inputs)
>>> #         CompiledBackward.apply     autograd's node; a Call of it holds what is saved
>>> #             DifferentiableGraph.forward
>>> #     Epilogue(inputs, outputs)      write-backs, inputs and views as results
>>> # autograd's engine
>>> #     CompiledBackward.backward
>>> #         DifferentiableGraph.backward
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dovetail.errors import HigherOrderGradientError
from dovetail.runtime.backward_reads import CallReads, pending_reads, reads_of
from dovetail.runtime.derivatives import DifferentiableBackward, Edges, Gradients, partial_gradients, refusal
from dovetail.runtime.epilogue import Epilogue, change_metadata, is_inside
from dovetail.runtime.origins import Origin, check_unchanged, origins_of
from dovetail.runtime.output_dependencies import depend_on, prepare_hooks, require_gradient
from dovetail.runtime.spec import RuntimeSpec
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import state as private_state

_ANOTHER_BACKWARD = "backward() is called inside of an autocast block, or with some gradients of a custom backward only"
_NO_CONTEXT = contextlib.nullcontext()
FlatCallable = Callable[[list[Any]], list[Any]]
Pattern = tuple[bool, ...]
TangentStrides = Callable[[Sequence[torch.Tensor]], "Sequence[tuple[int, ...] | None]"]
RuntimeFunction = Callable[[list[torch.Tensor]], list[torch.Tensor]]
#: The plain tensor that an incoming gradient of a class stands for.
TANGENTS: dict[type, Callable[[Any], torch.Tensor]] = {}


class Backward(Protocol):
    """The backward of one entry, by pattern of defined tangents."""

    def __call__(self, defined: Pattern) -> FlatCallable:
        """The backward for these tangents, called with the saved values and those tangents."""

    def graph_of(self, defined: Pattern) -> tuple[torch.fx.GraphModule, Sequence[int]] | None:
        """Its graph, and which of the saved values and tangents that takes, in order; None where no gradient flows."""


class SavedApart(Protocol):
    """The saved values of one call, where a backward from some outputs leaves others with theirs."""

    def read(self, defined: Pattern) -> Sequence[Any]:
        """The saved values for a backward from these outputs; raises eager's error where they were freed or written to."""

    def free(self, defined: Pattern) -> bool:
        """A backward from these outputs has begun, and no other one follows; whether anything is left."""


class KeepApart(Protocol):
    """Keeps the saved values of calls apart."""

    def __call__(self, saved: Sequence[Any]) -> SavedApart:
        """The saved values of one call."""

    def around(self, graph: DifferentiableGraph) -> FlatCallable:
        """The callable that a call runs in the graph's place."""


def make_runtime_function(
    spec: RuntimeSpec,
    forward: FlatCallable,
    backward: Backward | None,
    *,
    tangent_strides: TangentStrides | None = None,
    derivatives: DifferentiableBackward | None = None,
    keep_apart: KeepApart | None = None,
    unreached: Sequence[int] = (),
    read_later: Sequence[tuple[int, int, Sequence[int]]] = (),
) -> RuntimeFunction:
    """``run(inputs) -> results``, one real tensor for each entry of ``spec.outputs``.

    ``forward(primals)`` returns the forward outputs and then what the backward needs. A tangent with other strides than
    ``tangent_strides(primals)`` says (those of the outputs, if None) is copied into them, because the backward was compiled
    for those. ``derivatives`` runs the backward where it is to be differentiated itself. ``keep_apart`` keeps what a call has
    saved apart from its node of autograd. ``unreached`` are inputs that get no gradient whatever is asked for.
    ``read_later`` are inputs that may not change between their write-back, of so many writes, and a backward from these outputs.
    """
    compute = forward
    if backward is not None:
        compute = DifferentiableGraph(spec, forward, backward, tangent_strides, derivatives, keep_apart, unreached)
        compute.read_later = read_later
        compute = compute if keep_apart is None else keep_apart.around(compute)
    epilogue = Epilogue(spec)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        epilogue.check(inputs)
        before = change_metadata(spec.metadata_changes, inputs) if spec.metadata_changes else inputs
        # The graph's callable may clear the list that it is given.
        outputs = compute(list(before))
        results = epilogue(inputs, outputs, before)
        if derivatives is not None:
            derivatives.watch(inputs, outputs)
        return results

    return run


@dataclass(slots=True, eq=False)
class Call:
    """The state of one call, from its forward to its last backward; the call's node of autograd holds it.

    ``origins`` are tensors that inputs stand for, ``strides`` are those that the backward takes tangents in. ``reads`` must be
    unchanged since the call, ``kept`` is kept of the inputs for a derivative of the backward, ``constants`` are the saved values
    that are no tensors (each in a tuple, None in the places of tensors). ``apart`` are the saved values where they are not read
    from the node. ``is_partial``: a derivative of the backward has run, so that an ordinary one gives summands of gradients only.
    ``direct`` adds what an output's gradient has been divided into.
    """

    graph: DifferentiableGraph
    origins: list[Origin]
    reads: CallReads | None
    kept: Any
    strides: Sequence[tuple[int, ...] | None] = ()
    constants: list[tuple[Any] | None] | None = None
    apart: SavedApart | None = None
    is_partial: bool = False
    direct: Callable[[Gradients], Gradients] | None = None


class CompiledBackward(torch.autograd.Function):
    """The node of autograd of every compiled call; its first argument says which graph it is."""

    @staticmethod
    def forward(ctx: Any, graph: DifferentiableGraph, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the forward graph."""
        return graph.forward(ctx, given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the backward graph."""
        try:
            return (None, *ctx.call.graph.backward(ctx, gradients))
        except Exception as error:
            importlib.import_module("dovetail.reports.messages").without_internals(error)
            raise

    # For compiled autograd, which puts the backward's graph into its own.
    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """The engine asks for it: nodes with one key have one backward (torch 2.13)."""
        return (ctx.call.graph.number, ctx.call.is_partial)

    @staticmethod
    def prologue(ctx: Any, saved: Sequence[Any], gradients: Gradients) -> list[Any]:
        """The arguments of the backward's graph."""
        return ctx.call.graph.prologue(ctx.call, saved, gradients)

    @staticmethod
    def backward_graph(ctx: Any, gradients: Gradients) -> tuple[torch.fx.GraphModule, Sequence[int]] | None:
        """The graph for the gradients that there are, and which of the prologue's values it takes; None without a graph."""
        return ctx.call.graph.backward_graph(gradients)

    @staticmethod
    def epilogue(ctx: Any, results: Sequence[Any]) -> list[Any]:
        """The graph's results in the order of this node's outputs."""
        return [None, *ctx.call.graph.to_edges(results)]


#: Called with the inputs of a graph with several results, after its forward.
SEVERAL_RESULTS: list[Callable[[list[torch.Tensor]], None]] = []
#: Called with the edges of a node and their gradients, after a backward from some of its results only.
SOME_GRADIENTS: list[Callable[[Edges, Gradients], None]] = []
private_calls.hide_from_dynamo(CompiledBackward.backward)
_direct_apply = private_autograd.direct_apply(CompiledBackward)
private_autograd.call_directly(CompiledBackward)


class DifferentiableGraph:
    """Forward and backward graph of one entry; called with the primals, it gives the forward outputs as autograd sees them.

    It is one object per entry, with a ``number`` of its own. What belongs to one call is in a :class:`Call`.
    """

    def __init__(
        self,
        spec: RuntimeSpec,
        forward: FlatCallable,
        backward: Backward,
        tangent_strides: TangentStrides | None,
        derivatives: DifferentiableBackward | None,
        keep_apart: KeepApart | None,
        unreached: Sequence[int],
    ) -> None:
        self.number = private_autograd.new_function_number()
        self._forward = forward
        self._backward = backward
        self._tangent_strides = tangent_strides
        self.derivatives = derivatives
        self._keep_apart = keep_apart
        flags = spec.output_differentiable
        self._count = len(flags)
        self._differentiable = [index for index, flag in enumerate(flags) if flag]
        self._constant = [index for index, flag in enumerate(flags) if not flag]
        self._requires_grad = any(spec.input_requires_grad)
        reached = {index for index, flag in enumerate(spec.input_requires_grad) if flag} - set(unreached)
        # Eager's results have no edge to these, which would keep alive, and visit, the graph that they were computed in.
        self._cut_off = [index for index in unreached if spec.input_requires_grad[index]] if reached else []
        self.dependencies = [
            (item, [spec.outputs[position].index for position in item.results])  # type: ignore[union-attr]
            for item in spec.dependencies
            if is_inside(spec, item)
        ]
        self.to_edges, self.from_edges = _both_ways(spec.leaf_order)
        # Which outputs are tensors, and which inputs stand for other tensors, is the same at every call.
        self._saves_tensors: bool | None = None
        self._standing: list[int] | None = None
        self.read_later: Sequence[tuple[int, int, Sequence[int]]] = ()

    def __call__(self, inputs: list[torch.Tensor], apply: Callable[..., Any] | None = None) -> list[torch.Tensor]:
        """The forward outputs; ``apply(graph, *edges)`` may put them behind other nodes."""
        # No guard lets functorch's wrappers pass, so there is nothing to unwrap unless a transform is active.
        apply = apply or (_direct_apply if private_state.functorch_level() is None else CompiledBackward.apply)
        for index in self._cut_off:
            inputs[index] = inputs[index].detach()
        if self.derivatives is not None:
            self.derivatives.prepare(inputs)
        # The program may turn gradients on inside of a block that has turned them off.
        with _NO_CONTEXT if torch.is_grad_enabled() else torch.enable_grad():
            outputs = list(apply(self, *self.to_edges(inputs)))
        self._connect(outputs)
        for prepare in SEVERAL_RESULTS if len(self._differentiable) > 1 else ():
            prepare(inputs)
        return outputs

    def _connect(self, outputs: list[torch.Tensor]) -> None:
        """Tell autograd which outputs were computed from which."""
        if not self._requires_grad:
            for index in self._differentiable:
                outputs[index] = require_gradient(outputs[index])
            return
        if len(self._differentiable) > 1:
            for item, sources in self.dependencies:
                outputs[item.output] = depend_on(outputs[item.output], [outputs[other] for other in sources], item)
            for index in self._differentiable:
                prepare_hooks(outputs[index])

    # --- forward ------------------------------------------------------------------------------------------------------

    def forward(self, ctx: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Run the forward graph and save what the backward needs."""
        primals = self.from_edges(given)
        if self._standing is None:
            self._standing = [index for index, value in enumerate(primals) if origins_of(value)]
        origins = [noted for index in self._standing for noted in origins_of(primals[index])] if self._standing else []
        origins += [(primals[at], primals[at]._version + count, outputs) for at, count, outputs in self.read_later]
        derivatives = self.derivatives
        kept = None if derivatives is None else derivatives.keep(primals)
        call = ctx.call = Call(self, origins, pending_reads(), kept)
        if self._tangent_strides is not None:
            call.strides = self._tangent_strides(primals)
        results = self._forward(list(primals))
        if self._tangent_strides is None:
            call.strides = [results[index].stride() for index in self._differentiable]
        saved = results[self._count :]
        if self._keep_apart is not None:
            call.apart = self._keep_apart(saved)
        if derivatives is not None:
            derivatives.settle(kept, primals, saved if call.apart is None else ())
        ctx.set_materialize_grads(False)
        self._save(ctx, saved)
        if self._constant:
            ctx.mark_non_differentiable(*[results[index] for index in self._constant])
        return tuple(results[: self._count])

    def _save(self, ctx: Any, saved: list[Any]) -> None:
        if self._saves_tensors is None:
            self._saves_tensors = all(isinstance(value, torch.Tensor) for value in saved)
        if not self._saves_tensors:  # if a value is no tensor at a later call, save_for_backward says so
            ctx.call.constants = [None if isinstance(value, torch.Tensor) else (value,) for value in saved]
            saved = [value for value in saved if isinstance(value, torch.Tensor)]
        ctx.save_for_backward(*saved)

    # --- backward -----------------------------------------------------------------------------------------------------

    def backward(self, ctx: Any, gradients: Gradients) -> Gradients:
        """One gradient for each edge of the node."""
        call: Call = ctx.call
        tangents = [gradients[index] for index in self._differentiable]
        defined = tuple([tangent is not None for tangent in tangents])
        if not any(defined) and call.direct is None:
            # Eager's backward comes to none of these nodes: it checks nothing, and frees nothing.
            return self.to_edges(self._backward(defined)([]))
        check_unchanged(call.origins, defined)
        if call.reads is not None:
            call.reads.check()
        if torch.is_grad_enabled():
            compute = self._with_derivative
        elif self._differs(defined):
            compute = self._captured_anew
        else:
            compute = self._plain
        # Autograd's own nodes call no ``__torch_function__`` of an incoming gradient's class.
        is_plain = {torch.Tensor, type(None)}.issuperset(map(type, tangents))
        classes = _NO_CONTEXT if is_plain else private_calls.no_torch_function()
        with classes, partial_gradients() if call.is_partial else _NO_CONTEXT:
            found = compute(ctx, call, tangents, defined)
        if call.direct is not None:
            found, call.direct = self.to_edges(call.direct(self.from_edges(found))), None
        for look in () if all(defined) else SOME_GRADIENTS:
            look(ctx.next_functions, found)
        return found

    def _plain(self, ctx: Any, call: Call, tangents: Gradients, defined: Pattern) -> Gradients:
        """The gradients, connected to nothing."""
        run, values = self._backward(defined), self._graph_inputs(call, self.saved(ctx, call, defined), tangents)
        # Then only the list holds what is saved, so that the graph frees each value when it has read it for the last time.
        self._free(ctx, call, defined)
        return self.to_edges(run(values))

    def _with_derivative(self, ctx: Any, call: Call, tangents: Gradients, defined: Pattern) -> Gradients:
        """The gradients, connected to inputs and tangents (``create_graph=True``)."""
        if self.derivatives is None:
            raise refusal("the graph was compiled without it")
        # As in the ordinary backward: raises for what is freed, and for what was written to.
        saved = self.saved(ctx, call, defined)
        call.is_partial = True
        plain = functools.partial(self.plain, call, saved, tangents, defined)
        with reads_of(call.reads):
            found = self.derivatives.run(call.kept, self.from_edges(ctx.next_functions), tangents, plain, saved)
        return self.to_edges(found)

    def plain(self, call: Call, saved: Sequence[Any], tangents: Gradients, defined: Pattern) -> Gradients:
        """The gradient of each input, connected to nothing."""
        return self._backward(defined)(self._graph_inputs(call, saved, tangents))

    def _captured_anew(self, ctx: Any, call: Call, tangents: Gradients, defined: Pattern) -> Gradients:
        """The gradients where the backward differs from the captured one."""
        if self.derivatives is None:
            raise HigherOrderGradientError(_ANOTHER_BACKWARD, advice="call backward() outside of the autocast block")
        saved = self.saved(ctx, call, defined)
        with reads_of(call.reads):
            found = self.derivatives.first_order(call.kept, self.from_edges(ctx.next_functions), tangents, saved)
        self._free(ctx, call, defined)
        return self.to_edges(found)

    def _differs(self, defined: Pattern) -> bool:
        """Whether the captured backward may not run for these tangents, or in the autocast state of the moment."""
        return private_state.is_any_autocast_on() if self.derivatives is None else self.derivatives.differs(defined)

    def _graph_inputs(self, call: Call, saved: Sequence[Any], tangents: Gradients) -> list[Any]:
        given = zip(tangents, call.strides, strict=True)
        return [*saved, *(_with_strides(tangent, strides) for tangent, strides in given if tangent is not None)]

    def saved(self, ctx: Any, call: Call, defined: Pattern) -> Sequence[Any]:
        """The saved values; raises eager's error where they were freed, or any of them was written to."""
        if call.apart is not None:
            return call.apart.read(defined)
        try:
            return _with_constants(call, ctx.saved_tensors)
        except RuntimeError:
            taken = None if all(defined) or torch.is_grad_enabled() else self._backward.graph_of(defined)
            if taken is None or call.constants is not None:
                raise
            with contextlib.suppress(RuntimeError):
                # In eager, the others belong to nodes that this backward does not come to.
                return private_autograd.saved_at(ctx, taken[1][: len(taken[1]) - sum(defined)])
            raise

    def _free(self, ctx: Any, call: Call, defined: Pattern) -> None:
        """Free the saved values unless the graph is kept; outputs that are independent of these gradients keep theirs."""
        if private_autograd.keeps_graph():
            return
        if call.apart is None:
            ctx.maybe_clear_saved_tensors()
        if call.apart is None or not call.apart.free(defined):
            call.kept, call.origins = None, []

    # --- for compiled autograd ----------------------------------------------------------------------------------------

    def prologue(self, call: Call, saved: Sequence[Any], gradients: Gradients) -> list[Any]:
        """The arguments of the backward's graph."""
        tangents = [gradients[index] for index in self._differentiable]
        check_unchanged(call.origins, [tangent is not None for tangent in tangents])
        if call.reads is not None:
            call.reads.check()
        return self._graph_inputs(call, _with_constants(call, saved), tangents)

    def backward_graph(self, gradients: Gradients) -> tuple[torch.fx.GraphModule, Sequence[int]] | None:
        """The graph for the gradients that there are, and its inputs; None where the node's own backward is to be called."""
        defined = tuple([gradients[index] is not None for index in self._differentiable])
        return None if self._differs(defined) else self._backward.graph_of(defined)


def _both_ways(order: Sequence[int]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function that puts values into this order, and one that undoes it."""
    if len(order) < 2 or list(order) == sorted(order):
        return (lambda values: values), (lambda values: values)
    back = sorted(range(len(order)), key=order.__getitem__)
    return operator.itemgetter(*order), operator.itemgetter(*back)


def _with_constants(call: Call, saved: Sequence[Any]) -> Sequence[Any]:
    if call.constants is None:
        return saved
    tensors = iter(saved)
    return [next(tensors) if entry is None else entry[0] for entry in call.constants]


def _with_strides(tangent: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    tangent = TANGENTS[type(tangent)](tangent) if type(tangent) in TANGENTS else tangent
    if strides is None or tangent.stride() == strides or tangent.layout is not torch.strided:
        return tangent
    target = torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device)
    return target.copy_(tangent)
