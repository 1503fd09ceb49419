"""One part of a graph at run time: warm up, record, replay.

Every call has a *key*: sizes and strides of the inputs that are copied in, addresses of those that are not, whole numbers. A
recording is replayed only for the key that it was made for, so an address that has changed can make a call slower, but never
wrong.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.backends.common.outputs import storage_address
from dovetail.backends.cudagraphs.recorder import Recorder, Recording
from dovetail.backends.cudagraphs.results import Results, flat, is_dense, span
from dovetail.backends.cudagraphs.shared import Addresses, Shared, register_part, shared_by, warn
from dovetail.backends.protocol import CompiledCallable, Kind
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import recordings as private_recordings

Key = tuple[Any, ...]

#: Sizes beyond these are not even counted, so that a run in which every batch differs does not fill the memory.
_REMEMBERED_SIZES = 256


@dataclass(frozen=True)
class Limits:
    """How often a part may be recorded.

    ``warm_ups``: calls of each shape that run before it is recorded. ``shapes``: how many shapes are recorded.
    ``in_flight``: how many recordings of one shape there may be at a time, because earlier results are still needed.
    ``moves``: how many addresses of inputs that are not copied one shape may see before these inputs are copied.
    """

    warm_ups: int = 1
    shapes: int = 8
    in_flight: int = 4
    moves: int = 6


@dataclass(frozen=True)
class PartSpec:
    """What is known of a part before it runs; all sets hold indices of inputs, ``visible`` those of outputs.

    ``keeps``: whether there are outputs besides the visible ones, which are handed out where they lie.
    ``static``: inputs that are likely to stay at one address; ``pinned``: those of them whose sizes cannot change either.
    """

    kind: Kind
    device: torch.device
    names: tuple[str, ...]
    static: frozenset[int]
    pinned: frozenset[int]
    numbers: frozenset[int]
    mutated: frozenset[int]
    visible: frozenset[int]
    keeps: bool = False


@dataclass
class _Buffer:
    """Memory at a fixed address into which one input is copied before each replay."""

    index: int
    value: torch.Tensor
    row: torch.Tensor | None

    @classmethod
    def like(cls, index: int, value: torch.Tensor, device: torch.device) -> _Buffer:
        # Attention's seed lies on the host unless its forward was recorded, and the host is read only while recording.
        made = torch.empty(span(value), dtype=value.dtype, device=device)
        strided = made.as_strided(value.shape, value.stride(), 0).detach()
        return cls(index, strided, None if is_dense(value) else made)

    def fill(self, value: torch.Tensor) -> None:
        if self.row is None:
            self.value.copy_(value)
        else:
            # Elements that overlap cannot be written one by one.
            self.row.copy_(flat(value))

    def write_back(self, value: torch.Tensor) -> None:
        if self.row is None:
            value.copy_(self.value)
        else:
            flat(value).copy_(self.row)


@dataclass
class _Shape:
    """Calls with the same sizes: what they share, and the recordings by address."""

    buffers: list[_Buffer] = field(default_factory=list)
    numbers: dict[int, torch.Tensor] = field(default_factory=dict)
    slots: dict[Key, list[_Slot]] = field(default_factory=dict)


@dataclass(eq=False)
class _Slot:
    """A recording with the inputs that it is for; ``others`` are neither tensors nor numbers that may change."""

    recording: Recording
    results: Results
    addresses: Addresses
    shape: _Shape
    copied: frozenset[int]
    pointers: list[int]
    fixed: list[int]
    sized: list[int]
    sizes: list[Any]
    others: list[tuple[int, Any]]
    written: frozenset[int]
    #: Memory that other recordings keep, or rely on, and that is read where it lies.
    relied: tuple[int, ...]

    @classmethod
    def of(
        cls,
        made: tuple[Recording, Results, Addresses],
        shape: _Shape,
        copied: frozenset[int],
        inputs: Sequence[Any],
        spec: PartSpec,
    ) -> _Slot:
        tensors = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        fixed = [index for index in tensors if index not in copied]
        sized = [index for index in tensors if index not in spec.pinned or index in copied]
        others = [
            (index, value)
            for index, value in enumerate(inputs)
            if not isinstance(value, torch.Tensor) and index not in spec.numbers
        ]
        pointers = [inputs[index].data_ptr() for index in fixed]
        sizes = [(inputs[index].shape, inputs[index].stride()) for index in sized]
        written = frozenset(storage_address(inputs[index]) for index in spec.mutated)
        relied = tuple(storage_address(inputs[index]) for index in fixed if index not in spec.static | spec.numbers)
        return cls(*made, shape, copied, pointers, fixed, sized, sizes, others, written, relied)

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether a call with these inputs may be a replay of this recording. Copying what need not be is no harm."""
        return (
            [inputs[index].data_ptr() for index in self.fixed] == self.pointers
            and [(inputs[index].shape, inputs[index].stride()) for index in self.sized] == self.sizes
            and all(inputs[index] is value for index, value in self.others)
            and (not self.written or all(storage_address(inputs[index]) not in self.written for index in self.copied))
            and not self.recording.is_released
            and not self.results.in_use()
        )


def _drop_all(shapes: dict[Key, _Shape], shared: Shared) -> None:
    for shape in shapes.values():
        for slots in shape.slots.values():
            for slot in slots:
                shared.drop(slot.recording, slot.addresses)
    shapes.clear()


class RecordedPart:
    """A callable with the backend protocol's signature that records ``kernels`` and replays them."""

    def __init__(self, kernels: CompiledCallable, spec: PartSpec, recorder: Recorder, limits: Limits) -> None:
        self.spec = spec
        self.limits = limits
        #: Why this part is no longer recorded; empty as long as it is.
        self.given_up = ""
        self._kernels = kernels
        self._recorder = recorder
        self._shared = shared_by(recorder)
        self._shapes: dict[Key, _Shape] = {}
        #: How often calls of these sizes have run without a recording.
        self._warm_ups: Counter[Key] = Counter()
        self._moving: set[int] = set()
        #: The recordings of the last calls, which are likely to be those of the next.
        self._recent: deque[_Slot] = deque(maxlen=4)
        self._copied_last: frozenset[int] = frozenset()
        self._noticed: set[str] = set()
        weakref.finalize(self, _drop_all, self._shapes, self._shared)
        register_part(self)

    @property
    def recordings(self) -> int:
        """How many recordings there are now."""
        return sum(len(slots) for shape in self._shapes.values() for slots in shape.slots.values())

    def release(self) -> None:
        """Give all recordings back; the next calls record again."""
        with self._shared.lock:
            self._recent.clear()
            _drop_all(self._shapes, self._shared)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the part; ``inputs`` is emptied."""
        if self.given_up or self._recorder.is_recording():
            return self._run(inputs)
        with ExitStack() as stack:
            stack.enter_context(self._shared.lock)
            stack.enter_context(private_operators.BelowAutograd())
            stack.enter_context(private_operators.NoAutocast())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(self._recorder.on_device(self.spec.device))
            self._shared.collect()
            return self._call(inputs)

    def _call(self, inputs: list[Any]) -> list[Any]:
        # Copied inputs that are written to, and may share memory with others, need a closer look.
        if self.spec.mutated.isdisjoint(self._copied_last):
            for recent in self._recent:
                if recent.fits(inputs):
                    return self._replay(recent, recent.shape, inputs, recent.copied)
        copied = self._copied(inputs)
        sizes, addresses = self._key(inputs, copied)
        if self.spec.mutated and self._overlaps(inputs, copied):
            self._notice("inputs that the graph writes to share memory with each other", "pass tensors of their own")
            return self._run(inputs)
        shape_key = (sizes, copied)
        shape = self._shapes.get(shape_key)
        slots = shape.slots.get(addresses, []) if shape is not None else []
        for gone in [slot for slot in slots if slot.recording.is_released]:
            slots.remove(gone)
            self._shared.drop(gone.recording, gone.addresses)
        slot = next((slot for slot in slots if not slot.results.in_use()), None)
        if slot is None:
            if self._warm_ups[sizes] < self.limits.warm_ups and len(self._warm_ups) <= _REMEMBERED_SIZES:
                self._warm_ups[sizes] += 1
                return self._recorder.warm_up(self._run, inputs, self.spec.device)
            if shape is None:
                if len(self._shapes) >= self.limits.shapes or len(self._warm_ups) > _REMEMBERED_SIZES:
                    self._notice(
                        f"inputs have had more than {self.limits.shapes} different sizes, strides or whole numbers; calls "
                        f"with others run without a recording ({self._sizes(inputs, copied)})",
                        'pad to a few sizes, or raise backend_options={"max_shapes": ...}; each costs memory',
                    )
                    return self._run(inputs)
                shape = self._shapes[shape_key] = _Shape()
            if len(slots) >= self.limits.in_flight:
                self._notice(
                    f"results of the last {len(slots)} calls are all still needed (a backward that has not run)",
                    'raise backend_options={"max_in_flight": ...}, which costs memory for each, or run the backward earlier',
                )
                return self._run(inputs)
            if not slots and len(shape.slots) >= self.limits.moves:
                self._drop_stranded(shape)
            if not slots and len(shape.slots) >= self.limits.moves:
                self._copy_what_moves(shape_key, shape, addresses, inputs, copied)
                return self._run(inputs)
            made = self._record(shape, inputs, copied)
            if made is None:
                return self._run(inputs)
            slot = _Slot.of(made, shape, copied, inputs, self.spec)
            shape.slots.setdefault(addresses, []).append(slot)
        self._recent.appendleft(slot)
        self._copied_last = copied
        assert shape is not None
        return self._replay(slot, shape, inputs, copied)

    def _copied(self, inputs: Sequence[Any]) -> frozenset[int]:
        is_stable, spec = self._shared.is_stable, self.spec
        return frozenset(
            index
            for index, value in enumerate(inputs)
            if isinstance(value, torch.Tensor)
            and index not in spec.numbers
            and (index in self._moving or (index not in spec.static and not is_stable(storage_address(value))))
        )

    def _key(self, inputs: Sequence[Any], copied: frozenset[int]) -> tuple[Key, Key]:
        """Sizes and whole numbers of this call, and the addresses of what is not copied."""
        shapes: list[Any] = []
        addresses: list[Any] = []
        numbers, pinned = self.spec.numbers, self.spec.pinned
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                if index not in copied:
                    addresses.append(value.data_ptr())
                    if index in pinned:
                        # The entry's guards have compared its sizes.
                        continue
                shapes.append((value.shape, value.stride()))
            elif index not in numbers:
                # True and 1 are equal, and so are 0.0 and -0.0: the text tells them apart.
                shapes.append(value if type(value) is int else repr(value))
        return tuple(shapes), tuple(addresses)

    def _overlaps(self, inputs: Sequence[Any], copied: frozenset[int]) -> bool:
        """Whether a written input shares memory with another, and one of the two is copied."""
        owners: dict[int, list[int]] = {}
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and storage_address(value):
                owners.setdefault(storage_address(value), []).append(index)
        return any(
            len(indices) > 1 and not self.spec.mutated.isdisjoint(indices) and not copied.isdisjoint(indices)
            for indices in owners.values()
        )

    def _run(self, inputs: list[Any]) -> list[Any]:
        """Run the kernels without a recording."""
        for index in self.spec.numbers:
            inputs[index] = torch.full((), inputs[index], dtype=torch.float64, device=self.spec.device)
        written = [(inputs[index], inputs[index]._version) for index in self.spec.mutated]
        outputs = self._kernels(inputs)
        for value, version in written:
            if value._version == version:
                # Compiled kernels write without telling autograd.
                torch.autograd.graph.increment_version(value)
        return outputs

    def _record(
        self, shape: _Shape, inputs: Sequence[Any], copied: frozenset[int]
    ) -> tuple[Recording, Results, Addresses] | None:
        given = list(inputs)
        try:
            if not shape.buffers and not shape.numbers:
                shape.buffers = [_Buffer.like(index, inputs[index], self.spec.device) for index in sorted(copied)]
                shape.numbers = {
                    index: torch.zeros((), dtype=torch.float64, device=self.spec.device) for index in self.spec.numbers
                }
            self._fill(shape, inputs)
            for buffer in shape.buffers:
                given[buffer.index] = buffer.value
            for index, number in shape.numbers.items():
                given[index] = number
            recording, outputs = self._recorder.record(self._kernels, given, self.spec.device, keeps=self.spec.keeps)
        except Exception as error:  # noqa: BLE001 - whatever a device says while recording, training goes on without it
            self._give_up(error)
            return None
        results = Results(outputs, given, self.spec.visible)
        static = tuple(
            storage_address(value)
            for index, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and index in self.spec.static and index not in copied
        )
        addresses = Addresses(results.addresses, static)
        self._shared.remember(addresses)
        return recording, results, addresses

    def _fill(self, shape: _Shape, inputs: Sequence[Any]) -> None:
        for buffer in shape.buffers:
            buffer.fill(inputs[buffer.index])
        for index, number in shape.numbers.items():
            number.fill_(inputs[index])

    def _replay(self, slot: _Slot, shape: _Shape, inputs: list[Any], copied: frozenset[int]) -> list[Any]:
        self._fill(shape, inputs)
        slot.recording.replay()
        for index in self.spec.mutated:
            if index not in copied:
                torch.autograd.graph.increment_version(inputs[index])
        for buffer in shape.buffers:
            if buffer.index in self.spec.mutated:
                buffer.write_back(inputs[buffer.index])
        outputs = slot.results.hand_out(inputs)
        inputs.clear()
        return outputs

    def _drop_stranded(self, shape: _Shape) -> None:
        """Drop recordings that read what another one kept and that is gone: those inputs have not moved by themselves."""
        self._recent.clear()
        for addresses, slots in list(shape.slots.items()):
            for slot in [item for item in slots if not all(map(self._shared.is_stable, item.relied))]:
                slots.remove(slot)
                self._shared.drop(slot.recording, slot.addresses)
            if not slots:
                del shape.slots[addresses]

    def _copy_what_moves(
        self, shape_key: Key, shape: _Shape, addresses: Key, inputs: Sequence[Any], copied: frozenset[int]
    ) -> None:
        fixed = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor) and index not in copied]
        fixed = [index for index in fixed if index not in self.spec.numbers]
        seen = [set(column) for column in zip(*shape.slots, addresses, strict=True)]
        moving = [index for index, column in zip(fixed, seen, strict=True) if len(column) > 1]
        self._moving.update(moving)
        names = ", ".join(self.spec.names[index] for index in moving[:3])
        self._notice(
            f"{len(moving)} inputs that were taken to stay where they are have moved {len(shape.slots)} times ({names} …); "
            "they are copied from now on",
            "keep parameters and buffers at one address: write to them in place instead of assigning new tensors",
        )
        self._recent.clear()
        _drop_all({shape_key: self._shapes.pop(shape_key)}, self._shared)

    def _give_up(self, error: Exception) -> None:
        self._recent.clear()
        _drop_all(self._shapes, self._shared)
        self._shared.collect()
        where = private_recordings.last_line_of_generated_code(error)
        out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        self.given_up = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        advice = (
            'leave more memory free, lower backend_options={"max_shapes": ..., "max_in_flight": ...}, or use backend="inductor"'
            if out_of_memory
            else "take the operator out of the compiled function if it waits for the device or talks to the host"
        )
        others = ", and so does every other that finds no memory" if out_of_memory else ""
        warn(
            f"the {self.spec.kind} graph could not be recorded and runs without CUDA graphs from now on{others}"
            f"{f', because of {where}' if where else ''} ({self.given_up})",
            advice,
            once="out of memory" if out_of_memory else False,
        )

    def _sizes(self, inputs: Sequence[Any], copied: frozenset[int]) -> str:
        found = [f"{self.spec.names[index]}: {tuple(inputs[index].shape)}" for index in sorted(copied)]
        return ", ".join(found[:3])

    def _notice(self, text: str, advice: str) -> None:
        """Warn once for each kind of thing that happens to this part."""
        kind = text.split(";")[0]
        if kind not in self._noticed:
            self._noticed.add(kind)
            warn(f"CUDA graphs, {self.spec.kind} graph: {text}", advice)
