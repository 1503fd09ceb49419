"""Faults that are planted into the ``cudagraphs`` backend, one by one: each must be seen on the recorder that behaves like CUDA.

The same programs pass without the fault, so that it is the fault that is seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.backends.cudagraphs import SimulatedRecorder, backend, obstacles, replay, results, slots
from tests.backends.cudagraphs.recorded import check_calls, check_training, compile_recorded, recorded_backend

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


def check_write(recorder: SimulatedRecorder) -> None:
    run = recorded_backend(recorder).compile(
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


def check_results(recorder: SimulatedRecorder) -> None:
    check_calls(lambda x: (x.exp(), x * 3), [(torch.randn(4),) for _ in range(5)], recorder)


def check_accumulation(recorder: SimulatedRecorder) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    check_training(
        model, [(torch.randn(3, 4),) for _ in range(6)], lambda m, x: m(x).pow(2).sum(), recorder, accumulate=3
    )


def check_in_flight(recorder: SimulatedRecorder) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    step = compile_recorded(lambda x: (x @ weight).tanh().pow(2).sum(), recorder)
    for _ in range(4):
        inputs = [torch.randn(3, 4) for _ in range(2)]
        losses = [step(x) for x in inputs]
        for x, loss in zip(inputs, losses):
            (wanted,) = torch.autograd.grad((x @ weight).tanh().pow(2).sum(), weight)
            assert torch.equal(torch.autograd.grad(loss, weight)[0], wanted), "the gradient of another call"


def check_several_functions(recorder: SimulatedRecorder) -> None:
    """Forwards in one order, then in another, before any of their backwards: what one keeps the other may not overwrite."""
    weight = torch.randn(4, 4, requires_grad=True)
    functions = [lambda x: (x @ weight).tanh().pow(2).sum(), lambda x: (x @ weight).exp().sin().sum()]
    steps = [compile_recorded(function, recorder) for function in functions]
    for number in range(8):
        x = torch.randn(3, 4)
        order = (0, 1) if number < 4 else (1, 0)
        losses = {index: steps[index](x) for index in order}
        for index, loss in losses.items():
            (wanted,) = torch.autograd.grad(functions[index](x), weight)
            (found,) = torch.autograd.grad(loss, weight)
            assert torch.equal(found, wanted), "what one function keeps was overwritten by the other"


def check_scalar(recorder: SimulatedRecorder) -> None:
    check_calls(lambda x, s: x.exp() * s, [(torch.randn(3), 0.5 + number) for number in range(6)], recorder)


def check_whole_number(recorder: SimulatedRecorder) -> None:
    check_calls(lambda x, n: x.exp() * n, [(torch.randn(3), 2 + number % 3) for number in range(9)], recorder)


def check_inputs(recorder: SimulatedRecorder) -> None:
    check_calls(lambda x: x.exp() + 1, [(torch.randn(3),) for _ in range(4)], recorder)


def check_parameter(recorder: SimulatedRecorder) -> None:
    model = nn.Linear(3, 3)
    step = compile_recorded(lambda x: model(x).sum(), recorder)
    for _ in range(5):
        x = torch.randn(2, 3)
        assert torch.equal(step(x), model(x).sum()), "a parameter that was replaced is read where it was"
        kept = model.weight.data
        model.weight.data = torch.randn(3, 3)
        kept.zero_()


def check_host(recorder: SimulatedRecorder) -> None:
    recorder.host_dtypes = (torch.float64,)
    check_calls(lambda x: (x.exp().double() * 2).float() + x, [(torch.randn(3),) for _ in range(4)], recorder)


def check_whole_step(recorder: SimulatedRecorder) -> None:
    """Forward, backward and torch's own optimizer as one recording; nobody may hold a recording's memory as ``.grad``."""
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)
    pairs = [(one, torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)) for one in (model, twin)]

    def step_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    eager, recorded = step_of(*pairs[0]), compile_recorded(step_of(*pairs[1]), recorder)
    gradients: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    for _ in range(6):
        x = torch.randn(3, 4)
        version = twin.weight._version
        assert torch.equal(eager(x), recorded(x)), "another loss"
        assert torch.equal(model.weight, twin.weight), "the step was not written to the parameter"
        assert twin.weight._version > version, "autograd does not notice the step"
        gradients.append((model.weight.grad, twin.weight.grad))
        for wanted, found in gradients:
            assert wanted is not None and found is not None
            assert torch.equal(wanted, found), "a gradient that was kept has changed"


def check_noise(recorder: SimulatedRecorder) -> None:
    check_calls(lambda x: nn.functional.dropout(x, 0.5) + torch.rand_like(x), [(torch.randn(9),)] * 5, recorder)


def check_shared_inputs(recorder: SimulatedRecorder) -> None:
    """A written input and one that is read afterwards are the same memory, and both would be copied."""
    graph = torch.fx.Graph()
    total, x = graph.placeholder("total"), graph.placeholder("x")
    graph.call_function(torch.ops.aten.add_.Tensor, (total, 1))
    graph.output([graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))])
    for node in graph.nodes:
        node.meta["val"] = torch.ones(3)
    module = torch.fx.GraphModule({}, graph)
    run = recorded_backend(recorder).compile(module, [torch.ones(3), torch.ones(3)], kind="inference", options={})
    for number in range(5):
        same = torch.full((3,), 1.0 + number)
        (double,) = run([same, same])
        assert torch.equal(same, torch.full((3,), 2.0 + number))
        assert torch.equal(double, 2 * same), "an input was read before the write to its memory"


def no_mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "mutated_inputs", lambda graph: frozenset())


def shallow_mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of tensors are not looked into."""
    from dovetail.passes import mutations

    whole = mutations.written_arguments

    def shallow(node: torch.fx.Node) -> list[torch.fx.Node]:
        return [value for value in whole(node) if value in node.args]

    monkeypatch.setattr(mutations, "written_arguments", shallow)


def no_copies_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_copies", lambda sources, templates: [value.detach() for value in sources])


def no_look_at_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results.Results, "in_use", lambda self: False)


def one_pool_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept lies in the pool that all recordings share."""
    whole = SimulatedRecorder.record

    def record(self: Any, work: Any, inputs: Any, device: Any, *, keeps: bool) -> Any:
        return whole(self, work, inputs, device, keeps=False)

    monkeypatch.setattr(SimulatedRecorder, "record", record)


def stale_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, shape: Any, inputs: Any) -> None:
        for buffer in shape.buffers:
            buffer.fill(inputs[buffer.index])
        if not getattr(shape, "filled", False):
            shape.filled = True
            for index, number in shape.numbers.items():
                number.fill_(inputs[index])

    monkeypatch.setattr(replay.RecordedPiece, "_fill", fill)


def numbers_as_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is recorded as it is at the first call."""
    monkeypatch.setattr(backend, "read_from_memory", lambda graph, device: ())
    monkeypatch.setattr(obstacles, "is_float", lambda node: False)
    whole = replay.RecordedPiece._key

    def without_numbers(self: Any, inputs: Any, copied: Any) -> Any:
        return whole(self, [0 if isinstance(value, float) else value for value in inputs], copied)

    monkeypatch.setattr(replay.RecordedPiece, "_key", without_numbers)


def sizes_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, and whole numbers, which the graph takes as sizes."""
    whole = replay.RecordedPiece._key
    monkeypatch.setattr(replay.RecordedPiece, "_key", lambda self, *args: ((), whole(self, *args)[1]))


def no_copies_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.RecordedPiece, "_fill", lambda self, shape, inputs: None)


def addresses_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay.RecordedPiece._key
    monkeypatch.setattr(replay.RecordedPiece, "_key", lambda self, *args: (whole(self, *args)[0], ()))


def no_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_obstacle", lambda node, recorder, device: None)
    monkeypatch.setattr(obstacles, "on_host", lambda node, recorder: False)


def no_replay_after_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay.RecordedPiece._replay
    seen: set[int] = set()

    def skipping(self: Any, slot: Any, inputs: Any) -> Any:
        if id(slot) not in seen:
            seen.add(id(slot))
            slot.recording.replay, replaying = lambda: None, slot.recording.replay
            outputs = whole(self, slot, inputs)
            slot.recording.replay = replaying
            return outputs
        return whole(self, slot, inputs)

    monkeypatch.setattr(replay.RecordedPiece, "_replay", skipping)


def no_write_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written to an input's copy stays there."""
    monkeypatch.setattr(slots.Buffer, "write_back", lambda self, value: None)


def silent_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd is not told of writes by a replay."""
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda value: None)


def parameters_taken_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's writes go to copies of the parameters, and nobody brings them back."""
    whole = replay.RecordedPiece._copied

    def everything(self: Any, inputs: Any) -> frozenset[int]:
        tensors = {index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        return whole(self, inputs) | tensors - self.spec.numbers

    monkeypatch.setattr(replay.RecordedPiece, "_copied", everything)
    no_write_back(monkeypatch)


def noise_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay draws the numbers that were drawn while recording."""
    whole = SimulatedRecorder.record

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording, outputs = whole(self, *args, **kwargs)
        state, again = torch.get_rng_state(), recording.replay

        def replay_it() -> None:
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            again()
            torch.set_rng_state(after)

        recording.replay = replay_it
        return recording, outputs

    monkeypatch.setattr(SimulatedRecorder, "record", record)


def no_look_at_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.RecordedPiece, "_overlaps", lambda self, inputs, copied: False)


Program = Callable[[SimulatedRecorder], None]
#: A program, what is planted, and the words in which the program must see it.
FAULTS: list[tuple[Program, Fault, str]] = [
    (check_write, no_mutations, "a write to an input is missing"),
    (check_write, shallow_mutations, "a write to an input is missing"),
    (check_write, no_write_back, "a write to an input is missing"),
    (check_results, no_copies_of_results, r"values of .*call.*\[0\]: "),
    (check_in_flight, no_look_at_what_is_in_use, "the gradient of another call"),
    (check_several_functions, one_pool_for_all, "overwritten by the other"),
    (check_in_flight, one_pool_for_all, "the gradient of another call"),
    (check_scalar, stale_numbers, "values of call"),
    (check_scalar, numbers_as_constants, "values of call"),
    (check_whole_number, sizes_left_out, "values of call"),
    (check_inputs, no_copies_of_inputs, "values of call"),
    (check_parameter, addresses_left_out, "read where it was"),
    (check_accumulation, no_copies_of_results, "a loss, after batch 2: "),
    (check_host, no_obstacles, "nothing was replayed"),
    (check_results, no_replay_after_recording, r"values of .*call.*\[0\]: "),
    (check_whole_step, no_copies_of_results, "another loss|a gradient that was kept has changed"),
    (check_whole_step, silent_writes, "autograd does not notice the step"),
    (check_whole_step, parameters_taken_as_copies, "the step was not written"),
    (check_noise, noise_of_the_recording, "random state|values of call"),
    (check_shared_inputs, no_look_at_shared_memory, "read before the write"),
]
#: The host's work in whole functions is seen by nobody.
ONLY_OPERATORS = {no_obstacles}
RECORDERS = pytest.mark.parametrize("opaque", [False, True], ids=["operators", "whole functions"])


@RECORDERS
@pytest.mark.filterwarnings("ignore::dovetail.errors.RecordingWarning")
@pytest.mark.parametrize("program", dict.fromkeys(program for program, *_ in FAULTS), ids=lambda item: item.__name__)
@pytest.mark.sampled(2)
def test_without_a_fault_the_program_is_right(program: Program, opaque: bool) -> None:
    program(SimulatedRecorder(opaque=opaque))


@RECORDERS
@pytest.mark.filterwarnings("ignore::dovetail.errors.RecordingWarning")
@pytest.mark.parametrize(("program", "fault", "seen"), FAULTS, ids=lambda item: getattr(item, "__name__", ""))
@pytest.mark.sampled(2)
def test_a_planted_fault_is_seen(
    program: Program, fault: Fault, seen: str, opaque: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if opaque and fault in ONLY_OPERATORS:
        pytest.skip("this recorder does not see the host's work")
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=seen):
        program(SimulatedRecorder(opaque=opaque))
