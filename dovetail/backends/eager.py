"""The ``eager`` backend: PyTorch replays the torch-level program under its own autograd."""

from __future__ import annotations

from dovetail.backends.aten import compile_aten
from dovetail.backends.protocol import Backend

# An ATen graph (a hand-made one, say) runs as under ``aten``.
EAGER = Backend(
    "eager",
    compile_aten,
    takes_program=True,
    numerics="bitwise",
    has_options=False,
    description="replays the captured torch calls under PyTorch's own autograd; for finding out where an error lies",
)
