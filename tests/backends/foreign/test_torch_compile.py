"""``torch.compile(backend="dovetail")``: torch captures, Dovetail's stages compile; results, gradients and guards are eager's."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.aot.compile_joint import compile_joint
from dovetail.backends.foreign import torch_compile
from dovetail.backends.foreign.torch_compile import TorchBackend
from dovetail.backends.inductor.job import Job
from dovetail.backends.inductor.workarounds import give_sizes_as_inputs
from dovetail.errors import BackendError, EagerFallbackWarning, OptionError
from tests.differential import backward, check_calls, same

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compilations(backend: TorchBackend) -> int:
    return sum(event.name == "compile" for event in backend.events.events)


def fall_backs(backend: TorchBackend) -> list[str]:
    return [str(event) for event in backend.events.events if event.name == "runs as torch captured it"]


def compare(
    function: Callable[..., Any],
    *calls: tuple[Any, ...],
    inner: Any = "aten",
    exact: bool = True,
    dynamic: bool | None = None,
    refuses: bool = False,
) -> TorchBackend:
    """Call after call, eager and compiled from the same state: results, arguments, gradients and random state agree."""
    backend = dovetail.torch_backend(inner, fullgraph=not refuses)

    def compiler(function: Callable[..., Any]) -> Any:
        return torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)

    check_calls(function, calls, compiler=compiler, exact=exact)
    return backend


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(8, 3)
    )


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dynamic", "expected"), [(False, 4), (None, 2), (True, 1)])
def test_training_with_changing_batches(dynamic: bool | None, expected: int) -> None:
    backend = compare(network(), *[(leaf(size, 4),) for size in (5, 6, 7, 9)], dynamic=dynamic)
    assert compilations(backend) == expected


@pytest.mark.slow
def test_training_with_inductor() -> None:
    backend = compare(network(), *[(leaf(size, 4),) for size in (5, 6, 7)], inner="inductor", exact=False)
    assert compilations(backend) == 2


def test_inference() -> None:
    with torch.no_grad():
        compare(network().eval(), (torch.randn(3, 4),), (torch.randn(5, 4),))


def test_grad_mode_is_the_callers_guard() -> None:
    backend = dovetail.torch_backend("aten", fullgraph=True)
    compiled = torch.compile(network(), backend=backend)
    with torch.no_grad():
        assert not compiled(torch.ones(2, 4)).requires_grad
    assert compiled(torch.ones(2, 4)).requires_grad


def test_gradients_accumulate_and_a_graph_is_retained() -> None:
    weight = leaf(3, 3)
    twin = weight.detach().clone().requires_grad_()
    compiled = torch.compile(lambda x: (x @ x).tanh(), backend=dovetail.torch_backend("aten", fullgraph=True))
    for parameter, function in ((weight, lambda x: (x @ x).tanh()), (twin, compiled)):
        first = function(parameter)
        first.sum().backward(retain_graph=True)
        first.sum().backward()
        function(parameter).pow(2).sum().backward()
    same(weight.grad, twin.grad, "gradient")


def test_writes_to_inputs() -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        x[0].mul_(2)
        return x * y

    backend = compare(write, (torch.randn(3, 2), leaf(3, 2)), (torch.randn(3, 2), leaf(3, 2)))
    assert compilations(backend) == 1


def test_a_write_to_an_intermediate_of_the_caller() -> None:
    def run(function: Callable[..., Any], start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = start * 2
        return function(middle), middle

    def write(x: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return x.sin()

    compiled = torch.compile(write, backend=dovetail.torch_backend("aten", fullgraph=True))
    first, second = leaf(4), leaf(4)
    expected, actual = run(write, first), run(compiled, second)
    same(expected, actual)
    backward(expected)
    backward(actual)
    same(first.grad, second.grad, "gradient")


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
@pytest.mark.parametrize("separate_first", [True, False])
def test_inputs_that_share_memory(separate_first: bool) -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    def arguments(separate: bool) -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.arange(6.0)
        return (base[:4], base.clone()[2:]) if separate else (base[:4], base[2:])

    compiled = torch.compile(write, backend=dovetail.torch_backend("aten"))
    for separate in (separate_first, not separate_first):
        expected_args, actual_args = arguments(separate), arguments(separate)
        same(write(*expected_args), compiled(*actual_args))
        same(list(expected_args), list(actual_args))


def test_a_leaf_after_an_intermediate() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x * 3

    compiled = torch.compile(write, backend=dovetail.torch_backend("aten"))
    start = leaf(3)
    same(write(start * 1), compiled(start * 1))
    first, second = leaf(3), leaf(3)
    same(write(first), compiled(second))
    same(first.detach(), second.detach(), "written leaf")


def test_outputs_that_alias() -> None:
    def alias(x: torch.Tensor) -> Any:
        y = x.sin()
        return x, x.view(-1), y, y[1:], y.t(), y.detach()

    compare(alias, (leaf(3, 2),), (leaf(3, 2),))
    compare(alias, (leaf(3, 2),), (leaf(5, 2),), (leaf(7, 2),), dynamic=True)


def test_numbers_in_and_out() -> None:
    def numbers(x: torch.Tensor, count: int, factor: float) -> Any:
        return x.sum() * count * factor + x.shape[0], x.view(-1)[:count], x.shape[0] + count, "text", None

    calls = [(leaf(size, 3), count, factor) for size, count, factor in ((4, 7, 1.5), (5, 8, 2.5), (6, 2, -3.0))]
    backend = compare(numbers, *calls, dynamic=True)
    assert compilations(backend) <= 2
    compare(lambda x, n: x * n, (leaf(2), 5), (leaf(2), -3), (leaf(2), 0), (leaf(2), 1), (leaf(2), -7), dynamic=True)


def test_random_numbers_are_eagers() -> None:
    def random(x: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
        return mask * torch.bernoulli(torch.full_like(x, 0.5).detach()) + torch.randn(3)

    compare(random, (leaf(4, 3),), (leaf(4, 3),))


def test_no_grad_and_autocast_regions() -> None:
    weight = leaf(4, 4)

    def regions(x: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = x.abs().max()
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ weight
        return (y.float() / scale).sum(), scale

    compare(regions, (leaf(3, 4),), (leaf(3, 4),))
    with torch.autocast("cpu", torch.bfloat16):
        compare(lambda x: (x @ weight).sum(), (leaf(3, 4),))


def test_grad_mode_that_the_function_leaves_changed() -> None:
    def switch(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.set_grad_enabled(False)
        return y

    compiled = torch.compile(switch, backend=dovetail.torch_backend("aten"))
    for _ in range(2):
        try:
            result = compiled(leaf(3))
            assert not torch.is_grad_enabled()
            assert result.requires_grad
        finally:
            torch.set_grad_enabled(True)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() * 7


def test_a_custom_function_and_a_checkpoint() -> None:
    compare(lambda x: _Scaled.apply(x).sin(), (leaf(3),), (leaf(3),))
    linear = torch.nn.Linear(3, 3)

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(lambda y: self.linear(y).sigmoid(), x, use_reentrant=False)

    compare(Checkpointed(), (leaf(2, 3),), (leaf(2, 3),))


def test_some_outputs_without_a_gradient() -> None:
    def several(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.sin() * y, y.exp(), x.argmax(), (x > 0).sum()

    backend = dovetail.torch_backend("aten", fullgraph=True)
    compiled = torch.compile(several, backend=backend, dynamic=True)
    for size in (3, 5, 4):
        for chosen in ((0,), (1,), (0, 1)):
            args = [leaf(size), leaf(size)]
            twins = [value.detach().clone().requires_grad_() for value in args]
            for function, values in ((several, args), (compiled, twins)):
                sum(function(*values)[index].sum() for index in chosen).backward()
            for left, right in zip(args, twins, strict=True):
                same(left.grad, right.grad, "gradient")
    assert compilations(backend) == 1


def test_a_module_with_its_parameters_in_the_graph() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    twin = copy.deepcopy(graph)
    first, second = leaf(5, 4), leaf(5, 4)
    run = dovetail.torch_backend("aten", fullgraph=True)(twin, [second])
    for _ in range(2):
        expected, actual = graph(first), run(second)
        same(expected, actual)
        backward(expected)
        backward(actual)
    for left, right in zip([first, *graph.parameters()], [second, *twin.parameters()], strict=True):
        same(left.grad, right.grad, "gradient")
    for left, right in zip(graph.buffers(), twin.buffers(), strict=True):
        same(left, right, "buffer")


@torch.library.custom_op("dovetail_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _halved_setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _halved_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    # Eager's own formula depends on the size, which torch's capture of the forward never sees.
    return gradient * (10.0 if ctx.saved_tensors[0].shape[0] > 6 else 0.5)


halved.register_autograd(_halved_backward, setup_context=_halved_setup)


def test_a_branch_on_a_size_in_the_backward_recompiles() -> None:
    backend = compare(lambda x: halved(x).sum(), *[(leaf(size),) for size in (3, 5, 6, 8, 9, 4)], dynamic=True)
    assert compilations(backend) == 2


def test_a_branch_on_a_size_in_a_decomposition_of_the_inner_backend_recompiles() -> None:
    from dovetail.backends import Backend
    from dovetail.backends.aten import compile_aten

    def decomposed_sin(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.cos(x) * 0 + 5 if x.shape[0] > 6 else torch.ops.aten.tanh(x)

    table = {torch.ops.aten.sin.default: decomposed_sin}
    inner = Backend("branching", compile_aten, decompositions=lambda: table)
    compiled = torch.compile(torch.sin, backend=dovetail.torch_backend(inner, fullgraph=True), dynamic=True)
    for size in (4, 5, 7, 9, 3):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), decomposed_sin(x))


def test_a_size_that_the_inner_backend_insists_on_recompiles() -> None:
    seen: list[int] = []

    def insisting(graph: Any, inputs: Any, *, kind: str, options: Any) -> Any:
        size = next(int(value.shape[0]) for value in inputs if isinstance(value, torch.Tensor) and value.dim())
        seen.append(size)
        return lambda values: [torch.full((size,), 2.0) * values[-1]]

    compiled = torch.compile(lambda x: x * 2.0, backend=dovetail.torch_backend(insisting, fullgraph=True), dynamic=True)
    with torch.no_grad():
        for size in (4, 5, 4):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 2.0))
    assert seen == [4, 5]


def test_passes_edit_the_joint_graph() -> None:
    def tripled(joint: dovetail.JointGraph) -> None:
        for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.tanh.default

    compiled = torch.compile(lambda x: x.sin(), backend=dovetail.torch_backend("aten", passes=[tripled]))
    x = torch.randn(3)
    assert torch.equal(compiled(x), x.tanh())


def test_the_program_runs_as_torch_captured_it() -> None:
    compare(network(), (leaf(3, 4),), (leaf(5, 4),), inner="eager")


def test_what_cannot_be_taken_runs_eagerly_or_is_refused() -> None:
    def sparse(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(x, table, sparse=True).sum()

    table = torch.nn.Parameter(torch.randn(4, 3))
    with pytest.warns(EagerFallbackWarning, match="sparse"):
        torch.compile(sparse, backend=dovetail.torch_backend("aten"))(torch.tensor([1, 2])).backward()
    assert table.grad is not None and table.grad.is_sparse
    torch._dynamo.reset()
    with pytest.raises(Exception, match="sparse"):
        torch.compile(sparse, backend=dovetail.torch_backend("aten", fullgraph=True))(torch.tensor([1, 2]))


def test_an_input_that_is_neither_tensor_nor_size_runs_eagerly() -> None:
    graph = torch.fx.symbolic_trace(lambda x, n: x * n)
    with pytest.warns(EagerFallbackWarning, match="is a int, neither a tensor nor a size"):
        run = dovetail.torch_backend("aten")(graph, [torch.ones(2), 3])
    assert torch.equal(run(torch.ones(2), 4), torch.full((2,), 4.0))


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
def test_tensor_subclasses_and_modes_run_eagerly() -> None:
    class Labelled(torch.Tensor):
        pass

    function = torch.compile(lambda x: x.sin() * 2, backend=dovetail.torch_backend("aten"))
    value = torch.randn(3).as_subclass(Labelled)
    assert torch.equal(function(value), value.sin() * 2)
    with torch.inference_mode():
        assert torch.equal(function(torch.ones(3)), torch.ones(3).sin() * 2)
    x, twin = leaf(3), leaf(3)
    with torch.autograd.graph.save_on_cpu():
        same(function(x), x.sin() * 2)
        backward(function(x))
        backward(twin.sin() * 2)
    same(twin.grad, x.grad, "gradient")


def test_a_module_that_compiles_itself() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square()

    torch.manual_seed(0)
    model, x = Net(), torch.ones(4, 3)
    model(x).sum().backward()
    expected, model.layer.weight.grad = model.layer.weight.grad, None
    names = list(model.state_dict())
    model.compile(backend="dovetail", options={"inner": "aten"}, fullgraph=True)
    model(x).sum().backward()
    assert torch.equal(model.layer.weight.grad, expected) and list(model.state_dict()) == names


def test_copies_and_pickles() -> None:
    model = torch.compile(network().eval(), backend=dovetail.torch_backend("aten", fullgraph=True))
    x = leaf(2, 4)
    expected = model(x)
    same(expected, copy.deepcopy(model)(x))
    backend = pickle.loads(pickle.dumps(dovetail.torch_backend("aten", fullgraph=True)))
    assert backend.options.fullgraph and backend.inner.name == "aten"


@pytest.mark.slow
def test_threads() -> None:
    model = torch.compile(network().eval(), backend=dovetail.torch_backend("aten", fullgraph=True))
    plain = network().eval()

    def work(size: int) -> bool:
        results = []
        for function in (plain, model):
            x = leaf(size % 3 + 2, 4)
            (gradient,) = torch.autograd.grad(function(x).sum(), x)
            results.append(gradient)
        return torch.equal(*results)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))


def test_a_second_order_derivative() -> None:
    x = leaf(3)
    result = torch.compile(lambda x: x.sin().sum(), backend=dovetail.torch_backend("aten", fullgraph=True))(x)
    (gradient,) = torch.autograd.grad(result, x, create_graph=True)
    assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], -x.sin())


def test_options_by_name_and_unknown_ones() -> None:
    from dovetail.backends.foreign.torch_compile import dovetail as by_name

    compiled = torch.compile(lambda x: x * 2, backend=by_name, options={"inner": "aten", "fullgraph": True})
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(Exception, match="no option 'iner'") as caught:
        torch.compile(lambda x: x * 3, backend=by_name, options={"iner": "aten"})(torch.ones(2))
    assert isinstance(caught.value.inner_exception, OptionError)  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="no mode 'max-autotune'"):
        torch.compile(lambda x: x * 4, backend=by_name, mode="max-autotune")(torch.ones(2))


def test_the_entry_point_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    registry.list_backends()  # before the table is changed: it fills itself once
    entry = importlib.metadata.EntryPoint("dovetail", declared["dovetail"], "torch_dynamo_backends")
    monkeypatch.setitem(registry._BACKENDS, "dovetail", entry)
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    compiled = torch.compile(network(), backend="dovetail", options={"inner": "aten"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerFallbackWarning)
        assert torch.equal(compiled.eval()(torch.ones(2, 4)), network().eval()(torch.ones(2, 4)))


def test_without_a_caller_of_its_own() -> None:
    graph = torch.fx.symbolic_trace(lambda x, y: (x @ y).relu())
    first, second = leaf(2, 3), leaf(3, 2)
    run = dovetail.torch_backend("aten", fullgraph=True)(graph, [first, second])
    assert torch.equal(run(first, second), graph(first, second))


def sizes_as_inputs(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A backend that asks for its sizes as Inductor's does, and runs the graph as it is."""
    give_sizes_as_inputs(Job(copy.deepcopy(graph), list(examples), {}))
    return graph.forward


@pytest.mark.parametrize("inner", [sizes_as_inputs, pytest.param("inductor", marks=pytest.mark.slow)])
def test_sizes_that_turn_out_to_be_equal(inner: Any) -> None:
    """Torch has a symbol for each size of each input; those of a sum are one, and strides are made of the other."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(x, (4,)) + y

    calls = [
        (torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)),
        (torch.randn(5, 6, 4), torch.randn(5, 6, 4)),
    ]
    compare(function, *calls, inner=inner, exact=inner != "inductor", dynamic=True)


def test_a_default_backend_that_fails_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fails(source: Any, joint: Any, backend: Any, **options: Any) -> Any:
        tried.append(backend.name)
        if backend.name == "inductor":
            raise BackendError("there is no compiler")
        return compile_joint(source, joint, backend, **options)

    monkeypatch.setattr(torch_compile, "compile_joint", fails)
    x = torch.randn(3, requires_grad=True)
    with pytest.warns(EagerFallbackWarning, match="one by one, because there is no compiler"):
        result = torch.compile(torch.sin, backend="dovetail")(x)
    same(result, x.sin())
    assert tried == ["inductor", "aten"]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="there is no compiler"):
        torch.compile(torch.sin, backend=dovetail.torch_backend("inductor", fullgraph=True))(x)
