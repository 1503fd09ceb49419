"""Measured time of a compiled graph: its operators one by one, the call as it was compiled, and the machine's peak.

The values are made up, at the sizes of the capture: the program's own tensors are neither read nor written.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.runtime.entry import Entry
from dovetail.torch_private import dynamo as private_dynamo
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state

#: Operators that wait for other processes, by namespace; they are never run by themselves.
_COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "dovetail_distributed")
_SECONDS, _MOST_RUNS = 1.0, 5


@dataclass(frozen=True)
class Machine:
    """The speed of a device: operations a second in a product of matrices, bytes a second read and written by a copy."""

    device: str
    dtype: str
    threads: int
    flops: float
    bytes: float


@dataclass(frozen=True)
class Measured:
    """The least of a few runs, in seconds.

    ``seconds``: of each node of the joint graph, by name, run by itself; ``not_run`` are those that could not be. ``forward`` and
    ``backward``: the whole call, as it was compiled, and ``peak_memory`` the most bytes that were alive in it, inputs and
    parameters included; None where the call could not be run, with the reason in ``problem``.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()
    forward: float | None = None
    backward: float | None = None
    peak_memory: int | None = None
    problem: str = ""


def measure(entry: Entry) -> Measured:
    """Measure the graphs of an entry; takes a few seconds at most, unless one call takes longer."""
    joint, run = entry.compiled.joint, entry.run
    if private_state.dispatch_mode_count():
        return Measured(problem="another dispatch mode is active")
    seconds: dict[str, float] = {}
    not_run: dict[str, None] = {}
    with torch.inference_mode(False), private_state.preserved_rng_state():
        try:
            with torch.no_grad(), private_operators.BelowAutograd(), private_operators.NoAutocast():
                _repeat(lambda: _OneByOne(joint, seconds, not_run).run())
            if run is None or entry.compiled.lowering.reused or any(map(_is_collective, joint.graph.nodes)):
                return Measured(seconds, tuple(not_run), problem="the call has parts that cannot run by themselves")
            return Measured(seconds, tuple(not_run), *_whole(joint, run))
        except Exception as error:  # noqa: BLE001  (an operator may raise anything)
            return Measured(seconds, tuple(not_run), problem=f"{type(error).__name__}: {error}")


def _whole(joint: JointGraph, run: Callable[[list[Any]], list[Any]]) -> tuple[float, float | None, int | None]:
    """Forward, backward and peak of memory of the call."""
    best: dict[str, float] = {}
    asked = joint.spec.input_requires_grad

    def made() -> list[Any]:
        inputs = [made_up(node.meta["val"]) for node in joint.primals]
        for value, requires_grad in zip(inputs, asked, strict=True):
            if requires_grad:
                value.requires_grad_()
        return inputs

    def call(inputs: list[Any]) -> None:
        leaves = [value for value, requires_grad in zip(inputs, asked, strict=True) if requires_grad]
        begin = _now()
        results = run(list(inputs))
        best["forward"] = min(_now() - begin, best.get("forward", 1e9))
        ends = [item for item in results if isinstance(item, torch.Tensor) and item.requires_grad]
        if joint.nodes_of("backward") and ends and leaves:
            tangents = [made_up(item.detach()) for item in ends]
            begin = _now()
            torch.autograd.grad(ends, leaves, tangents, allow_unused=True)
            best["backward"] = min(_now() - begin, best.get("backward", 1e9))

    with torch.enable_grad():
        _repeat(functools.partial(call, made()))
        return best["forward"], best.get("backward"), _peak(lambda: call(made()))


def _peak(call: Callable[[], None]) -> int | None:
    """The most bytes that are alive in a call, by the allocator; None where a profiler is at work already."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return int(torch.cuda.max_memory_allocated()) - before
    if private_dynamo.is_profiling():
        return None
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    alive = peak = 0
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


class _OneByOne(torch.fx.Interpreter):
    """Runs the operators of a joint graph one after the other, and notes the least time of each."""

    def __init__(self, joint: JointGraph, seconds: dict[str, float], not_run: dict[str, None]) -> None:
        super().__init__(joint.graph_module)
        self.extra_traceback = False
        self._seconds, self._not_run = seconds, not_run

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op == "placeholder":
            return made_up(n.meta["val"])
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        if not _is_collective(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            begin = _now()
            try:
                result = n.target(*args, **kwargs)  # type: ignore[operator]
            except Exception:  # noqa: BLE001  (made-up values may be none that an operator takes)
                self._seconds.pop(n.name, None)
            else:
                self._seconds[n.name] = min(_now() - begin, self._seconds.get(n.name, 1e9))
                return result
        self._not_run[n.name] = None
        return made_up(n.meta.get("val"))


def _is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", "") in _COLLECTIVE


def made_up(value: Any) -> Any:
    """A value like a fake one: small numbers above 0, zeros for whole numbers; symbolic sizes as they were at capture."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(made_up, value))
    if not isinstance(value, torch.Tensor):
        return private_sizes.hint(value) if private_sizes.is_symbolic(value) else value
    shape, strides = (tuple(map(private_sizes.hint, item)) for item in (value.shape, value.stride()))
    room = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    is_real = value.dtype.is_floating_point or value.dtype.is_complex
    flat = (
        torch.rand(room, device=value.device).mul_(0.1).add_(0.01)
        if is_real
        else torch.zeros(room, device=value.device)
    )
    return flat.to(value.dtype).as_strided(shape, strides)


def machine_of(joint: JointGraph, flops: Callable[[torch.fx.Node], int]) -> Machine:
    """The speed of the device of the graph's largest operator, in the type of its numbers; measured once a process."""
    nodes = [node for node in joint.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    value = max(nodes, key=flops).meta["val"]
    return _machine(
        value.device, value.dtype if value.dtype.is_floating_point else torch.float32, torch.get_num_threads()
    )


@functools.cache
def _machine(device: torch.device, dtype: torch.dtype, threads: int) -> Machine:
    sides, room = ((2048, 4096), 2**28) if device.type == "cuda" else ((256, 512, 1024), 2**26)
    with torch.inference_mode():
        factors = [torch.ones(side, side, dtype=dtype, device=device) for side in sides]
        source = torch.ones(room, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        flops = max(2 * len(item) ** 3 / _repeat(functools.partial(torch.mm, item, item), 0.2) for item in factors)
        copy = _repeat(lambda: target.copy_(source), 0.2)
    return Machine(str(device), str(dtype).removeprefix("torch."), threads, flops, 2 * room / copy)


def _repeat(act: Callable[[], object], seconds: float = _SECONDS) -> float:
    """The least time of some runs, the first of which is for warming up unless it takes all the time that there is."""
    begin, best = _now(), 1e9
    for number in range(_MOST_RUNS + 1):
        start = _now()
        act()
        end = _now()
        best = min(best, end - start) if number > 1 else end - start
        if end - begin > seconds:
            break
    return best


def _now() -> float:
    """The time, when all that was begun on GPUs is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
