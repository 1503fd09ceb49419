"""Higher-order operators (``torch.cond``, custom operators that write): torch's own rules for them, under the modes of a trace.

Torch looks for these rules by the very type of a dispatch mode, and a trace has types of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.torch_private import dynamo as private_dynamo
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import trees as private_trees
from dovetail.trace.overrides import FAKE, FUNCTIONAL, SYMBOLIC_FAKE, OperatorHook, Run
from dovetail.trace.trace import open_trace


def _hook(rule: Callable[..., Any], mode: str) -> OperatorHook:
    def run_rule(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        trace = open_trace()
        if trace is None:
            # A graph that is decomposed runs on its own fake values.
            return rule(private_dynamo.callers_fake_mode(private_trees.tree_leaves((args, kwargs))), *args, **kwargs)
        return rule(getattr(trace, mode), *args, **kwargs)

    return run_rule


for _operator in private_libraries.higher_order_operators():
    _functional, _fake = private_libraries.functional_rule(_operator), private_libraries.fake_rule(_operator)
    if _functional is not None:
        FUNCTIONAL.setdefault(_operator, _hook(_functional, "functional_mode"))
    if _fake is not None:
        FAKE.setdefault(_operator, _hook(_fake, "fake_mode"))
        SYMBOLIC_FAKE.setdefault(_operator, _hook(_fake, "fake_mode"))
