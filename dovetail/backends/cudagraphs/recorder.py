"""What the logic of the ``cudagraphs`` backend needs from a device: run once, record, replay.

Two recorders follow this interface: :class:`~dovetail.backends.cudagraphs.cuda.CudaRecorder`, and
:class:`~dovetail.backends.cudagraphs.simulated.SimulatedRecorder`, which behaves like CUDA does on a machine without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

#: What is run or recorded: it takes one list of inputs, which it may empty, and returns one list.
Work = Callable[[list[Any]], list[Any]]


class Recording(Protocol):
    """Work that was recorded: it reads and writes the same addresses at every replay."""

    @property
    def is_released(self) -> bool:
        """Whether it was given back, by its owner or by the recorder, and can no longer be replayed."""
        ...

    def replay(self) -> None:
        """Do the recorded work again, after everything that was asked of the device before."""
        ...

    def release(self) -> None:
        """Give the recording back; memory that a tensor outside still uses stays valid. May be called twice."""
        ...


class Recorder(Protocol):
    """A device that can record its work."""

    name: str

    def unavailable(self) -> str:
        """Why nothing can be recorded here and what to do about it; an empty string if recording works."""
        ...

    def records(self, value: torch.Tensor) -> bool:
        """Whether work on this (real or fake) tensor can be part of a recording."""
        ...

    def is_recording(self) -> bool:
        """Whether somebody is recording already, on the stream that the caller uses."""
        ...

    def warm_up(self, work: Work, inputs: list[Any], device: torch.device) -> list[Any]:
        """Do the work once, where a recording would be made, and return its real results."""
        ...

    def record(
        self, work: Work, inputs: Sequence[Any], device: torch.device, *, keeps: bool
    ) -> tuple[Recording, list[Any]]:
        """Record the work without doing it: no memory changes, no random number is drawn.

        Returns the recording and what the work returned; the tensors among that are overwritten by every replay. The
        recording keeps no input alive. Raises whatever the work, or the device, raises; then nothing has changed.

        ``keeps``: whether results must outlive the next replay of another recording. Recordings that keep nothing share one
        pool of the device, in which a replay may overwrite what any other has left; one that keeps has memory of its own.
        """
        ...

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes ``device`` the current one, and what is done inside come after all that was done inside before.

        The caller may be on another stream than last time, and recordings are read and written at fixed addresses.
        """
        ...
