"""One captured function as one ``torch.autograd.Function``, and what eager does around a pure graph.

The graph is pure; this module writes mutated inputs back, hands inputs through as themselves and makes returned views anew.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import HigherOrderGradientError, PartialGradientError
from dovetail.higher_order.runtime import DifferentiableBackward, freed, refusal
from dovetail.runtime.autocast import UnderAutocast
from dovetail.runtime.backward_reads import pending_reads, reads_of
from dovetail.runtime.independence import Independence, SavedValues, unpack
from dovetail.runtime.origins import check_unchanged, origins_of
from dovetail.runtime.partial_gradients import partial_gradients
from dovetail.runtime.spec import FreshOutput, InputOutput, OutputTensor, RuntimeSpec, Tie, ViewOutput
from dovetail.runtime.spread import spread_gradients
from dovetail.runtime.ties import note_fed, prepare_hooks, require_gradient, tie
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import state as private_state
from dovetail.trace.metadata import MetadataChange

FlatCallable = Callable[[list[Any]], list[Any]]
TangentStrides = Callable[[Sequence[torch.Tensor]], Sequence[tuple[int, ...]]]
Arrange = Callable[[Sequence[Any]], Sequence[Any]]
RuntimeFunction = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def make_runtime_function(
    spec: RuntimeSpec,
    forward: FlatCallable,
    backward_for: Callable[[tuple[bool, ...]], FlatCallable] | None,
    tangent_strides: TangentStrides | None = None,
    derivatives: DifferentiableBackward | None = None,
    unreached: Sequence[int] = (),
    spread: Mapping[int, tuple[int, ...]] | None = None,
) -> RuntimeFunction:
    """``run(inputs) -> results``, one real tensor for each entry of ``spec.outputs``.

    ``forward(primals)`` returns the forward outputs and then what the backward needs; ``backward_for(defined)`` gives the
    backward for the tangents that are defined, called with the saved values and those tangents. A tangent with other strides
    than ``tangent_strides(primals)`` says (those of the outputs, if None) is copied into them, because the backward was compiled
    for those. ``derivatives`` runs the backward where it is to be differentiated itself. ``unreached`` are inputs that get no
    gradient whatever is asked for; ``spread`` are the strides of gradients that do not fill their memory.
    """
    compute = (
        forward
        if backward_for is None
        else _autograd_function(spec, forward, backward_for, tangent_strides, derivatives, unreached, spread or {})
    )
    epilogue = _Epilogue(spec)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        epilogue.check(inputs)
        # The graph's callable may clear the list that it is given.
        given = list(inputs)
        if spec.metadata_changes:
            _change_metadata(spec.metadata_changes, inputs, given)
        outputs = compute(given)
        return epilogue(inputs, outputs)

    return run


def _change_metadata(changes: Sequence[MetadataChange], inputs: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    """Change the inputs as the program does; the graph is given views of them as they were.

    Before the graph runs: autograd would take a later change for a write to what the graph has saved.
    """
    before = {
        change.input_index: (value.shape, value.stride(), value.storage_offset())
        for change in changes
        for value in (inputs[change.input_index],)
    }
    for change in changes:
        with torch.set_grad_enabled(change.grad_enabled):
            change.operator(inputs[change.input_index], *change.arguments)
    for index, geometry in before.items():
        with torch.enable_grad():
            given[index] = inputs[index].as_strided(*geometry)


def _autograd_function(
    spec: RuntimeSpec,
    forward: FlatCallable,
    backward_for: Callable[[tuple[bool, ...]], FlatCallable],
    tangent_strides: TangentStrides | None,
    derivatives: DifferentiableBackward | None,
    unreached: Sequence[int],
    spread: Mapping[int, tuple[int, ...]],
) -> FlatCallable:
    count = len(spec.output_differentiable)
    differentiable = [index for index, flag in enumerate(spec.output_differentiable) if flag]
    constant = [index for index, flag in enumerate(spec.output_differentiable) if not flag]
    needed = getattr(backward_for, "needed", None)
    independence = None
    if spec.freed_together is not None and needed is not None:
        independence = Independence(spec.freed_together, needed)
    is_apart = not any(spec.input_requires_grad)
    reached = {index for index, flag in enumerate(spec.input_requires_grad) if flag} - set(unreached)
    # Eager's results have no edge to these, which would keep alive, and visit, the graph that they were computed in.
    cut_off = [index for index in unreached if spec.input_requires_grad[index]] if reached else []
    inner_ties = [(item.output, _fed_inside(spec, item)) for item in spec.ties if _is_inside(spec, item)]
    # Which of the graph's outputs are tensors is the same at every call. Looking takes 30 us for 757 of them.
    saves_tensors: bool | None = None
    # So is which inputs stand for other tensors.
    standing: list[int] | None = None

    # Hooks of leaves can tell in which order the gradients come, and an error of one of them stops those behind it.
    arranged, restored = _both_ways(spec.arrangement)

    class CompiledBackward(torch.autograd.Function):
        """Forward and backward graph of one entry."""

        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal saves_tensors, standing
            primals = restored(given)
            if standing is None:
                standing = [index for index, value in enumerate(primals) if origins_of(value)]
            ctx.origins = [noted for index in standing for noted in origins_of(primals[index])]
            if tangent_strides is not None:
                ctx.tangent_strides = tangent_strides(primals)
            ctx.reads = pending_reads()
            ctx.freed, ctx.rest, ctx.in_parts = frozenset(), None, False
            ctx.kept = derivatives.keep(primals) if derivatives is not None else None
            results = forward(list(primals))
            if tangent_strides is None:
                ctx.tangent_strides = [results[index].stride() for index in differentiable]
            saved = results[count:]
            if derivatives is not None:
                derivatives.settle(ctx.kept, primals, saved)
            ctx.set_materialize_grads(False)
            if saves_tensors is None:
                saves_tensors = all(isinstance(value, torch.Tensor) for value in saved)
            if saves_tensors:  # if not, save_for_backward says so
                ctx.save_for_backward(*saved)
                ctx.saved_constants = None
            else:
                is_tensor = [isinstance(value, torch.Tensor) for value in saved]
                ctx.save_for_backward(*[value for value, flag in zip(saved, is_tensor, strict=True) if flag])
                ctx.saved_constants = [None if flag else (value,) for value, flag in zip(saved, is_tensor, strict=True)]
            if constant:
                ctx.mark_non_differentiable(*[results[index] for index in constant])
            return tuple(results[:count])

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            check_unchanged(ctx.origins)
            if ctx.reads is not None:
                ctx.reads.check()
            for hooks, output in getattr(ctx, "watched", ()):
                _refuse_partial_gradient(hooks, output())
            tangents = [gradients[index] for index in differentiable]
            if independence is not None:
                independence.check(ctx.freed, tuple(tangent is not None for tangent in tangents))
            if torch.is_grad_enabled():
                if derivatives is None:
                    raise refusal("the graph was compiled without it")
                # As in the ordinary backward: raises for what is freed, and for what was written to.
                saved = values_for_derivatives(ctx, tuple([tangent is not None for tangent in tangents]))
                ctx.in_parts = True
                with reads_of(ctx.reads):
                    found = derivatives.run(
                        ctx.kept, restored(ctx.next_functions), tangents, lambda: plain(ctx, saved, tangents), saved
                    )
                return tuple(arranged(found))
            defined = tuple(tangent is not None for tangent in tangents)
            if private_state.is_any_autocast_on() and under_autocast.is_another(defined):
                return tuple(arranged(first_order(ctx, tangents, defined)))
            values: Any
            try:
                saved = values = saved_values(ctx)
            except RuntimeError as error:
                if independence is None or all(defined) or "modified by an inplace operation" not in str(error):
                    raise
                values = one_by_one(ctx, error)
                saved = values.those(independence.wanted(defined))
            if not private_autograd.keeps_graph():
                free(ctx, values, defined)
            if ctx.in_parts:
                with partial_gradients():
                    return tuple(arranged(backward_for(defined)(graph_inputs(ctx, saved, tangents))))
            return tuple(arranged(backward_for(defined)(graph_inputs(ctx, saved, tangents))))

        # For compiled autograd, which puts the backward's graph into its own.

        @staticmethod
        def prologue(ctx: Any, saved: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> list[Any]:
            """What the backward's graph is called with."""
            if ctx.reads is not None:
                ctx.reads.check()
            for hooks, output in getattr(ctx, "watched", ()):
                _refuse_partial_gradient(hooks, output())
            return graph_inputs(ctx, with_constants(ctx, saved), [gradients[index] for index in differentiable])

        @staticmethod
        def backward_graph(gradients: Sequence[Any]) -> tuple[torch.fx.GraphModule, Sequence[int]] | None:
            """The graph for the gradients that there are, and which of the prologue's values it takes; None without a graph."""
            graph_of = getattr(backward_for, "graph_of", None)
            defined = tuple(gradients[index] is not None for index in differentiable)
            if private_state.is_any_autocast_on() and under_autocast.is_another(defined):
                raise HigherOrderGradientError(
                    "a compiled function's backward is captured inside of an autocast block, where it has other types",
                    advice="call backward() outside of the autocast block",
                )
            return None if graph_of is None else graph_of(defined)  # type: ignore[no-any-return]

        @staticmethod
        def arranged(values: Sequence[Any]) -> Sequence[Any]:
            """The graph's results in the order of this node's outputs."""
            return arranged(values)

    def first_order(ctx: Any, tangents: list[torch.Tensor | None], defined: tuple[bool, ...]) -> Sequence[Any]:
        """The gradients in another autocast state than the backward was captured for."""
        if derivatives is None:
            raise HigherOrderGradientError(
                "backward() is called inside of an autocast block, where it has other types than the captured one",
                advice="call backward() outside of the autocast block",
            )
        saved = values_for_derivatives(ctx, defined)
        with reads_of(ctx.reads):
            found = derivatives.first_order(ctx.kept, restored(ctx.next_functions), tangents, saved)
        if not private_autograd.keeps_graph():
            free(ctx, saved, defined)
        return found

    def plain(ctx: Any, saved: Sequence[Any], tangents: list[torch.Tensor | None]) -> list[Any]:
        defined = tuple(tangent is not None for tangent in tangents)
        return backward_for(defined)(graph_inputs(ctx, saved, tangents))

    def values_for_derivatives(ctx: Any, defined: tuple[bool, ...]) -> Sequence[Any]:
        """What is saved; where it was written to what only other outputs need, without that."""
        try:
            return saved_values(ctx)
        except RuntimeError as error:
            only = None if derivatives is None or ctx.kept is None else derivatives.needed.for_outputs(defined)
            if independence is None or only is None or "modified by an inplace operation" not in str(error):
                raise
            values = one_by_one(ctx, error)
            ctx.kept.check_held(values, only)
            return values.those(independence.wanted(defined))

    def saved_values(ctx: Any) -> Sequence[Any]:
        return with_constants(ctx, ctx.saved_tensors) if ctx.rest is None else unpack(ctx.rest)

    def with_constants(ctx: Any, saved: Sequence[Any]) -> Sequence[Any]:
        if ctx.saved_constants is None:
            return saved
        tensors = iter(saved)
        return [next(tensors) if entry is None else entry[0] for entry in ctx.saved_constants]

    def one_by_one(ctx: Any, error: RuntimeError) -> SavedValues:
        if ctx.rest is not None:
            return SavedValues(ctx.rest, error)
        return SavedValues.of(private_autograd.raw_saved_tensors(ctx), ctx.saved_constants, error)

    def free(ctx: Any, saved: Sequence[Any] | SavedValues, defined: tuple[bool, ...]) -> None:
        """After this backward there is nothing left, but for the outputs that are independent of those it came from."""
        if independence is not None:
            ctx.freed = independence.after(ctx.freed, defined)
            ctx.rest = independence.keep(saved, ctx.freed)
            if ctx.kept is not None and ctx.rest is not None:
                ctx.kept.let_go(saved, restored(ctx.next_functions))
        if independence is None or ctx.rest is None:
            ctx.kept = None

    def graph_inputs(ctx: Any, saved: Sequence[Any], tangents: Sequence[torch.Tensor | None]) -> list[Any]:
        values: list[Any] = list(saved)
        for position, tangent in enumerate(tangents):
            if tangent is not None:
                values.append(_with_strides(tangent, ctx.tangent_strides[position]))
        return values

    under_autocast = UnderAutocast(getattr(backward_for, "graph_of", None))
    private_calls.hide_from_dynamo(CompiledBackward.backward)
    direct = private_autograd.direct_apply(CompiledBackward)

    def compute(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        # No guard lets functorch's wrappers pass, so there is nothing to unwrap unless a transform is active.
        apply = direct if private_state.functorch_level() is None else CompiledBackward.apply
        for index in cut_off:
            inputs[index] = inputs[index].detach()
        if spread:
            spread_gradients(inputs, spread)
        if torch.is_grad_enabled():
            outputs = list(apply(*arranged(inputs)))  # type: ignore[no-untyped-call]
        else:
            # The program may turn gradients on inside of a block that has turned them off.
            with torch.enable_grad():
                outputs = list(apply(*arranged(inputs)))  # type: ignore[no-untyped-call]
        if spec.feeding and not spec.ties and not is_apart:
            _watch([outputs[index] for index in spec.feeding])
        if is_apart:
            for index in differentiable:
                outputs[index] = require_gradient(outputs[index])
        elif len(differentiable) > 1:
            for index in differentiable:
                prepare_hooks(outputs[index])
            for index, fed in inner_ties:
                note_fed(outputs[index], [outputs[other] for other in fed])
        return outputs

    return compute


def _both_ways(arrangement: Sequence[int]) -> tuple[Arrange, Arrange]:
    """A function that puts values into this order, and one that undoes it."""
    if len(arrangement) < 2 or list(arrangement) == sorted(arrangement):
        return (lambda values: values), (lambda values: values)
    back = sorted(range(len(arrangement)), key=arrangement.__getitem__)
    return operator.itemgetter(*arrangement), operator.itemgetter(*back)


def _fed_inside(spec: RuntimeSpec, item: Tie) -> tuple[int, ...]:
    return tuple(output.index for position in item.results if isinstance(output := spec.outputs[position], FreshOutput))


def _is_inside(spec: RuntimeSpec, item: Tie) -> bool:
    """Whether all that an output was computed from comes from the graph's own node of autograd."""
    differentiable = spec.output_differentiable
    fed = [spec.outputs[position] for position in item.results]
    return (
        not item.inputs
        and any(spec.input_requires_grad)
        and differentiable[item.output]
        and all(
            isinstance(output, FreshOutput)
            and differentiable[output.index]
            and not output.is_leaf
            and not output.is_freed
            for output in fed
        )
    )


def _watch(outputs: list[torch.Tensor]) -> None:
    """Notice hooks on outputs that other outputs were computed from, however they are registered."""
    for output in outputs:
        node: Any = output.grad_fn
        if node is None:
            continue
        hooks = prepare_hooks(output)
        node.watched = [*getattr(node, "watched", ()), (hooks, weakref.ref(output))]


def _refuse_partial_gradient(hooks: Mapping[int, Any], output: torch.Tensor | None) -> None:
    if hooks or (output is not None and output.retains_grad):
        raise PartialGradientError(
            "the gradient of an output is asked for by a hook or retain_grad(), and another output of the same graph was "
            "computed from it",
            advice="register the hook inside the compiled function, or return only one of the two outputs",
        )


def _with_strides(tangent: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if tangent.stride() == strides or tangent.layout is not torch.strided:
        return tangent
    target = torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device)
    return target.copy_(tangent)


class _Epilogue:
    """What happens after the graph: write-backs, then inputs and views as results."""

    def __init__(self, spec: RuntimeSpec) -> None:
        self._mutations = {mutation.input_index: mutation for mutation in spec.mutations}
        # Where nothing requires a gradient, no graph's node can tell.
        self._ties = [item for item in spec.ties if not _is_inside(spec, item)]
        self._outputs = spec.outputs
        self._plain = (
            not spec.mutations
            and not self._ties
            and not spec.metadata_changes
            and all(
                isinstance(output, FreshOutput)
                and output.index == position
                and not output.is_leaf
                and not output.is_freed
                for position, output in enumerate(spec.outputs)
            )
        )
        self._count = len(spec.outputs)

    def check(self, inputs: list[torch.Tensor]) -> None:
        """Raise eager's error for a write to a leaf that requires a gradient, before anything has run."""
        for mutation in self._mutations.values():
            value = inputs[mutation.input_index]
            if mutation.differentiable and value.requires_grad and value.is_leaf and torch.is_grad_enabled():
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def __call__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of the call."""
        if self._plain:
            del outputs[self._count :]
            return outputs
        made: dict[int, torch.Tensor] = {}
        written: set[int] = set()
        for item in self._ties:
            for index in item.inputs:
                self._write(index, inputs, outputs, written)
            for position in item.results:
                output = self._outputs[position]
                if isinstance(output, ViewOutput) and isinstance(output.base, InputOutput):
                    self._write(output.base.index, inputs, outputs, written)
                if position not in made:
                    made[position] = self._result(output, inputs, outputs)
            fed = [made[position] for position in item.results] + [inputs[index] for index in item.inputs]
            outputs[item.output] = tie(outputs[item.output], fed)
        in_place = []
        for index, mutation in self._mutations.items():
            if index in written:
                continue
            if outputs[mutation.output_index] is inputs[index]:
                in_place.append(inputs[index])
            else:
                self._write(index, inputs, outputs, written)
        if in_place:
            # The backend has written there, below autograd, which must hear of it.
            torch.autograd.graph.increment_version(in_place)
        return [
            made[position] if position in made else self._result(output, inputs, outputs)
            for position, output in enumerate(self._outputs)
        ]

    def _write(self, index: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor], written: set[int]) -> None:
        """Write an input's new value back, once."""
        mutation = self._mutations.get(index)
        if mutation is None or index in written:
            return
        written.add(index)
        target, value = inputs[index], outputs[mutation.output_index]
        if value is target:
            torch.autograd.graph.increment_version(target)
            return
        with torch.set_grad_enabled(mutation.differentiable):
            (target if mutation.counted else target.data).copy_(value)

    def _result(self, output: OutputTensor, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(output, FreshOutput):
            fresh = outputs[output.index]
            if output.is_freed:
                return freed(fresh)
            return fresh.requires_grad_() if output.is_leaf else fresh
        if isinstance(output, InputOutput):
            return inputs[output.index]
        assert isinstance(output, ViewOutput)
        base = self._result(output.base, inputs, outputs)
        with torch.set_grad_enabled(output.differentiable):
            view: torch.Tensor = output.replay(base, inputs)
        if output.differentiable or output.requires_grad:
            return view
        return view.detach() if view.requires_grad else view
