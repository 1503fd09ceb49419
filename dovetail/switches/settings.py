"""The meaning here of torch.compile's settings and of its marks on functions, or that they have none."""

from __future__ import annotations

import dataclasses
import logging
import types
from typing import Any

from dovetail.face.dispatcher import Dispatcher
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, class_rule, rule, wrapper_rule
from dovetail.options import Options
from dovetail.torch_private import dynamo as private_dynamo

LOG = logging.getLogger("dovetail")
_DEFAULTS = Options()
_DYNAMO, _COMPILER = "torch._dynamo.config.", "torch.compiler.config."
_IS_SO = "Dovetail always does this"
_IS_LOOKED_INTO = "functions are looked into, and what they read is guarded; torch.library.custom_op keeps one whole"
_SAY_BACKEND = "say dovetail.compile(..., backend=...)"
_MARK_SIZES = "mark what changes with dovetail.mark_dynamic"
#: Why a wish has no effect, and what to do instead. A setting that is not named here has none either.
_IN_VAIN = {
    _DYNAMO + "suppress_errors": "Dovetail always runs eagerly what it cannot compile, unless fullgraph=True",
    _DYNAMO + "capture_scalar_outputs": _IS_SO,
    _DYNAMO + "capture_dynamic_output_shape_ops": _IS_SO,
    _DYNAMO + "allow_unspec_int_on_nn_module": _IS_SO,
    _DYNAMO + "inline_inbuilt_nn_modules": _IS_SO,
    _DYNAMO + "guard_nn_modules": _IS_SO,
    _DYNAMO + "trace_numpy": "NumPy always runs for real, between two graphs",
    _DYNAMO + "compiled_autograd": "say dovetail.compile(..., compiled_autograd=True)",
    _DYNAMO + "optimize_ddp": "Dovetail exchanges gradients inside of its graphs",
    _DYNAMO + "accumulated_recompile_limit": "recompile_limit holds for each function",
    _DYNAMO + "specialize_int": "mark what changes, or say dynamic=False",
    _DYNAMO + "specialize_float": "mark what changes, or say dynamic=False",
    _DYNAMO + "force_parameter_static_shapes": "sizes of parameters are never symbolic",
    _DYNAMO + "verbose": "set DOVETAIL_LOG",
    _DYNAMO + "reorderable_logging_functions": "what is printed and logged keeps its place",
    _COMPILER + "force_disable_caches": "DOVETAIL_CACHE=0 switches Dovetail's off",
    _COMPILER + "dynamic_sources": _MARK_SIZES,
    _COMPILER + "unbacked_sources": _MARK_SIZES,
    _COMPILER + "dynamic_values": _MARK_SIZES,
    "torch.compiler.allow_in_graph": _IS_LOOKED_INTO,
    "torch.compiler.nonstrict_trace": _IS_LOOKED_INTO,
    "torch.compiler.assume_constant_result": "the function is looked into, and its result is guarded",
    "torch.compiler.nested_compile_region": "regional=True compiles repeated blocks once",
    "torch.compiler.set_default_backend": _SAY_BACKEND,
    "torch._dynamo.disallow_in_graph": "call the function in one that dovetail.disable was given",
    "torch._dynamo.error_on_graph_break": "say dovetail.compile(..., fullgraph=True)",
    "torch._dynamo.override_cudagraphs": _SAY_BACKEND,
    "guard_filter_fn": "no guard is ever left out",
    "torch.compiler.set_stance(skip_guard_eval_unsafe=...)": "no guard is ever left out",
    "torch.compiler.set_stance(force_backend=...)": f'{_SAY_BACKEND}; "eager" alone is followed',
    "torch._functorch.config.activation_memory_budget": "say dovetail.compile(..., memory_budget=...)",
}
_WITH_EFFECT = {
    _DYNAMO + name
    for name in (
        *("disable", "error_on_recompile", "recompile_limit", "fail_on_recompile_limit_hit"),
        *("automatic_dynamic_shapes", "assume_static_by_default"),
    )
}
_told: set[str] = set()


def say_in_vain(wish: str) -> None:
    """Log once in a process that a wish to torch.compile has no effect here, and why."""
    if wish not in _told:
        _told.add(wish)
        why = f": {_IN_VAIN[wish]}" if wish in _IN_VAIN else ""
        LOG.warning(f"{wish} has no effect on dovetail.compile{why}")


def changed_in_torch() -> dict[str, Any]:
    """The settings that have been changed and mean something here; each other one is told of."""
    changed = private_dynamo.changed_settings()
    if private_dynamo.has_memory_budget():
        say_in_vain("torch._functorch.config.activation_memory_budget")
    for name in changed.keys() - _WITH_EFFECT:
        say_in_vain(name)
    if private_dynamo.allows_native_code():
        say_in_vain("torch.compiler.allow_in_graph")
    if private_dynamo.disallowed_functions():
        say_in_vain("torch._dynamo.disallow_in_graph")
    for original, polyfill in private_dynamo.substitutes().items():
        rule.setdefault(original, _substitute(polyfill))
    return {name.removeprefix(_DYNAMO): value for name, value in changed.items() if name in _WITH_EFFECT}


def _substitute(polyfill: Any) -> Any:
    """The rule for ``torch.compiler.substitute_in_graph``: another function is called, and looked into."""
    return lambda interpreter, args, kwargs: interpreter.call(polyfill, args, kwargs)


@wrapper_rule
def _asks_in_vain(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> None:
    # An object that can be called comes here by its method, and is marked itself.
    owner = args[:1] if type(function) is types.FunctionType and function.__name__ == "__call__" else ()
    for item in (function, *owner):
        _say_what_marks_ask(item)


@class_rule
def _say_what_marks_ask(marked: Any) -> None:
    for mark in private_dynamo.marks_of(marked):
        say_in_vain(f"torch.compiler.{mark}")


def apply_to(dispatcher: Dispatcher, changed: dict[str, Any]) -> None:
    """Give a function the options that torch's settings stand for, where it was given none of its own."""
    options = dispatcher.options
    if options.backend is None and private_dynamo.chosen_backend() not in (None, "dovetail"):
        say_in_vain("torch.compiler.set_default_backend")
    news = {
        name: value
        for name, value in _meanings(changed).items()
        if getattr(options, name) == getattr(_DEFAULTS, name) and value != getattr(_DEFAULTS, name)
    }
    if news:
        dispatcher.take_options(dataclasses.replace(options, **news))


def _meanings(changed: dict[str, Any]) -> dict[str, Any]:
    """The options that changed settings stand for."""
    options: dict[str, Any] = {}
    if "recompile_limit" in changed:
        options["recompile_limit"] = max(1, int(changed["recompile_limit"]))
    if changed.get("fail_on_recompile_limit_hit"):
        options["at_recompile_limit"] = "error"
    if changed.get("automatic_dynamic_shapes") is False:
        options["dynamic"] = False
    if changed.get("assume_static_by_default") is False:
        options["dynamic"] = True
    return options
