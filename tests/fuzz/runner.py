"""Run one program in two fresh worlds, eagerly and compiled, and compare the two after each call.

A program is source text. It defines ``function``, which is compiled, and ``call_0``, ``call_1``, ...: each changes the
program's state and then returns ``run(...)``, where ``run`` is the function or its compiled version. A program with a global
``tolerance`` calls ``backward`` itself, and its numbers may lie that far apart.

>>> source = "import torch\\ndef function(x): return x * 2\\ndef call_0(run): return run(torch.ones(2))\\n"
>>> run_program(source).category
'one graph'
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import linecache
import logging
import random
import re
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import dovetail
from dovetail.errors import ChangedReadError, HigherOrderGradientError, PartialGradientError
from dovetail.face.loading import load_rules
from dovetail.guards import AmbientState
from dovetail.reports.explanation import compiled_function
from dovetail.torch_private import state as private_state
from tests.fuzz.world import Comparison, Difference

MODULE_NAME = "fuzzed_program"
ONE_GRAPH, BREAKS, FALL_BACK, EXCEPTION = "one graph", "with graph breaks", "whole fall-back", "exceptions"
_numbers = itertools.count()
# Before the first look at the state of torch, to which rules add.
load_rules()
# Torch logs every operator that refuses its arguments; here that is an error of the program, and meant.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
# The standard library looks for the module of a class there.
sys.modules.setdefault(MODULE_NAME, types.ModuleType(MODULE_NAME))


class OutOfTime(BaseException):
    """A program took too long. Not an Exception, so that no handler of the program or of Dovetail takes it."""


@dataclass(frozen=True)
class Outcome:
    """What became of one program: how it was captured, and the failure if there is one (``kind`` and a text).

    One that raises before its first call has not ``begun``.
    """

    category: str
    failure: str = ""
    kind: str = ""
    reasons: tuple[str, ...] = ()
    raised: int = 0
    has_begun: bool = True


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise :class:`OutOfTime` in the body after so many seconds (main thread only)."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@dataclass
class _Call:
    """What one call returned, raised and printed, and the state of the random generators after it."""

    result: Any
    error: BaseException | None
    printed: str
    torch_random: torch.Tensor
    python_random: Any
    state_of_torch: tuple[AmbientState, private_state.StateOfTorch]


class _World:
    """One execution of the program's source."""

    def __init__(self, source: str, filename: str) -> None:
        self.namespace: dict[str, Any] = {"__name__": MODULE_NAME}
        torch.manual_seed(0)
        random.seed(0)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, filename, "exec"), self.namespace)

    def call(self, name: str, run: Callable[..., Any], seed: int) -> _Call:
        torch.manual_seed(seed)
        random.seed(seed)
        printed = io.StringIO()
        result, error = None, None
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = self.namespace[name](run)
            except (OutOfTime, KeyboardInterrupt):
                raise
            except BaseException as raised:  # noqa: BLE001  (Dovetail's own breaks must not come out)
                error = raised
                # A generator that they hold would be closed whenever somebody lets go of the exception.
                traceback.clear_frames(error.__traceback__)
        # Accepted: the text of a tensor names the node of autograd that made it, which is the graph's own in one of the two.
        text = re.sub(r"grad_fn=<\w+>", "grad_fn", printed.getvalue())
        state = (AmbientState.snapshot(), private_state.StateOfTorch.now())
        return _Call(result, error, text, torch.get_rng_state(), random.getstate(), state)


def _differentiable(comparison: Comparison) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = [(a, b) for _, a, b in comparison.tensors if a.requires_grad and a.grad_fn is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _turned(value: torch.Tensor, number: int) -> torch.Tensor:
    return value.float().transpose(0, -1) if value.dim() > 1 and number % 2 else value.float()


def _backward(roots: list[torch.Tensor]) -> Exception | None:
    """Gradients of a scalar made from all roots, with weights that differ from element to element."""
    total = torch.zeros(())
    try:
        for number, root in enumerate(roots):
            weights = torch.linspace(0.5, 1.5 + number, max(root.numel(), 1), dtype=torch.float32)[: root.numel()]
            # Tangents of every layout: as the result, transposed, with strides of zero.
            total = (
                total
                + (_turned(root, number) * _turned(weights.reshape(root.shape), number)).sum()
                + root.float().mean()
            )
        total.backward(retain_graph=True)
    except Exception as error:
        return error
    return None


def _compare_errors(left: Exception | None, right: Exception | None, kind: str, where: str) -> None:
    left_text = f"{type(left).__name__}: {left}"
    right_text = f"{type(right).__name__}: {right}"
    # Accepted: which of the saved tensors autograd names. The graph saves others than eager's operators do.
    saved = "one of the variables needed for gradient computation has been modified by an inplace operation"
    viewed = "is a view and its base or another view of its base has been modified inplace"
    # How it goes on depends on the operator that made the view.
    unrecorded = "A view was created in no_grad mode and is being modified inplace with grad mode enabled"
    if any(text in left_text and text in right_text for text in (saved, viewed, unrecorded)):
        return
    # Accepted: what the graph saved is a copy that the later write does not reach, and the gradient is right.
    if right is None and saved in left_text:
        return
    # Accepted: a returned part of an unbind or a split is no view of what it was split from, and may be written to.
    if right is None and "is a view and is being modified inplace" in left_text:
        return
    # Accepted: what a backward refuses by name (docs/memory-and-autograd.md, docs/any-order.md).
    if isinstance(right, (PartialGradientError, HigherOrderGradientError, ChangedReadError)):
        return
    # Accepted: a graph is one node, which looks after all that it saved for the results together.
    if left is None and saved in right_text:
        return
    # Accepted: a graph's backward frees all that it saved, also where eager's operators had saved nothing.
    if left is None and "Trying to backward through the graph a second time" in right_text:
        return
    if left_text != right_text:
        kind = f"{kind} {type(left).__name__} {type(right).__name__}"
        shown = "" if right is None else "".join(traceback.format_exception(right))[-3000:]
        raise Difference(kind, f"{where}: {left_text} and {right_text}\n{shown}")


def _is_unchecked(error: BaseException | None) -> bool:
    """Accepted: an operator whose result nobody uses is not run. Where torch's own meta function does not check what the
    kernel does (two dtypes in one matrix product, strides beyond the memory), the error is lost; where it is used, the graph
    raises the error as a whole, before any of the program's effects.
    """
    # A fault of torch's: a write to a tensor with retain_grad() that is not the first output of its node.
    texts = (
        "same dtype",
        "same scalar type",
        "are out of bounds for storage of size",
        "out != nullptr INTERNAL ASSERT",
    )
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _compare_calls(
    left: _World, right: _World, first: _Call, second: _Call, where: str, has_gradients: bool
) -> Comparison:
    _compare_errors(first.error, second.error, "exception", where)
    if first.printed != second.printed:
        raise Difference("printed", f"{where}: {first.printed!r} and {second.printed!r}")
    if not torch.equal(first.torch_random, second.torch_random) or first.python_random != second.python_random:
        raise Difference("random state", where)
    if first.state_of_torch != second.state_of_torch:
        raise Difference("state of torch", f"{where}: {first.state_of_torch[0].differences()}")
    comparison = Comparison(MODULE_NAME, left.namespace.get("tolerance", 0.0), has_gradients)
    comparison.same(first.result, second.result, f"{where} result")
    comparison.namespace(left.namespace, right.namespace)
    return comparison


def call_names(namespace: dict[str, Any]) -> list[str]:
    """The calls of a program, in order."""
    return [
        name for name, item in namespace.items() if name.startswith("call_") and isinstance(item, types.FunctionType)
    ]


def _unseen_writers(source: str) -> frozenset[str]:
    """The calls that write past autograd, by ``.data``: what a backward finds afterwards depends on what it has saved, and no
    version counter tells.
    """
    return frozenset(
        function.name
        for function in ast.parse(source).body
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.Attribute) and node.attr == "data" for node in ast.walk(function))
    )


def run_program(source: str, backend: str = "aten", seconds: int = 60) -> Outcome:
    """Run a program eagerly and compiled, call by call, and say how it went."""
    filename = f"<fuzzed program {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    compiled: Any = None
    raised = 0
    failure, kind = "", ""
    left = right = None
    is_written_unseen, unseen_writers = False, _unseen_writers(source)
    try:
        with time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            left = _World(source, filename)
            right = _World(source, filename)
            compiled = dovetail.compile(right.namespace["function"], backend=backend)
            for number, name in enumerate(call_names(left.namespace)):
                first = left.call(name, left.namespace["function"], number)
                second = right.call(name, compiled, number)
                raised += first.error is not None
                if _is_unchecked(first.error) or _is_unchecked(second.error):
                    break
                if (first.error is None) != (second.error is None):
                    # Either a failure, or accepted; the two worlds are no longer comparable.
                    _compare_errors(first.error, second.error, "exception", name)
                    break
                comparison = _compare_calls(left, right, first, second, name, not is_written_unseen)
                if "tolerance" in left.namespace:
                    continue
                roots = _differentiable(comparison)
                errors = [_backward(roots[0]), _backward(roots[1])] if roots[0] else [None, None]
                _compare_errors(errors[0], errors[1], "backward", name)
                # What this and earlier calls have saved may be written to; it may be kept, and used by a later backward.
                is_written_unseen = is_written_unseen or name in unseen_writers
                if errors == [None, None] and not is_written_unseen:
                    for path, *tensors in comparison.tensors:
                        comparison.gradient(*tensors, f"{name}: {path}")
                else:
                    # What was accumulated before an error depends on the order of the backward's parts.
                    for _, *tensors in comparison.tensors:
                        for tensor in tensors:
                            tensor.grad = None
    except Difference as difference:
        failure, kind = str(difference), difference.kind
    except OutOfTime:
        failure, kind = f"took longer than {seconds} s", "time"
    except Exception:
        if left is None:
            return Outcome(EXCEPTION, raised=1, has_begun=False)
        failure, kind = traceback.format_exc(), f"crash {type(sys.exc_info()[1]).__name__}"
    finally:
        linecache.cache.pop(filename, None)
    return Outcome(_category(compiled, raised), failure, kind, _reasons(compiled), raised)


def _category(compiled: Any, raised: int) -> str:
    if raised or compiled is None:
        return EXCEPTION
    function = compiled_function(compiled)
    if any(entry.run is None for entry in function.entries):
        return FALL_BACK
    return BREAKS if function.continuations() else ONE_GRAPH


def _reasons(compiled: Any) -> tuple[str, ...]:
    if compiled is None:
        return ()
    events = compiled_function(compiled).events.events
    return tuple(str(event.details["reason"]).splitlines()[0] for event in events if event.name == "graph break")
