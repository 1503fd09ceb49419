"""A recorder for machines without a GPU that behaves like CUDA, and is stricter where CUDA is silently wrong.

Recording changes no memory and draws no random number. A replay runs the recorded operators on the recorded addresses with
the recorded numbers. Memory of recordings is poisoned (NaN, or all bits set) between replays, so that a late read, or a missing
write, gives nonsense; recordings that keep nothing share a pool, so a replay of one poisons the results of the others. Reading a
tensor's value while recording is an error.

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
    """The error of an operation that may not be part of a recording."""


def poison(value: torch.Tensor) -> None:
    """Overwrite all memory of a tensor's storage with nonsense: NaN for floating-point numbers, -1 for integers.

    >>> x = torch.ones(2)
    >>> poison(x)
    >>> x
    tensor([nan, nan])
    """
    _bytes(value).fill_(1 if value.dtype == torch.bool else 255)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in private_trees.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Snapshots:
    """Contents of memory before a recording, by address."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, value: torch.Tensor) -> None:
        """Remember a tensor's memory, if this is the first time."""
        if storage_address(value) not in self._contents:
            self._contents[storage_address(value)] = (value, _bytes(value).clone())

    def restore(self) -> None:
        """Undo all writes."""
        for value, content in self._contents.values():
            _bytes(value).copy_(content)


@dataclass(frozen=True)
class _Step:
    """One recorded operator; a replay fills the memory of ``results``."""

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
    """Runs operators and lists them as steps."""

    def __init__(self, recorder: SimulatedRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.steps: list[_Step] = []
        #: One tensor for each storage that was made while recording, by address.
        self.pool: dict[int, torch.Tensor] = {}
        self.snapshots = _Snapshots()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        on_device = [value for value in given if self.recorder.records(value)]
        self._refuse_synchronisation(func, args, given, bool(on_device))
        known = {storage_address(value) for value in given}
        self._take_snapshots(func, args, kwargs)
        results = func(*args, **kwargs)
        leaves = private_trees.tree_leaves(results)
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if given and not on_device and not any(map(self.recorder.records, made)):
            # The host's own work happens once, when it is recorded; a replay does not repeat it.
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

    def _refuse_synchronisation(
        self, func: Any, args: Sequence[Any], given: list[torch.Tensor], on_device: bool
    ) -> None:
        name = func._schema.name
        host_reads = any(value.dim() for value in given if not self.recorder.records(value))
        synchronises = host_reads or name in _READS_VALUE or any(tag in func.tags for tag in _SYNCHRONISING_TAGS)
        if name in ("aten::copy_", "aten::_to_copy"):
            synchronises = host_reads
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            masks = any(value.dtype in (torch.bool, torch.uint8) for value in _tensors(args[1]))
            synchronises = host_reads or masks
        if on_device and synchronises:
            raise SimulatedCaptureError(f"operation not permitted when stream is capturing: {func}")

    def _take_snapshots(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            for value in _tensors(written):
                if storage_address(value) not in self.pool:
                    self.snapshots.take(value)


class _SimulatedRecording:
    """Work that a replay does again; ``memory`` is all that it has allocated, ``results`` the part that it hands out."""

    def __init__(
        self,
        recorder: SimulatedRecorder,
        redo: Callable[[], None],
        memory: Sequence[torch.Tensor],
        results: Sequence[Any],
        keeps: bool,
    ) -> None:
        self.is_released = False
        self.keeps = keeps
        self.memory = list(memory)
        self._recorder = recorder
        self._redo = redo
        kept = {storage_address(value) for value in _tensors(results)}
        self._intermediate = [value for value in self.memory if storage_address(value) not in kept]

    def replay(self) -> None:
        """Do the work again in poisoned memory, and poison values that do not outlive the replay."""
        if self.is_released:
            raise RuntimeError("this recording was released")
        self._recorder.spoil_pool(self)
        self.poison()
        self._redo()
        for value in self._intermediate:
            poison(value)
        self._recorder.replays += 1

    def poison(self) -> None:
        """Overwrite all its memory with nonsense."""
        for value in self.memory:
            poison(value)

    def release(self) -> None:
        """Forget everything; a tensor that somebody keeps stays valid."""
        self.is_released = True
        self.memory, self._intermediate = [], []
        self._redo = lambda: None


class SimulatedRecorder:
    """Records work on the CPU; see this module for its behaviour.

    ``host_dtypes``: tensors of these dtypes stand for tensors on the host, out of the device's reach.
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
        """The number of recordings that were made and not released."""
        return sum(not recording.is_released for recording in self.recordings)

    def unavailable(self) -> str:
        """Return "": every machine has a CPU."""
        return ""

    def records(self, value: torch.Tensor) -> bool:
        """Return whether the tensor stands for one on the device."""
        return value.device.type == "cpu" and value.dtype not in self.host_dtypes

    def is_recording(self) -> bool:
        """Return whether a recording is under way."""
        return self.recording

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Do nothing: there is only one device."""
        return contextlib.nullcontext()

    def warm_up(self, work: Work, inputs: list[Any], device: torch.device) -> list[Any]:
        """Do the work."""
        self.warm_ups += 1
        return work(inputs)

    def record(self, work: Work, inputs: Sequence[Any], device: torch.device, *, keeps: bool) -> tuple[Any, list[Any]]:
        """Record the work; all memory that it has allocated is nonsense until the first replay."""
        if self.fail_with is not None:
            self.fail_with()
        given = [self._address_of(value) for value in inputs]
        record = self._record_function if self.opaque else self._record_operators
        self.recording = True
        try:
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
                recording, outputs = record(work, given, keeps)
        finally:
            self.recording = False
        recording.poison()
        self.recordings.append(recording)
        originals = {id(alias): value for alias, value in zip(given, inputs, strict=True)}
        return recording, [originals.get(id(value), value) for value in outputs]

    def spoil_pool(self, replayed: Any) -> None:
        """Poison the other recordings in the shared pool: a replay there may overwrite their results."""
        if not replayed.keeps:
            for other in self.recordings:
                if other is not replayed and not other.keeps:
                    other.poison()

    def _address_of(self, value: Any) -> Any:
        """Return the same memory without a reference to its storage: a device knows only addresses."""
        if not isinstance(value, torch.Tensor) or not self.records(value) or not storage_address(value):
            return value
        storage = value.untyped_storage()
        raw = torch.frombuffer((ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
        return torch.empty(0, dtype=value.dtype).set_(
            raw.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )

    def _record_operators(self, work: Work, inputs: list[Any], keeps: bool) -> tuple[_SimulatedRecording, list[Any]]:
        log = _Log(self)
        try:
            with log:
                outputs = work(list(inputs))
        finally:
            log.snapshots.restore()
        steps = log.steps

        def redo() -> None:
            with private_operators.NoAutocast():
                for step in steps:
                    step.run()

        return _SimulatedRecording(self, redo, list(log.pool.values()), outputs, keeps), outputs

    def _record_function(self, work: Work, inputs: list[Any], keeps: bool) -> tuple[_SimulatedRecording, list[Any]]:
        """Record kernels that no dispatcher sees: a replay calls the function again with the recorded inputs."""
        snapshots = _Snapshots()
        for value in _tensors(inputs):
            snapshots.take(value)
        try:
            outputs = work(list(inputs))
        finally:
            snapshots.restore()
        given = {storage_address(value) for value in _tensors(inputs)}
        own = {
            index: value
            for index, value in enumerate(outputs)
            if isinstance(value, torch.Tensor) and storage_address(value) not in given
        }

        def redo() -> None:
            results = work(list(inputs))
            for index, recorded in own.items():
                _bytes(recorded).copy_(_bytes(results[index]))

        return _SimulatedRecording(self, redo, list(own.values()), outputs, keeps), outputs


_by_kernels: dict[bool, SimulatedRecorder] = {}


def simulated_recorder(*, opaque: bool = False) -> SimulatedRecorder:
    """Return the one recorder of the option ``recorder="simulated"``; ``opaque`` for Inductor's kernels.

    >>> simulated_recorder() is simulated_recorder()
    True
    """
    return _by_kernels.setdefault(opaque, SimulatedRecorder(opaque=opaque))
