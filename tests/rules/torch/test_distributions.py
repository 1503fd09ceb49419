"""``torch.distributions`` with its checks of arguments: one graph, eager's numbers, gradients, random state and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions
from torch.distributions import kl_divergence, transforms

import dovetail
from tests.differential import same

Make = Callable[..., distributions.Distribution]


@pytest.fixture(autouse=True)
def _validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile switches it off for the whole process."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


def _normals(mean: torch.Tensor, spread: torch.Tensor) -> distributions.Distribution:
    return distributions.Normal(mean, spread.exp())


def _tanh(mean: torch.Tensor, spread: torch.Tensor) -> distributions.Distribution:
    return distributions.TransformedDistribution(_normals(mean, spread), [transforms.TanhTransform(cache_size=1)])


def _matrix(mean: torch.Tensor, spread: torch.Tensor, **how: Any) -> distributions.Distribution:
    square = spread.unsqueeze(-1) * spread.unsqueeze(-2) + 2 * torch.eye(3)
    if how:
        return distributions.MultivariateNormal(mean, covariance_matrix=square)
    return distributions.MultivariateNormal(mean, scale_tril=torch.linalg.cholesky(square))


def _mixture(mean: torch.Tensor, spread: torch.Tensor) -> distributions.Distribution:
    return distributions.MixtureSameFamily(distributions.Categorical(logits=mean), _normals(mean, spread))


CASES: dict[str, Make] = {
    "normal": _normals,
    "log normal": lambda a, b: distributions.LogNormal(a, b.exp()),
    "categorical": lambda a, b: distributions.Categorical(logits=a + b),
    "categorical by probabilities": lambda a, b: distributions.Categorical((a + b).exp()),
    "one hot": lambda a, b: distributions.OneHotCategoricalStraightThrough(logits=a + b),
    "bernoulli": lambda a, b: distributions.Bernoulli((a + b).sigmoid()),
    "beta": lambda a, b: distributions.Beta(a.exp(), b.exp()),
    "gamma": lambda a, b: distributions.Gamma(a.exp(), b.exp()),
    "dirichlet": lambda a, b: distributions.Dirichlet((a + b).exp()),
    "student": lambda a, b: distributions.StudentT(torch.tensor(3.0), a, b.exp()),
    "uniform": lambda a, b: distributions.Uniform(a, a + b.exp()),
    "poisson": lambda a, b: distributions.Poisson((a + b).exp()),
    "multivariate by factor": _matrix,
    "multivariate by covariance": lambda a, b: _matrix(a, b, covariance=True),
    "independent": lambda a, b: distributions.Independent(_normals(a, b), 1),
    "transformed": _tanh,
    "mixture": _mixture,
    "expanded": lambda a, b: _normals(a, b).expand((2, 4, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(20)
def test_one_graph(name: str) -> None:
    make = CASES[name]

    def program(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        one = make(a, b)
        drawn = one.rsample() if one.has_rsample else one.sample()
        found = [drawn, one.log_prob(drawn.detach()), one.sample((2,))]
        if name not in ("transformed", "mixture", "poisson", "log normal"):
            found += [one.entropy(), one.mean, one.variance]
        if name not in ("mixture", "student"):
            found.append(kl_divergence(one, make(b, a)))
        return found

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for size in (4, 5):
        if name == "expanded" and size != 4:
            continue
        found = []
        for function in (program, compiled):
            torch.manual_seed(size)
            inputs = [torch.randn(size, 3, requires_grad=True) for _ in range(2)]
            results = function(*inputs)
            loss = sum(item.sum() for item in results if item.requires_grad)
            assert isinstance(loss, torch.Tensor)
            slopes = torch.autograd.grad(loss, inputs, allow_unused=True)
            found.append((results, torch.rand(1), slopes))
        same(found[0][:2], found[1][:2])
        # A parameter's gradient is a sum over the results, in another order.
        same(found[0][2], found[1][2], exact=False)


def _outcome(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    try:
        found = function(*args)
    except (ValueError, NotImplementedError) as error:
        found = f"{type(error).__name__}: {error}"
    return found, torch.rand(1)


def test_bad_parameters_are_eagers_error() -> None:
    log: list[str] = []

    def program(mean: torch.Tensor, spread: torch.Tensor, value: torch.Tensor) -> Any:
        log.append("called")
        noise = torch.rand(2)
        return (
            distributions.Normal(mean, spread).rsample(),
            distributions.Categorical(spread.abs()).log_prob(value),
            noise,
        )

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    good, nan = torch.ones(3), torch.full((3,), float("nan"))
    one = torch.tensor(1)
    for args in ((good, good, one), (good, -good, one), (nan, good, one), (good, good, one + 2), (good, good, one)):
        found = []
        for function in (program, compiled):
            log.clear()
            found.append((_outcome(function, *args), list(log)))
        same(*found)


def test_a_check_that_the_program_handles() -> None:
    def program(mean: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        try:
            normal = distributions.Normal(mean, spread)
        except ValueError:
            return mean * 0
        return normal.log_prob(mean)

    compiled = dovetail.compile(program, backend="aten")
    for sign in (1, -1, 1, -1):
        args = torch.ones(3), sign * torch.ones(3)
        same(program(*args), compiled(*args))


def test_the_switch_is_seen() -> None:
    def program(mean: torch.Tensor) -> torch.Tensor:
        return distributions.Laplace(mean, -mean).mean

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    good, bad = -torch.ones(2), torch.ones(2)
    same(program(good), compiled(good))
    try:
        distributions.Distribution.set_default_validate_args(False)
        same(program(bad), compiled(bad))
    finally:
        distributions.Distribution.set_default_validate_args(True)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        compiled(bad)


def test_matrices_that_are_not_symmetric_not_positive_or_not_square() -> None:
    def program(matrix: torch.Tensor) -> torch.Tensor:
        # Without a check of the sizes before it.
        return distributions.constraints.positive_definite.check(matrix)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    good = torch.eye(3).repeat(2, 1, 1)
    skew, negative, hole = good.clone(), good.clone(), good.clone()
    skew[0, 0, 1], negative[1, 1, 1], hole[0, 0, 0] = 0.5, -1.0, float("nan")
    for matrix in (good, skew, negative, hole, good[:, :2], good[0]):
        same(program(matrix), compiled(matrix))


class _Own(distributions.Normal):
    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return super().log_prob(value) * 2


def test_a_divergence_that_is_registered_later() -> None:
    def program(mean: torch.Tensor) -> torch.Tensor:
        own = _Own(mean, mean.exp())
        return kl_divergence(own, own) + own.log_prob(mean)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.ones(2)
    same(program(x), compiled(x))
    distributions.register_kl(_Own, _Own)(lambda one, other: one.loc + 7)
    same(program(x), compiled(x))
    same(torch.full((2,), 8.0) + _Own(x, x.exp()).log_prob(x), compiled(x))


def test_a_divergence_that_there_is_not() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return kl_divergence(distributions.Cauchy(x, x), distributions.Gamma(x, x))

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    same(_outcome(program, torch.ones(2)), _outcome(compiled, torch.ones(2)))


def test_distributions_come_in_and_go_out() -> None:
    def program(given: distributions.Distribution, x: torch.Tensor) -> Any:
        made = distributions.Categorical(logits=x)
        return given.log_prob(x), given.sample(), made

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    given = distributions.Normal(torch.zeros(3), torch.ones(3))
    for size in (2, 3, 4):
        x = torch.randn(size, 3)
        (*expected, eager), state = _outcome(program, given, x)[0], None
        (*found, made), state = _outcome(compiled, given, x)[0], state
        same(expected, found)
        assert vars(made).keys() == vars(eager).keys() and made.batch_shape == eager.batch_shape
        same(eager.probs, made.probs)


def test_sampling_until_accepted_breaks_once() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return distributions.VonMises(x, x.exp()).sample() * 2

    compiled = dovetail.compile(program, backend="aten")
    with pytest.warns(dovetail.errors.GraphBreakWarning, match="draws again"):
        same(_outcome(program, torch.ones(3)), _outcome(compiled, torch.ones(3)))
    assert dovetail.events_of(compiled).count("graph break") == 1
