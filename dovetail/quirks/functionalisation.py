"""Operators that torch's functionalisation records as something else than eager computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import kernels as private_kernels
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.overrides import FUNCTIONAL, GRAPHS, WRITES, RefusedOperatorError, Run
from dovetail.trace.repeats import draws_random_numbers
from dovetail.trace.trace import open_trace

_aten = torch.ops.aten
_PRODUCTS_OF_TWO = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot")
SAME_DTYPE = frozenset(getattr(_aten, name).default for name in _PRODUCTS_OF_TWO)
"""Products whose operands must have one dtype."""


@quirk(
    FUNCTIONAL,
    _aten.bernoulli_.float,
    example=lambda: Example(lambda x: x.clone().bernoulli_(0.5), [(torch.zeros(3, 4).t(),)], order=0),
)
def bernoulli_in_memory_order(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw a Bernoulli mask in the order of the tensor's memory, as eager does.

    The functional ``bernoulli.p`` makes a contiguous result, so that the dropout mask of a transposed tensor would be another
    one. The other random operators keep the strides.
    """
    target = args[0]
    order = sorted(range(target.dim()), key=lambda dim: -target.stride(dim))
    if order == list(range(target.dim())) or _has_gaps(run, target):
        return NotImplemented
    view = run(_aten.permute.default, (target, order), {})
    run(operator, (view, *args[1:]), kwargs)
    return target


def _has_gaps(run: Run, target: torch.Tensor) -> bool:
    """Whether a copy lies in memory otherwise."""
    return bool(run(_aten.clone.default, (target,), {}).stride() != target.stride())


def _drawn(draw: Callable[[torch.Tensor], Any]) -> Callable[[], Example]:
    return lambda: Example(lambda x: draw(x * 1).sum(), [(torch.zeros(8, 8),)], order=0)


@quirk(
    WRITES,
    example={
        "every second column": _drawn(lambda x: x[:, ::2].normal_()),
        "out": _drawn(lambda x: torch.normal(0.0, 1.0, (8, 8), out=x.t())),
    },
)
def numbers_with_gaps(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw into a dense copy where the tensor has gaps in memory, as the functional operators do; refuse what draws otherwise.

    ``normal_`` has another algorithm for contiguous tensors, and functionalised ``out=`` draws into a new tensor.
    """
    if not draws_random_numbers(operator):
        return NotImplemented
    target = kwargs.get("out", args[0] if args else None)
    if not isinstance(target, torch.Tensor) or target.is_contiguous():
        return NotImplemented
    is_out = operator._schema.name[-1] != "_"
    if not is_out and not _has_gaps(run, target):
        return NotImplemented
    dense = run(_aten.clone.default, (target,), {})
    if is_out or (operator is _aten.normal_.default and dense.is_contiguous() and target.numel() >= 16):
        raise RefusedOperatorError(
            f"{operator} draws random numbers into a tensor that is not contiguous",
            advice="draw into a new tensor, and copy it there",
        )
    hook = FUNCTIONAL.get(operator)
    if hook is None or hook(run, operator, (dense, *args[1:]), kwargs) is NotImplemented:
        run(operator, (dense, *args[1:]), kwargs)
    run(_aten.copy_.default, (target, dense), {})
    return target


def _list_written_after_use(x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    sine = doubled.sin()
    torch.ops.aten._foreach_add_.Scalar([doubled], 1.0)
    return sine


@quirk(WRITES, example=lambda: Example(_list_written_after_use, [(torch.ones(2),)]))
def counted_writes_to_lists(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Count the writes of ``_foreach_add_`` and its kin as eager does: autograd counts none for wrapped tensors.

    A write that is not counted is taken for one through ``.data``, which has no derivative and invalidates nothing.
    """
    if operator._schema.name.startswith("aten::_foreach_") and operator._schema.name.endswith("_"):
        torch.autograd.graph.increment_version(args[0])
    return NotImplemented


def strides_of(tensor: torch.Tensor) -> list[int]:
    """The strides of a tensor, symbolic ones as they are now."""
    return list(map(private_sizes.hint, tensor.stride()))


def _has_default_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides of a new one. The fake kernel is wrong about those of an empty result."""
    return not _is_empty(tensor) and strides_of(tensor) == new_strides(tensor.shape)


def _is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor had no elements at capture; nothing is guarded, and what only the data knows counts as more than none."""
    return 0 in map(private_sizes.hint, tensor.shape)


def new_strides(shape: Sequence[Any]) -> list[int]:
    """The strides of a new tensor."""
    sizes = [max(private_sizes.hint(size), 1) for size in shape]
    return [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]


@quirk(
    WRITES,
    example={
        "masked_fill_": lambda: Example(lambda x: (x * 1).masked_fill_(x > 1, 0), [(torch.rand(3, 4).t(),)], order=0),
        "cumsum_": lambda: Example(lambda x: (x * 1).cumsum_(0), [(torch.rand(3, 4).t(),)], order=0),
        "one row": lambda: Example(lambda x: (x.t().mul_(2), x.detach())[1], [(torch.rand(1, 2),)], order=0),
        "places": lambda: Example(lambda x: x.nonzero().mul_(2), [(torch.zeros(3, 5),)], order=0),
    },
)
def written_keeps_its_strides(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Copy the result of an operator in place into the memory of a transposed tensor, where the result alone lies otherwise."""
    target = args[0] if args else None
    functional = private_kernels.functional_form(operator)
    if functional is None or not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
        return NotImplemented
    is_view = torch.Tag.inplace_view in operator.tags
    if is_view or operator is _aten.copy_.default or draws_random_numbers(operator) or _has_default_strides(target):
        return NotImplemented
    value = run(functional, args, kwargs)
    # An empty result does not lie as the fake kernel says, and what only the data knows may be empty.
    may_be_empty = _is_empty(target) or any(map(private_sizes.is_data_number, target.shape))
    lies_alike = isinstance(value, torch.Tensor) and not may_be_empty and strides_of(value) == strides_of(target)
    if lies_alike or not isinstance(value, torch.Tensor) or value.dtype != target.dtype:
        # The value leaves the graph as dead code.
        return NotImplemented
    run(_aten.copy_.default, (target, value), {})
    return target


def _halves(x: torch.Tensor) -> torch.Tensor:
    halves = x.bfloat16()
    torch.ops.aten._foreach_mul_.Scalar([halves], 0.37)
    return halves


@quirk(
    FUNCTIONAL,
    *(_aten._foreach_mul_.Scalar, _aten.mul_.Scalar),
    example=lambda: Example(_halves, [(torch.linspace(0.5, 1.5, 64),)], order=0),
)
def rounded_factor(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Round a factor to half precision first, as the kernels in place do; the functional ones keep it in single precision."""
    targets, factor = args
    each = targets if isinstance(targets, (list, tuple)) else [targets]
    is_half = [target.dtype in (torch.bfloat16, torch.float16) for target in each]
    if not any(is_half):
        return NotImplemented
    for target, rounds in zip(each, is_half, strict=True):
        kind = {"dtype": target.dtype if rounds else torch.float64, "device": target.device}
        run(_aten.mul_.Tensor, (target, run(_aten.scalar_tensor.default, (factor,), kind)), {})
    return targets


def _product_into(target: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Example]:
    generator = torch.Generator().manual_seed(0)
    # Kernels round in another way on other CPUs: each of these products shows the fault on some.
    kinds = ((9, 33, 17, torch.float32), (5, 300, 7, torch.float64))
    given = [
        [
            torch.randn(*shape, generator=generator, dtype=dtype)
            for shape in ((rows, inner), (inner, columns), (rows, columns))
        ]
        for rows, inner, columns, dtype in kinds
    ]
    factors = [item[:2] for item in given]

    def products(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [target(x).addmm_(*both) for x, both in zip(inputs, factors, strict=True)]

    return lambda: Example(products, [tuple(item[2] for item in given)], order=0)


def _too_small(x: torch.Tensor) -> torch.Tensor:
    return x.sum().addr_(x, x)


@quirk(FUNCTIONAL, _aten.addr_.default, example=lambda: Example(_too_small, [(torch.ones(3),)], order=0))
def outer_product_of_its_size(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse to add an outer product to a tensor of another size, as eager does; the functional operator would expand it."""
    target, *vectors = args
    if tuple(target.shape) != tuple(item.shape[0] for item in vectors):
        raise RuntimeError(f"size mismatch, input: {tuple(target.shape)}")
    return NotImplemented


_PRODUCTS = (_aten.addmm_.default, _aten.addbmm_.default, _aten.baddbmm_.default, _aten.addmv_.default)
#: Kernels round in another way at an address that is not a multiple of this.
_ALIGNMENT = 64


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins in its memory where a new one may begin."""
    return bool(private_sizes.hint(tensor.storage_offset()) * tensor.element_size() % _ALIGNMENT == 0)


@quirk(
    FUNCTIONAL,
    *_PRODUCTS,
    example={
        "transposed": _product_into(lambda x: (x.t() * 1).contiguous().t()),
        "with gaps": _product_into(lambda x: torch.stack([x, x], -1)[..., 0]),
    },
)
def product_where_it_is_written(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Multiply transposed operands where the target is transposed, as the kernel does; the functional kernel writes rows.

    A target with gaps is computed as a transposed one. What rounds in a way of its own is refused.
    """
    target, *operands = args
    trace = open_trace()
    if trace is None or not trace.settings.exact or target.device.type != "cpu" or not target.is_floating_point():
        return NotImplemented
    if target.is_contiguous() and is_aligned(target):
        return NotImplemented
    turned_shape, turned_strides = list(target.shape), strides_of(target)
    for numbers in (turned_shape, turned_strides):
        numbers[-2:] = numbers[:-3:-1]
    is_turned = is_aligned(target) and turned_strides == new_strides(turned_shape)
    if target.dim() == 1 or not (is_turned or (target.dim() == 2 and 1 not in turned_strides)):
        raise RefusedOperatorError(
            f"{operator} rounds in another way in memory with gaps or at an odd address",
            advice="multiply into a new tensor, and copy it there",
        )
    left, right = (run(_aten.transpose.int, (item, -1, -2), {}) for item in operands)
    turned = run(_aten.transpose.int, (target, -1, -2), {})
    value = run(private_kernels.functional_form(operator), (turned, right, left), kwargs)
    run(_aten.copy_.default, (target, run(_aten.transpose.int, (value, -1, -2), {})), {})
    return target


def _written_by_strides(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.as_strided((2, 2), x.stride(), 0).mul_(2)
    return x * 3


@quirk(GRAPHS, example=lambda: Example(_written_by_strides, [(torch.rand(3, 4).t(),)]))
def scatters_without_gradients(graph: torch.fx.Graph) -> None:
    """Scatter by strides into a detached input: torch asserts that what requires a gradient is contiguous."""
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided_scatter.default):
        target = node.all_input_nodes[0]
        if target.op == "placeholder":
            _, _, sizes, strides, *offset = node.args
            span = sum(
                (private_sizes.hint(size) - 1) * private_sizes.hint(step)
                for size, step in zip(sizes, strides, strict=True)
            )
            if span + sum(map(private_sizes.hint, offset)) >= private_sizes.hint(target.meta["val"].numel()):
                raise CaptureError(
                    "as_strided writes to an input that is a part of a larger memory", advice="write to a clone"
                )
            with graph.inserting_before(node):
                detached = graph.call_function(_aten.detach.default, (target,))
            detached.meta = dict(target.meta, phase=node.meta["phase"])
            node.replace_input_with(target, detached)


def _filled_column(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 1].resize_(8).add_(1)
    return y


def _dropped_rows(x: torch.Tensor) -> torch.Tensor:
    mask = x.data.new().resize_((x.size(0), 1)).bernoulli_(0.5)
    return mask.expand_as(x) * x


@quirk(
    FUNCTIONAL,
    _aten.resize_.default,
    _aten.resize_as_.default,
    example={
        "format": lambda: Example(
            lambda x: x.clone().resize_((2, 3, 4, 5), memory_format=torch.channels_last),
            [(torch.arange(120.0),)],
            order=0,
        ),
        "same size": lambda: Example(_filled_column, [(torch.ones(8, 8),)], order=0),
        "larger": lambda: Example(_dropped_rows, [(torch.ones(4, 3),)], options={"fullgraph": True}),
    },
)
def resized(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse a resize to a memory format, which the functional form leaves out.

    A resize to the same size keeps the strides, and one to a larger size the device of the memory, by which views are made.
    """
    memory_format = kwargs.get("memory_format")
    if memory_format is None and tuple(args[0].shape) == tuple(getattr(args[1], "shape", args[1])):
        return args[0]
    if memory_format in (None, torch.contiguous_format):
        _make_room(args[0], getattr(args[1], "shape", args[1]))
        return NotImplemented
    raise RefusedOperatorError("a tensor is resized to another memory format", advice="make a new tensor instead")


def _observed_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    on, low, high = torch.ones(1, dtype=torch.long), torch.empty(0), torch.empty(0)
    scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int)
    return torch.fused_moving_avg_obs_fake_quant(x, on, on, low, high, scale, zero, 0.1, -128, 127, 0, True, True), low


@quirk(
    FUNCTIONAL,
    _aten._fused_moving_avg_obs_fq_helper.default,
    example=lambda: Example(_observed_rows, [(torch.ones(4, 3),)]),
)
def ranges_of_one_size(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse an observer's first call, which makes one range for each channel of empty tensors; the fake kernel leaves these."""
    by_channel = len(args) > 11 and args[11]
    if by_channel and any(item.dim() == 0 or item.shape[0] != args[0].shape[args[10]] for item in args[3:7]):
        raise RefusedOperatorError(
            "an observer makes one range for each channel", advice="call the observer once outside of the function"
        )
    return NotImplemented


def _make_room(target: torch.Tensor, shape: Sequence[Any]) -> None:
    """Enlarge the memory of a traced tensor before torch does, which would take it to another device."""
    size = (math.prod(shape) + target.storage_offset()) * target.element_size()
    if type(size) is int and size > target.untyped_storage().nbytes():
        private_kernels.enlarge_memory(target, size)


def _polygamma(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.polygamma_(2)
    return y


@quirk(
    FUNCTIONAL,
    _aten.polygamma_.default,
    example=lambda: Example(_polygamma, [(torch.rand(4),)], options={"fullgraph": True}),
)
def polygamma_in_place(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write ``polygamma_`` as a copy: no other operator that writes lacks a functional kernel."""
    value = run(_aten.polygamma.default, (args[1], args[0]), {})
    run(_aten.copy_.default, (args[0], value), {})
    return args[0]


def _write_at_symbolic_size(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.renorm_(2, 0, 0.5)
    return y


@quirk(
    WRITES,
    example=lambda: Example(
        _write_at_symbolic_size, [(torch.rand(size, 3),) for size in (4, 5, 6)], graphs=2, options={"fullgraph": True}
    ),
)
def written_at_symbolic_sizes(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write by a copy where torch tries the operator out on tensors that cannot have symbolic sizes."""
    functional = private_kernels.functional_form(operator)
    is_view = torch.Tag.inplace_view in operator.tags
    if is_view or functional is None or not private_sizes.has_symbols(args[0]):
        return NotImplemented
    try:
        return run(operator, args, kwargs)
    except RuntimeError as error:
        if not private_kernels.asks_for_plain_sizes(error):
            raise
    value = run(functional, args, kwargs)
    if not torch.can_cast(value.dtype, args[0].dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {args[0].dtype}")
    run(_aten.copy_.default, (args[0], value), {})
    return args[0]


def _products_of_two_types(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch.mm(x, y)
    return x * 2


@quirk(
    FUNCTIONAL,
    *SAME_DTYPE,
    example=lambda: Example(_products_of_two_types, [(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64))]),
)
def operands_of_one_type(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse operands of different dtypes as eager does.

    The fake kernels do not compare them. An unused result would be dropped from the graph, and eager's error with it.
    """
    dtypes = {item.dtype for item in args if isinstance(item, torch.Tensor)}
    if len(dtypes) > 1:
        raise RuntimeError(f"{operator} got operands of different dtypes: {', '.join(sorted(map(str, dtypes)))}")
    return NotImplemented


def _emptied(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    y = x.sin()
    torch.ops.inductor.resize_storage_bytes_(x, 0)
    return y, x.untyped_storage().nbytes()


@quirk(
    FUNCTIONAL,
    torch.ops.inductor.resize_storage_bytes_.default,
    example=lambda: Example(_emptied, [(torch.ones(4),)], order=0),
)
def resized_memory(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse to resize a tensor's memory: a graph's inputs keep theirs, and kernels would write beyond it."""
    raise RefusedOperatorError("the memory of a tensor is resized", advice="resize it outside of the compiled function")


def _halved_column(x: torch.Tensor) -> torch.Tensor:
    pairs = x * 1
    first, _ = pairs.T
    first.mul_(0.5)
    return pairs


@quirk(
    FUNCTIONAL,
    _aten.unbind.int,
    example=lambda: Example(_halved_column, [(torch.rand(n, 2),) for n in (3, 4, 5, 6)], order=0, graphs=2),
)
def parts_by_number(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Take the parts of a tensor of symbolic size one by one: a write to a part of an ``unbind`` asks for each size as a number."""
    whole, dim = args[0], (*args[1:], *kwargs.values(), 0)[0]
    if not any(map(private_sizes.is_symbolic, whole.shape)) or private_sizes.is_symbolic(whole.shape[dim]):
        return NotImplemented
    return [run(_aten.select.int, (whole, dim, number), {}) for number in range(whole.shape[dim])]
