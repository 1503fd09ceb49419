"""Modules that ``fully_shard`` has spread over the ranks: their hooks run as in eager, the forward between them is compiled.

The hooks gather parameters in front of the forward and of its backward, and free them behind. A graph reads the gathered
parameters, the same objects at each call. Saved views of them share their memory, which is empty until the backward.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from dovetail.face.dispatcher import SURROUNDINGS, Dispatcher, Run
from dovetail.frontend.interpreter.call_tables import interpret_modules
from dovetail.torch_private import distributed as private_distributed

interpret_modules(*private_distributed.CALLS_THE_PROGRAM)
#: The compiled ``forward`` of each compiled module that FSDP has taken over.
_FORWARDS: weakref.WeakKeyDictionary[Dispatcher, Dispatcher] = weakref.WeakKeyDictionary()


def between_hooks(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """The call of a module that FSDP has taken over; None for any other one."""
    module = dispatcher.original
    if not isinstance(module, torch.nn.Module) or not private_distributed.has_fsdp_hooks(module):
        return None
    forward = _FORWARDS.get(dispatcher)
    if forward is None or forward.original != module.forward:
        forward = _FORWARDS[dispatcher] = type(dispatcher)(module.forward, dispatcher.options)  # type: ignore[arg-type,call-arg]
    return functools.partial(private_distributed.call_between_hooks, module, forward, args, kwargs)


# In front of all: what is decided there is decided of the forward.
SURROUNDINGS.insert(0, between_hooks)
