"""Runs the segments of a captured backward, and writes the leaves' gradients between them."""

from __future__ import annotations

import operator
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from dovetail.backward_capture import accumulation, hooks
from dovetail.backward_capture.builder import Collected
from dovetail.backward_capture.segments import USER_CODE, Segment, Write


@dataclass(frozen=True)
class _Step:
    """A segment and its function, with the last uses of its values.

    ``dropped`` are carried values that this segment is the last to use. ``writes`` says of each write whether it is the last use of
    its gradient. The segment computes with the saved tensors ``saved``, with those in ``saved_later`` after code of the user's.
    """

    segment: Segment
    function: Callable[..., Any]
    dropped: tuple[int, ...]
    writes: tuple[tuple[Write, bool], ...]
    saved: tuple[int, ...]
    saved_later: tuple[int, ...]


class SegmentRunner:
    """Runs the segments one after the other; a value is let go of after its last use."""

    def __init__(
        self, segments: Sequence[Segment], results: Sequence[int | None], functions: Sequence[Callable[..., Any]]
    ) -> None:
        self.segments = segments
        #: The callable of each segment.
        self.functions = tuple(functions)
        self._results = results
        last_use: dict[int | None, int] = {}
        for index, segment in enumerate(segments):
            last_use.update(dict.fromkeys(segment.takes, index))
            last_use.update({write.gradient: index for write in segment.writes})
        last_use.update(dict.fromkeys(results, len(segments)))
        self._steps = [
            _step(segment, function, frozenset(number for number, last in last_use.items() if last == index))
            for index, (segment, function) in enumerate(zip(segments, functions, strict=True))
        ]
        #: Functions among the hooks of earlier runs that a guard keeps alive, by code, globals, cells and defaults.
        self._hooks: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
        # Only code of the user's could write to saved tensors.
        self._checks = any(node.target in USER_CODE for segment in segments for node in segment.graph.graph.nodes)

    def __call__(self, *arguments: Any) -> list[Any]:
        """Run on collected values; returns the gradients that were asked for. The others are in ``.grad`` afterwards."""
        collected = Collected(*arguments)
        arguments = collected._replace(hooks=[self._known(hook) for hook in collected.hooks])
        values: dict[int, Any] = {}
        versions = [tensor._version for tensor in collected.tensors] if self._checks else None
        for step in self._steps:
            if versions is not None:
                _check_unwritten(collected.tensors, versions, step.saved)
            carried = [values[number] for number in step.segment.takes]
            for number in step.dropped:
                del values[number]
            values.update(zip(step.segment.keeps, step.function(*arguments, carried), strict=True))
            del carried
            if versions is not None:
                _check_unwritten(collected.tensors, versions, step.saved_later)
            for (place, gradient), is_last in step.writes:
                if gradient is None:
                    collected.hooks[place]()
                elif is_last and values[gradient] is not None:
                    accumulation.accumulate_owned(collected.tensors[place], [values.pop(gradient)])
                else:
                    accumulation.accumulate_grad(collected.tensors[place], values[gradient])
        return [None if number is None else values[number] for number in self._results]

    def _known(self, hook: Any) -> Any:
        """The function of an earlier run that does the same as a hook made anew, for which segments would be compiled again."""
        if type(hook) is not types.FunctionType or hook.__dict__ or hook.__kwdefaults__:
            return hook
        inside = hook.__globals__, *(hook.__closure__ or ()), *(hook.__defaults__ or ())
        return self._hooks.setdefault((hook.__code__, *map(id, inside)), hook)


def _step(segment: Segment, function: Callable[..., Any], last_used: frozenset[int | None]) -> _Step:
    """A step; ``last_used`` are the values that nothing behind it uses."""
    uses = Counter(write.gradient for write in segment.writes)
    return _Step(
        segment,
        function,
        tuple(number for number in dict.fromkeys(segment.takes) if number in last_used and number not in uses),
        tuple((write, uses[write.gradient] == 1 and write.gradient in last_used) for write in segment.writes),
        *_saved_in(segment.graph),
    )


def _saved_in(graph_module: fx.GraphModule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The saved tensors that a segment computes with, and those that it uses after code of the user's has run."""
    used: dict[int, None] = {}
    afterwards: dict[int, None] = {}
    user_code = False
    for node in graph_module.graph.nodes:
        if node.target is hooks.call_post_accumulate_hook:
            user_code = True
            continue  # its leaf is no saved value
        for item in node.all_input_nodes:
            if item.target is operator.getitem and item.args[0].name == "tensors":  # type: ignore[union-attr]
                (afterwards if user_code else used)[item.args[1]] = None  # type: ignore[index]
        user_code = user_code or node.target in USER_CODE
    return tuple({**used, **afterwards}), tuple(afterwards)


def _check_unwritten(tensors: Sequence[Any], versions: Sequence[int], places: Sequence[int]) -> None:
    """Raise eager's error if a saved tensor was written to since the backward began."""
    for place in places:
        if tensors[place]._version != versions[place]:
            tensor = tensors[place]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
                f"{versions[place]} instead. A hook or function that runs in this backward wrote to it."
            )
