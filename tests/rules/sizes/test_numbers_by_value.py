"""Floats that torch's C++ takes by value and that change from call to call: two captures for all of them, and eager's numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.rules.sizes import floats_given_on, numbers_by_value
from tests.differential import backward, captures, gradients, random_state, same, set_seed

pytestmark = pytest.mark.usefixtures("quiet")
_GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(6, 5, generator=_GENERATOR), torch.randn(6, 5, generator=_GENERATOR)
LABELS = torch.tensor([0, 3, 1, 4, 2, 2])
SIGNS = Y[:, 0].sign()
SCHEDULE = (0.3, 0.2, 0.1, 0.7, 0.15, 0.45)


def _normal_into_part(x: Tensor, v: float) -> Tensor:
    noise = torch.zeros(6, 5)
    noise[0].normal_(1.0, v)
    noise[2:4].uniform_(-v, v)
    return x * noise


def _batch_norm(x: Tensor, v: float) -> Any:
    mean, deviation = torch.zeros(5), torch.ones(5)
    first = F.batch_norm(x, mean, deviation, training=True, momentum=v)
    kept = mean.clone()
    return F.batch_norm(first, mean, deviation, training=True, momentum=v, eps=v), mean, deviation, kept


def _instance_norm(x: Tensor, v: float) -> Any:
    mean, deviation = torch.zeros(6), torch.ones(6)
    return F.instance_norm(x[None], mean, deviation, momentum=v, eps=v), mean, deviation


def _lists(x: Tensor, v: float) -> Any:
    tensors = [x * 1, Y * 1]
    torch._foreach_lerp_(tensors, [Y, Y], v)
    return tensors


def _inside(x: Tensor, v: float) -> Any:
    inner = x.detach().requires_grad_()
    F.cross_entropy(F.dropout(inner, v), LABELS, label_smoothing=v).backward()
    return inner.grad


def _twice(x: Tensor, v: float) -> Any:
    loss = F.huber_loss(x * x, Y, delta=v) + F.layer_norm(x, (5,), eps=v).pow(3).sum() + F.dropout(x, v).pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return gradient.square().sum()


def _autocast(x: Tensor, v: float) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return F.huber_loss(x @ Y.t(), Y @ Y.t(), delta=v), F.dropout(x @ Y.t(), v)


PROGRAMS: dict[str, Callable[[Tensor, float], Any]] = {
    "huber loss": lambda x, v: (
        F.huber_loss(x, Y, delta=v),
        F.huber_loss(x, Y, "sum", v),
        F.huber_loss(x, Y, "none", v),
    ),
    "smooth L1 loss": lambda x, v: (F.smooth_l1_loss(x, Y, beta=v), F.smooth_l1_loss(x, Y, reduction="none", beta=v)),
    "label smoothing": lambda x, v: F.cross_entropy(x, LABELS, label_smoothing=v),
    "label smoothing without some": lambda x, v: (
        F.cross_entropy(x, LABELS, ignore_index=2, reduction="sum", label_smoothing=v),
        F.cross_entropy(x, LABELS, reduction="none", label_smoothing=v),
    ),
    "label smoothing of probabilities": lambda x, v: F.cross_entropy(x, Y.softmax(-1), label_smoothing=v),
    "label smoothing of one": lambda x, v: F.cross_entropy(x[0], LABELS[0], label_smoothing=v),
    "margins": lambda x, v: (
        F.margin_ranking_loss(x, Y, Y.sign(), margin=v),
        F.hinge_embedding_loss(x, Y.sign(), margin=v),
        F.cosine_embedding_loss(x, Y, SIGNS, margin=v),
        F.multi_margin_loss(x, LABELS, margin=v),
        F.poisson_nll_loss(x.abs(), Y.abs(), log_input=False, eps=v),
    ),
    "triplets": lambda x, v: F.triplet_margin_loss(x, Y, Y.flip(0), margin=v, swap=True),
    "dropout": lambda x, v: F.dropout(x, v) + F.dropout(x, v) + torch.rand(5),
    "dropout in place": lambda x, v: F.dropout(x * 1, v, inplace=True) + 1,
    "dropout of bfloat16": lambda x, v: F.dropout(x.bfloat16(), v),
    "dropout in evaluation": lambda x, v: F.dropout(x, v, training=False) * 2,
    "dropout of channels": lambda x, v: (
        F.dropout1d(x[None], v),
        F.dropout2d(x[None], v),
        F.feature_alpha_dropout(x, v, True),
    ),
    "alpha dropout": lambda x, v: F.alpha_dropout(x, v, training=True),
    "attention": lambda x, v: F.scaled_dot_product_attention(x[None], Y[None], Y[None], dropout_p=v),
    "checkpoint": lambda x, v: checkpoint(lambda part: F.dropout(part.sin(), v).cos(), x, use_reentrant=False),
    "layer norm": lambda x, v: (F.layer_norm(x, (5,), eps=v), F.group_norm(x[None], 2, eps=v)),
    "batch norm": _batch_norm,
    "instance norm": _instance_norm,
    "normal": lambda x, v: x + torch.normal(0.0, v, (6, 5)) * torch.empty(5).normal_(0, v) + Y.clone().normal_(v, 1.0),
    "uniform": lambda x, v: x + torch.empty(7).uniform_(-v, v)[:5],
    "part of a tensor": _normal_into_part,
    "bernoulli": lambda x, v: x * torch.bernoulli(Y, v) + torch.empty(5).bernoulli_(v) + torch.bernoulli(X, p=v),
    "exponential": lambda x, v: x * torch.empty(5).exponential_(v),
    "initialisation": lambda x, v: x + nn.init.normal_(torch.empty(5), std=v) + nn.init.uniform_(torch.empty(5), -v, v),
    "lerp": lambda x, v: (torch.lerp(x, Y, v), (x * 1).lerp_(Y, v), torch.lerp(Y, x.double().float(), weight=v)),
    "lerp of lists": _lists,
    "powers": lambda x, v: (x.abs() ** v, torch.pow(x.abs(), v), x.abs().pow(exponent=v)),
    "bases": lambda x, v: (v**x, torch.pow(v, x), v ** (x * 0)),
    "norms below one": lambda x, v: (x.norm(p=v), torch.linalg.vector_norm(x, v), x.norm(v, 1), (x * 0).norm(v)),
    "norms below two": lambda x, v: (x.norm(1 + v), torch.linalg.vector_norm(x, ord=1 + v, dim=1), (x * 0).norm(1 + v)),
    "norms above two": lambda x, v: (x.norm(2 + v, 0, True), F.normalize(x, p=2 + v), F.normalize(x, 2 + v, 0)),
    "scaled attention": lambda x, v: (
        F.scaled_dot_product_attention(x[None], Y[None], Y[None], scale=v),
        F.scaled_dot_product_attention(x[None, None], Y[None, None], x[None, None], is_causal=True, scale=v),
    ),
    "no numbers": lambda x, v: (
        torch.nan_to_num(x * X.sign().log(), nan=v, neginf=-v),
        torch.logit(x.sigmoid(), v / 10),
    ),
    "padding": lambda x, v: (F.pad(x, (1, 2), value=v), F.pad(x, (1, 2, 0, 1), "constant", v)),
    "quantiles": lambda x, v: (torch.quantile(x, v, dim=1), x.quantile(v), torch.nanquantile(x, v, keepdim=True)),
    "others": lambda x, v: (
        torch.trapezoid(x, dx=v),
        F.cosine_similarity(x * 0.01, Y, eps=v),
        torch.isclose(x, Y, rtol=v, atol=v),
    ),
    "backward inside": _inside,
    "derivative of a derivative": _twice,
    "autocast": _autocast,
}


def _check(program: Callable[[Tensor, float], Any], numbers: Sequence[float], **options: Any) -> Any:
    compiled = dovetail.compile(program, **{"backend": "aten", **options})
    for seed, number in enumerate(numbers):
        found = []
        for function in (program, compiled):
            set_seed(seed)
            x = X.clone().requires_grad_()
            try:
                result = function(x, number)
            except (RuntimeError, ValueError) as error:
                found.append((type(error), str(error)))
                continue
            backward(result)
            found.append((result, gradients([x]), random_state()))
        same(found[0], found[1], f"number {number}")
    return compiled


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_captures_for_all_numbers(name: str) -> None:
    assert captures(_check(PROGRAMS[name], SCHEDULE, fullgraph=True)) <= 2


@pytest.mark.parametrize(
    "program",
    [
        lambda x, v: F.dropout(x, v) * 2,
        lambda x, v: F.cross_entropy(x, LABELS, label_smoothing=v),
        lambda x, v: F.smooth_l1_loss(x, Y, beta=v),
        lambda x, v: F.huber_loss(x, Y, delta=v),
        lambda x, v: torch.lerp(x.double(), Y.double(), v),
        lambda x, v: x + torch.empty(5).uniform_(-v, v) + torch.empty(5).normal_(0.0, abs(v)),
        lambda x, v: F.batch_norm(x, Y[0].clone(), torch.ones(5), training=False, eps=v),
        lambda x, v: torch.quantile(x, v),
        lambda x, v: x.norm(v),
        lambda x, v: x.norm(1 + v, 1) + x.norm(p=2 - v, dim=1),
        lambda x, v: v ** x.abs(),
        lambda x, v: x.abs() ** v,
        lambda x, v: (x * 0) ** v + (x * 0).norm(v),
        lambda x, v: F.scaled_dot_product_attention(x[None, None], Y[None, None], Y[None, None], scale=v),
    ],
)
def test_numbers_at_which_torch_does_something_else(program: Any) -> None:
    _check(program, (0.3, 0.2, 0.0, 0.1, 1.0, 0.7, -0.1, 0.15, 1.5, 0.4))


def test_a_module_whose_dropout_and_momentum_are_scheduled() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.drop = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.norm(self.first(x)).relu())

    results = []
    for is_compiled in (False, True):
        set_seed(0)
        model = Model()
        run = dovetail.compile(model, backend="aten") if is_compiled else model
        rate = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(6):
            model.drop.p, model.norm.momentum = 0.05 + 0.1 * step, 0.5 - 0.06 * step
            rate.zero_grad()
            loss = run(X).square().mean()
            loss.backward()
            rate.step()
            losses.append(loss.detach())
        results.append((losses, dict(model.state_dict())))
    same(*results)
    assert captures(run) == 2


def test_powers_whose_gradient_is_differentiated_again_hold_the_exponent() -> None:
    def program(x: Tensor, v: float) -> Tensor:
        (gradient,) = torch.autograd.grad((x.abs() ** v).sum(), x, create_graph=True)
        return gradient.square().sum()

    _check(program, (2.3, 1.2, 3.1, 0.7))


@pytest.mark.parametrize("name", ["dropout", "label smoothing", "huber loss", "powers", "bases", "norms above two"])
def test_a_derivative_of_the_next_order_is_of_the_same_number(name: str) -> None:
    program = PROGRAMS[name]
    compiled = dovetail.compile(program, backend="aten")
    for seed, number in enumerate(SCHEDULE[:4]):
        found = []
        for function in (program, compiled):
            set_seed(seed)
            x = X.clone().requires_grad_()
            results = function(x, number)
            results = results if isinstance(results, tuple) else (results,)
            total = torch.stack([(item**3).sum() for item in results]).sum()
            (gradient,) = torch.autograd.grad(total, x, create_graph=True)
            found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
        same(*found, exact=False)


def test_a_transform_holds_the_number() -> None:
    def program(x: Tensor, v: float) -> Tensor:
        return torch.func.vmap(lambda row: F.huber_loss(row, Y[0], delta=v))(x)

    _check(program, SCHEDULE[:3])


def test_what_is_not_known_of_a_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers_by_value, "dependent_floats", lambda *call: {0.123})
    assert captures(_check(lambda x, v: F.dropout(x, v) * 2, SCHEDULE)) >= len(SCHEDULE)
    monkeypatch.setattr(numbers_by_value, "dependent_floats", lambda *call: None)
    assert captures(_check(lambda x, v: F.huber_loss(x, Y, delta=v), SCHEDULE)) >= len(SCHEDULE)


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (torch.dropout, (X, 0.25, True), {0.75}),
        (torch.lerp, (X, Y, 0.25), {0.25, 0.75}),
        (torch.celu, (X, 0.25), {0.25, 4.0}),
        (torch.sin, (X,), set()),
        (torch.dropout, (X, 0.25, "no flag"), None),
    ],
)
def test_floats_that_depend_on_another(function: Any, args: tuple[Any, ...], expected: Any) -> None:
    given = [item.clone().requires_grad_() if isinstance(item, Tensor) else item for item in args]
    before = random_state()
    floats = {id(item): item for item in given if type(item) is float}
    assert floats_given_on.dependent_floats(function, given, {}, floats) == expected
    same(random_state(), before)
