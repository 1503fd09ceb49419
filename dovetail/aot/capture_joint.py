"""Stage 1: run the frontend under the open trace, ask autograd for the gradients, and describe every input and output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.descriptors import AliasBase, Descriptor, Gradient, MutatedInput, Tangent, UserOutput
from dovetail.aot.independence import freed_together
from dovetail.aot.joint_graph import JointGraph, assumes, must_stay
from dovetail.aot.state import AOTState
from dovetail.aot.tangents import shares_places
from dovetail.aot.ties import find_ties
from dovetail.errors import CaptureError
from dovetail.guards.ambient import without_autocast
from dovetail.rules.sparse.deferred import deferred_call
from dovetail.runtime.spec import FreshOutput, InputOutput, Mutation, OutputTensor, RuntimeSpec, ViewOutput
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Bindings, Trace, TracedInput
from dovetail.trace.backward_order import arrangement_of_leaves
from dovetail.trace.memory import may_overlap_itself
from dovetail.trace.overrides import (
    GRAPHS,
    INPUT_GRADIENTS,
    autograd_nodes,
    check_differentiable,
    inexact_gradients,
    requested_gradients,
)
from dovetail.whole_calls.handles import parts_of_handle


class AutogradView:
    """Makes a view of a base again by the view operators that autograd recorded, so that its backward is eager's too.

    The sizes in it are computed from the inputs where they are symbolic.
    """

    def __init__(self, view: torch.Tensor, bindings: Bindings) -> None:
        self._replay = private_tensors.view_replay(view)
        sizes: list[Any] = []

        def note(size: Any) -> Any:
            sizes.append(private_sizes.expression_of(size) if private_sizes.is_symbolic(size) else size)
            return size

        with torch.no_grad():
            again = self._replay(view._base, note)
        # Writes to the view's own sizes (``t_``) are not always recorded.
        self.is_exact = _layout(again) == _layout(view)
        self._compute = None if all(type(size) is int for size in sizes) else bindings.function(sizes)

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base."""
        if self._compute is None:
            view: torch.Tensor = self._replay(base)
            return view
        sizes = iter(self._compute(inputs))
        view = self._replay(base, lambda size: next(sizes))
        return view


class StridedView:
    """Makes a view of a base again: same size, stride and offset.

    A tensor that autograd does not know as a view of the base is made from ``base.detach()``, or from ``base.data`` if it
    counts its own versions.
    """

    def __init__(self, view: torch.Tensor, base: torch.Tensor) -> None:
        self.size: tuple[Any, ...] = tuple(view.shape)
        self.stride: tuple[Any, ...] = view.stride()
        self.offset: Any = view.storage_offset() - base.storage_offset()
        self.same = _layout(view) == _layout(base)
        self.detached = view._base is not base and not view.requires_grad
        self.counts_own_versions = self.detached and not private_tensors.share_version_counter(view, base)
        self.is_view = view._base is not None

    def geometry(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any, int]:
        """Size, stride and offset from the base's."""
        return self.size, self.stride, self.offset

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base."""
        if not self.detached:
            if self.same:
                return base.view_as(base) if torch.is_grad_enabled() else base.detach()
            return self._part(base, inputs)
        apart = base.data if self.counts_own_versions else base.detach()
        if not self.same:
            apart = self._part(apart, inputs)
        elif self.is_view:
            apart = apart.view_as(apart)
        return apart if self.is_view or apart._base is None else apart.detach()

    def _part(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        size, stride, offset = self.geometry(inputs)
        return base.as_strided(size, stride, base.storage_offset() + offset)


class SymbolicView(StridedView):
    """The same, where size, stride and offset follow from the sizes of the inputs."""

    def __init__(self, view: torch.Tensor, base: torch.Tensor, bindings: Bindings) -> None:
        super().__init__(view, base)
        self._compute = bindings.function(_expressions((*self.size, *self.stride, self.offset)))
        self._count = view.dim()

    def geometry(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any, int]:
        """Size, stride and offset from the base's."""
        numbers = self._compute(inputs)
        return numbers[: self._count], numbers[self._count : -1], numbers[-1]


def _whole_view(base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of a tensor, as a view."""
    return base.view_as(base)


def _view_of_custom_function(base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of a tensor, as a view that may not be written to."""
    view = base.view_as(base)
    private_tensors.mark_as_view_of_custom_function(view)
    return view


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    numbers = _expressions((*value.shape, *value.stride(), value.storage_offset()))
    return (value.dtype, value.is_conj(), value.is_neg(), *numbers)


def _expressions(numbers: Sequence[Any]) -> list[Any]:
    return [private_sizes.expression_of(item) if private_sizes.is_symbolic(item) else item for item in numbers]


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


class _Outputs:
    """Works out how each returned tensor relates to inputs and to other returned tensors."""

    def __init__(self, trace: Trace, returned: tuple[torch.Tensor, ...]) -> None:
        self.trace = trace
        self.returned = returned
        self.graph_values: list[torch.Tensor] = []
        self.descriptors: list[Descriptor] = []
        self.outputs: list[OutputTensor] = []
        self.mutations: list[Mutation] = []
        self._positions: dict[int, int] = {}
        self._input_storages = {_storage(item.value): item for item in trace.inputs}
        self._find()
        self._find_mutations()

    def _add(self, value: torch.Tensor, descriptor: Descriptor) -> int:
        position = self._positions.get(id(value))
        if position is None:
            position = self._positions[id(value)] = len(self.graph_values)
            self.graph_values.append(value)
            self.descriptors.append(descriptor)
        return position

    def _find(self) -> None:
        sharing: dict[int, int] = {}
        for value in self.returned:
            if value.layout is not torch.strided:
                continue
            if value.is_inference() and not torch.is_inference_mode_enabled():
                raise CaptureError(
                    "a tensor made under torch.inference_mode leaves the function",
                    where=self.trace.locate(),
                    advice="use torch.no_grad() inside of the function, or inference_mode around it",
                )
            sharing[_storage(value)] = sharing.get(_storage(value), 0) + 1
        bases: dict[int, int] = {}
        for position, value in enumerate(self.returned):
            traced = self.trace.input_of(value)
            if value.layout is not torch.strided:
                self.outputs.append(self._deferred(position, value, sharing))
                continue
            if traced is not None:
                self.outputs.append(InputOutput(traced.index))
                continue
            storage = _storage(value)
            source = self._input_storages.get(storage)
            if source is not None:
                self.outputs.append(self._view(value, source.value, InputOutput(source.index)))
            elif sharing[storage] == 1 and (
                value._base is None or _is_new_leaf(value) or private_tensors.is_view_of_custom_function(value)
            ):
                leaf = _is_new_leaf(value)
                output = FreshOutput(self._add(value, UserOutput(str(position))), leaf)
                if private_tensors.is_view_of_custom_function(value):
                    self.outputs.append(ViewOutput(output, _view_of_custom_function, True, True))
                else:
                    # A view made without recording says that it requires a gradient, and takes none.
                    is_view = leaf and value._base is not None
                    self.outputs.append(ViewOutput(output, _whole_view, False, True) if is_view else output)
            else:
                if storage not in bases:
                    base = self._root(storage)
                    is_returned = any(base is other for other in self.returned)
                    descriptor = UserOutput(str(position)) if is_returned else AliasBase(len(bases))
                    bases[storage] = self._add(base, descriptor)
                base = self.graph_values[bases[storage]]
                fresh = FreshOutput(bases[storage], _is_new_leaf(base))
                self.outputs.append(fresh if value is base else self._view(value, base, fresh))

    def _deferred(self, position: int, value: torch.Tensor, sharing: dict[int, int]) -> ViewOutput:
        """A sparse result, made after the graph has run."""
        base, call, is_recorded = deferred_call(self.trace, value)
        traced = self.trace.input_of(base)
        if traced is not None:
            return ViewOutput(InputOutput(traced.index), call, is_recorded, value.requires_grad)
        if _storage(base) in sharing:
            raise CaptureError(
                f"a tensor with the layout {value.layout} is returned beside the dense tensor that it was made from",
                advice="return a clone of the dense one",
            )
        return ViewOutput(
            FreshOutput(self._add(base, UserOutput(str(position)))), call, is_recorded, value.requires_grad
        )

    def _root(self, storage: int) -> torch.Tensor:
        """Among returned tensors of one storage and their bases: the one that the others are best made from."""
        dense = [value for value in self.returned if value.layout is torch.strided]
        members = [value for value in dense if _storage(value) == storage]
        candidates = [member if member._base is None else member._base for member in members]
        return max(candidates, key=lambda item: (item.requires_grad, private_sizes.has_symbols(item) or item.numel()))

    def _view(self, value: torch.Tensor, base: torch.Tensor, output: InputOutput | FreshOutput) -> ViewOutput:
        if value.requires_grad and not base.requires_grad:
            raise CaptureError(
                "a returned view requires a gradient but its base does not", advice="return a clone of it"
            )
        if private_tensors.is_view_of_custom_function(value):
            raise CaptureError(
                "a custom autograd.Function returns its input or a view of it, and the result is returned beside that input",
                where=self.trace.locate(),
                advice="return a clone of it",
            )
        if value.grad_fn is not None and not (
            value._base is not None and (value._base is base or value._base is base._base)
        ):
            raise CaptureError(
                "a detached tensor that was written to with what requires a gradient is returned beside the tensor that it "
                "was detached from: they share memory, and each has a derivative of its own",
                where=self.trace.locate(),
                advice="detach a clone of it",
            )
        recorded = value.grad_fn is not None or (not base.requires_grad and private_tensors.is_recorded_view(value))
        # A view made before its base was changed in place must not be made again by the same operators.
        is_changed = isinstance(output, InputOutput) and any(
            change.input_index == output.index for change in self.trace.metadata_changes
        )
        is_replayed = value._base is base and not is_changed
        replay: Any = AutogradView(value, self.trace.bindings()) if is_replayed else None
        if replay is None or not replay.is_exact:
            if value.dtype != base.dtype or value.is_conj() != base.is_conj() or value.is_neg() != base.is_neg():
                raise CaptureError(
                    "a returned tensor is a bit-cast or conjugate view of another tensor",
                    where=self.trace.locate(),
                    advice="return a clone of it",
                )
            if private_sizes.has_symbols(value) or private_sizes.has_symbols(base):
                replay = SymbolicView(value, base, self.trace.bindings())
            else:
                replay = StridedView(value, base)
        return ViewOutput(output, replay, recorded, value.requires_grad)

    def _find_mutations(self) -> None:
        changed = {change.input_index for change in self.trace.metadata_changes}
        mutated = [
            item
            for item in self.trace.inputs
            if self.trace.node_of(item.value) is not item.node
            and (item.index not in changed or private_tensors.is_written(item.value))
        ]
        if not mutated:
            return
        for item in mutated:
            self._check_mutation(item)
            differentiable = item.value.requires_grad and item.is_written_differentiably
            base = item.real._base
            if differentiable and base is not None and base.is_leaf and base.requires_grad:
                raise CaptureError(
                    f"{item.name} is a view of a leaf that requires a gradient, and it is written to",
                    advice="write to a clone, or under torch.no_grad()",
                )
            index = self._add(item.value, MutatedInput(UserOutput(item.name)))
            counted = item.value._version != item.original_version
            self.mutations.append(Mutation(item.index, index, differentiable, counted))

    def _check_mutation(self, item: TracedInput) -> None:
        value = item.value
        real = item.real
        fake = item.node.meta["val"]
        is_changed = any(change.input_index == item.index for change in self.trace.metadata_changes)
        if not is_changed and (
            value.shape != fake.shape
            or value.stride() != fake.stride()
            or value.dtype != real.dtype
            or private_tensors.size_inside(value) != fake.shape
        ):
            raise CaptureError(f"{item.name} changes its shape in place", advice="make a new tensor instead")
        if real.layout is torch.strided and not private_tensors.is_fake(real) and may_overlap_itself(real):
            raise CaptureError(
                f"{item.name} is written to, and several of its elements share one place in memory",
                advice="clone it first",
            )
        storage = real.untyped_storage()._cdata
        for other in self.trace.inputs:
            parts = parts_of_handle(other.real)
            if other is not item and any(part.untyped_storage()._cdata == storage for part in parts):
                raise CaptureError(
                    f"{item.name} is written to and shares memory with {other.name}", advice="clone one of them first"
                )


def _is_new_leaf(value: torch.Tensor) -> bool:
    """Whether a returned tensor requires a gradient that goes no further: made so, or a view made without recording."""
    return value.requires_grad and value.grad_fn is None


def _check_new_leaves(leaves: list[torch.Tensor], roots: list[torch.Tensor]) -> None:
    """Refuse a returned leaf that another output was computed from: the graph's backward has no place for its gradient."""
    wanted = {id(leaf) for leaf in leaves}
    if not wanted:
        return
    for node in autograd_nodes(roots):
        if id(getattr(node, "variable", None)) in wanted:
            raise CaptureError(
                "a tensor that the function makes with requires_grad is returned beside what is computed from it",
                advice="make the tensor outside of the function",
            )


def capture_joint(state: AOTState) -> JointGraph:
    """Capture forward and backward of ``state.function`` as one graph, in one pass.

    Raises :class:`CaptureError` for an aliasing that cannot be kept, and whatever the frontend raises.
    """
    state.require_open()
    trace = state.trace
    return finish_joint(trace, state.frontend(trace, state.function, state.args, state.kwargs))


def finish_joint(trace: Trace, result: CaptureResult) -> JointGraph:
    """Append the backward to a trace that holds a captured forward, and close the graph."""
    # The program tape ends here; its mode would be asked about every attribute that fake tensors read of each other, 9,000
    # times in the backward of a 6-layer GPT.
    with private_calls.no_torch_function():
        return _finish_joint(trace, result)


def _finish_joint(trace: Trace, result: CaptureResult) -> JointGraph:
    found = _Outputs(trace, result.outputs)
    for mutation in found.mutations:
        result.guards.add_leafness(mutation.input_index)
        result.guards.add_separate_memory(mutation.input_index)
    for change in trace.metadata_changes:
        result.guards.add_leafness(change.input_index)
    input_descriptors = list(result.input_descriptors)
    output_descriptors: list[Descriptor | None] = []
    for descriptor in found.descriptors:
        if isinstance(descriptor, MutatedInput):
            mutation = next(item for item in found.mutations if item.output_index == len(output_descriptors))
            descriptor = MutatedInput(input_descriptors[mutation.input_index])
        output_descriptors.append(descriptor)
    forward_nodes = [trace.node_of(value) for value in found.graph_values]
    mutated_plain = {item.output_index for item in found.mutations if not item.differentiable}
    freed = {position for position, value in enumerate(found.graph_values) if trace.is_freed(value)}
    if any(item.differentiable and item.output_index in freed for item in found.mutations):
        raise CaptureError(
            "an input is written to by what a backward() inside has freed", advice="pass retain_graph=True to it"
        )
    if any(found.graph_values[position].grad_fn not in trace.freed for position in freed):
        raise CaptureError(
            "a result was computed from what a backward() inside has freed, and from something else",
            advice="pass retain_graph=True to that backward",
        )
    outputs = [_mark_freed(output, freed) for output in found.outputs] if freed else found.outputs
    differentiable = tuple(
        value.grad_fn is not None and position not in mutated_plain and position not in freed
        for position, value in enumerate(found.graph_values)
    )
    if trace.replicas and any(differentiable):
        raise CaptureError(
            "DistributedDataParallel is called, and a result of it leaves the graph before backward() is",
            advice="compile the whole step, or the model before it is wrapped: DistributedDataParallel(dovetail.compile(model))",
        )
    program = trace.program(tuple(found.graph_values))
    ties = find_ties(found.graph_values, differentiable, found.returned, found.outputs, found.mutations, trace.inputs)
    # A write may have made an input differentiable that was not.
    leaves = [item.leaf if item.requires_grad else None for item in trace.inputs]
    trace.begin_backward()
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    wanted = [leaf for leaf in leaves if leaf is not None]
    roots = [value for value, is_root in zip(found.graph_values, differentiable, strict=True) if is_root]
    tangents: list[torch.Tensor] = []
    for position, is_root in enumerate(differentiable):
        if is_root:
            tangents.append(_tangent(trace, found.graph_values[position], len(tangents)))
            descriptor_of = output_descriptors[position]
            assert descriptor_of is not None
            input_descriptors.append(Tangent(descriptor_of))
    together = freed_together(roots) if len(roots) > 1 else None
    new_leaves = [value for place, value in enumerate(found.graph_values) if place not in mutated_plain]
    _check_new_leaves([value for value in new_leaves if _is_new_leaf(value)], roots)
    check_differentiable(roots)
    inexact = () if trace.settings.exact else inexact_gradients(roots)
    arrangement: tuple[int, ...] = ()
    if roots and wanted:
        arrangement = arrangement_of_leaves(
            [root.grad_fn for root in roots],
            [leaf if item.real.is_leaf else None for leaf, item in zip(leaves, trace.inputs, strict=True)],
            len(leaves),
            len({item.real.grad_fn for item in trace.inputs if not item.real.is_leaf}),
        )
        partial = result.order > 1
        # Autocast belongs to the call of backward(), which is outside of it unless somebody says otherwise (runtime/autocast.py).
        with torch.enable_grad(), without_autocast(), requested_gradients(trace, roots, partial=partial):
            flowing = iter(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
        gradients = [next(flowing) if leaf is not None else None for leaf in leaves]
        for gradient, item in zip(gradients, trace.inputs, strict=True):
            if gradient is None:
                continue
            for check in INPUT_GRADIENTS:
                check(trace, item, gradient)
            if private_tensors.is_wrapper(gradient):
                raise CaptureError(
                    f"the gradient of {item.name}, which is a plain tensor, is a {type(gradient).__name__}",
                    advice=f"make {item.name} a {type(gradient).__name__} too",
                )
            if gradient.layout is not torch.strided:
                raise CaptureError(
                    f"the gradient of {item.name} has the layout {gradient.layout}",
                    advice="use dense gradients (sparse=False)",
                )
    trace.random.finish()
    gradient_nodes = [None if gradient is None else trace.node_of(gradient) for gradient in gradients]
    output_descriptors.extend(
        None if gradient is None else Gradient(descriptor)
        for gradient, descriptor in zip(gradients, input_descriptors, strict=False)
    )
    trace.assert_assumptions()
    graph = trace.graph
    graph.output([*forward_nodes, *gradient_nodes])
    _placeholders_first(graph)
    graph.eliminate_dead_code(is_impure_node=must_stay)
    if trace.metadata_changes and any(map(assumes, graph.nodes)):
        raise CaptureError(
            "an input changes its size or strides in place, beside sizes that depend on data",
            advice="make a new tensor instead",
        )
    for edit in GRAPHS:
        edit(graph)
    for node, descriptor in zip(graph.find_nodes(op="placeholder"), input_descriptors, strict=True):
        node.meta["desc"] = descriptor
    spec = RuntimeSpec(
        tuple(leaf is not None for leaf in leaves),
        differentiable,
        tuple(outputs),
        tuple(found.mutations),
        _feeding(found.graph_values, differentiable),
        ties,
        tuple(trace.metadata_changes),
        together,
        arrangement,
        tuple(trace.kept_alive),
    )
    module = private_tracing.lazy_graph_module(trace.tracer.root, graph)
    return JointGraph(
        graph_module=module,
        input_descriptors=tuple(input_descriptors),
        output_descriptors=tuple(output_descriptors),
        num_primals=len(leaves),
        num_forward_outputs=len(forward_nodes),
        spec=spec,
        fake_mode=trace.fake_mode,
        capture=result,
        inexact=inexact,
        is_exact=trace.settings.exact,
        program=program,
    )


def _mark_freed(output: OutputTensor, freed: set[int]) -> OutputTensor:
    if isinstance(output, ViewOutput):
        base = _mark_freed(output.base, freed)
        assert not isinstance(base, ViewOutput)
        return dataclasses.replace(output, base=base)
    return (
        dataclasses.replace(output, is_freed=True)
        if output.index in freed and isinstance(output, FreshOutput)
        else output
    )


def _feeding(values: list[torch.Tensor], differentiable: tuple[bool, ...]) -> tuple[int, ...]:
    """The differentiable outputs that autograd passes on its way back from another one."""
    nodes: dict[tuple[Any, int], int] = {}
    for position, (value, flag) in enumerate(zip(values, differentiable, strict=True)):
        if flag and value.grad_fn is not None:
            nodes[value.grad_fn, value.output_nr] = position
    if len(nodes) < 2:
        return ()
    behind = autograd_nodes([value for value, flag in zip(values, differentiable, strict=True) if flag])
    found = {nodes[edge] for node in behind for edge in node.next_functions if edge in nodes}
    return tuple(sorted(found))


def _tangent(trace: Trace, of: torch.Tensor, number: int) -> torch.Tensor:
    if shares_places(of) and any(map(private_sizes.is_data_number, of.shape)):
        raise CaptureError(
            "a result whose places share memory has a size that the data decides", advice="return a clone of it"
        )
    with private_tracing.disable_current_modes(), trace.fake_mode:
        strides = torch.empty(of.shape, device="meta").stride() if shares_places(of) else of.stride()
        fake = torch.empty_strided(of.shape, strides, dtype=of.dtype, device=of.device)
    with private_tracing.disable_current_modes():
        proxy = trace.tracer.create_proxy("placeholder", f"tangents_{number + 1}", (), {})
        proxy.node.meta["val"] = fake
        private_tracing.track_tensor_tree(fake, proxy, constant=None, tracer=trace.tracer)
    return private_tracing.to_fun(fake)


def _placeholders_first(graph: torch.fx.Graph) -> None:
    placeholders = graph.find_nodes(op="placeholder")
    first = next(iter(graph.nodes))
    for node in reversed(placeholders):
        if node is not first:
            first.prepend(node)
            first = node
