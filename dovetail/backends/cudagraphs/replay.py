"""One recordable piece at run time: warm up, record, replay.

Every call has a *key*: sizes and strides of the inputs that are copied in, addresses of those that are not, whole numbers. A
recording is replayed only for its own key, so an address that has changed can make a call slower, but never wrong.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends.common.memory import storage_address
from dovetail.backends.cudagraphs.recorder import Recorder
from dovetail.backends.cudagraphs.results import Results
from dovetail.backends.cudagraphs.shared import Shared, register_piece, shared_by, warn
from dovetail.backends.cudagraphs.slots import Buffer, Key, PieceSpec, Reads, Shape, Slot
from dovetail.backends.protocol import CompiledCallable
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import recordings as private_recordings

#: Sizes beyond this number are not counted, so that a run in which every batch differs does not fill the memory.
_REMEMBERED_SIZES = 256


@dataclass(frozen=True)
class Limits:
    """Limits on the recordings of a piece; the names are those of the backend's options.

    ``warm_ups``: calls of each shape that run before it is recorded. ``max_shapes``: how many shapes are recorded.
    ``max_in_flight``: how many recordings of one shape there may be at a time, because earlier results are still needed.
    ``max_moves``: how many addresses of inputs that are not copied one shape may see before these inputs are copied.
    """

    warm_ups: int = 1
    max_shapes: int = 8
    max_in_flight: int = 4
    max_moves: int = 6


def _drop_all(shapes: dict[Key, Shape], shared: Shared) -> None:
    for shape in shapes.values():
        for slots in shape.slots.values():
            for slot in slots:
                shared.drop(slot)
    shapes.clear()


class RecordedPiece:
    """A callable from one list to one list that records ``kernels`` and replays them.

    A call goes through these methods::

        __call__
        ├── _call          fits a recent slot? → _replay
        │   ├── _copied, _key
        │   ├── _free_slot      a recording for this key that is not in use
        │   └── _new_slot       within the limits
        │       └── _record
        ├── _replay        fill the buffers, replay, write back, hand out
        └── _run           no recording for this call: the kernels run
    """

    def __init__(self, kernels: CompiledCallable, spec: PieceSpec, recorder: Recorder, limits: Limits) -> None:
        self.spec = spec
        self.limits = limits
        #: The reason why this piece is no longer recorded; empty as long as it is.
        self.given_up = ""
        self._kernels = kernels
        self._recorder = recorder
        self._shared = shared_by(recorder)
        self._shapes: dict[Key, Shape] = {}
        #: Calls of these sizes that have run without a recording.
        self._warm_ups: Counter[Key] = Counter()
        #: Inputs that were expected to stay at one address, and did not.
        self._moving: set[int] = set()
        #: The recordings of the last calls, which are likely to be those of the next.
        self._recent: deque[Slot] = deque(maxlen=4)
        self._noticed: set[str] = set()
        weakref.finalize(self, _drop_all, self._shapes, self._shared)
        register_piece(self)

    def release(self) -> None:
        """Release all recordings; the next calls record again."""
        with self._shared.lock:
            self._recent.clear()
            _drop_all(self._shapes, self._shared)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the piece; ``inputs`` is emptied."""
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
        spec, limits = self.spec, self.limits
        for recent in self._recent:
            # Copied inputs that are written to, and may share memory with others, need the checks below.
            is_simple = spec.mutated.isdisjoint(recent.reads.copied)
            if is_simple and self._key(inputs, recent.reads) == recent.key and recent.is_free(inputs):
                return self._replay(recent, inputs)
        copied = self._copied(inputs)
        reads = Reads.of(spec, inputs, copied)
        sizes, addresses = key = self._key(inputs, reads)
        if spec.mutated and self._overlaps(inputs, copied):
            self._notice("inputs that the graph writes to share memory with each other", "pass tensors of their own")
            return self._run(inputs)
        slot = self._free_slot((sizes, copied), addresses)
        if slot is None:
            if self._warm_ups[sizes] < limits.warm_ups and len(self._warm_ups) <= _REMEMBERED_SIZES:
                self._warm_ups[sizes] += 1
                return self._recorder.warm_up(self._run, inputs, spec.device)
            slot = self._new_slot(key, inputs, reads)
            if slot is None:
                return self._run(inputs)
        self._recent.appendleft(slot)
        return self._replay(slot, inputs)

    def _copied(self, inputs: Sequence[Any]) -> frozenset[int]:
        """Return the inputs that are copied into buffers."""
        is_stable, spec = self._shared.is_stable, self.spec
        return frozenset(
            index
            for index, value in enumerate(inputs)
            if isinstance(value, torch.Tensor)
            and index not in spec.numbers
            and (index in self._moving or (index not in spec.static and not is_stable(storage_address(value))))
        )

    def _key(self, inputs: Sequence[Any], reads: Reads) -> tuple[Key, Key]:
        """Return sizes and whole numbers of this call, and the addresses of inputs that are not copied."""
        sizes: list[Any] = [(inputs[index].shape, inputs[index].stride()) for index in reads.sized]
        for index in reads.others:
            # True and 1 are equal, and so are 0.0 and -0.0: the text tells them apart.
            value = inputs[index]
            sizes.append(value if type(value) is int else repr(value))
        return tuple(sizes), tuple([inputs[index].data_ptr() for index in reads.fixed])

    def _overlaps(self, inputs: Sequence[Any], copied: frozenset[int]) -> bool:
        """Return whether a written input shares memory with another, and one of the two is copied."""
        owners: dict[int, list[int]] = {}
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and storage_address(value):
                owners.setdefault(storage_address(value), []).append(index)
        return any(
            len(indices) > 1 and not self.spec.mutated.isdisjoint(indices) and not copied.isdisjoint(indices)
            for indices in owners.values()
        )

    def _free_slot(self, key: Key, addresses: Key) -> Slot | None:
        """Return a slot for this key whose results are no longer in use."""
        shape = self._shapes.get(key)
        slots = shape.slots.get(addresses, []) if shape is not None else []
        for gone in [slot for slot in slots if slot.recording.is_released]:
            slots.remove(gone)
            self._shared.drop(gone)
        return next((slot for slot in slots if not slot.results.in_use()), None)

    def _new_slot(self, key: tuple[Key, Key], inputs: Sequence[Any], reads: Reads) -> Slot | None:
        """Record for this key; None if a limit is reached, or if recording fails."""
        limits, (sizes, addresses) = self.limits, key
        shape = self._shapes.get((sizes, reads.copied))
        if shape is None:
            if len(self._shapes) >= limits.max_shapes or len(self._warm_ups) > _REMEMBERED_SIZES:
                texts = [f"{self.spec.names[index]}: {tuple(inputs[index].shape)}" for index in sorted(reads.copied)]
                self._notice(
                    f"inputs have had more than {limits.max_shapes} different sizes, strides or whole numbers; calls "
                    f"with others run without a recording ({', '.join(texts[:3])})",
                    'pad to a few sizes, or raise backend_options={"max_shapes": ...}; each costs memory',
                )
                return None
            shape = self._shapes[sizes, reads.copied] = Shape()
        slots = shape.slots.get(addresses, [])
        if len(slots) >= limits.max_in_flight:
            self._notice(
                f"results of the last {len(slots)} calls are all still needed (a backward that has not run)",
                'raise backend_options={"max_in_flight": ...}, which costs memory for each, or run the backward earlier',
            )
            return None
        if not slots and len(shape.slots) >= limits.max_moves:
            self._drop_stranded(shape)
            if len(shape.slots) >= limits.max_moves:
                self._copy_moving_inputs(key, reads)
                return None
        slot = self._record(shape, key, inputs, reads)
        if slot is not None:
            self._shared.remember(slot)
            shape.slots.setdefault(addresses, []).append(slot)
        return slot

    def _drop_stranded(self, shape: Shape) -> None:
        """Drop recordings that read kept memory of another recording that is gone: those inputs have not moved by themselves."""
        self._recent.clear()
        for addresses, slots in list(shape.slots.items()):
            for slot in [item for item in slots if not all(map(self._shared.is_stable, item.relied))]:
                slots.remove(slot)
                self._shared.drop(slot)
            if not slots:
                del shape.slots[addresses]

    def _copy_moving_inputs(self, key: tuple[Key, Key], reads: Reads) -> None:
        """Copy the inputs that keep moving from now on."""
        sizes, addresses = key
        shape = self._shapes.pop((sizes, reads.copied))
        seen = [set(column) for column in zip(*shape.slots, addresses, strict=True)]
        columns = zip(reads.fixed, seen, strict=True)
        moving = [index for index, column in columns if len(column) > 1 and index not in self.spec.numbers]
        self._moving.update(moving)
        names = ", ".join(self.spec.names[index] for index in moving[:3])
        self._notice(
            f"{len(moving)} inputs that were taken to stay where they are have moved {len(shape.slots)} times ({names} …); "
            "they are copied from now on",
            "keep parameters and buffers at one address: write to them in place instead of assigning new tensors",
        )
        self._recent.clear()
        _drop_all({sizes: shape}, self._shared)

    def _record(self, shape: Shape, key: tuple[Key, Key], inputs: Sequence[Any], reads: Reads) -> Slot | None:
        spec, given = self.spec, list(inputs)
        try:
            if not shape.buffers and not shape.numbers:
                shape.buffers = [Buffer.like(index, inputs[index], spec.device) for index in sorted(reads.copied)]
                shape.numbers = {
                    index: torch.zeros((), dtype=torch.float64, device=spec.device) for index in spec.numbers
                }
            self._fill(shape, inputs)
            for buffer in shape.buffers:
                given[buffer.index] = buffer.value
            for index, number in shape.numbers.items():
                given[index] = number
            recording, outputs = self._recorder.record(self._kernels, given, spec.device, keeps=spec.keeps)
        except Exception as error:  # noqa: BLE001  (whatever a device says while recording, training goes on without it)
            self._give_up(error)
            return None
        results = Results(outputs, given, spec.visible)
        fixed = {index: storage_address(inputs[index]) for index in reads.fixed if index not in spec.numbers}
        return Slot(
            recording,
            results,
            shape,
            reads,
            key,
            kept=results.kept,
            static=tuple(address for index, address in fixed.items() if index in spec.static),
            relied=tuple(address for index, address in fixed.items() if index not in spec.static),
            written=frozenset(storage_address(inputs[index]) for index in spec.mutated),
        )

    def _fill(self, shape: Shape, inputs: Sequence[Any]) -> None:
        for buffer in shape.buffers:
            buffer.fill(inputs[buffer.index])
        for index, number in shape.numbers.items():
            number.fill_(inputs[index])

    def _replay(self, slot: Slot, inputs: list[Any]) -> list[Any]:
        self._fill(slot.shape, inputs)
        slot.recording.replay()
        for index in self.spec.mutated - slot.reads.copied:
            torch.autograd.graph.increment_version(inputs[index])
        for buffer in slot.shape.buffers:
            if buffer.index in self.spec.mutated:
                buffer.write_back(inputs[buffer.index])
        outputs = slot.results.hand_out(inputs)
        inputs.clear()
        return outputs

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

    def _give_up(self, error: Exception) -> None:
        self._recent.clear()
        _drop_all(self._shapes, self._shared)
        self._shared.collect()
        where = private_recordings.last_line_of_generated_code(error)
        self.given_up = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        subject = f"the {self.spec.kind} graph could not be recorded and runs without CUDA graphs from now on"
        reason = f"{f', because of {where}' if where else ''} ({self.given_up})"
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            warn(
                f"{subject}, and so does every other that finds no memory{reason}",
                'leave more memory free, lower backend_options={"max_shapes": ..., "max_in_flight": ...}, '
                'or use backend="inductor"',
                once="out of memory",
            )
        elif isinstance(error, torch.AcceleratorError) and "captur" not in str(error):
            warn(f"{subject}{reason}", "see nvidia-smi: what fails on a lost GPU fails until the process starts again")
        else:
            advice = "take the operator out of the compiled function if it waits for the device or talks to the host"
            warn(f"{subject}{reason}", advice)

    def _notice(self, text: str, advice: str) -> None:
        """Warn once for each kind of event in this piece."""
        kind = text.split(";")[0]
        if kind not in self._noticed:
            self._noticed.add(kind)
            warn(f"CUDA graphs, {self.spec.kind} graph: {text}", advice)
