"""Hooks for saved tensors, and the regions of ``torch.utils.checkpoint``, which are made of them and put the generator back."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint

from dovetail.torch_private.autograd import saved_tensor_hooks

#: The function that ``checkpoint`` calls for its work since torch 2.15; it warns where it is not told its kind.
CHECKPOINT_INSIDE: Any = getattr(torch.utils.checkpoint, "_checkpoint_impl", torch.utils.checkpoint.checkpoint)


@dataclass(eq=False)
class Region:
    """One call of ``torch.utils.checkpoint`` without reentrant autograd; what is ``taken`` by its forward is taken again when it
    is computed again, for which the ``positions`` of each backward tell how far that has come. ``runs`` are the runtime functions
    that were chosen for graphs of which there are several.

    ``ends_early``: what comes after the last saved tensor is not computed again. ``keeps_random_state``: the random
    generators are as before afterwards.
    """

    ends_early: bool
    keeps_random_state: bool
    taken: list[Any] = field(default_factory=list)
    positions: dict[Any, int] = field(default_factory=dict)
    runs: dict[Any, Any] = field(default_factory=dict)


push_saved_tensor_hooks: Any = torch._C._autograd._push_saved_tensors_default_hooks
_REGIONS: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def open_region() -> tuple[Region, Any] | None:
    """The innermost region that runs now, and the number of the backward that computes it again, None in its forward."""
    top = saved_tensor_hooks()
    pack = None if top is None else inspect.unwrap(top[0])
    if getattr(pack, "__module__", None) != torch.utils.checkpoint.__name__:
        return None
    reference = _held(pack, "target_frame_ref")
    frame = _held(pack, "frame") if reference is None else reference()
    if frame is None:
        return None
    if frame not in _REGIONS:
        _REGIONS[frame] = Region(frame.early_stop, bool(_held(frame.recompute_fn, "preserve_rng_state")))
    return _REGIONS[frame], _held(pack, "gid")


def _held(function: Any, name: str) -> Any:
    """A variable of a function's closure; None without one."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None


@contextlib.contextmanager
def saved_tensor_hooks_set_aside() -> Iterator[None]:
    """No default hooks for saved tensors in the block."""
    aside = []
    while (top := saved_tensor_hooks()) is not None:
        aside.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(aside):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def saved_tensor_hooks_refused() -> str | None:
    """Why hooks for saved tensors may not be set now; None where they may."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()


_GENERATORS: dict[int, list[torch.Generator]] = {}
_generators_lock = threading.Lock()


class _ByThread:
    """In ``torch.random`` in place of the default generator: that of the thread in :data:`_GENERATORS`, else the default one."""

    def __getattr__(self, name: str) -> Any:
        own = _GENERATORS.get(threading.get_ident())
        return getattr(own[-1] if own else torch.default_generator, name)


_BY_THREAD: Any = _ByThread()


@contextlib.contextmanager
def generator_of_its_own() -> Iterator[None]:
    """In this thread, :mod:`torch.random` reads and sets a generator of its own, as regions of ``torch.utils.checkpoint`` do.

    Operators draw from the default one, and other threads see that as ever.

    >>> state = torch.get_rng_state()
    >>> with generator_of_its_own():
    ...     generator = torch.manual_seed(1)
    >>> torch.equal(torch.get_rng_state(), state)
    True
    """
    with _generator(torch.Generator()):
        yield


def the_default_generator() -> contextlib.AbstractContextManager[None]:
    """In this thread, :mod:`torch.random` reads and sets the default generator, also while a trace has one of its own."""
    return _generator(torch.default_generator)


@contextlib.contextmanager
def _generator(generator: torch.Generator) -> Iterator[None]:
    owner = threading.get_ident()
    with _generators_lock:
        _GENERATORS.setdefault(owner, []).append(generator)
        torch.random.default_generator = _BY_THREAD
    try:
        yield
    finally:
        with _generators_lock:
            _GENERATORS[owner].pop()
            if not _GENERATORS[owner]:
                del _GENERATORS[owner]
            if not _GENERATORS:
                torch.random.default_generator = torch.default_generator


if hasattr(os, "register_at_fork"):
    # The thread that would end it is not in the child, or the trace is none of the child's.
    os.register_at_fork(after_in_child=_GENERATORS.clear)


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
