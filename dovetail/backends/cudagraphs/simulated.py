"""A recorder for machines without a GPU that behaves like CUDA, and is stricter where CUDA is silently wrong.

Recording changes no memory and draws no random number. A replay calls the recorded function again, on the recorded addresses
with the recorded numbers. Results are poisoned (NaN, or all bits set) until they are computed, so that a late read gives
nonsense; recordings that keep nothing share a pool, so a replay of one poisons the results of the others. Reading a tensor's
value while recording, or using memory of the host, is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from dovetail.backends.common.memory import storage_address
from dovetail.backends.cudagraphs.recorder import Work
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees

_READS_VALUE = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"})
_SYNCHRONISING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class SimulatedCaptureError(RuntimeError):
    """The error of an operation that may not be part of a recording."""


def poison(value: torch.Tensor) -> None:
    """Overwrite all memory of a tensor's storage with nonsense: NaN for floating-point numbers, -1 for integers."""
    _bytes(value).fill_(1 if value.dtype == torch.bool else 255)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in private_trees.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Watch(private_tracing.TorchDispatchMode):
    """Refuses operators that wait for the device, or that use the host's memory: a replay does not repeat the host's work."""

    def __init__(self, recorder: SimulatedRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _tensors((args, kwargs))
        name = func._schema.name
        waits = name in _READS_VALUE or any(tag in func.tags for tag in _SYNCHRONISING_TAGS)
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            waits = any(value.dtype in (torch.bool, torch.uint8) for value in _tensors(args[1]))
        results = None if waits else func(*args, **(kwargs or {}))
        if waits or not all(map(self.recorder.records, (*given, *_tensors(results)))):
            raise SimulatedCaptureError(f"operation not permitted when stream is capturing: {func}")
        return results


class _SimulatedRecording:
    """Work that a replay does again; ``own``: outputs in memory of the recording."""

    def __init__(
        self, recorder: SimulatedRecorder, work: Callable[[], list[Any]], own: dict[int, torch.Tensor], keeps: bool
    ) -> None:
        self.is_released = False
        self.keeps = keeps
        self._recorder = recorder
        self._work = work
        self._own = own

    @property
    def memory(self) -> list[torch.Tensor]:
        """Tensors in memory of the recording."""
        return list(self._own.values())

    def replay(self) -> None:
        """Do the work again, and put its results into the memory of the first ones."""
        if self.is_released:
            raise RuntimeError("this recording was released")
        self._recorder.spoil_pool(self)
        with private_operators.NoAutocast(), self._recorder.watch():
            results = self._work()
        for index, value in self._own.items():
            _bytes(value).copy_(_bytes(results[index]))
        self._recorder.replays += 1

    def poison(self) -> None:
        """Overwrite all its memory with nonsense."""
        for value in self.memory:
            poison(value)

    def release(self) -> None:
        """Forget everything; a tensor that somebody keeps stays valid."""
        self.is_released = True
        self._own = {}
        self._work = list


class SimulatedRecorder:
    """Records work on the CPU; see this module for its behaviour.

    ``host_dtypes``: tensors of these dtypes stand for tensors on the host, out of the device's reach.
    ``opaque``: the kernels do not go through torch's dispatcher (Inductor's C++), so nothing is refused.
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
        return ""

    def records(self, value: torch.Tensor) -> bool:
        return value.device.type == "cpu" and value.dtype not in self.host_dtypes

    def is_recording(self) -> bool:
        return self.recording

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def warm_up(self, work: Work, inputs: list[Any], device: torch.device) -> list[Any]:
        self.warm_ups += 1
        return work(inputs)

    def record(self, work: Work, inputs: Sequence[Any], device: torch.device, *, keeps: bool) -> tuple[Any, list[Any]]:
        """Record the work; all memory that it has allocated is nonsense until the first replay."""
        if self.fail_with is not None:
            self.fail_with()
        given = [self._address_of(value) for value in inputs]
        before = {storage_address(value): (value, _bytes(value).clone()) for value in _tensors(given)}
        self.recording = True
        try:
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False), self.watch():
                outputs = work(list(given))
        finally:
            self.recording = False
            for value, content in before.values():
                _bytes(value).copy_(content)
        own = {index: value for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)}
        own = {index: value for index, value in own.items() if storage_address(value) not in before}
        recording = _SimulatedRecording(self, lambda: work(list(given)), own, keeps)
        recording.poison()
        self.recordings.append(recording)
        originals = {id(alias): value for alias, value in zip(given, inputs, strict=True)}
        return recording, [originals.get(id(value), value) for value in outputs]

    def watch(self) -> AbstractContextManager[Any]:
        """Return a context that refuses operations which cannot be part of a recording."""
        return contextlib.nullcontext() if self.opaque else _Watch(self)

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


_by_kernels: dict[bool, SimulatedRecorder] = {}


def simulated_recorder(*, opaque: bool = False) -> SimulatedRecorder:
    """Return the one recorder of the option ``recorder="simulated"``; ``opaque`` for Inductor's kernels."""
    return _by_kernels.setdefault(opaque, SimulatedRecorder(opaque=opaque))
