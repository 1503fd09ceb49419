"""The decompositions that Inductor's graphs get: Inductor's own, and Dovetail's where those are wrong here, or slow.

- Torch's fused optimizers, so that Inductor fuses the update with the backward and writes it in place. Torch's kernels walk through
  the memory of parameter, gradient and state side by side, whatever their strides say. Inductor lays out the gradient of a
  convolution as it likes, and the result of a fused kernel was silently wrong (torch 2.13).
- Operators on lists of symbolic floats, or that branch on one: Inductor takes symbolic floats only as tensors in plain arithmetic
  (:mod:`.float_inputs`). Calls with constant numbers are left to Inductor's own decompositions.
- Products over a single column, as products of elements that Inductor fuses with what reads them. The gradient of a layer with one
  output is such a product. As a matrix product it is a call of its own, with memory for its result. Inductor takes it apart on
  a GPU, and on a CPU for 32 numbers at most.
- The gradient of ``nll_loss``, as a comparison of each element: Inductor's own decomposition scatters into zeros, which takes the
  memory of all scores once more (torch 2.11 to 2.13).
- The gradient of a nearest neighbour by a scale in two dimensions: Inductor takes the scale to be the quotient of the sizes, and
  the gradient of ``interpolate(x, scale_factor=1.7)`` was silently wrong (torch 2.13).
- Arithmetic with other results than eager's (:mod:`.arithmetic`).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dovetail.backends.inductor.arithmetic import LOOKING, arithmetic, or_else
from dovetail.passes.decompose import stays_whole
from dovetail.rules.optim.fused_updates import NAMES, takes_symbols
from dovetail.rules.sizes.scalar_operators import takes_numbers
from dovetail.torch_private import inductor as private_inductor
from dovetail.trace.repeats import draws_random_numbers

Rule = Callable[..., Any]
_aten = torch.ops.aten


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    # Torch's own decomposition takes one of two formulas, by the size of the weight.
    return start + (end - start) * weight


def _has_symbol(value: Any) -> bool:
    return any(map(_has_symbol, value)) if isinstance(value, (list, tuple)) else isinstance(value, torch.SymFloat)


def _item(value: Any, place: int) -> Any:
    return value[place] if isinstance(value, (list, tuple)) else value


def _each(function: Rule) -> Rule:
    """Return the operator on lists of an operator on their items."""

    def apply(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        if not _has_symbol((args, list(kwargs.values()))):
            return NotImplemented
        return [
            function(
                tensor,
                *[_item(value, place) for value in args],
                **{name: _item(value, place) for name, value in kwargs.items()},
            )
            for place, tensor in enumerate(tensors)
        ]

    return apply


#: Operators with a list of numbers, or one number for all.
_WITH_NUMBERS: dict[str, Rule] = {
    "_foreach_add": lambda tensor, number: tensor + number,
    "_foreach_sub": lambda tensor, number: tensor - number,
    "_foreach_mul": lambda tensor, number: tensor * number,
    "_foreach_div": lambda tensor, number: tensor / number,
    "_foreach_pow": lambda tensor, number: tensor**number,
    "_foreach_addcdiv": lambda tensor, one, two, scalars=1, value=1: tensor + (one / two) * _given(scalars, value),
    "_foreach_addcmul": lambda tensor, one, two, scalars=1, value=1: tensor + (one * two) * _given(scalars, value),
    "_foreach_lerp": _lerp,
}
#: Operators with two lists of tensors, the second one multiplied by a number.
_SCALED: dict[str, Rule] = {
    "_foreach_add": lambda tensor, other, alpha=1: tensor + other * alpha,
    "_foreach_sub": lambda tensor, other, alpha=1: tensor - other * alpha,
}


def _given(scalars: Any, value: Any) -> Any:
    """Return the number, which comes by position or by name."""
    return value if type(scalars) is int and scalars == 1 else scalars


def changing_numbers(table: dict[Any, Rule]) -> dict[Any, Rule]:
    """Return decompositions for symbolic numbers, by operator; for constant numbers they call those in ``table``."""
    found: dict[Any, Rule] = {}
    for name, function in _WITH_NUMBERS.items():
        for overload in ("ScalarList", "Scalar"):
            if hasattr(getattr(_aten, name), overload):
                found[getattr(getattr(_aten, name), overload)] = _each(function)
    for name, function in _SCALED.items():
        found[getattr(_aten, name).List] = _each(function)
    found[_aten.lerp.Scalar] = lambda start, end, weight: (
        _lerp(start, end, weight) if _has_symbol(weight) else NotImplemented
    )
    return {operator: or_else(rule, table.get(operator)) for operator, rule in found.items()}


#: Operators with a float in their schema that Inductor takes apart.
_BY_VALUE = (
    *("huber_loss", "huber_loss_backward", "smooth_l1_loss_backward", "native_layer_norm", "native_group_norm"),
    *(
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_functional",
        "native_batch_norm_backward",
        "nan_to_num",
    ),
)


def numbers_by_value(table: Mapping[Any, Rule]) -> dict[Any, Rule]:
    """Return the decompositions of the operators that take changing numbers in the place of floats."""
    names = [name.partition(".") for name in _BY_VALUE]
    operators = [getattr(getattr(_aten, name), overload or "default") for name, _, overload in names]
    found = {takes_numbers(operator): table[operator] for operator in operators if operator in table}
    found[takes_numbers(_aten.smooth_l1_loss.default)] = _smooth_l1_loss
    found[takes_numbers(_aten.lerp.Scalar)] = _lerp
    found[takes_numbers(_aten._foreach_lerp.Scalar)] = _each(_lerp)
    return found


def _smooth_l1_loss(one: Tensor, other: Tensor, reduction: int = 1, beta: Any = 1.0) -> Tensor:
    # Torch's own decomposition looks whether ``beta`` is 0.
    difference = (one - other).abs()
    loss = torch.where(difference < beta, 0.5 * difference * difference / beta, difference - 0.5 * beta)
    return loss if reduction == _NONE else loss.mean() if reduction == _MEAN else loss.sum()


Update = Callable[..., Sequence[Tensor | None]]


def _power(base: float, step: Tensor) -> Tensor:
    # A symbolic float may be multiplied by, and no tensor be filled with it.
    one = torch.ones((), dtype=torch.float64, device=step.device)
    return torch.pow(one * base, step.to(torch.float64))


def _ascent(o: SimpleNamespace, value: Tensor, gradient: Tensor, decay: bool = True) -> Tensor:
    """Return the gradient with its sign for ``maximize`` and, with ``decay``, the weight decay in it."""
    ascent = -gradient if o.maximize else gradient
    return ascent + value * o.weight_decay if decay and o.weight_decay != 0 else ascent


def _adam(
    o: SimpleNamespace,
    value: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    largest: Tensor,
    step: Tensor,
    decoupled: bool = False,
) -> Sequence[Tensor | None]:
    ascent = _ascent(o, value, gradient, decay=not decoupled)
    start = value - (value * o.lr) * o.weight_decay if decoupled and o.weight_decay != 0 else value
    average = average + (1 - o.beta1) * (ascent - average)
    square = o.beta2 * square + (1 - o.beta2) * ascent * ascent
    first = (1 - _power(o.beta1, step)).to(value.dtype)
    second = (1 - _power(o.beta2, step)).sqrt().to(value.dtype)
    root = torch.maximum(largest, square) if o.amsgrad else square
    new = start - ((average / first) / (root.sqrt() / second + o.eps)) * o.lr
    return [new, gradient, average, square, root if o.amsgrad else None, None]


def _sgd(o: SimpleNamespace, value: Tensor, gradient: Tensor, buffer: Tensor) -> Sequence[Tensor | None]:
    ascent = _ascent(o, value, gradient)
    if o.momentum == 0:
        return [value - ascent * o.lr, gradient, None]
    # The first buffer needs memory of its own: the gradient is an output as well.
    buffer = ascent.clone() if o.is_first_step else buffer * o.momentum + ascent * (1 - o.dampening)
    return [value - (ascent + buffer * o.momentum if o.nesterov else buffer) * o.lr, gradient, buffer]


def _adagrad(
    o: SimpleNamespace, value: Tensor, gradient: Tensor, total: Tensor, step: Tensor
) -> Sequence[Tensor | None]:
    ascent = _ascent(o, value, gradient)
    total = total + ascent * ascent
    slower = (1 + (step.to(torch.float64) - 1) * o.lr_decay).to(value.dtype)
    return [value - ((ascent / slower) / (total.sqrt() + o.eps)) * o.lr, gradient, total, None]


def _decomposed(operator: Any, update: Update) -> Callable[..., tuple[list[Tensor], ...]]:
    """Return the decomposition of a fused operator into the updates of single parameters.

    A gradient is divided by ``grad_scale`` first. Where ``found_inf`` says that one is not finite, the kernels write nothing, so
    old values stay. Tensors without dimensions get one: a symbolic float combines only with tensors that have dimensions.
    """
    arguments = operator._schema.arguments
    names = [item.name for item in arguments]
    list_names = [item.name for item in arguments if str(item.type) == "List[Tensor]"]
    count = len(operator._schema.returns)

    def run(*args: Any, **kwargs: Any) -> tuple[list[Tensor], ...]:
        defaults = {item.name: item.default_value for item in arguments}
        o = SimpleNamespace(**{**defaults, **dict(zip(names, args)), **kwargs})
        lists: list[list[Tensor]] = [getattr(o, name) for name in list_names]
        is_bad = None if o.found_inf is None else o.found_inf.reshape(()) == 1
        found: tuple[list[Tensor], ...] = tuple([] for _ in range(count))
        for place in range(len(lists[0])):
            old = [values[place] if values else None for values in lists]
            shaped = [value.reshape(1) if value is not None and value.dim() == 0 else value for value in old]
            if o.grad_scale is not None:
                shaped[1] = shaped[1] / o.grad_scale
            for values, kept, new in zip(found, old, update(o, *shaped)):
                if kept is not None and new is not None:
                    new = new.reshape(kept.shape)
                    values.append(new if is_bad is None else torch.where(is_bad, kept, new))
                elif kept is not None:
                    values.append(kept)
        return found

    return run


def fused_optimizers() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of the fused optimizers that this torch has."""
    updates: dict[str, Update] = {
        "_fused_adam": _adam,
        "_fused_adamw": functools.partial(_adam, decoupled=True),
        "_fused_sgd": _sgd,
        "_fused_adagrad": _adagrad,
    }
    found: dict[Any, Callable[..., Any]] = {}
    for name, update in updates.items():
        packet = getattr(torch.ops.aten, name, None)
        known = () if packet is None else packet.overloads()
        for overload in [item for item in ("default", "tensor_lr") if item in known]:
            operator = getattr(packet, overload)
            found[operator] = _decomposed(operator, update)
            if name in NAMES:
                found[takes_symbols(name, overload)] = found[operator]
    return found


def outer_products(table: Mapping[Any, Rule]) -> dict[Any, Rule]:
    """Return the decompositions by operator; whatever they leave alone goes to those of ``table``."""
    product, sum_with_product = table.get(_aten.mm.default, _not_here), table.get(_aten.addmm.default, _not_here)

    def mm(one: Tensor, other: Tensor) -> Any:
        return one * other if _is_outer(one) else product(one, other)

    def addmm(start: Tensor, one: Tensor, other: Tensor, **factors: Any) -> Any:
        # The library rounds a sum in half precision once.
        exact = one.dtype in (torch.float32, torch.float64)
        return (
            start + one * other
            if exact and not factors and _is_outer(one)
            else sum_with_product(start, one, other, **factors)
        )

    return {_aten.mm.default: mm, _aten.addmm.default: addmm}


def _is_outer(one: Tensor) -> bool:
    """Whether a matrix has a single column in every call."""
    return one.device.type == "cpu" and type(one.shape[1]) is int and one.shape[1] == 1


def _not_here(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


_MEAN, _NONE = 1, 0


def nll_loss_backward(
    gradient: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of ``nll_loss`` for the scores."""
    axis = 0 if scores.dim() < 2 else 1
    shape = [1] * scores.dim()
    shape[axis] = scores.shape[axis]
    classes = torch.arange(scores.shape[axis], device=scores.device).view(shape)
    wanted = target.unsqueeze(axis)
    value = gradient / total_weight if reduction == _MEAN else gradient
    if reduction == _NONE and scores.dim() > 1:
        value = value.unsqueeze(axis)
    if weight is not None:
        value = value * weight.view(shape)
    # Selected, not multiplied: the division by a total weight of zero may not reach other elements.
    return torch.where((classes == wanted) & (wanted != ignore_index), -value, 0).to(scores.dtype)


def nearest_backward(
    gradient: Tensor,
    output_size: Sequence[Any],
    input_size: Sequence[Any],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Any:
    """Return the gradient of the nearest neighbour in two dimensions; Inductor's own where the sizes alone decide."""
    if scales_h is None and scales_w is None:
        return NotImplemented
    places = []
    for before, after, scale in zip(input_size[2:], output_size, (scales_h, scales_w), strict=True):
        # In single precision, as eager's kernels find them.
        step = before / after if scale is None else 1 / scale
        place = torch.arange(after, device=gradient.device, dtype=torch.float32) * step
        places.append(place.to(torch.int64).clamp(max=before - 1))
    rows, columns = places
    return _aten.index_put(gradient.new_zeros(input_size), [None, None, rows[:, None], columns], gradient, True)


class Decompositions(collections.UserDict[Any, Rule]):
    """:func:`wanted_decompositions`, made when somebody looks: a graph that comes from the cache is decomposed already."""

    def __init__(self) -> None:
        """Nothing is made yet."""

    @functools.cached_property
    def data(self) -> dict[Any, Rule]:  # type: ignore[override]
        """The table."""
        return wanted_decompositions()

    def __bool__(self) -> bool:
        return True


def wanted_decompositions() -> dict[Any, Rule]:
    """Return Inductor's decompositions and Dovetail's for it, without those of operators that draw, or look at, numbers.

    A decomposed random operator draws other numbers than eager's kernel does.
    """
    table = {**private_inductor.inductor_decompositions(), **fused_optimizers()}
    table |= {_aten.nll_loss_backward.default: nll_loss_backward, _aten._efficientzerotensor.default: _zeros_in_memory}
    table |= changing_numbers(table) | numbers_by_value(table)
    table |= arithmetic(table)
    table |= outer_products(table)
    table[_aten.upsample_nearest2d_backward.default] = nearest_backward
    found = {target: rule for target, rule in table.items() if not draws_random_numbers(target)}
    return found | dict.fromkeys(LOOKING, stays_whole)


def _zeros_in_memory(size: Sequence[Any], **kwargs: Any) -> torch.Tensor:
    """Return zeros for autograd's zeros that have no memory, which generated code cannot take as an input."""
    return torch.full(size, 0, **{"dtype": torch.get_default_dtype(), **kwargs})
