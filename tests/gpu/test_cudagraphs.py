"""CUDA graphs on a real GPU: bitwise eager over ``aten``, close over ``inductor``, and safe where CUDA is not."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.backends.cudagraphs import release_recordings, shared
from dovetail.backends.cudagraphs.cuda import CudaRecorder
from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.errors import RecordingWarning
from dovetail.torch_private import has_triton

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(autouse=True)
def told():
    """No warning about recordings that a test does not ask for."""
    shared._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RecordingWarning)
        yield caught
    release_recordings()


def texts(caught: list[warnings.WarningMessage]) -> str:
    return "\n".join(str(item.message) for item in caught)


def normal(*sizes: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(sizes, device=CUDA, requires_grad=grad)


def compiled(function: Callable[..., Any], kernels: str = "aten", **options: Any) -> Any:
    return dovetail.compile(function, backend="cudagraphs", backend_options={"kernels": kernels, **options})


def train(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    batches: Sequence[tuple[Any, ...]],
    kernels: str = "aten",
    *,
    exact: bool = True,
    accumulate: int = 1,
) -> None:
    """Train eagerly and recorded; losses, gradients, parameters and the random state must agree after every step."""
    twin = copy.deepcopy(model)
    step = compiled(loss, kernels)
    eager = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    other = torch.optim.SGD(twin.parameters(), lr=0.02, momentum=0.9)
    kept = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        wanted = loss(model, *batch)
        wanted.backward()
        state = torch.cuda.get_rng_state()
        torch.manual_seed(number)
        found = step(twin, *batch)
        found.backward()
        assert torch.equal(state, torch.cuda.get_rng_state()), f"random state after step {number}"
        kept.append((wanted.detach(), found.detach()))
        for left, right in kept:
            compare(left, right, exact, f"a loss after step {number}")
        for (name, left), right in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (left.grad is None) == (right.grad is None)
            if left.grad is not None:
                compare(left.grad, right.grad, exact, f"gradient of {name} in step {number}")
        if (number + 1) % accumulate == 0:
            for optimizer in (eager, other):
                optimizer.step()
                optimizer.zero_grad()
        for (name, left), right in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            compare(left, right, exact, f"{name} after step {number}")


def compare(left: torch.Tensor, right: torch.Tensor, exact: bool, what: str) -> None:
    if exact:
        assert torch.equal(left, right), f"{what}: {(left - right).abs().max()}"
    else:
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4, msg=lambda text: f"{what}: {text}")


def small_model() -> nn.Module:
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4)]
    return nn.Sequential(*layers).to(CUDA)


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


KERNELS = [
    "aten",
    pytest.param("inductor", marks=pytest.mark.skipif(not has_triton(), reason="needs Triton")),
]


@pytest.mark.parametrize("kernels", KERNELS)
def test_training(kernels: str, told: list[Any]) -> None:
    batches = [(normal(8, 16),) for _ in range(6)]
    train(small_model(), squared, batches, kernels, exact=kernels == "aten")
    assert not told, texts(told)


def test_gradient_accumulation(told: list[Any]) -> None:
    train(small_model(), squared, [(normal(8, 16),) for _ in range(8)], accumulate=3)
    assert not told, texts(told)


@pytest.mark.parametrize("kernels", KERNELS)
def test_gpt(kernels: str, told: list[Any]) -> None:
    model = GPT(GPTConfig(vocabulary=65, block=32, layers=2, heads=2, width=64, dropout=0.1)).to(CUDA)
    batches = [(torch.randint(65, (4, 32), device=CUDA), torch.randint(65, (4, 32), device=CUDA)) for _ in range(6)]
    train(model, lambda m, x, y: m(x, y), batches, kernels, exact=kernels == "aten")
    assert not told, texts(told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numbers_that_change(dtype: torch.dtype) -> None:
    """Bitwise, whatever the dtype: a number is read from memory only where that gives the same bits."""

    def scaled(x: torch.Tensor, s: float) -> torch.Tensor:
        return (x * s + s).tanh() - s

    step = compiled(scaled)
    for number in range(8):
        x = normal(64).to(dtype)
        assert torch.equal(step(x, 0.1 + number / 3), scaled(x, 0.1 + number / 3))


def test_a_division_by_a_number_that_changes(told: list[Any]) -> None:
    step = compiled(lambda x, s: (x.exp() / s).tanh())
    for number in range(6):
        x = normal(64)
        assert torch.equal(step(x, 0.1 + number), (x.exp() / (0.1 + number)).tanh())
    assert "aten.div" in texts(told)


def test_random_numbers_are_eagers() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.4) + torch.rand_like(x) + torch.randn_like(x)

    step = compiled(noisy)
    for seed in range(5):
        x = normal(33, 7)
        torch.manual_seed(seed)
        wanted, after = noisy(x), torch.rand(3, device=CUDA)
        torch.manual_seed(seed)
        assert torch.equal(step(x), wanted)
        assert torch.equal(torch.rand(3, device=CUDA), after)


def test_results_can_be_kept() -> None:
    step = compiled(lambda x: (x * 2, x.exp().t()))
    inputs = [normal(3, 5) for _ in range(6)]
    kept = [step(x) for x in inputs]
    for x, (double, turned) in zip(inputs, kept, strict=True):
        assert torch.equal(double, x * 2)
        assert torch.equal(turned, x.exp().t())


def test_forwards_in_flight() -> None:
    weight = normal(8, 8, grad=True)
    step = compiled(lambda x: (x @ weight).tanh().pow(2).sum())
    for _ in range(4):
        inputs = [normal(4, 8) for _ in range(3)]
        losses = [step(x) for x in inputs]
        for x, loss in zip(inputs, losses, strict=True):
            (wanted,) = torch.autograd.grad((x @ weight).tanh().pow(2).sum(), weight)
            for _ in range(2):
                (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
                assert torch.equal(found, wanted)


def test_calls_on_several_streams() -> None:
    """Recordings share memory, so replays on two streams have to wait for each other."""
    first, second = compiled(lambda x: (x @ x).tanh() @ x), compiled(lambda x: (x @ x).sin() @ x)
    x = normal(256, 256)
    wanted = (x @ x).tanh() @ x, (x @ x).sin() @ x
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, step in zip(streams, (first, second), strict=True):
            with torch.cuda.stream(stream):
                found.append(step(x))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted[index % 2]) for index, result in enumerate(found))


def test_sizes_that_change() -> None:
    step = compiled(lambda x: x.exp().cumsum(0))
    for number in range(12):
        x = normal(2 + number % 3, 4)
        assert torch.equal(step(x), x.exp().cumsum(0))


def test_an_operator_on_the_cpu_cuts_the_graph(told: list[Any]) -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return (x.tanh().cpu() * 2).to(CUDA).exp() + x

    step = compiled(mixed)
    for _ in range(5):
        x = normal(16)
        assert torch.equal(step(x), mixed(x))
    assert "test_cudagraphs.py" in texts(told)


def test_an_operator_that_waits_goes_on_without(told: list[Any]) -> None:
    with torch.library._scoped_library("dovetail_gpu_test", "FRAGMENT") as library:
        library.define("waits(Tensor x) -> Tensor")
        library.impl("waits", lambda x: x * x.sum().item(), "CompositeExplicitAutograd")
        library.impl("waits", lambda x: torch.empty_like(x), "Meta")
        operator = torch.ops.dovetail_gpu_test.waits.default
        step = compiled(lambda x: operator(x.exp()) + torch.rand_like(x))
        for seed in range(4):
            x = normal(16)
            torch.manual_seed(seed)
            wanted = x.exp() * x.exp().sum() + torch.rand_like(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(step(x), wanted)
    assert "could not be recorded" in texts(told)
    # The device and its generator are fine after the failure.
    other = compiled(lambda x: torch.rand_like(x) + x)
    for seed in range(4):
        x = normal(8)
        torch.manual_seed(seed)
        wanted = torch.rand_like(x) + x
        torch.manual_seed(seed)
        assert torch.equal(other(x), wanted)


def test_a_device_that_runs_out_of_memory_while_recording(monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> None:
    whole = CudaRecorder.record

    def without_memory(self: Any, work: Any, inputs: Any, device: Any) -> Any:
        def greedy(values: list[Any]) -> list[Any]:
            torch.empty(2**60, dtype=torch.uint8, device=device)
            return work(values)

        return whole(self, greedy, inputs, device)

    monkeypatch.setattr(CudaRecorder, "record", without_memory)
    train(small_model(), squared, [(normal(8, 16),) for _ in range(4)])
    assert "out of memory" in texts(told)
    assert len(told) == 2, "one for the forward, one for the backward"


def test_memory_comes_back() -> None:
    def use() -> None:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(CUDA)
        step = compiled(lambda x: model(x).sum())
        for _ in range(4):
            step(normal(64, 256)).backward()

    # What libraries keep for themselves is there after the first time.
    use()
    left = []
    for _ in range(3):
        use()
        gc.collect()
        release_recordings()
        left.append(torch.cuda.memory_allocated())
    assert left[0] == left[-1]
