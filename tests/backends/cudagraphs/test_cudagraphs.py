"""The ``cudagraphs`` backend end to end, on a recorder that behaves like CUDA does."""

from __future__ import annotations

import gc
import re
import warnings

import pytest
import torch
from torch import nn

from dovetail.backends import lookup_backend
from dovetail.backends.cudagraphs import SimulatedRecorder, release_recordings, shared, slots
from dovetail.errors import OptionError, RecordingWarning
from dovetail.testing import check_backend
from tests.backends.cudagraphs.recorded import check_calls, check_training, compile_recorded, recorded_backend


def normal(*sizes: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(sizes, requires_grad=grad)


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    )


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


@pytest.fixture(autouse=True)
def told():
    """The warnings about recordings during a test; a test that does not ask for any gets none."""
    shared._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RecordingWarning)
        texts = Told(caught)
        yield texts
        assert texts.asked or not texts.texts, texts.texts


class Told:
    """Texts of the warnings so far."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self._caught = caught
        self.asked = False

    @property
    def texts(self) -> list[str]:
        return [str(item.message) for item in self._caught]

    def check(self, pattern: str, count: int | None = None) -> None:
        """One of the warnings matches; ``count``: how many there are in all."""
        self.asked = True
        assert any(re.search(pattern, text, re.DOTALL) for text in self.texts), self.texts
        assert count is None or len(self.texts) == count, self.texts


def memory_of(recorder: SimulatedRecorder) -> set[int]:
    """Addresses of all memory that recordings own."""
    return {value.untyped_storage().data_ptr() for recording in recorder.recordings for value in recording.memory}


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_is_bitwise_eager() -> None:
    recorder = check_training(small_model(), [(normal(5, 6),) for _ in range(6)], squared)
    # One forward and one backward: the first call warms up, the second records, and all others replay.
    assert (recorder.warm_ups, recorder.live, recorder.replays) == (2, 2, 10)


@pytest.mark.slow
def test_training_over_inductor() -> None:
    check_training(
        small_model(),
        [(normal(5, 6),) for _ in range(4)],
        squared,
        SimulatedRecorder(opaque=True),
        exact=False,
        kernels="inductor",
    )


def test_gradient_accumulation() -> None:
    check_training(small_model(), [(normal(5, 6),) for _ in range(8)], squared, accumulate=3)


def test_two_forwards_before_their_backwards() -> None:
    """What the first forward has saved is still needed when the second runs."""

    def both(run):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        step = run(lambda x: model(x).sin().sum())
        for _ in range(4):
            first, second = step(torch.randn(3, 4)), step(torch.randn(3, 4))
            first.backward()
            second.backward()
        return [parameter.grad for parameter in model.parameters()]

    recorder = SimulatedRecorder()
    expected = both(lambda function: function)
    actual = both(lambda function: compile_recorded(function, recorder))
    assert all(map(torch.equal, expected, actual))
    assert recorder.replays > 4


def test_a_graph_that_is_kept_is_not_overwritten() -> None:
    """``retain_graph``: a second backward of an old forward, after later forwards."""
    weight = normal(4, 4, grad=True)
    recorder = SimulatedRecorder()
    step = compile_recorded(lambda x: (x @ weight).tanh().pow(2).sum(), recorder)
    inputs = [normal(3, 4) for _ in range(5)]
    losses = [step(x) for x in inputs[:4]]
    for _ in range(2):
        for x, loss in zip(inputs, losses):
            (wanted,) = torch.autograd.grad((x @ weight).tanh().pow(2).sum(), weight)
            (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
            assert torch.equal(wanted, found)


def test_more_calls_in_flight_than_allowed_run_without_a_recording(told: Told) -> None:
    weight = normal(4, 4, grad=True)
    step = compile_recorded(lambda x: (x @ weight).tanh().sum(), SimulatedRecorder(), max_in_flight=2)
    inputs = [normal(3, 4) for _ in range(6)]
    losses = [step(x) for x in inputs]
    told.check("still needed")
    for x, loss in zip(inputs, losses):
        assert torch.equal(
            torch.autograd.grad((x @ weight).tanh().sum(), weight)[0], torch.autograd.grad(loss, weight)[0]
        )


def test_grad_is_never_memory_of_a_recording() -> None:
    model = nn.Linear(4, 4)
    recorder = SimulatedRecorder()
    step = compile_recorded(lambda x: model(x).sum(), recorder)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        step(normal(3, 4)).backward()
    assert not memory_of(recorder) & {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}


def test_a_gradient_that_was_saved_by_the_forward_is_copied(told: Told) -> None:
    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.exp())
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.saved_tensors[0]

    weight = normal(3, grad=True)
    recorder = SimulatedRecorder()
    step = compile_recorded(lambda x: Saved.apply(weight * 1), recorder)
    for _ in range(5):
        weight.grad = None
        step(normal(2)).backward()
        assert torch.equal(weight.grad, weight.exp())
        assert weight.grad.untyped_storage().data_ptr() not in memory_of(recorder)
        step(normal(2)).backward()
        assert torch.equal(weight.grad, 2 * weight.exp())
        with torch.no_grad():
            weight += 1
    # That the gradient is whole, which this backward does not read, is checked for real.
    told.check("1 operators of the backward graph", count=1)


def test_results_can_be_kept_and_written_to() -> None:
    recorder = SimulatedRecorder()
    step = compile_recorded(lambda x: (x * 2, x.exp().t()), recorder)
    inputs = [normal(3, 2) for _ in range(5)]
    kept = [step(x) for x in inputs]
    for x, (double, turned) in zip(inputs, kept):
        assert torch.equal(double, x * 2)
        assert torch.equal(turned, x.exp().t())
        assert turned.stride() == x.exp().t().stride()
        double.zero_()
    assert torch.equal(step(inputs[0])[0], inputs[0] * 2)


def test_a_write_to_a_saved_result_is_an_error_as_in_eager() -> None:
    weight = normal(3, grad=True)
    step = compile_recorded(lambda x: (x * weight).exp(), SimulatedRecorder())
    for _ in range(3):
        result = step(normal(3))
        with torch.no_grad():
            result.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_inputs_are_read_anew() -> None:
    check_calls(lambda x, y: (x * y).cos(), [(normal(3, grad=True), normal(3)) for _ in range(5)])


def test_parameters_may_be_replaced() -> None:
    model = nn.Linear(3, 3)
    step = compile_recorded(lambda x: model(x).sum(), SimulatedRecorder())
    for _ in range(6):
        x = normal(2, 3)
        assert torch.equal(step(x), model(x).sum())
        model.weight.data = torch.randn(3, 3)


def test_parameters_that_always_move_are_copied(told: Told) -> None:
    model = nn.Linear(3, 3)
    recorder = SimulatedRecorder()
    step = compile_recorded(lambda x: model(x).sum(), recorder, max_moves=2)
    kept = []
    for _ in range(8):
        x = normal(2, 3)
        assert torch.equal(step(x), model(x).sum())
        kept.append(model.weight.data)
        model.weight.data = torch.randn(3, 3)
    told.check("weight.*copied from now on")
    assert recorder.live <= 3


def test_a_backward_outlives_recordings_of_its_forward() -> None:
    """Each new recording of the forward keeps its values elsewhere; the backward is recorded for that, and forgets the old."""
    hoard = []

    class Hoarder(SimulatedRecorder):
        """No memory is given out twice."""

        def record(self, *args, **kwargs):
            recording, outputs = super().record(*args, **kwargs)
            hoard.append([value.untyped_storage() for value in outputs if isinstance(value, torch.Tensor)])
            return recording, outputs

    model = nn.Linear(3, 3)
    recorder = Hoarder()
    step = compile_recorded(lambda x: model(x).tanh().sum(), recorder, max_moves=2)
    for _ in range(9):
        x = normal(2, 3)
        model.weight.grad = None
        step(x).backward()
        (wanted,) = torch.autograd.grad(model(x).tanh().sum(), model.weight)
        assert torch.equal(model.weight.grad, wanted)
        for piece in [item for item in shared._pieces if item._recorder is recorder and item.spec.kind == "forward"]:
            piece.release()
    assert recorder.live <= 3
    assert recorder.replays == 16


def test_several_batches_of_a_star_argument_are_copied() -> None:
    model = nn.Linear(3, 3)
    recorder = SimulatedRecorder()
    batches = [(normal(2, 3), normal(2, 3)) for _ in range(10)]
    step = compile_recorded(lambda *batch: (model(batch[0]) - batch[1]).pow(2).sum(), recorder)
    for batch in batches:
        assert torch.equal(step(*batch), (model(batch[0]) - batch[1]).pow(2).sum())
    assert recorder.live == 1


def test_a_copied_input_lies_on_the_device_wherever_it_came_from() -> None:
    """A value that the host reads while recording would be the first call's for ever."""
    buffer = slots.Buffer.like(0, torch.tensor(3), torch.device("meta"))
    assert buffer.value.device.type == "meta" and buffer.value.shape == ()


def test_strided_and_expanded_inputs() -> None:
    calls = [(torch.randn(4, 6)[:, 1::2], torch.randn(1, 3).expand(4, 3), torch.randn(3, 4).t()) for _ in range(4)]
    check_calls(lambda x, y, z: (x * y + z, x.sum(0)), calls)


def test_inputs_that_share_memory() -> None:
    def calls():
        for _ in range(4):
            base = torch.randn(8)
            yield base[:6], base[2:]

    check_calls(lambda x, y: x * 2 + y, list(calls()))


def test_a_buffer_is_written_where_it_lies() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.sum(0))
            return x * self.seen

    model, twin = Counter(), Counter()
    step = compile_recorded(twin, SimulatedRecorder())
    for _ in range(5):
        x = normal(2, 3)
        assert torch.equal(model(x), step(x))
        assert torch.equal(model.seen, twin.seen)


def test_random_numbers_are_eagers() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.4) + torch.rand_like(x)

    check_calls(noisy, [(normal(5, 5, grad=True),) for _ in range(5)])


def test_numbers_that_change_are_inputs() -> None:
    recorder = check_calls(lambda x, s: (x * s + s).tanh(), [(normal(3, grad=True), 0.5 + i) for i in range(8)])
    # Nothing is recorded anew for a new value.
    assert recorder.live <= 4


def test_a_number_that_cannot_be_read_from_memory_is_left_out(told: Told) -> None:
    check_calls(lambda x, s: (x.exp() / s).tanh(), [(normal(3, grad=True), 0.5 + i) for i in range(6)])
    told.check(r"aten.div.Tensor at .*test_cudagraphs.py:\d+.*a number that changes")


def test_whole_numbers_and_sizes() -> None:
    check_calls(lambda x, n: (x * n).cumsum(0), [(normal(2 + i % 3, 3, grad=True), 2 + i % 2) for i in range(14)])


def test_sizes_beyond_the_limit_run_without_a_recording(told: Told) -> None:
    recorder = SimulatedRecorder()
    check_calls(lambda x: x.exp().sum(0), [(normal(2 + i // 3, 3),) for i in range(18)], recorder, max_shapes=2)
    told.check("more than 2 different sizes.*max_shapes")
    assert recorder.live <= 3


# --- what cannot be recorded ------------------------------------------------------------------------------------------


def test_an_operator_on_the_host_cuts_the_graph(told: Told) -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        on_host = x.tanh().double()
        return (on_host * 2).float().exp() + x

    recorder = SimulatedRecorder(host_dtypes=(torch.float64,))
    check_calls(mixed, [(normal(4, grad=True),) for _ in range(5)], recorder)
    told.check(r"aten._to_copy.* at .*test_cudagraphs.py:\d+ `on_host = .*CPU")
    assert recorder.live >= 3


def test_every_operator_left_out_is_named_with_its_line(told: Told) -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh().double()
        for _ in range(4):
            y = y * 2
        y = y.sin()
        y = y.cos()
        y = y.exp()
        y = y.abs()
        return y.float() + x

    recorder = SimulatedRecorder(host_dtypes=(torch.float64,))
    check_calls(mixed, [(normal(4),) for _ in range(3)], recorder)
    told.check(r"10 operators of the inference graph")
    for name, line in (("sin", "y = y.sin()"), ("cos", "y = y.cos()"), ("exp", "y = y.exp()"), ("abs", "y = y.abs()")):
        told.check(rf"aten.{name}.default at .*test_cudagraphs.py:\d+ `{re.escape(line)}`")
    told.check(r"aten.mul.Tensor at .*`y = y \* 2`: .* \(4 times\)")


def test_results_of_several_pieces_can_be_kept(told: Told) -> None:
    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x.exp()
        host = first.double() + 1
        return first.view(-1), host.float().sin()

    recorder = SimulatedRecorder(host_dtypes=(torch.float64,))
    check_calls(mixed, [(normal(2, 2),) for _ in range(5)], recorder)
    told.check("lies on the CPU")


def test_a_data_dependent_size_is_left_out(told: Told) -> None:
    backend = recorded_backend(SimulatedRecorder())
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.exp.default, (x,))
    places = graph.call_function(torch.ops.aten.nonzero.default, (y,))
    double = graph.call_function(torch.ops.aten.mul.Tensor, (places, 2))
    graph.output([double])
    value = torch.ones(3)
    for node, example in ((x, value), (y, value), (places, torch.zeros(3, 1)), (double, torch.zeros(3, 1))):
        node.meta["val"] = example
    run = backend.compile(torch.fx.GraphModule({}, graph), [value], kind="inference", options={})
    told.check("aten.nonzero")
    for content in ([1.0, 2.0, 3.0], [float("-inf"), 1.0, 1.0], [0.0, float("-inf"), 1.0], [0.0, 0.0, 0.0]):
        given = torch.tensor(content)
        assert torch.equal(run([given])[0], given.exp().nonzero() * 2)


def test_sizes_made_of_data(told: Told) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        chosen = x.exp()[x > 0]
        return (chosen * 2).sin().sum() + x.tanh().sum()

    check_calls(function, [(normal(5, grad=True),) for _ in range(10)])
    told.check(r"aten.index.Tensor at .*test_cudagraphs.py:\d+ `chosen = ")


def test_exact_numerics_need_exact_kernels() -> None:
    import dovetail

    recorder = SimulatedRecorder()

    def step(kernels: str) -> torch.Tensor:
        options = {"kernels": kernels, "recorder": recorder}
        return dovetail.compile(torch.exp, backend="cudagraphs", numerics="exact", backend_options=options)(
            torch.ones(2)
        )

    assert torch.equal(step("aten"), torch.ones(2).exp())
    with pytest.raises(OptionError, match="not eager's"):
        step("inductor")


def test_a_device_without_memory(told: Told) -> None:
    def no_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    recorder = SimulatedRecorder(fail_with=no_memory)
    check_training(small_model(), [(normal(5, 6),) for _ in range(5)], squared, recorder)
    told.check(r"out of memory.*what to do: leave more memory free", count=1)
    assert recorder.live == 0


def test_a_device_that_is_lost_while_recording(told: Told) -> None:
    """The warning says why; the kernels of the same call fail as eager's, and nothing of the call is left."""
    is_lost = False

    def lose() -> None:
        nonlocal is_lost
        is_lost = True
        refuse()

    def refuse() -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    def runs(x: torch.Tensor) -> torch.Tensor:
        if is_lost:
            refuse()
        return x * 2

    recorder = SimulatedRecorder(fail_with=lose)
    model = small_model()
    with torch.library._scoped_library("dovetail_test", "FRAGMENT") as library:
        library.define("runs(Tensor x) -> Tensor")
        library.impl("runs", runs, "CompositeExplicitAutograd")
        library.impl("runs", lambda x: torch.empty_like(x), "Meta")
        operator = torch.ops.dovetail_test.runs.default
        compiled = compile_recorded(lambda x: (model(x), operator(x.detach())), recorder)
        with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
            for _ in range(5):
                compiled(normal(5, 6))
    assert is_lost and recorder.live == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    told.check(r"AcceleratorError: CUDA error: unspecified launch failure.*what to do: see nvidia-smi", count=1)


def test_a_graph_that_synchronises_goes_on_without(told: Told) -> None:
    """An operator that nobody has listed and that waits for the device."""
    recorder = SimulatedRecorder()

    def waits(x: torch.Tensor) -> torch.Tensor:
        if recorder.is_recording():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return x * x.sum().item()

    with torch.library._scoped_library("dovetail_test", "FRAGMENT") as library:
        library.define("waits(Tensor x) -> Tensor")
        library.impl("waits", waits, "CompositeExplicitAutograd")
        library.impl("waits", lambda x: torch.empty_like(x), "Meta")
        operator = torch.ops.dovetail_test.waits.default
        check_calls(lambda x: operator(x.exp()), [(normal(3),) for _ in range(4)], recorder, replays=False)
        told.check(r"could not be recorded.*waits.*test_cudagraphs.py.*what to do")


def test_without_a_gpu_there_is_one_warning_and_the_kernels_run(told: Told) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    import dovetail

    step = dovetail.compile(lambda x: x.exp() * 2, backend="cudagraphs", backend_options={"kernels": "aten"})
    for _ in range(3):
        x = normal(3, grad=True)
        assert torch.equal(step(x), x.exp() * 2)
    told.check(r"CUDA graphs are not used.*what to do", count=1)


@pytest.mark.parametrize(
    ("said", "told_of"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 11040). Please update",
            r"The NVIDIA driver on your system is too old \(found version 11040\)",
        ),
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            "Found no NVIDIA driver on your system",
        ),
        ("", "no device is visible"),
    ],
)
def test_a_build_for_cuda_without_a_gpu_says_why(
    said: str, told_of: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dovetail
    from dovetail.cli.doctor import gpu_finding

    def init() -> None:
        if said:
            raise RuntimeError(said)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    step = dovetail.compile(lambda x: x.exp() * 2, backend="cudagraphs", backend_options={"kernels": "aten"})
    x = normal(3, grad=True)
    assert torch.equal(step(x), x.exp() * 2)
    told.check(rf"torch finds no GPU here \({told_of}\).*what to do: check the driver", count=1)
    assert re.search(told_of, gpu_finding().found)


# --- lifetime, options, conformance -----------------------------------------------------------------------------------


def test_recordings_end_with_the_function() -> None:
    recorder = SimulatedRecorder()
    weight = normal(3, 3, grad=True)
    step = compile_recorded(lambda x: (x @ weight).exp().sum(), recorder)
    losses = [step(normal(2, 3)) for _ in range(3)]
    assert recorder.live > 0
    del step
    (losses[-1] * 1).backward()
    del losses
    gc.collect()
    release_recordings()
    assert recorder.live == 0


def test_released_recordings_are_made_again_and_results_stay() -> None:
    recorder = SimulatedRecorder()
    weight = normal(3, 3, grad=True)
    step = compile_recorded(lambda x: (x @ weight).exp().sum(), recorder)
    inputs = [normal(2, 3) for _ in range(3)]
    losses = [step(x) for x in inputs]
    release_recordings()
    assert recorder.live == 0
    for x, loss in zip(inputs, losses):
        assert torch.equal(
            torch.autograd.grad(loss, weight)[0], torch.autograd.grad((x @ weight).exp().sum(), weight)[0]
        )
    x = normal(2, 3)
    assert torch.equal(step(x), (x @ weight).exp().sum())
    assert recorder.live > 0


@pytest.mark.slow
def test_conformance_over_aten(told: Told) -> None:
    told.asked = True  # a few of the suite's graphs cannot be recorded as a whole
    report = check_backend(recorded_backend(SimulatedRecorder()), groups=["operators"], isolate=False, show=False)
    assert report.failures == ()


@pytest.mark.slow
def test_conformance_over_inductor(told: Told) -> None:
    told.asked = True
    recorder = SimulatedRecorder(opaque=True)
    backend = recorded_backend(recorder, kernels="inductor")
    assert check_backend(backend, groups=["operators"], isolate=False, show=False).failures == ()
    assert recorder.replays > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "cuda"}, "kernels must be one of"),
        ({"max_shapes": 0}, "max_shapes must be"),
        ({"warm_ups": True}, "warm_ups must be"),
        ({"kernels": "aten", "max_autotune": True}, "no option 'max_autotune'"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        lookup_backend("cudagraphs").with_options(options)


def test_its_numerics_are_those_of_its_kernels() -> None:
    backend = lookup_backend("cudagraphs")
    assert backend.with_options({"kernels": "aten"}).numerics == "bitwise"
    assert backend.with_options({"kernels": "inductor"}).numerics == "tolerance"
