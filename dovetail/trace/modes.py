"""The dispatch modes of a trace: functionalisation above, fake tensors below, and the tracer that records in between."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace.overrides import EVERY, FAKE, FUNCTIONAL, SYMBOLIC_FAKE, WRITE_CHECKS, WRITES, OperatorHook
from dovetail.trace.repeats import draws_random_numbers

if TYPE_CHECKING:
    from dovetail.trace.trace import Trace


class FakeMode(private_tracing.FakeTensorMode):
    """Fake tensors whose results are those of torch's fake kernels, or of the table ``FAKE``."""

    supports_higher_order_operators = True

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the base class."""
        return _hooked(FAKE.get(func), super().dispatch, func, types, args, kwargs)


class SymbolicFakeMode(FakeMode):
    """Fake tensors with symbolic sizes.

    C++ operators that are made of others ask for plain sizes, their Python forms do not. The recorded operators stay those of
    eager: this mode is below what is recorded.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the base class."""
        with private_tracing.enable_python_dispatcher():
            return _hooked(SYMBOLIC_FAKE.get(func), super().dispatch, func, types, args, kwargs)


def _hooked(hook: OperatorHook | None, dispatch: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Let a hook give the result; without one, or where it has nothing to say, ``dispatch`` does."""

    def run(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return dispatch(operator, types, tuple(args), dict(kwargs))

    found = NotImplemented if hook is None else hook(run, func, args, kwargs or {})
    return dispatch(func, types, args, kwargs) if found is NotImplemented else found


class FunctionalMode(private_tracing.FunctionalTensorMode):
    """Functionalisation: operators that write become operators that return, except where ``FUNCTIONAL`` says otherwise."""

    supports_higher_order_operators = True

    def __init__(self, open_trace: Trace) -> None:
        super().__init__()
        self.open_trace = open_trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hook = FUNCTIONAL.get(func)
        is_write = isinstance(func, private_operators.OpOverload) and func._schema.is_mutable
        kwargs = kwargs or {}

        def run(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return super(FunctionalMode, self).__torch_dispatch__(operator, types, tuple(args), dict(kwargs))

        for check in WRITE_CHECKS if is_write else ():
            check(func, args, kwargs)
        for item in (*((hook,) if hook is not None else ()), *(WRITES if is_write else ()), *EVERY):
            found = item(run, func, args, kwargs)
            if found is not NotImplemented:
                return found
        result = run(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            self.open_trace.note_metadata_change(func, args, kwargs)
        return result


class Tracer(private_tracing.PythonKeyTracer):
    """Notes on every node its phase, the user's line, and where in a backward it was computed."""

    def __init__(self, open_trace: Trace) -> None:
        super().__init__()
        self.open_trace = open_trace
        # Of the arithmetic of sizes (which torch does for each fake tensor), what nothing reads is not recorded.
        self.enable_thunkify = True

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """See the base class."""
        trace = self.open_trace
        is_random = draws_random_numbers(args[1])
        if is_random and (again := trace.random.repeated(args[1])) is not None:
            return again
        node = super().create_node(*args, **kwargs)
        if is_random:
            trace.random.record(node)
        self.note(node)
        return node

    def note(self, node: torch.fx.Node) -> None:
        """Say of a new node when, where and by whose backward it was recorded."""
        trace, meta = self.open_trace, node.meta
        meta["phase"] = phase = trace.phase
        if not (records := torch.is_grad_enabled()):
            meta["without_gradients"] = True
        if (backward := private_autograd.current_backward()) >= 0:
            meta["in_backward"] = backward
        if phase == "backward" and records:
            # Autograd's own formulas run without recording; only a checkpointed region, called again, records. A part of a
            # result is where the result is: in the forward, for that of a random operator, which is not repeated.
            meta["checkpointed"] = node.target is not operator.getitem
        elif phase == "backward" and trace.user_backward:
            meta["user_backward"] = trace.user_backward
        if (line := trace.backward_line() if phase == "backward" else trace.locate()) is not None:
            meta["user_line"] = line
