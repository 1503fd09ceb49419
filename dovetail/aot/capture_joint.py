"""Stage 1: run the frontend under the open trace, ask autograd for the gradients, and describe every input and output."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.aot.descriptors import AliasBase, Descriptor, Gradient, MutatedInput, Tangent, UserOutput
from dovetail.aot.joint_graph import JointGraph, must_stay
from dovetail.aot.state import AOTState, FrontendResult
from dovetail.errors import CaptureError
from dovetail.runtime.spec import FreshOutput, InputOutput, Mutation, OutputTensor, RuntimeSpec, ViewOutput
from dovetail.trace import Bindings, Trace, TracedInput

# Found by running torch's operator database bitwise; all differ by rounding, ormqr by the strides of its gradient.
OTHER_FORMULA = frozenset(
    {
        "MaskedFillBackward1",
        "MaxBackward1",
        "MinBackward1",
        "MedianBackward0",
        "NanmedianBackward0",
        "ProdBackward0",
        "ProdBackward1",
        "OrmqrBackward0",
    }
)


class AutogradView:
    """Makes a view of a base again by the view operators that autograd recorded, so that its backward is eager's too."""

    def __init__(self, view: torch.Tensor) -> None:
        self._replay = private.view_replay(view)

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base."""
        view: torch.Tensor = self._replay(base)
        return view


class StridedView:
    """Makes a view of a base again: same size, stride, offset and, for a bit-cast view, dtype."""

    def __init__(self, view: torch.Tensor, base: torch.Tensor) -> None:
        self.size = tuple(view.shape)
        self.stride = view.stride()
        self.offset = view.storage_offset() - base.storage_offset()
        self.same = self.size == tuple(base.shape) and self.stride == base.stride() and self.offset == 0

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base."""
        if self.same:
            return base.view_as(base) if torch.is_grad_enabled() else base.detach()
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class SymbolicView:
    """Makes a view of a base again whose size, stride and offset follow from the sizes of the inputs."""

    def __init__(self, view: torch.Tensor, base: torch.Tensor, bindings: Bindings) -> None:
        numbers = (*view.shape, *view.stride(), view.storage_offset() - base.storage_offset())
        self._compute = bindings.function(
            [private.expression_of(item) if private.is_symbolic(item) else item for item in numbers]
        )
        self._count = view.dim()

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base."""
        numbers = self._compute(inputs)
        size, stride = numbers[: self._count], numbers[self._count : -1]
        return base.as_strided(size, stride, base.storage_offset() + numbers[-1])


def _whole_view(base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of a tensor, as a view."""
    return base.view_as(base)


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
                raise CaptureError(
                    f"a tensor with the layout {value.layout} is returned", advice="return a dense tensor"
                )
            sharing[_storage(value)] = sharing.get(_storage(value), 0) + 1
        bases: dict[int, int] = {}
        for position, value in enumerate(self.returned):
            traced = self.trace.input_of(value)
            if traced is not None:
                self.outputs.append(InputOutput(traced.index))
                continue
            storage = _storage(value)
            source = self._input_storages.get(storage)
            if source is not None:
                self.outputs.append(self._view(value, source.value, InputOutput(source.index)))
            elif sharing[storage] == 1:
                leaf = _is_new_leaf(value)
                output = FreshOutput(self._add(value, UserOutput(str(position))), leaf)
                # A view made without recording says that it requires a gradient, and takes none.
                is_view = leaf and value._base is not None
                self.outputs.append(ViewOutput(output, _whole_view, False, True) if is_view else output)
            else:
                if storage not in bases:
                    base = value._base if value._base is not None else self._root(storage)
                    is_returned = any(base is other for other in self.returned)
                    descriptor = UserOutput(str(position)) if is_returned else AliasBase(len(bases))
                    bases[storage] = self._add(base, descriptor)
                base = self.graph_values[bases[storage]]
                fresh = FreshOutput(bases[storage], _is_new_leaf(base))
                self.outputs.append(fresh if value is base else self._view(value, base, fresh))

    def _root(self, storage: int) -> torch.Tensor:
        """Among returned tensors of one storage: the differentiable one of which the others are views or detached copies."""
        members = [value for value in self.returned if _storage(value) == storage]
        for member in members:
            if member._base is not None:
                return member._base
        ordered = sorted(members, key=lambda member: (member.requires_grad, member.numel()), reverse=True)
        return ordered[0]

    def _view(self, value: torch.Tensor, base: torch.Tensor, output: InputOutput | FreshOutput) -> ViewOutput:
        if value._base is not base and (
            value.dtype != base.dtype or value.is_conj() != base.is_conj() or value.is_neg() != base.is_neg()
        ):
            raise CaptureError(
                "a returned tensor is a bit-cast or conjugate view of another tensor",
                where=self.trace.locate(),
                advice="return a clone of it",
            )
        if value.requires_grad and not base.requires_grad:
            raise CaptureError(
                "a returned view requires a gradient but its base does not", advice="return a clone of it"
            )
        replay: Any
        if private.has_symbols(value) or private.has_symbols(base):
            if value.dtype != base.dtype or value.is_conj() or value.is_neg():
                raise CaptureError(
                    "a returned view of another dtype has a symbolic size", advice="return a clone of it"
                )
            replay = SymbolicView(value, base, self.trace.bindings())
        else:
            replay = AutogradView(value) if value._base is base else StridedView(value, base)
        recorded = value.grad_fn is not None or (not base.requires_grad and private.is_recorded_view(value))
        return ViewOutput(output, replay, recorded, value.requires_grad)

    def _find_mutations(self) -> None:
        mutated = [item for item in self.trace.inputs if self.trace.node_of(item.value) is not item.original_node]
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
            self.mutations.append(Mutation(item.index, index, differentiable))

    def _check_mutation(self, item: TracedInput) -> None:
        value = item.value
        real = item.real
        fake = item.node.meta["val"]
        if value.shape != fake.shape or value.stride() != fake.stride() or value.dtype != real.dtype:
            raise CaptureError(f"{item.name} changes its shape in place", advice="make a new tensor instead")
        storage = real.untyped_storage()._cdata
        for other in self.trace.inputs:
            if other is not item and other.real.untyped_storage()._cdata == storage:
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
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            raise CaptureError(
                "a tensor that the function makes with requires_grad is returned beside what is computed from it",
                advice="make the tensor outside of the function",
            )
        stack += [following for following, _ in node.next_functions]


def capture_joint(state: AOTState) -> JointGraph:
    """Capture forward and backward of ``state.function`` as one graph, in one pass.

    Raises :class:`CaptureError` for an aliasing that cannot be kept, and whatever the frontend raises.
    """
    state.require_open()
    trace = state.trace
    result = state.frontend(trace, state.function, state.args, state.kwargs)
    return finish_joint(trace, result)


def finish_joint(trace: Trace, result: FrontendResult) -> JointGraph:
    """Append the backward to a trace that holds a captured forward, and close the graph."""
    # The program tape ends here; its mode would be asked about every attribute that fake tensors read of each other, 9,000
    # times in the backward of a 6-layer GPT.
    with private.no_torch_function():
        return _finish_joint(trace, result)


def _finish_joint(trace: Trace, result: FrontendResult) -> JointGraph:
    found = _Outputs(trace, result.outputs)
    for mutation in found.mutations:
        result.guards.add_leafness(mutation.input_index)
        result.guards.add_separate_memory(mutation.input_index)
    input_descriptors = list(result.input_descriptors)
    output_descriptors: list[Descriptor | None] = []
    for descriptor in found.descriptors:
        if isinstance(descriptor, MutatedInput):
            mutation = next(item for item in found.mutations if item.output_index == len(output_descriptors))
            descriptor = MutatedInput(input_descriptors[mutation.input_index])
        output_descriptors.append(descriptor)
    forward_nodes = [trace.node_of(value) for value in found.graph_values]
    mutated_plain = {item.output_index for item in found.mutations if not item.differentiable}
    differentiable = tuple(
        value.grad_fn is not None and position not in mutated_plain for position, value in enumerate(found.graph_values)
    )
    # A write may have made an input differentiable that was not.
    leaves = [item.leaf if item.real.requires_grad else None for item in trace.inputs]
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
    new_leaves = [value for place, value in enumerate(found.graph_values) if place not in mutated_plain]
    _check_new_leaves([value for value in new_leaves if _is_new_leaf(value)], roots)
    if roots and wanted:
        with torch.enable_grad():
            flowing = iter(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
        gradients = [next(flowing) if leaf is not None else None for leaf in leaves]
        for gradient, item in zip(gradients, trace.inputs, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
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
    _remove_input_clones(trace)
    graph.eliminate_dead_code(is_impure_node=must_stay)
    _drop_unused_vectors(graph)
    for node, descriptor in zip(graph.find_nodes(op="placeholder"), input_descriptors, strict=True):
        node.meta["desc"] = descriptor
    inexact = _inexact_nodes(roots)
    spec = RuntimeSpec(
        tuple(leaf is not None for leaf in leaves),
        differentiable,
        tuple(found.outputs),
        tuple(found.mutations),
        _feeding(found.graph_values, differentiable),
    )
    module = private.lazy_graph_module(trace.tracer.root, graph)
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
    )


def _feeding(values: list[torch.Tensor], differentiable: tuple[bool, ...]) -> tuple[int, ...]:
    """The differentiable outputs that autograd passes on its way back from another one."""
    nodes: dict[tuple[Any, int], int] = {}
    for position, (value, flag) in enumerate(zip(values, differentiable, strict=True)):
        if flag and value.grad_fn is not None:
            nodes[value.grad_fn, value.output_nr] = position
    if len(nodes) < 2:
        return ()
    found: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = [node for node, _ in nodes]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, number in node.next_functions:
            if following is not None:
                stack.append(following)
                if (following, number) in nodes:
                    found.add(nodes[following, number])
    return tuple(sorted(found))


def _inexact_nodes(roots: list[torch.Tensor]) -> tuple[str, ...]:
    """Autograd nodes for which torch uses another formula while a dispatch mode is on (``isTensorSubclassLike`` in C++)."""
    found: set[str] = set()
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [entry[0] for entry in node.next_functions]
        stack += following
        name = node.name()
        # The value of a masked_fill is the second input; with a number, or a value without gradient, the formulas agree.
        if name in OTHER_FORMULA and not (name == "MaskedFillBackward1" and following[1] is None):
            found.add(name)
    return tuple(sorted(found))


def _drop_unused_vectors(graph: torch.fx.Graph) -> None:
    """Eager computes eigenvectors only where a gradient may need them; for a traced tensor torch always asks for them."""
    for target, wanted in ((torch.ops.aten._linalg_eigh.default, 0), (torch.ops.aten._linalg_svd.default, 1)):
        for node in graph.find_nodes(op="call_function", target=target):
            if all(user.target is operator.getitem and user.args[1] == wanted for user in node.users):
                names = [argument.name for argument in target._schema.arguments]
                flag = "compute_v" if "compute_v" in names else "compute_uv"
                position = names.index(flag)
                args = list(node.args)
                if len(args) > position:
                    args[position] = False
                    node.args = tuple(args)
                else:
                    node.kwargs = {**node.kwargs, flag: False}


def _tangent(trace: Trace, of: torch.Tensor, number: int) -> torch.Tensor:
    with private.disable_current_modes(), trace.fake_mode:
        fake = torch.empty_strided(of.shape, of.stride(), dtype=of.dtype, device=of.device)
    with private.disable_current_modes():
        proxy = trace.tracer.create_proxy("placeholder", f"tangents_{number + 1}", (), {})
        proxy.node.meta["val"] = fake
        private.track_tensor_tree(fake, proxy, constant=None, tracer=trace.tracer)
    return private.to_fun(fake)


def _placeholders_first(graph: torch.fx.Graph) -> None:
    placeholders = graph.find_nodes(op="placeholder")
    first = next(iter(graph.nodes))
    for node in reversed(placeholders):
        if node is not first:
            first.prepend(node)
            first = node


def _remove_input_clones(trace: Trace) -> None:
    """The clone that shields a non-leaf input is no part of the program: the graph is functional without it."""
    for item in trace.inputs:
        if item.original_node is not item.node:
            item.original_node.replace_all_uses_with(item.node)
