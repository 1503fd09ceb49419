"""Random numbers that nobody uses are drawn all the same: what is drawn after them must be eager's.

Inductor leaves out what no output depends on, and does not count the state of the generator as an output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dovetail.trace.repeats import draws_random_numbers


def keep_unused_draws(graph: torch.fx.GraphModule) -> int:
    """Add the results of random operators that no output depends on to the outputs; how many these are."""
    output = next(iter(graph.graph.find_nodes(op="output")))
    used: set[torch.fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node not in used:
            used.add(node)
            waiting += node.all_input_nodes
    draws = [node for node in graph.graph.nodes if node.op == "call_function" and draws_random_numbers(node.target)]
    unused = [node for node in draws if node not in used and isinstance(node.meta.get("val"), torch.Tensor)]
    if unused:
        output.args = (type(output.args[0])((*output.args[0], *unused)),)  # type: ignore[misc, call-arg, arg-type]
        graph.recompile()
    return len(unused)


def without_last(call: Callable[[list[Any]], Any], count: int) -> Callable[[list[Any]], Any]:
    """``call`` without its last results.

    >>> without_last(lambda values: [*values, 3], 1)([1, 2])
    [1, 2]
    """
    return call if not count else lambda inputs: list(call(inputs))[:-count]
