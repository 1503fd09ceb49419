"""The real recorder: ``torch.cuda.CUDAGraph`` on a side stream.

Recordings whose results are copied out at once share one memory pool of the device. A recording whose results stay in place
(values that a forward saves for its backward) has a pool of its own: in the shared pool they would lie where an earlier
recording has its intermediate values, and its next replay would overwrite them.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dovetail.backends.cudagraphs.recorder import Work
from dovetail.torch_private import recordings as private_recordings


class _DeviceState:
    """The stream and the memory pool that the recordings of one device share."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = None
        self.recordings: weakref.WeakSet[_CudaRecording] = weakref.WeakSet()
        self.last_stream: torch.cuda.Stream | None = None

    def pool_for(self, keeps: bool) -> Any:
        """Return the pool that the next recording allocates from."""
        if keeps:
            return torch.cuda.graph_pool_handle()
        if all(recording.is_released or recording.keeps for recording in self.recordings):
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool


class _CudaRecording:
    """One ``CUDAGraph``."""

    def __init__(self, graph: torch.cuda.CUDAGraph, state: _DeviceState, keeps: bool) -> None:
        self.keeps = keeps
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._state = state

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("this recording was released")
        self._graph.replay()

    @property
    def is_released(self) -> bool:
        return self._graph is None

    def release(self) -> None:
        """Free the graph once the device has finished with it."""
        graph, self._graph = self._graph, None
        if graph is not None:
            torch.cuda.synchronize(self._state.stream.device)
            graph.reset()


def _repair_generator(generator: torch.Generator, before: torch.Generator, state: _DeviceState) -> None:
    """Restore a generator that still waits for the end of a failed capture, and refuses to draw."""
    try:
        torch.rand(1, device=state.stream.device)
        generator.set_state(before.get_state())
    except RuntimeError:
        generator.graphsafe_set_state(before)
        # Their replays would draw from the generator's old state, which is gone.
        for recording in list(state.recordings):
            recording.release()


def why_no_gpu() -> str:
    """Torch's message where it finds no GPU: there is no driver, or it is too old."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).split(". ")[0]
    return "no device is visible"


class CudaRecorder:
    """Records what runs on a CUDA device."""

    name = "cuda"

    def __init__(self) -> None:
        self._states: dict[int, _DeviceState] = {}
        self._lock = threading.Lock()

    def unavailable(self) -> str:
        if torch.version.hip is not None and not torch.cuda.is_available():
            return "torch was built for ROCm and finds no GPU; what to do: check the driver with rocm-smi"
        if torch.version.cuda is None and torch.version.hip is None:
            return 'this torch was built without CUDA; what to do: install a CUDA build, or use backend="inductor"'
        if not torch.cuda.is_available():
            advice = 'check the driver with nvidia-smi, or use backend="inductor"'
            return f"torch finds no GPU here ({why_no_gpu()}); what to do: {advice}"
        return ""

    def records(self, value: torch.Tensor) -> bool:
        return value.device.type == "cuda"

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Make the CUDA device the current one; a stream other than the last one waits for that one."""
        state = self._state(device)
        with torch.cuda.device(state.stream.device):
            stream = torch.cuda.current_stream()
            if state.last_stream is not None and state.last_stream != stream:
                # Wait for the whole stream: copies out of a recording, and reads of its kept values, come after its replay.
                stream.wait_stream(state.last_stream)
            state.last_stream = stream
            yield

    def warm_up(self, work: Work, inputs: list[Any], device: torch.device) -> list[Any]:
        """Do the work on the side stream, so that libraries allocate their workspaces for that stream."""
        state = self._state(device)
        current = torch.cuda.current_stream(device)
        state.stream.wait_stream(current)
        with torch.cuda.stream(state.stream):
            results = work(inputs)
        current.wait_stream(state.stream)
        for value in results:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                # The caller frees it on its own stream, which the allocator must know.
                value.record_stream(current)
        return results

    def record(
        self, work: Work, inputs: Sequence[Any], device: torch.device, *, keeps: bool
    ) -> tuple[_CudaRecording, list[Any]]:
        state = self._state(device)
        current = torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        # A collection during the capture could free a tensor of another stream, which ends the capture.
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        pool = state.pool_for(keeps)
        generator = torch.cuda.default_generators[state.stream.device.index]
        before = generator.clone_state()
        try:
            # Other threads (pinning a data loader's batches, a collective's watchdog) may continue their own work.
            with torch.cuda.graph(graph, pool=pool, stream=state.stream, capture_error_mode="thread_local"):
                outputs = work(list(inputs))
        except BaseException:
            # torch leaves its own context half open if the end of the capture raises as well.
            torch.cuda.set_stream(current)
            private_recordings.end_capture_allocations(state.stream.device, pool)
            _repair_generator(generator, before, state)
            raise
        finally:
            if enabled:
                gc.enable()
        recording = _CudaRecording(graph, state, keeps)
        state.recordings.add(recording)
        return recording, outputs

    def _state(self, device: torch.device) -> _DeviceState:
        index = torch.cuda.current_device() if device.index is None else device.index
        with self._lock:
            if index not in self._states:
                self._states[index] = _DeviceState(torch.device("cuda", index))
            return self._states[index]
