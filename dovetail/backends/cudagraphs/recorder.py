"""The interface of a device that can record its work: run once, record, replay.

Two recorders implement it: :class:`~dovetail.backends.cudagraphs.cuda.CudaRecorder`, and
:class:`~dovetail.backends.cudagraphs.simulated.SimulatedRecorder`, which behaves like CUDA on a machine without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

#: The work that is run or recorded: takes one list of inputs, which it may empty, and returns one list.
Work = Callable[[list[Any]], list[Any]]


class Recording(Protocol):
    """Recorded work: reads and writes the same addresses at every replay."""

    @property
    def is_released(self) -> bool:
        """Whether its owner or the recorder has released it, so that it can no longer be replayed."""
        ...

    def replay(self) -> None:
        """Do the recorded work again, after all work that the device was given before."""
        ...

    def release(self) -> None:
        """Free the recording; memory that a tensor outside still uses stays valid. May be called twice."""
        ...


class Recorder(Protocol):
    """A device that can record its work."""

    name: str

    def unavailable(self) -> str:
        """Return why nothing can be recorded here and what to do about it; empty if recording works."""
        ...

    def records(self, value: torch.Tensor) -> bool:
        """Return whether work on this (real or fake) tensor can be part of a recording."""
        ...

    def is_recording(self) -> bool:
        """Return whether somebody is recording already, on the stream that the caller uses."""
        ...

    def warm_up(self, work: Work, inputs: list[Any], device: torch.device) -> list[Any]:
        """Do the work once, where a recording would be made, and return its real results."""
        ...

    def record(
        self, work: Work, inputs: Sequence[Any], device: torch.device, *, keeps: bool
    ) -> tuple[Recording, list[Any]]:
        """Record the work without doing it: no memory changes, no random number is drawn.

        Returns the recording and the outputs of the work, whose tensors every replay overwrites. The recording keeps no input
        alive. Raises any error of the work or of the device; then nothing has changed.

        ``keeps``: whether results must outlive the next replay of another recording. Recordings that keep nothing share one
        pool of the device, in which a replay may overwrite the results of any other; one that keeps has memory of its own.
        """
        ...

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make ``device`` the current one, and order the work of this block after that of all blocks before.

        The caller may be on another stream than last time, and recordings are read and written at fixed addresses.
        """
        ...
