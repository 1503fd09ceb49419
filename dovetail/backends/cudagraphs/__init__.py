"""The ``cudagraphs`` backend: work for a GPU is recorded once and then replayed, safely by default.

``CUDAGRAPHS`` is the backend, ``release_recordings`` gives all recordings back, ``SimulatedRecorder`` behaves like a GPU on
machines without one. The way of a graph: :mod:`.obstacles` and :mod:`.mutations` look at it, :mod:`.parts` cuts it,
:mod:`.replay` records and replays each part, :mod:`.results` hands out what a replay has computed.
"""

from dovetail.backends.cudagraphs.backend import CUDAGRAPHS, RecordedGraph, Settings, compile_cudagraphs, make_settings
from dovetail.backends.cudagraphs.recorder import Recorder, Recording
from dovetail.backends.cudagraphs.shared import release_recordings
from dovetail.backends.cudagraphs.simulated import SimulatedCaptureError, SimulatedRecorder, simulated_recorder

__all__ = [
    "CUDAGRAPHS",
    "RecordedGraph",
    "Recorder",
    "Recording",
    "Settings",
    "SimulatedCaptureError",
    "SimulatedRecorder",
    "compile_cudagraphs",
    "make_settings",
    "release_recordings",
    "simulated_recorder",
]
