"""The ``cudagraphs`` backend: records work for a GPU once and then replays it, safely by default.

``CUDAGRAPHS`` is the backend, ``release_recordings`` frees all recordings, ``SimulatedRecorder`` behaves like a GPU on machines
without one. A graph passes through these modules: :mod:`.obstacles` finds what cannot be recorded, :mod:`.pieces` cuts the graph
there, :mod:`.replay` records and replays each piece, :mod:`.results` hands out what a replay has computed.
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
