"""A fixed slice of the operator database in the default tests, and checks of the harness itself."""

from __future__ import annotations

import json

import pytest
import torch

from tests.conformance import compilers, opinfo_runner
from tests.differential import clone_inputs

SLICE = """
add mul div.no_rounding_mode pow exp log sigmoid tanh sqrt clamp where maximum abs neg
matmul bmm addmm mv einsum linalg.norm linalg.solve
sum mean var prod logsumexp amax max.reduction_with_dim argmax cumsum sort topk unique_consecutive
cat stack split chunk reshape transpose permute expand squeeze unsqueeze flip roll tril
index_select gather scatter index_put masked_fill __getitem__ masked_select
softmax log_softmax nn.functional.linear nn.functional.conv2d nn.functional.layer_norm nn.functional.batch_norm
nn.functional.embedding nn.functional.gelu nn.functional.relu nn.functional.cross_entropy nn.functional.mse_loss
nn.functional.dropout nn.functional.max_pool2d nn.functional.scaled_dot_product_attention
zeros_like ones_like to
""".split()


@pytest.mark.parametrize("name", SLICE)
@pytest.mark.sampled(10)
def test_operator(name: str) -> None:
    (result,) = opinfo_runner.run_here([name], compilers.COMPILERS["dovetail"], samples=1)
    for variant in opinfo_runner.VARIANTS:
        for sample in result.samples[variant]:
            assert sample.verdict in ("passed", "eager cannot", "not applicable"), (variant, sample)
    assert result.verdict("forward") == "passed"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["sin", "mul", "matmul", "addmm", "prod", "cumprod", "masked_fill", "masked_select", "cov"]
)
def test_operator_twice_differentiated(name: str) -> None:
    (result,) = opinfo_runner.run_here([name], compilers.COMPILERS["dovetail"], samples=1, direction="double")
    assert result.verdict("double") == "passed", result.samples


def test_the_double_direction_finds_a_wrong_second_derivative() -> None:
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * x.cos().detach()

    x = torch.rand(3, requires_grad=True)
    found = opinfo_runner.check_call(torch.sin, (x,), lambda _: Off.apply, backward=True, double=True)
    assert found.verdict == "wrong"
    assert opinfo_runner.check_call(torch.sin, (x,), lambda _: Off.apply, backward=True).verdict == "passed"


def test_another_order_of_a_sum_is_told_from_another_formula() -> None:
    class Sine(torch.autograd.Function):
        """The sine, with one rounding where ``clumsy`` has several; another function where ``error`` is not zero."""

        error = 0.0

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * x.cos() * (1 + Sine.error)

    def clumsy(x):
        return 3 * x.sin() - x.sin() - x.sin()

    x = torch.rand(64, requires_grad=True)

    def verdict(**rest):
        found = opinfo_runner.check_call(
            clumsy, (x,), lambda _: lambda x: 3 * Sine.apply(x) - 2 * Sine.apply(x), **rest
        )
        return found.verdict, found.kind

    assert verdict(backward=True, double=True) == ("passed", "by rounding")
    # The criterion is for second derivatives only.
    assert verdict(backward=True)[0] == "wrong"
    # Within the tolerances for float32, and still another formula.
    Sine.error = 1e-7
    assert verdict(backward=True, double=True) == ("wrong", "values, by rounding")


def _verdict(function, broken, *values, backward: bool = False) -> tuple[str, str]:
    found = opinfo_runner.check_call(function, values, broken, backward=backward)
    return found.verdict, found.kind


def test_harness_accepts_eager() -> None:
    for result in opinfo_runner.run_here(["add", "cat", "sort"], lambda function: function):
        assert result.verdict("forward") == result.verdict("backward") == "passed", result


@pytest.mark.parametrize(
    ("function", "broken", "kind"),
    [
        (torch.sin, lambda x: torch.sin(x) * (1 + 1e-6), "values, by rounding"),
        (torch.zeros_like, lambda x: -torch.zeros_like(x), "values, by rounding"),
        (torch.sin, lambda x: torch.sin(x).double(), "dtype"),
        (torch.sin, lambda x: torch.sin(x)[None], "shape"),
        (torch.sin, lambda x: torch.sin(x).t().contiguous().t(), "strides"),
        (torch.sin, lambda x: torch.sin(x).requires_grad_(), "requires_grad"),
        (torch.sin, lambda x: (torch.sin(x),), "type"),
        (torch.sin, lambda x: (torch.sin(x), x.add_(1))[0], "values"),
        (torch.sin, lambda x: (torch.rand(1), torch.sin(x))[1], "random state"),
    ],
)
def test_harness_finds_what_is_wrong(function, broken, kind: str) -> None:
    value = torch.linspace(0.1, 0.9, 6).reshape(2, 3)
    assert _verdict(function, lambda _: broken, value) == ("wrong", kind)


def test_harness_finds_a_lost_view_and_a_lost_identity() -> None:
    value = torch.ones(2, 3)
    assert _verdict(lambda x: x.reshape(6), lambda f: lambda x: f(x).clone(), value) == ("wrong", "aliasing")
    assert _verdict(lambda x: x.relu_(), lambda f: lambda x: f(x).view_as(x), value) == ("wrong", "aliasing")


def test_harness_finds_a_wrong_and_a_lost_gradient() -> None:
    value = torch.ones(3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    doubled = lambda function: lambda x, y: function(Doubled.apply(x), y)  # noqa: E731
    assert _verdict(torch.mul, doubled, value, other, backward=True) == ("wrong", "values")
    lost = lambda function: lambda x, y: function(x, y.detach())  # noqa: E731
    assert _verdict(torch.mul, lost, value, other, backward=True) == ("wrong", "type")


def test_harness_tells_a_refusal_from_an_error() -> None:
    from dovetail.errors import GraphBreakError

    def refuse(function):
        def compiled(x):
            raise GraphBreakError("no")

        return compiled

    def fail(function):
        def compiled(x):
            raise KeyError("no")

        return compiled

    assert _verdict(torch.sin, refuse, torch.ones(2)) == ("refused", "GraphBreakError")
    assert _verdict(torch.sin, fail, torch.ones(2)) == ("error", "KeyError")
    assert _verdict(lambda x: x.nothing, refuse, torch.ones(2)) == ("eager cannot", "AttributeError")


def test_harness_finds_a_fall_back_to_eager() -> None:
    import dovetail

    def plain(function):
        return dovetail.compile(lambda x: (open, print(end=""), function(x))[2], backend="aten")

    with pytest.warns(dovetail.errors.EagerFallbackWarning):
        assert _verdict(torch.sin, plain, torch.ones(2)) == ("error", "not compiled")


def test_harness_finds_a_refusal_that_changed_an_input() -> None:
    def refuse(function):
        def compiled(x):
            x.zero_()
            raise RuntimeError("too late")

        return compiled

    assert "values" in opinfo_runner.check_refusal_leaves_inputs(torch.sin, (torch.ones(2),), refuse)


def test_clone_keeps_strides_sharing_and_requires_grad() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    leaf = torch.ones(2, requires_grad=True)
    values = (base.t(), base[0], leaf * 2, leaf, [leaf])
    copies = clone_inputs(values)
    assert copies[0].stride() == (1, 4)
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr() != base.data_ptr()
    assert copies[2].is_leaf and copies[2].requires_grad
    assert copies[4][0] is copies[3] is not leaf


def test_tolerance_where_eager_is_not_deterministic() -> None:
    calls = iter(range(1000))

    def wavering(x):
        return x + next(calls) * 1e-7

    assert _verdict(wavering, lambda function: function, torch.ones(2)) == ("passed", "")


@pytest.mark.slow
def test_command_line_survives_a_crash(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "results.json"
    assert opinfo_runner.main(["--ops", "sin,cos", "-j", "2", "--compiler", "identity", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["totals"]["forward"]["passed"] == 2
    assert "100.0" in capsys.readouterr().out
    results = opinfo_runner.run_parallel(["sin", "no such operator", "cos"], "identity", timeout=60)
    assert [result.verdict("forward") for result in results] == ["passed", "error", "passed"]
