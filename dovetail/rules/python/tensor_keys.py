"""Operators on tables whose keys are tensors: one that existed before has the real tensors, one of the program the traced ones."""

from __future__ import annotations

import operator
from collections.abc import KeysView
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, operator_rule
from dovetail.torch_private import tensors as private_tensors


def _refuse(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    kinds = {
        private_tensors.is_traced(key)
        for container in operands
        if isinstance(container, (dict, set, frozenset, KeysView))
        for key in container
        if isinstance(key, torch.Tensor)
    }
    if len(kinds) > 1:
        raise Break(
            "an operator is given a container of tensors that existed before and one that did not",
            "add the items one by one",
        )
    return NotImplemented


for _function in (operator.and_, operator.or_, operator.xor, operator.sub, operator.eq, operator.ne):
    operator_rule(_function)(_refuse)
for _function in (operator.lt, operator.le, operator.gt, operator.ge):
    operator_rule(_function)(_refuse)
