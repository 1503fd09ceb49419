"""Sharp edges of training, by name; eager is the oracle."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail import errors
from tests.differential import check, check_calls, same


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).logsumexp(-1).sum()


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.norm = torch.nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


def test_tied_weights_and_unused_parameters() -> None:
    check_calls(Tied(), [(torch.arange(6),)] * 2)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_statistics(training: bool) -> None:
    check_calls(Norm().train(training), [(torch.randn(2, 2, 6, 6),)] * 2)


@pytest.mark.slow
def test_batch_norm_under_inductor() -> None:
    check_calls(Norm(), [(torch.randn(2, 2, 6, 6),)] * 2, backend="inductor", exact=False)


def test_eager_backend_runs_the_program() -> None:
    check_calls(Norm(), [(torch.randn(2, 2, 6, 6),)] * 2, backend="eager")
    joint = dovetail.capture(Norm(), (torch.randn(2, 2, 6, 6),))
    assert "conv2d" in str(joint.capture.program)


def test_retain_graph_and_accumulation() -> None:
    model, twin = Tied(), None
    twin = copy.deepcopy(model)
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    for net, call in ((model, model), (twin, compiled)):
        loss = call(torch.arange(5))
        loss.backward(retain_graph=True)
        loss.backward()
        call(torch.arange(5)).backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert net.unused.weight.grad is None
    assert torch.equal(model.embed.weight.grad, twin.embed.weight.grad)  # type: ignore[arg-type]


def test_hooks_on_parameters_and_outputs() -> None:
    seen: list[list[float]] = []
    for wrap in (lambda m: m, lambda m: dovetail.compile(m, backend="aten", fullgraph=True)):
        torch.manual_seed(0)
        layer = torch.nn.Linear(2, 1)
        layer.weight.register_hook(lambda g: g * 2)
        out = wrap(layer)(torch.ones(3, 2))
        out.register_hook(lambda g: g * 3)
        out.sum().backward()
        seen.append(layer.weight.grad.flatten().tolist())
    assert seen[0] == seen[1]


def test_methods_that_return_the_module_return_the_compiled_one() -> None:
    class Named(torch.nn.Linear):
        float = "an attribute"

    compiled = dovetail.compile(Named(2, 2), backend="aten")
    for name, args in (
        ("eval", ()),
        ("train", ()),
        ("requires_grad_", (False,)),
        ("to", ("cpu",)),
        ("cpu", ()),
        ("double", ()),
    ):
        assert getattr(compiled, name)(*args) is compiled
    assert compiled.weight.dtype is torch.float64
    assert compiled.float == "an attribute"
    listed = dovetail.compile(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), backend="aten")
    assert len(listed) == 2
    assert list(listed) == [listed[0], listed[1]]
    with pytest.raises(TypeError):
        iter(compiled)


def test_state_dict_deepcopy_and_pickle() -> None:
    model = Norm()
    compiled = dovetail.compile(model, backend="aten")
    x = torch.randn(2, 2, 6, 6)
    compiled(x)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in model.named_parameters()]
    fresh = dovetail.compile(Norm(), backend="aten")
    fresh.load_state_dict(compiled.state_dict())
    compiled.eval(), fresh.eval()
    assert not model.training
    assert torch.equal(fresh(x), compiled(x))
    twin = copy.deepcopy(compiled)
    twin.conv.weight.data.zero_()
    assert model.conv.weight.abs().sum() > 0
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), compiled(x))
    assert torch.equal(pickle.loads(pickle.dumps(compiled))(x), compiled(x))
    assert isinstance(compiled, torch.nn.Module)


def test_inputs_written_to() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x[0] = 7
        return x + 1

    check(f, torch.ones(3))

    def through(w: torch.Tensor) -> torch.Tensor:
        x = w * 1
        y = dovetail_compiled(x)
        return y.sum() + x.sum()

    dovetail_compiled: Any = f
    w = torch.ones(3, requires_grad=True)
    through(w).backward()
    expected, w.grad = w.grad, None
    dovetail_compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    through(w).backward()
    assert torch.equal(expected, w.grad)  # type: ignore[arg-type]


def test_inputs_written_to_that_share_memory_are_not_mixed_up() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    compiled = dovetail.compile(f, backend="aten")
    base = torch.zeros(4)
    assert compiled(torch.zeros(4), torch.zeros(4)).tolist() == [1, 1, 1, 1]
    with pytest.warns(errors.EagerFallbackWarning, match="shares memory"):
        assert compiled(base, base.view(4)).tolist() == [2, 2, 2, 2]


def test_an_in_place_write_on_a_returned_view_reaches_the_other() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y.view(-1)

    results = []
    for call in (f, dovetail.compile(f, backend="aten", fullgraph=True)):
        x = torch.ones(2, 2, requires_grad=True)
        y, view = call(x)
        assert view._base is y
        view.mul_(3)
        y.sum().backward()
        results.append((y.tolist(), x.grad.tolist()))  # type: ignore[union-attr]
    assert results[0] == results[1]


def test_same_tensor_twice_to_a_custom_function() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return g * b * 10, g * a * 100

    check(lambda x: Product.apply(x, x), torch.ones(3, requires_grad=True))


def test_second_derivative_through() -> None:
    compiled = dovetail.compile(lambda x: x.pow(3).sum(), backend="aten")
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], torch.full((2,), 6.0))


def test_saved_tensor_written_to_before_backward_is_eagers_error() -> None:
    compiled = dovetail.compile(lambda x: (x * x).sum(), backend="aten")
    x = torch.ones(2, requires_grad=True)
    loss = compiled(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_input() -> None:
    with pytest.raises(errors.UnknownBackendError, match="inductor"):
        dovetail.compile(torch.sin, backend="inductr")
    with pytest.raises(errors.OptionError, match="fullgraph"):
        dovetail.compile(torch.sin, fulgraph=True)
    with pytest.raises(errors.NotCallableError):
        dovetail.compile(3)
    on_meta = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(RuntimeError, match="meta") as eager:
        on_meta(torch.ones(1, 2))
    with pytest.raises(RuntimeError) as ours:
        dovetail.compile(on_meta, backend="aten")(torch.ones(1, 2))
    assert str(ours.value) == str(eager.value)

    def broken(graph: Any, inputs: Any, *, kind: str, options: Any) -> Any:
        raise ValueError("cannot")

    model = torch.nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(errors.BackendError, match="cannot"):
        dovetail.compile(model, backend=broken)(torch.ones(1, 2))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(errors.BackendError):
        dovetail.compile(model, backend=lambda graph, inputs, *, kind, options: lambda values: [])(torch.ones(1, 2))


def test_recompile_limit_runs_eagerly_with_one_warning() -> None:
    compiled = dovetail.compile(lambda x, k: x * k, backend="aten", recompile_limit=2, dynamic=False)
    x = torch.ones(1)
    assert [compiled(x, k).item() for k in (1, 2)] == [1, 2]
    with pytest.warns(errors.RecompileLimitWarning):
        assert compiled(x, 3).item() == 3
    assert compiled(x, 4).item() == 4


def test_unsupported_versions() -> None:
    from dovetail.versions import check_versions

    for python, torch_version in (((3, 10), "2.13.0"), ((3, 16), "2.13.0"), ((3, 11), "2.10.1"), ((3, 11), "2.16.0")):
        with pytest.raises(errors.UnsupportedVersionError):
            check_versions(python, torch_version)
    for minor in (11, 12, 13, 14, 15):
        check_versions((3, minor), "2.15.0+cu130")


def test_a_build_without_the_global_interpreter_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.versions import check_versions

    monkeypatch.setattr(sys, "abiflags", "t")
    with pytest.raises(errors.UnsupportedVersionError, match=r"3\.\d+t(?s:.*)global interpreter lock"):
        check_versions()


def test_two_versions_of_torch_on_the_path_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.versions import check_versions

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('it is not imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_versions()
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(errors.UnsupportedVersionError, match=r"mixed: 2\.9\.1\+cpu is imported"):
        check_versions()


@pytest.mark.parametrize("name", ["typing_extensions", "sympy", "mpmath", "networkx"])
def test_a_torch_without_its_own_dependencies_is_refused_at_import(name: str) -> None:
    program = f"""
import importlib.util, sys
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {name!r} else plain(name, *rest)
try:
    import dovetail
except ImportError as error:
    print("torch" in sys.modules, "dovetail" in sys.modules, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"False False torch is installed without {name}") and not done.stderr


def test_dropout_of_a_transposed_tensor_draws_eagers_mask() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.nn.functional.dropout2d(x.permute(0, 3, 1, 2), 0.4)
        return torch.nn.functional.dropout(x.permute(0, 3, 1, 2), 0.4), images

    check(function, torch.randn(2, 8, 8, 16, requires_grad=True))


def _two_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x.sin()
    return hidden, hidden * 2


@pytest.mark.parametrize(
    "ask", [lambda hidden: hidden.register_hook(lambda gradient: gradient * 2), torch.Tensor.retain_grad]
)
def test_gradient_of_an_output_that_feeds_another(ask: Callable[[torch.Tensor], Any]) -> None:
    compiled = dovetail.compile(_two_outputs, backend="aten", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    hidden, result = compiled(x)
    ask(hidden)
    result.sum().backward()
    same(x.detach().cos() * (2 if hidden.retains_grad else 4), x.grad, exact=False)
    assert not hidden.retains_grad or torch.equal(hidden.grad, torch.full((2,), 2.0))


def test_gradient_of_an_output_that_feeds_no_other() -> None:
    compiled = dovetail.compile(_two_outputs, backend="aten", fullgraph=True)
    hidden, result = compiled(torch.ones(2, requires_grad=True))
    seen: list[torch.Tensor] = []
    result.register_hook(seen.append)
    (hidden.sum() + result.sum()).backward()
    assert torch.equal(seen[0], torch.ones(2))
