"""The work of torch's functions on the floats that they take by value, as the C++ of torch 2.13 is written.

A number that is computed and not said here would stay that of the capture. For the torch that is there, :func:`.dependent_floats`
finds such numbers, and the call is left to others; ``tests/rules/sizes/test_numbers_by_value.py`` compares with eager.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule, number_rule
from dovetail.rules.sizes.number_tensors import with_owner
from dovetail.rules.sizes.numbers_by_value import Computed, Needs, UnknownCallError, by_value, changing
from dovetail.torch_private import sizes as private_sizes

_ALPHA = 1.7580993408473766


def _below(left: Any, right: Any) -> Computed:
    return Computed(operator.lt, (left, right))


def _at_most(left: Any, right: Any) -> Computed:
    return Computed(operator.le, (left, right))


def _minus(left: Any, right: Any) -> Computed:
    return Computed(operator.sub, (left, right))


def _times(left: Any, right: Any) -> Computed:
    return Computed(operator.mul, (left, right))


def _over(left: Any, right: Any) -> Computed:
    return Computed(operator.truediv, (left, right))


def _known(*values: Any) -> None:
    if not all(values):
        raise UnknownCallError


# --- losses -----------------------------------------------------------------------------------------------------------


@by_value("huber_loss", "smooth_l1_loss")
def smooth_losses(*args: Any, **named: Any) -> Needs:
    """``delta`` is positive; ``beta`` of 0 is another function."""
    return Needs(holds=tuple(_below(0.0, number) for number in changing(args, named)))


@by_value("cross_entropy")
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Needs:
    """The losses are weighted by what is left over, and by the share of each class."""
    classes = input.shape[0 if input.dim() == 1 else 1]
    _known(type(classes) is int)
    return Needs(
        holds=(_below(0.0, label_smoothing), _at_most(label_smoothing, 1.0)),
        computed=(_minus(1, label_smoothing), _over(label_smoothing, classes)),
        hands_on=False,
    )


@by_value(
    "margin_ranking_loss", "hinge_embedding_loss", "cosine_embedding_loss", "multi_margin_loss", "poisson_nll_loss"
)
def losses_with_margins(*args: Any, **named: Any) -> Needs:
    """A margin, or what keeps a logarithm finite, is added to a tensor."""
    return Needs()


@by_value("triplet_margin_loss")
def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: Any = 2,
    eps: Any = 1e-6,
    *rest: Any,
    **named: Any,
) -> Needs:
    """The margin is added to a tensor; the order of the norm decides more."""
    _known(not isinstance(p, torch.SymFloat), not isinstance(eps, torch.SymFloat))
    return Needs(holds=(_below(0.0, margin),))


# --- dropout ----------------------------------------------------------------------------------------------------------


def _dropped(input: torch.Tensor, p: Any, training: Any) -> tuple[Computed, ...]:
    """The conditions under which numbers are drawn."""
    _known(training is True, input.device.type == "cpu", input.numel() != 0)
    return (_below(0.0, p), _below(p, 1.0))


@by_value("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_")
def dropout(input: torch.Tensor, p: float = 0.5, training: Any = True, inplace: Any = False, **named: Any) -> Needs:
    """Noise of zeros and ones is divided by the share that is kept; on a GPU one kernel does all."""
    training = named.pop("train", training)
    if training is False:
        return Needs(holds=(_at_most(0.0, p), _at_most(p, 1.0)), hands_on=False)
    return Needs(holds=_dropped(input, p, training), computed=(_minus(1, p),), hands_on=False)


@by_value("scaled_dot_product_attention")
def scaled_attention(query: Any, *rest: Any, scale: Any = None, dropout_p: float = 0.0, **named: Any) -> Needs:
    """The scores are scaled by a kernel for all of it."""
    _known(not changing((dropout_p, *rest), named))
    return Needs(holds=(_below(0.0, scale),))


@by_value("scaled_dot_product_attention")
def attention_by_its_parts(query: Any, *rest: Any, scale: Any = None, dropout_p: float = 0.0, **named: Any) -> Needs:
    """Queries and keys are scaled by the root of it."""
    _known(not changing((dropout_p, *rest), named), scale is not None)
    return Needs(holds=(_below(0.0, scale),), computed=(Computed(math.sqrt, (scale,)),), hands_on=False)


@by_value("scaled_dot_product_attention")
def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
) -> Needs:
    """With dropout, a CPU has no kernel for all of it."""
    _known(query.device.type == "cpu", not changing(rest, named))
    return Needs(holds=_dropped(query, dropout_p, True), computed=(_minus(1, dropout_p),), hands_on=False)


@by_value("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_")
def alpha_dropout(input: torch.Tensor, p: float = 0.5, training: Any = False, *rest: Any, **named: Any) -> Needs:
    """Dropped elements get the value that leaves mean and variance alone."""
    kept = _minus(1, p)
    under_the_root = _times(Computed(operator.add, (_times(_ALPHA * _ALPHA, p), 1)), kept)
    scale = _over(1.0, Computed(math.sqrt, (under_the_root,)))
    moved = _times(_ALPHA, scale)
    holds = _dropped(input, p, named.pop("train", training))
    return Needs(holds=holds, computed=(kept, scale, moved, _times(moved, p)), hands_on=False)


# --- normalisation ----------------------------------------------------------------------------------------------------


@by_value("layer_norm", "group_norm")
def normalisation(*args: Any, **named: Any) -> Needs:
    """The number added to a variance."""
    return Needs(holds=tuple(_at_most(0.0, number) for number in changing(args, named)))


_NORMS = ("norm", "vector_norm", "linalg_vector_norm", "normalize")


def _order(input: torch.Tensor, args: Arguments, named: dict[str, Any]) -> Any:
    """The order of a norm of real numbers; all other arguments do not change."""
    orders = changing(args, named)
    _known(len(orders) == 1, args[:1] == tuple(orders) or named.get("p", named.get("ord")) is orders[0])
    _known(input.is_floating_point())
    return orders[0]


@by_value(*_NORMS)
def norm_below_one(input: torch.Tensor, *args: Any, **named: Any) -> Needs:
    """The gradient of an order below 1 has powers of the sum and of the norm."""
    order = _order(input, args, named)
    return Needs((_below(0.0, order), _below(order, 1.0)), in_backward=(_minus(order, 1.0), _minus(1.0, order)))


@by_value(*_NORMS)
def norm_below_two(input: torch.Tensor, *args: Any, **named: Any) -> Needs:
    """The gradient of an order between 1 and 2 has a power by the order less one."""
    order = _order(input, args, named)
    return Needs((_below(1.0, order), _below(order, 2.0)), in_backward=(_minus(order, 1.0),))


@by_value(*_NORMS)
def norm_above_two(input: torch.Tensor, *args: Any, **named: Any) -> Needs:
    """The gradient of an order above 2 has powers by the order less one and less two."""
    order = _order(input, args, named)
    return Needs((_below(2.0, order),), in_backward=(_minus(order, 1.0), _minus(order, 2.0)))


@by_value("batch_norm", "instance_norm")
def normalisation_with_averages(input: torch.Tensor, *rest: Any, **named: Any) -> Needs:
    """The number added to a variance, and an average's momentum; a GPU has operators that write to the averages unseen."""
    _known(input.device.type == "cpu")
    return Needs(holds=tuple(_below(0.0, number) for number in changing(rest, named)))


# --- random numbers ---------------------------------------------------------------------------------------------------


@by_value("bernoulli", "bernoulli_")
def bernoulli(self: torch.Tensor, p: float, generator: None = None) -> Needs:
    """See the name."""
    return Needs(holds=(_at_most(0.0, p), _at_most(p, 1.0)))


@by_value("uniform_")
def uniform(self: torch.Tensor, start: float = 0.0, to: float = 1.0, generator: None = None) -> Needs:
    """See the name."""
    return Needs(holds=(_below(start, to),))


@by_value("normal_")
def normal_(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: None = None) -> Needs:
    """See the name."""
    return Needs(holds=(_at_most(0.0, std),))


@by_value("normal")
def normal(mean: float, std: float, size: Any, **named: Any) -> Needs:
    """The distribution of all numbers of a new tensor."""
    _known(not named, not isinstance(mean, torch.Tensor), not isinstance(std, torch.Tensor))
    return Needs(holds=(_at_most(0.0, std),))


@by_value("exponential_")
def exponential(self: torch.Tensor, lambd: float = 1.0, generator: None = None) -> Needs:
    """See the name."""
    return Needs(holds=(_below(0.0, lambd),))


# --- by elements ------------------------------------------------------------------------------------------------------


@by_value("lerp", "lerp_", "_foreach_lerp", "_foreach_lerp_")
def lerp(input: Any, end: Any, weight: float) -> Needs:
    """The gradient is shared out by the weight."""
    return Needs(in_backward=(_minus(1, weight),))


@method_rule("pow", "pow_")
def whole_power(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A whole number that changes as a float: the power of a tensor of floats is the same by both."""
    owner, *others = (*with_owner(function, args), *kwargs.values())
    numbers = [
        item for item in (owner, *others) if type(item) is torch.SymInt and not private_sizes.is_data_number(item)
    ]
    tensors = [item for item in (owner, *others) if isinstance(item, torch.Tensor)]
    if len(numbers) != 1 or len(tensors) != 1 or not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        return NotImplemented
    given = [interpreter.call(float, (item,), {}) if item is numbers[0] else item for item in (*args, *kwargs.values())]
    return interpreter.call_torch(
        function, tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))
    )


@by_value("pow", "pow_")
def power(self: Any, exponent: Any) -> Needs:
    """The gradient has a power by one less; by the exponent it has the logarithm of the base."""
    if isinstance(self, torch.Tensor):
        return Needs(in_backward=(_minus(exponent, 1.0),))
    _known(not exponent.is_complex())
    return Needs(holds=(_below(0.0, self),), in_backward=(Computed(math.log, (self,)),))


@number_rule
def power_of_tensor(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """The operator as the function that it means."""
    if function not in (operator.pow, operator.ipow) or not any(isinstance(item, torch.Tensor) for item in operands):
        return NotImplemented
    is_in_place = isinstance(operands[0], torch.Tensor) and function is operator.ipow
    return interpreter.call_torch(torch.Tensor.pow_ if is_in_place else torch.pow, operands, {})


@by_value("nan_to_num", "nan_to_num_")
def nan_to_num(input: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Needs:
    """See the name."""
    return Needs()


@by_value("logit", "logit_")
def logit(input: Any, eps: Any = None) -> Needs:
    """Its gradient has bounds of its own."""
    return Needs(holds=(_at_most(0.0, eps),), in_backward=(_minus(1.0, eps),))


# --- others -----------------------------------------------------------------------------------------------------------


@by_value("pad", "constant_pad_nd")
def pad(input: Any, pad: Any, *rest: Any, **named: Any) -> Needs:
    """See the name."""
    return Needs()


@by_value("quantile", "nanquantile")
def quantile(input: Any, q: float, *rest: Any, **named: Any) -> Needs:
    """The number becomes a tensor."""
    return Needs(holds=(_at_most(0.0, q), _at_most(q, 1.0)))


@by_value("trapezoid", "trapz")
def trapezoid(y: Any, *, dx: float = 1.0, dim: int = -1) -> Needs:
    """The step is multiplied by."""
    return Needs()


@by_value("cosine_similarity")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Needs:
    """The number becomes a tensor."""
    return Needs()


@by_value("isclose")
def isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Needs:
    """Where both are 0 only equal numbers are close."""
    return Needs(holds=(_below(0.0, atol), _below(0.0, rtol)))
