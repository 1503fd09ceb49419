"""``torch.stack(states)`` of a list that existed before: one of which each call has made other tensors the same, as a sample of a
replay buffer does, is joined between two graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.rules.sizes.places import check_numbers


def _join(function: Any) -> None:
    @rule(function)
    def join(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if args:
            check_numbers(interpreter, args[0])
        return interpreter.call_native(function, args, kwargs)


for _function in (torch.stack, torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack):
    _join(_function)
