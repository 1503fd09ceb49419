"""Regions of ``torch.utils.checkpoint`` while something is traced. Checked on torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """In this thread, regions of ``torch.utils.checkpoint`` save and recompute as in eager.

    While something is traced, torch saves all of a selective region and leaves marks for a compiler; and the operator that
    Dynamo makes of a region does not put the random generator back (checked on torch 2.13).
    """
    from torch._higher_order_ops.wrap import TagActivationCheckpoint
    from torch.utils import checkpoint

    module: Any = checkpoint
    operator_class: Any = TagActivationCheckpoint
    owner = threading.get_ident()
    is_compiling = getattr(module, "_is_compiling", None)
    call = operator_class.__call__

    def never(*args: Any, **kwargs: Any) -> bool:
        return threading.get_ident() != owner and is_compiling is not None and is_compiling(*args, **kwargs)

    def as_in_eager(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return call(self, graph, *args, **kwargs)
        kwargs["use_reentrant"] = False
        if "_checkpoint_context_fn" in graph.meta:
            kwargs["context_fn"] = graph.meta["_checkpoint_context_fn"]
        return checkpoint.checkpoint(torch.fx.Interpreter(graph).run, *args, **kwargs)

    module._is_compiling = never
    operator_class.__call__ = as_in_eager
    try:
        yield
    finally:
        operator_class.__call__ = call
        if is_compiling is not None:
            module._is_compiling = is_compiling
