"""CUDA graphs on a real GPU: bitwise eager over ``aten``, close over ``inductor``, and safe where CUDA is not.

Without a GPU the same tests run on the CPU, with the recorder that behaves like CUDA does, so that they are known to be right
before a GPU sees them; those marked ``gpu`` need a real one.
"""

from __future__ import annotations

import copy
import gc
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.backends.cudagraphs import SimulatedRecorder, release_recordings, shared
from dovetail.backends.cudagraphs.cuda import CudaRecorder
from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.errors import RecordingWarning
from dovetail.testing import check_backend
from dovetail.torch_private import compilers as private_compilers
from tests.differential import Rule, check_training, same

REAL = torch.cuda.is_available()
CUDA = "cuda" if REAL else "cpu"
needs_gpu = pytest.mark.gpu
#: What records in the test that runs; None for the device itself.
simulated: SimulatedRecorder | None = None


@pytest.fixture(autouse=True)
def told():
    """The warnings about recordings. On the CPU a test that is not about failures has replayed something at its end."""
    global simulated
    simulated = None if REAL else SimulatedRecorder()
    shared._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RecordingWarning)
        yield caught
    release_recordings()
    if simulated is not None and "could not be recorded" not in texts(caught):
        assert simulated.replays > 0


def texts(caught: list[warnings.WarningMessage]) -> str:
    return "\n".join(str(item.message) for item in caught)


def normal(*sizes: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(sizes, device=CUDA, requires_grad=grad)


def compiled(function: Callable[..., Any], kernels: str = "aten", **options: Any) -> Any:
    if simulated is not None:
        options["recorder"] = simulated
    return dovetail.compile(
        function,
        backend="cudagraphs",
        backend_options={"kernels": kernels, **options},
        numerics="exact" if kernels == "aten" else "fast",
    )


def random_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if REAL else torch.get_rng_state()


KERNELS_ROUND = Rule("close", tolerance=(1e-3, 1e-4))


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
    rule = True if exact else KERNELS_ROUND
    check_training(model, loss, batches, lambda one: compiled(one, kernels), exact=rule, accumulate=accumulate)


def compare(left: torch.Tensor, right: torch.Tensor, exact: bool, what: str) -> None:
    same(left, right, what, True if exact else KERNELS_ROUND)


def small_model() -> nn.Module:
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4)]
    return nn.Sequential(*layers).to(CUDA)


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


KERNELS = [
    "aten",
    pytest.param(
        "inductor", marks=[needs_gpu, pytest.mark.skipif(not private_compilers.has_triton(), reason="needs Triton")]
    ),
]


@pytest.mark.parametrize("kernels", KERNELS)
def test_training(kernels: str, told: list[Any]) -> None:
    batches = [(normal(8, 16),) for _ in range(6)]
    train(small_model(), squared, batches, kernels, exact=kernels == "aten")
    assert not told, texts(told)


def test_gradient_accumulation(told: list[Any]) -> None:
    train(small_model(), squared, [(normal(8, 16),) for _ in range(8)], accumulate=3)
    assert not told, texts(told)


@pytest.mark.slow
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


@needs_gpu
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


@needs_gpu
def test_one_function_on_several_streams() -> None:
    """The same recording: a call may not fill inputs, nor replay, before the other stream has copied its results."""
    step = compiled(lambda x: (x @ x).tanh() @ x)
    inputs = [normal(512, 512) for _ in range(24)]
    wanted = [(x @ x).tanh() @ x for x in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            found.append(step(x))
    torch.cuda.synchronize()
    for result, expected in zip(found, wanted, strict=True):
        assert torch.equal(result, expected)


def test_functions_in_changing_order() -> None:
    """What one keeps for its backward survives the replay of another that was recorded earlier."""
    weight = normal(64, 64, grad=True)
    functions: list[Callable[..., torch.Tensor]] = [
        lambda x: (x @ weight).tanh().pow(2).sum(),
        lambda x: ((x @ weight).sin() @ weight).tanh().sum(),
        lambda x: (x @ weight).exp().sum(),
    ]
    steps = [compiled(function) for function in functions]
    for number in range(12):
        x = normal(32, 64) / 8
        order = [(number + index) % 3 for index in range(3)] if number % 2 else [2, 1, 0]
        losses = {index: steps[index](x) for index in order}
        for index, loss in losses.items():
            (wanted,) = torch.autograd.grad(functions[index](x), weight)
            (found,) = torch.autograd.grad(loss, weight)
            assert torch.equal(found, wanted), (number, index)


def test_a_step_count_on_the_host_is_told(told: list[Any]) -> None:
    model = nn.Linear(4, 2).to(CUDA)
    twin = copy.deepcopy(model)

    def step_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = module(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    eager, recorded = step_of(model), compiled(step_of(twin))
    for number in range(6):
        x = normal(3, 4)
        compare(eager(x), recorded(x), True, f"loss of step {number}")
        compare(model.weight, twin.weight, True, f"weight after step {number}")
    assert "capturable=True" in texts(told)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_whole_step_is_one_replay(kind: str, kernels: str, told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and optimizer in one graph: parameters, state and ``.grad`` are eager's, and nothing is left out."""
    if not REAL:
        adam = importlib.import_module("torch.optim.adam")
        monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *args, **kwargs: ["cpu"])
    model = small_model()
    twin = copy.deepcopy(model)
    settings: dict[str, Any] = {"lr": 0.01, **({"momentum": 0.9} if kind == "SGD" else {"capturable": True})}

    def step_of(module: nn.Module) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.optim.Optimizer]:
        optimizer = getattr(torch.optim, kind)(module.parameters(), **settings)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, optimizer

    eager, mine = step_of(model)
    inner, theirs = step_of(twin)
    recorded = compiled(inner, kernels)
    exact = kernels == "aten"
    kept = []
    for number in range(8):
        x = normal(8, 16)
        torch.manual_seed(number)
        wanted, state = eager(x), random_state()
        torch.manual_seed(number)
        kept.append((wanted, recorded(x)))
        assert torch.equal(state, random_state())
        kept += [(one.grad, two.grad) for one, two in zip(model.parameters(), twin.parameters(), strict=True)]
        for left, right in kept:
            compare(left, right, exact, f"a loss or gradient after step {number}")
        for (name, left), right in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            compare(left, right, exact, f"{name} after step {number}")
        for one, two in zip(mine.state.values(), theirs.state.values(), strict=True):
            for name, value in one.items():
                compare(value, two[name], exact, f"{name} of the optimizer after step {number}")
    assert not told, texts(told)
    if simulated is not None:
        before = simulated.replays
        recorded(normal(8, 16))
        assert simulated.replays == before + 1


def test_sizes_that_change() -> None:
    step = compiled(lambda x: x.exp().cumsum(0))
    for number in range(12):
        x = normal(2 + number % 3, 4)
        assert torch.equal(step(x), x.exp().cumsum(0))


@needs_gpu
def test_an_operator_on_the_cpu_cuts_the_graph(told: list[Any]) -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return (x.tanh().cpu() * 2).to(CUDA).exp() + x

    step = compiled(mixed)
    for _ in range(5):
        x = normal(16)
        assert torch.equal(step(x), mixed(x))
    assert "test_cudagraphs.py" in texts(told)


def _waits_if_recorded(x: torch.Tensor) -> torch.Tensor:
    if simulated is not None and simulated.is_recording():
        raise RuntimeError("operation not permitted when stream is capturing")
    return x * x.sum().item()


def test_an_operator_that_waits_goes_on_without(told: list[Any]) -> None:
    with torch.library._scoped_library("dovetail_gpu_test", "FRAGMENT") as library:
        library.define("waits(Tensor x) -> Tensor")
        # On the CPU it is found out by the recorder, which sees operators but not the ones inside of this one.
        waits = (lambda x: x * x.sum().item()) if REAL else _waits_if_recorded
        library.impl("waits", waits, "CompositeExplicitAutograd")
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
    recorder: Any = CudaRecorder if REAL else SimulatedRecorder
    whole = recorder.record

    def without_memory(self: Any, work: Any, inputs: Any, device: Any, *, keeps: bool) -> Any:
        def greedy(values: list[Any]) -> list[Any]:
            if not REAL:
                raise torch.OutOfMemoryError("out of memory")
            torch.empty(2**60, dtype=torch.uint8, device=device)
            return work(values)

        return whole(self, greedy, inputs, device, keeps=keeps)

    monkeypatch.setattr(recorder, "record", without_memory)
    train(small_model(), squared, [(normal(8, 16),) for _ in range(4)])
    assert "out of memory" in texts(told)
    assert len(told) == 1, "one for all graphs"


@needs_gpu
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


@needs_gpu
@pytest.mark.parametrize("kernels", KERNELS)
def test_it_conforms(kernels: str) -> None:
    report = check_backend("cudagraphs", options={"kernels": kernels, "warm_ups": 1}, device=CUDA, show=False)
    assert report.failures == (), str(report)
