"""Hooks that the program registers and that outlive the call: on an input, on a result, or with a write to an object outside.

A hook belongs to the graph at first: the gradient that the graph computes goes through it. Where that is not what eager does (the
tensor is seen outside, where its gradient is that behind the hook; or the hook writes to an object, which belongs to each backward)
the capture begins anew, and the graph breaks at the registration.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import end_rule, leaving_rule
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import calls as private_calls
from dovetail.trace import Retry


class HooksOutside:
    """The hooks of one capture that are in the graph, each with its place in the program."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self._passes: Counter[Any] = Counter()
        self._in_graph: list[tuple[Any, torch.Tensor]] = []
        interpreter.trace.at_close.append(lambda: vars(self).clear())

    def note(self, tensor: torch.Tensor) -> Any:
        """The key of a registration in the graph. Raises :class:`Break` where an earlier attempt found that it cannot be there."""
        frame = self._interpreter.frames[-1]
        at = ("hook outside", frame.code, frame.position)
        self._passes[at] += 1
        key = (*at, self._passes[at])
        if key in self._interpreter.trace.settings.observed:
            raise Break("a hook is registered that outlives the call", "register it outside of the function")
        self._in_graph.append((key, tensor))
        return key

    def keep_outside(self, key: Any, reason: str) -> None:
        """Begin the capture anew with a graph break in the place of this hook."""
        self._interpreter.trace.findings.observed[key] = True
        raise Retry(reason)

    def check_leaving(self, tensor: torch.Tensor) -> None:
        """A tensor leaves the program."""
        for key, known in self._in_graph if tensor._backward_hooks else ():
            if known is tensor:
                self.keep_outside(key, "a tensor with a hook on its gradient leaves the function")

    def check_inputs(self) -> None:
        """The program has ended: the hooks that are still on inputs stay there."""
        trace = self._interpreter.trace
        with private_calls.no_torch_function():
            for key, tensor in self._in_graph:
                if trace.input_of(tensor) is not None and private_autograd.has_hooks(tensor):
                    self.keep_outside(key, "a hook is registered on an input")


@leaving_rule
def _leaving(interpreter: TracingInterpreter, value: torch.Tensor) -> None:
    interpreter.state(HooksOutside).check_leaving(value)


@end_rule
def _end(interpreter: TracingInterpreter) -> None:
    interpreter.state(HooksOutside).check_inputs()
