"""``dovetail.reset``: all compiled functions forget their entries. ``torch.compiler.reset`` does the same."""

from __future__ import annotations

import gc

from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.dispatcher import compile_lock
from dovetail.torch_private import dynamo as private_dynamo


def reset() -> None:
    """Make all compiled functions of the process forget their entries, and all they have learned of sizes and breaks.

    Their events are kept, and so is the cache on disk.

    >>> import torch, dovetail
    >>> double = dovetail.compile(lambda x: x * 2, backend="aten")
    >>> result = double(torch.ones(2))
    >>> dovetail.reset()
    >>> len(double.entries)
    0
    """
    with compile_lock:
        # By type(): isinstance() asks objects of the program for their __class__.
        for item in [item for item in gc.get_objects() if issubclass(type(item), CompiledFunction)]:
            item.forget_entries()


class _Follower:
    """Stands among the backends of torch.compile, which ``torch.compiler.reset`` resets."""

    def reset(self) -> None:
        reset()


_FOLLOWER = _Follower()


def follow_torch() -> None:
    """From now on, ``torch.compiler.reset`` is a reset of ours as well."""
    private_dynamo.reset_with_torch(_FOLLOWER)
