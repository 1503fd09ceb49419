"""A recorder for machines without a GPU that behaves like CUDA does, and is stricter where CUDA is silently wrong.

Recordings that keep nothing share a pool, so a replay of one makes nonsense of what the others have left.
Recording changes no memory and draws no random number; a replay runs the recorded operators on the recorded addresses with
the numbers that were recorded; memory that belongs to recordings is poisoned (NaN, or all bits set) between replays, so that
whoever reads it too late, or forgets to have it written, gets nonsense; reading a tensor's value while recording is an error.

>>> x = torch.ones(2)
>>> recorder = SimulatedRecorder()
>>> recording, outputs = recorder.record(lambda inputs: [inputs[0] * 2], [x], x.device, keeps=False)
>>> outputs
[tensor([nan, nan])]
>>> recording.replay()
>>> outputs
[tensor([2., 2.])]
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends.common.outputs import storage_address
from dovetail.backends.cudagraphs.recorder import Work
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees

_READS_VALUE = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"})
_SYNCHRONISING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class SimulatedCaptureError(RuntimeError):
    """What a device says to an operation that may not be part of a recording."""


def poison(value: torch.Tensor) -> None:
    """Overwrite all memory of a tensor's storage with nonsense: NaN for floating-point numbers, -1 for integers.

    >>> x = torch.ones(2)
    >>> poison(x)
    >>> x
    tensor([nan, nan])
    """
    fill = 1 if value.dtype == torch.bool else 255
    _bytes(value).fill_(fill)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in private_trees.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class _Step:
    """One recorded operator; ``results`` are the tensors whose memory it has to fill at a replay."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: list[Any]

    def run(self) -> None:
        results = private_trees.tree_leaves(self.function(*self.args, **self.kwargs))
        for made, recorded in zip(results, self.results, strict=True):
            if isinstance(recorded, torch.Tensor) and storage_address(made) != storage_address(recorded):
                _bytes(recorded).copy_(_bytes(made))


class _Log(private_tracing.TorchDispatchMode):
    """Runs operators and writes them down."""

    def __init__(self, recorder: SimulatedRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.steps: list[_Step] = []
        #: One tensor for each storage that was made while recording, by address.
        self.pool: dict[int, torch.Tensor] = {}
        self.snapshots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        on_device = [value for value in given if self.recorder.records(value)]
        self._check(func, args, given, on_device)
        known = {storage_address(value) for value in given}
        self._keep(func, args, kwargs)
        results = func(*args, **kwargs)
        leaves = private_trees.tree_leaves(results)
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if given and not on_device and not any(map(self.recorder.records, made)):
            # The host's own work happens once, when it is recorded, and a replay knows nothing of it.
            return results
        for value in made:
            if storage_address(value) not in known:
                self.pool.setdefault(storage_address(value), value)
        # The device gets the value that a tensor of the host has now.
        frozen_args, frozen_kwargs = private_trees.tree_map(self._freeze, (list(args), kwargs))
        self.steps.append(_Step(func, frozen_args, frozen_kwargs, leaves))
        return results

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not self.recorder.records(value):
            return value.clone()
        return value

    def _check(self, func: Any, args: Sequence[Any], given: list[torch.Tensor], on_device: list[torch.Tensor]) -> None:
        name = func._schema.name
        hosts = [value for value in given if not self.recorder.records(value)]
        synchronises = name in _READS_VALUE or any(tag in func.tags for tag in _SYNCHRONISING_TAGS)
        if name in ("aten::copy_", "aten::_to_copy"):
            synchronises = bool(hosts) and any(value.dim() for value in hosts)
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            synchronises = any(value.dtype in (torch.bool, torch.uint8) for value in _tensors(args[1]))
        if on_device and (synchronises or any(value.dim() for value in hosts)):
            raise SimulatedCaptureError(f"operation not permitted when stream is capturing: {func}")

    def _keep(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        schema = func._schema
        if not schema.is_mutable:
            return
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            for value in _tensors(written):
                address = storage_address(value)
                if address not in self.pool and address not in self.snapshots:
                    self.snapshots[address] = (value, _bytes(value).clone())

    def restore(self) -> None:
        """Undo all writes to memory that was there before."""
        for value, content in self.snapshots.values():
            _bytes(value).copy_(content)


class _OperatorRecording:
    """Replays the operators that a :class:`_Log` has written down."""

    def __init__(self, log: _Log, outputs: list[Any], recorder: SimulatedRecorder, keeps: bool) -> None:
        self.is_released = False
        self.keeps = keeps
        self._recorder = recorder
        self._steps = log.steps
        self.memory = list(log.pool.values())
        kept = {storage_address(value) for value in _tensors(outputs)}
        self._intermediate = [value for value in self.memory if storage_address(value) not in kept]

    def replay(self) -> None:
        """Run every operator again, in poisoned memory, and poison what does not outlive the replay."""
        if self.is_released:
            raise RuntimeError("this recording was released")
        self._recorder.spoil_pool(self)
        self.poison()
        with private_operators.NoAutocast():
            for step in self._steps:
                step.run()
        for value in self._intermediate:
            poison(value)
        self._recorder.replays += 1

    def poison(self) -> None:
        """Make nonsense of all its memory."""
        for value in self.memory:
            poison(value)

    def release(self) -> None:
        """Forget everything; a tensor that somebody keeps stays valid."""
        self.is_released = True
        self._steps, self.memory, self._intermediate = [], [], []


class _FunctionRecording:
    """Replays kernels that no dispatcher sees, by calling the function again with what it was recorded with."""

    def __init__(
        self, work: Work, inputs: Sequence[Any], outputs: list[Any], recorder: SimulatedRecorder, keeps: bool
    ) -> None:
        self.is_released = False
        self.keeps = keeps
        self._work = work
        self._inputs = list(inputs)
        self._recorder = recorder
        given = {storage_address(value) for value in _tensors(self._inputs)}
        self._own = {
            index: value
            for index, value in enumerate(outputs)
            if isinstance(value, torch.Tensor) and storage_address(value) not in given
        }

    def replay(self) -> None:
        """Call the function and put its results where the recorded ones lie."""
        if self.is_released:
            raise RuntimeError("this recording was released")
        self._recorder.spoil_pool(self)
        self.poison()
        results = self._work(list(self._inputs))
        for index, recorded in self._own.items():
            _bytes(recorded).copy_(_bytes(results[index]))
        self._recorder.replays += 1

    def poison(self) -> None:
        """Make nonsense of everything that the function returned."""
        for value in self._own.values():
            poison(value)

    def release(self) -> None:
        """Forget everything; a tensor that somebody keeps stays valid."""
        self.is_released = True
        self._own, self._inputs = {}, []


class SimulatedRecorder:
    """Records what runs on the CPU; see this module for how it behaves.

    ``host_dtypes``: tensors of these dtypes play those that lie on the host, out of the device's reach.
    ``opaque``: the kernels do not go through torch's dispatcher (Inductor's C++), so a replay calls them again.
    ``fail_with``: called before each recording; it may raise, as a device without memory does.
    """

    name = "simulated"

    def __init__(
        self,
        host_dtypes: Sequence[torch.dtype] = (),
        *,
        opaque: bool = False,
        fail_with: Callable[[], None] | None = None,
    ) -> None:
        self.host_dtypes = tuple(host_dtypes)
        self.opaque = opaque
        self.fail_with = fail_with
        self.recording = False
        self.warm_ups = 0
        self.recordings: list[Any] = []
        self.replays = 0

    @property
    def live(self) -> int:
        """How many recordings were made and not given back."""
        return sum(not recording.is_released for recording in self.recordings)

    def unavailable(self) -> str:
        """Every machine has a CPU."""
        return ""

    def records(self, value: torch.Tensor) -> bool:
        """Whether the tensor plays one that lies on the device."""
        return value.device.type == "cpu" and value.dtype not in self.host_dtypes

    def is_recording(self) -> bool:
        """Whether a recording is under way."""
        return self.recording

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """There is only one device."""
        return contextlib.nullcontext()

    def warm_up(self, work: Work, inputs: list[Any], device: torch.device) -> list[Any]:
        """Do the work."""
        self.warm_ups += 1
        return work(inputs)

    def record(self, work: Work, inputs: Sequence[Any], device: torch.device, *, keeps: bool) -> tuple[Any, list[Any]]:
        """Write down what the work does; all memory that it has made is nonsense until the first replay."""
        if self.fail_with is not None:
            self.fail_with()
        given = [self._address_of(value) for value in inputs]
        self.recording = True
        try:
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
                recording, outputs = (self._record_function if self.opaque else self._record_operators)(
                    work, given, keeps
                )
        finally:
            self.recording = False
        self.recordings.append(recording)
        originals = {id(alias): value for alias, value in zip(given, inputs, strict=True)}
        return recording, [originals.get(id(value), value) for value in outputs]

    def spoil_pool(self, replayed: Any) -> None:
        """A replay in the shared pool may overwrite what any other recording there has left."""
        if not replayed.keeps:
            for other in self.recordings:
                if other is not replayed and not other.keeps:
                    other.poison()

    def _address_of(self, value: Any) -> Any:
        """The same memory without a hold on it, which is all that a device knows."""
        if not isinstance(value, torch.Tensor) or not self.records(value) or not storage_address(value):
            return value
        storage = value.untyped_storage()
        raw = torch.frombuffer((ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
        return torch.empty(0, dtype=value.dtype).set_(
            raw.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )

    def _record_operators(self, work: Work, inputs: list[Any], keeps: bool) -> tuple[_OperatorRecording, list[Any]]:
        log = _Log(self)
        try:
            with log:
                outputs = work(list(inputs))
        finally:
            log.restore()
        for value in log.pool.values():
            poison(value)
        return _OperatorRecording(log, outputs, self, keeps), outputs

    def _record_function(self, work: Work, inputs: list[Any], keeps: bool) -> tuple[_FunctionRecording, list[Any]]:
        before = [(value, _bytes(value).clone()) for value in _tensors(inputs)]
        try:
            outputs = work(list(inputs))
        finally:
            for value, content in before:
                _bytes(value).copy_(content)
        recording = _FunctionRecording(work, inputs, outputs, self, keeps)
        recording.poison()
        return recording, outputs


_by_kernels: dict[bool, SimulatedRecorder] = {}


def simulated_recorder(*, opaque: bool = False) -> SimulatedRecorder:
    """The one recorder that the option ``recorder="simulated"`` stands for; ``opaque`` for Inductor's kernels.

    >>> simulated_recorder() is simulated_recorder()
    True
    """
    return _by_kernels.setdefault(opaque, SimulatedRecorder(opaque=opaque))
