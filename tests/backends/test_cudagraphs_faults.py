"""Faults that are planted into the ``cudagraphs`` backend, one by one: each must be seen on the recorder that behaves like CUDA.

The same programs pass without the fault, so that it is the fault that is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.backends.cudagraphs import SimulatedRecorder, backend, numbers, obstacles, replay, results
from tests.backends.recorded import check_calls, check_training, compile_recorded, recorded_backend

Fault = Callable[[pytest.MonkeyPatch], None]


def writing_graph() -> torch.fx.GraphModule:
    """A graph that writes to its first input in place, as a graph of a whole step does."""
    graph = torch.fx.Graph()
    total, x = graph.placeholder("total"), graph.placeholder("x")
    double = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.call_function(torch.ops.aten._foreach_add_.List, ([total], [double]))
    graph.output([double])
    for node in graph.nodes:
        node.meta["val"] = torch.ones(3)
    return torch.fx.GraphModule({}, graph)


def check_write() -> None:
    run = recorded_backend(SimulatedRecorder()).compile(
        writing_graph(), [torch.ones(3), torch.ones(3)], kind="inference", options={}
    )
    wanted = torch.zeros(3)
    total = torch.zeros(3)
    for number in range(5):
        x = torch.full((3,), float(number))
        wanted += 2 * x
        version = total._version
        (double,) = run([total, x])
        assert torch.equal(double, 2 * x)
        assert torch.equal(total, wanted), "a write to an input is missing"
        assert total._version > version, "a write to an input is not noticed"


def check_results() -> None:
    check_calls(lambda x: (x.exp(), x * 3), [(torch.randn(4),) for _ in range(5)])


def check_accumulation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    check_training(model, [(torch.randn(3, 4),) for _ in range(6)], lambda m, x: m(x).pow(2).sum(), accumulate=3)


def check_in_flight() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    recorder = SimulatedRecorder()
    step = compile_recorded(lambda x: (x @ weight).tanh().pow(2).sum(), recorder)
    for _ in range(4):
        inputs = [torch.randn(3, 4) for _ in range(2)]
        losses = [step(x) for x in inputs]
        for x, loss in zip(inputs, losses):
            (wanted,) = torch.autograd.grad((x @ weight).tanh().pow(2).sum(), weight)
            assert torch.equal(torch.autograd.grad(loss, weight)[0], wanted)


def check_scalar() -> None:
    check_calls(lambda x, s: x.exp() * s, [(torch.randn(3), 0.5 + number) for number in range(6)])


def check_whole_number() -> None:
    check_calls(lambda x, n: x.exp() * n, [(torch.randn(3), 2 + number % 3) for number in range(9)])


def check_inputs() -> None:
    check_calls(lambda x: x.exp() + 1, [(torch.randn(3),) for _ in range(4)])


def check_parameter() -> None:
    model = nn.Linear(3, 3)
    step = compile_recorded(lambda x: model(x).sum(), SimulatedRecorder())
    for _ in range(5):
        x = torch.randn(2, 3)
        assert torch.equal(step(x), model(x).sum())
        kept = model.weight.data
        model.weight.data = torch.randn(3, 3)
        kept.zero_()


def check_host() -> None:
    function = lambda x: (x.exp().double() * 2).float() + x  # noqa: E731
    check_calls(function, [(torch.randn(3),) for _ in range(4)], SimulatedRecorder(host_dtypes=(torch.float64,)))


def no_mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "mutated_inputs", lambda graph: frozenset())


def shallow_mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of tensors are not looked into."""
    from dovetail.backends import mutations

    whole = mutations.written_arguments

    def shallow(node: torch.fx.Node) -> list[torch.fx.Node]:
        return [value for value in whole(node) if value in node.args]

    monkeypatch.setattr(mutations, "written_arguments", shallow)


def no_copies_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_copies", lambda sources, templates: [value.detach() for value in sources])


def no_look_at_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results.Results, "in_use", lambda self: False)


def stale_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, shape: Any, inputs: Any) -> None:
        for buffer in shape.buffers:
            buffer.fill(inputs[buffer.index])
        if not getattr(shape, "filled", False):
            shape.filled = True
            for index, number in shape.numbers.items():
                number.fill_(inputs[index])

    monkeypatch.setattr(replay.RecordedPart, "_fill", fill)


def numbers_as_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is recorded as it is at the first call."""
    monkeypatch.setattr(backend, "read_from_memory", lambda graph, device: ())
    monkeypatch.setattr(numbers, "is_float", lambda node: False)
    whole = replay.RecordedPart._key

    def without_numbers(self: Any, inputs: Any, copied: Any) -> Any:
        return whole(self, [0 if isinstance(value, float) else value for value in inputs], copied)

    monkeypatch.setattr(replay.RecordedPart, "_key", without_numbers)


def sizes_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, and whole numbers, which the graph takes as sizes."""
    whole = replay.RecordedPart._key
    monkeypatch.setattr(replay.RecordedPart, "_key", lambda self, *args: ((), whole(self, *args)[1]))


def no_copies_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.RecordedPart, "_fill", lambda self, shape, inputs: None)


def addresses_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay.RecordedPart._key
    monkeypatch.setattr(replay.RecordedPart, "_key", lambda self, *args: (whole(self, *args)[0], ()))


def no_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_obstacle", lambda node, recorder, device: None)
    monkeypatch.setattr(obstacles, "on_host", lambda node, recorder: False)


def no_replay_after_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay.RecordedPart._replay
    seen: set[int] = set()

    def skipping(self: Any, slot: Any, shape: Any, inputs: Any, copied: Any) -> Any:
        if id(slot) not in seen:
            seen.add(id(slot))
            slot.recording.replay, replaying = lambda: None, slot.recording.replay
            outputs = whole(self, slot, shape, inputs, copied)
            slot.recording.replay = replaying
            return outputs
        return whole(self, slot, shape, inputs, copied)

    monkeypatch.setattr(replay.RecordedPart, "_replay", skipping)


FAULTS: list[tuple[Callable[[], None], Fault]] = [
    (check_write, no_mutations),
    (check_write, shallow_mutations),
    (check_results, no_copies_of_results),
    (check_in_flight, no_look_at_what_is_in_use),
    (check_scalar, stale_numbers),
    (check_scalar, numbers_as_constants),
    (check_whole_number, sizes_left_out),
    (check_inputs, no_copies_of_inputs),
    (check_parameter, addresses_left_out),
    (check_accumulation, no_copies_of_results),
    (check_host, no_obstacles),
    (check_results, no_replay_after_recording),
]


@pytest.mark.filterwarnings("ignore::dovetail.errors.RecordingWarning")
@pytest.mark.parametrize("program", dict.fromkeys(program for program, _ in FAULTS), ids=lambda item: item.__name__)
def test_without_a_fault_the_program_is_right(program: Callable[[], None]) -> None:
    program()


@pytest.mark.filterwarnings("ignore::dovetail.errors.RecordingWarning")
@pytest.mark.parametrize(("program", "fault"), FAULTS, ids=lambda item: item.__name__)
def test_a_planted_fault_is_seen(program: Callable[[], None], fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        program()
