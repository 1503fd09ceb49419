"""Functions and modules that nobody looks into: ``torch.compiler.disable``, ``dovetail.disable``, calls of torch's compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from dovetail.errors import NotCallableError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, class_rule, wrapper_rule
from dovetail.guards import InstanceDictSource, NoHooks
from dovetail.switches.settings import say_in_vain
from dovetail.switches.stances import set_stance, stance_of_this_thread
from dovetail.torch_private import dynamo as private_dynamo

Callee = TypeVar("Callee", bound=Callable[..., Any])
#: The reason for which a function or module is disabled.
_MARK = "_dovetail_disabled"


@overload
def disable(function: None = None, *, reason: str = "") -> _Disabled: ...


@overload
def disable(function: Callee, *, reason: str = "") -> Callee: ...


def disable(function: Any = None, *, reason: str = "") -> Any:
    """Keep a function or a module out of all graphs: decorator with or without arguments, or a ``with`` block.

    A compiled function that calls it breaks its graph there, an error with ``fullgraph=True``, and nothing inside of it is
    compiled, compiled functions included. A module is marked in place and returned. In a ``with dovetail.disable():`` block
    all compiled functions run eagerly.

    >>> import torch, dovetail
    >>> @dovetail.disable(reason="it talks to a server")
    ... def send(x): return x.sum().item()
    >>> dovetail.compile(lambda x: x * send(x), backend="aten", fullgraph=True)(torch.ones(2))
    Traceback (most recent call last):
        ...
    dovetail.errors.GraphBreakError: send is disabled: it talks to a server
      at ...
      what to do: call it outside of the compiled function, or take the decorator away
    """
    return _Disabled(reason) if function is None else _Disabled(reason)(function)


class _Disabled:
    """A decorator, and a block in which all compiled functions of this thread run eagerly."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._blocks: list[Any] = []

    def __enter__(self) -> None:
        self._blocks.append(stance_of_this_thread("force_eager"))
        self._blocks[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._blocks.pop().__exit__(*error)

    def __call__(self, function: Callee) -> Callee:
        if isinstance(function, torch.nn.Module):
            setattr(function, _MARK, self.reason)
            return function
        if not callable(function):
            raise NotCallableError(f"a {type(function).__name__} cannot be disabled because it cannot be called")

        @functools.wraps(function)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            with stance_of_this_thread("force_eager"):
                return function(*args, **kwargs)

        disabled._dovetail_disabled = self.reason  # type: ignore[attr-defined]
        wrapper: Any = disabled
        _WRAPPERS.add(wrapper.__code__)
        return wrapper


#: The code of the wrappers that ``disable`` makes. A decorator around one copies its attributes, and is traced all the same.
_WRAPPERS: set[Any] = set()


@wrapper_rule
def _disabled(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Instead | None:
    is_module = isinstance(function, torch.nn.Module)
    reason = private_dynamo.disabled_because(function)
    if reason is None and (is_module or function.__code__ in _WRAPPERS):
        reason = function.__dict__.get(_MARK)
    if reason is None:
        return None
    inside = private_dynamo.without_torch_compile(function)
    name = type(inside).__qualname__ if is_module else function.__qualname__
    advice = "call it outside of the compiled function, or take the decorator away"
    raise Break(f"{name} is disabled" + (f": {reason}" if reason else ""), advice)


@wrapper_rule
def _call_of_torchs_compiler(
    interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords
) -> Instead | None:
    """A function of torch's compiler that the program itself calls: to change its state, or to break the graph."""
    if isinstance(function, torch.nn.Module) or not private_dynamo.is_of_the_compiler(function):
        return None
    original = private_dynamo.method_behind_tagging(function)
    if original is not None:
        return Instead(original, args, kwargs)
    frames = interpreter.frames
    caller = str(frames[-1].globals.get("__name__")) if frames else ""
    if caller.split(".", 1)[0] == "torch":
        return None
    where = "torch.compiler" if function.__module__ == "torch.compiler" else "torch._dynamo"
    name = function.__qualname__ if "_dynamo_forbidden" in function.__dict__ else f"{where}.{function.__qualname__}"
    raise Break(f"{name} is called inside of a compiled function", "call it outside of it")


@wrapper_rule
def _made_by_torch_compile(
    interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords
) -> Instead | None:
    """A wrapper of torch.compile's would switch its compiler on for the thread that calls it: under a trace of ours, for good."""
    if private_dynamo.computes_with_numpy(function):
        raise Break(
            f"{function.__qualname__} computes with NumPy (wrap_numpy)", "write it with torch, or call it outside"
        )
    inside, wish = private_dynamo.decorated_in_vain(function)
    if wish:
        say_in_vain(wish)
        return Instead(inside, args, kwargs)
    inside = private_dynamo.without_torch_compile(function)
    if inside is function:
        return None
    if not isinstance(function, torch.nn.Module):
        return Instead(inside, args, kwargs)
    attributes = vars(function)
    if any(attributes.get(name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")):
        raise Break("a module that torch.compile made has hooks", "register them on the module that it was made of")
    source = interpreter.values.source_of(function)
    if source is not None:
        interpreter.values.guard(InstanceDictSource(source), NoHooks(), f"{source.name} has no hooks")
    return Instead(interpreter.load_attribute(function, "_orig_mod"), args, kwargs)


@class_rule
def _switch_made(kind: type) -> None:
    if issubclass(kind, (set_stance, _Disabled)) or "_dynamo_forbidden" in kind.__dict__:
        raise Break(f"{kind.__qualname__} is used inside of a compiled function", "use it around the call")
