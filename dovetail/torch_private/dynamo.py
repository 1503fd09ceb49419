"""Torch.compile as the caller of a backend, its registered backends and its counters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor


def torch_backend(name: str) -> Any:
    """One of torch's own registered backends, a callable ``(graph_module, example_inputs)``."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def labelled(label: str, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The same function, with a label around it for a profiler that is active when it is called."""
    profiler = torch.autograd.profiler

    def run_labelled(inputs: list[Any]) -> Any:
        if profiler._is_profiler_enabled:
            with profiler.record_function(label):
                return run(inputs)
        return run(inputs)

    return run_labelled


def is_profiling() -> bool:
    """Whether torch's profiler is active."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def is_compilation() -> bool:
    """Whether what is written to ``TORCH_TRACE`` belongs to a compilation already."""
    return torch._guards.CompileContext.try_get() is not None


@contextlib.contextmanager
def as_compilation(frame: int, number: int) -> Iterator[Callable[..., None]]:
    """A block of which all that is written to ``TORCH_TRACE`` belongs to a compilation of a frame; yields what writes there.

    It takes the name of a record, a text or a stack, and further facts.
    """
    from torch._guards import CompileContext, CompileId, compile_context
    from torch._logging import structured, trace_structured

    def write(record: str, content: Any, **facts: Any) -> None:
        if isinstance(content, str):
            trace_structured(record, lambda: facts, payload_fn=lambda: content)
        else:
            trace_structured(record, lambda: {**facts, "stack": structured.from_traceback(content)})

    with compile_context(CompileContext(CompileId(frame_id=frame, frame_compile_id=number))):
        yield write


def dynamo_capture_seconds() -> float:
    """Seconds that torch.compile has spent so far from bytecode to backend-ready graphs, Inductor's own work excluded."""
    from torch._dynamo.utils import compilation_time_metrics as metrics

    spent = {name: float(sum(times)) for name, times in metrics.items()}
    seconds = spent.get("_compile.compile_inner", 0.0) - spent.get("compile_fx.<locals>.fw_compiler_base", 0.0)
    if "backward._backward_impl" not in metrics:  # else the backward was compiled later, outside compile_inner
        seconds -= spent.get("compile_fx.<locals>.bw_compiler", 0.0)
    return seconds


def dynamo_graph_breaks() -> int:
    """The number of graph breaks that torch.compile has counted so far in this process."""
    from torch._dynamo.utils import counters

    return int(sum(counters["graph_break"].values()))


@dataclasses.dataclass(frozen=True)
class CallersInput:
    """One input of a graph that torch.compile hands over: the caller's fake value of it, and how the caller writes it."""

    value: Any
    name: str


def callers_name(source: Any) -> str:
    """The text by which the caller writes a source, such as ``L['x']``."""
    if source is None:
        return "an input"
    name = source.name
    return str(name() if callable(name) else name)  # a method before torch 2.12


def callers_fake_mode(inputs: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of the compiler that calls, or None."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(inputs))


def callers_inputs(graph: torch.fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode) -> list[CallersInput]:
    """The inputs as the caller's own fake values, symbols included.

    The placeholders' own values will not do: the caller's trace has been through them, in-place changes of metadata included.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    found = []
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            symbols = context.tensor_to_context.get(value) if context is not None else None
            value = fake_mode.from_tensor(
                value,
                static_shapes=context is None,
                symbolic_context=symbols,
                source=getattr(symbols, "tensor_source", None),
            )
        found.append(CallersInput(value, callers_name(source)))
    return found


@contextlib.contextmanager
def symbolic_sizes_in(fake_mode: FakeTensorMode) -> Iterator[None]:
    """C++ operators made of others ask for plain sizes, their Python forms do not: use those, in this fake mode only."""
    original = fake_mode.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        with enable_python_dispatcher():
            return original(*args, **kwargs)

    fake_mode.dispatch = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        del fake_mode.dispatch


def compiling_questions() -> tuple[Any, ...]:
    """The older names of ``torch.compiler.is_compiling``, which older libraries still call."""
    from torch._dynamo import external_utils

    return torch._utils.is_compiling, external_utils.is_compiling


def compile_stance() -> str:
    """The stance that ``torch.compiler.set_stance`` has set; it is kept by torch.compile, which may never have been loaded."""
    keeper = sys.modules.get("torch._dynamo.eval_frame")
    if keeper is None:
        return "default"
    stance = keeper._stance
    if stance.backend == "eager":
        return "force_eager"
    if stance.stance == "default" and (stance.backend is not None or stance.skip_guard_eval_unsafe):
        return "default with wishes"
    return stance.stance  # type: ignore[no-any-return]


def wishes_of_stance() -> Iterator[str]:
    """The arguments that ``torch.compiler.set_stance`` was given beside the stance, but for the backend "eager"."""
    keeper = sys.modules.get("torch._dynamo.eval_frame")
    if keeper is not None and keeper._stance.skip_guard_eval_unsafe:
        yield "skip_guard_eval_unsafe"
    if keeper is not None and keeper._stance.backend not in (None, "eager"):
        yield "force_backend"


def reset_with_torch(follower: Any) -> None:
    """Have ``follower.reset()`` called by ``torch.compiler.reset``, the next time only."""
    keeper = sys.modules.get("torch._dynamo.eval_frame")
    if keeper is not None:
        keeper.cached_backends.setdefault(id(follower), follower)


def changed_settings() -> dict[str, Any]:
    """The settings of torch.compile that somebody has changed, by their full names."""
    found = {}
    for module in ("torch._dynamo.config", "torch.compiler.config"):
        config: Any = sys.modules.get(module)
        known = {} if config is None else config._config
        # One that was changed for a block counts as changed for torch afterwards, with the value that it had.
        for name in [name for name in known if not config._is_default(name)]:
            if (value := getattr(config, name)) != known[name].default:
                found[f"{module}.{name}"] = value
    return found


def has_memory_budget() -> bool:
    """Whether somebody has told torch.compile how much a backward may keep."""
    config = sys.modules.get("torch._functorch.config")
    return config is not None and config.activation_memory_budget != 1.0


def marks_of(function: Any) -> Iterator[str]:
    """The decorators of torch.compile's that have left a mark on a function."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    attributes = getattr(function, "__dict__", ())
    if rules is not None and id(function) in rules._allowed_callable_ids:
        yield "nonstrict_trace" if id(function) in rules._nonstrict_trace_callable_ids else "allow_in_graph"
    if "_dynamo_marked_constant" in attributes:
        yield "assume_constant_result"


def allows_native_code() -> bool:
    """Whether ``torch.compiler.allow_in_graph`` was given a function that has no Python code."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return rules is not None and _are_native(frozenset(rules._allowed_callable_ids()))


@functools.lru_cache(maxsize=2)
def _are_native(ids: frozenset[int]) -> bool:
    natives = (types.BuiltinFunctionType, type(_are_native))
    # Copies: other threads import modules meanwhile. Torch's own functions are in graphs anyway.
    modules = [each for name, each in dict(sys.modules).items() if ids and name.split(".")[0] != "torch"]
    places = [dict(getattr(each, "__dict__", ())) for each in modules]
    return any(issubclass(type(item), natives) and id(item) in ids for place in places for item in place.values())


def disallowed_functions() -> tuple[str, ...]:
    """The names of torch's functions that ``torch._dynamo.disallow_in_graph`` was given."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return () if rules is None else _torchs_names(frozenset(rules._disallowed_callable_ids()))


@functools.lru_cache(maxsize=2)
def _torchs_names(ids: frozenset[int]) -> tuple[str, ...]:
    places = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft)
    # Copies: other threads load parts of torch meanwhile.
    found = (name for place in places for name, value in dict(vars(place)).items() if id(value) in ids)
    return tuple(dict.fromkeys(found))


def chosen_backend() -> Any:
    """The backend of ``torch.compiler.set_default_backend``; None where it is torch's own choice, or torch is older than 2.13."""
    ask = getattr(torch.compiler, "get_default_backend", None)
    if ask is None or "torch._dynamo.backends.registry" not in sys.modules or (found := ask()) == "inductor":
        return None
    return found


def substitutes() -> dict[Any, Any]:
    """The Python functions given to ``torch.compiler.substitute_in_graph``, by the functions that they stand for."""
    functions = sys.modules.get("torch._dynamo.variables.functions")
    if functions is None:
        return {}
    handlers = dict(functions.PolyfilledFunctionVariable._get_polyfill_handlers())
    found = {original: handler.__torch_dynamo_polyfill__ for original, handler in handlers.items()}
    return {key: value for key, value in found.items() if str(value.__module__).split(".", 1)[0] != "torch"}


def disabled_because(function: Any) -> str | None:
    """The reason given for ``torch.compiler.disable``, maybe empty; None where a function or module is not disabled.

    Torch's own functions are, so that its compiler leaves them alone; that is no wish of the program's.
    """
    wrappers = sys.modules.get("torch._dynamo.eval_frame")
    if wrappers is None:
        return None
    if isinstance(function, wrappers.OptimizedModule):
        context = function.dynamo_ctx
        return context.msg or "" if isinstance(context, wrappers.DisableContext) else None
    found = getattr(function, "__dict__", {})
    if not found.get("_torchdynamo_disable") or found.get("_torchdynamo_wrapper_id") not in (None, id(function)):
        return None
    if str(function.__module__).split(".", 1)[0] == "torch":
        return None
    return found.get("_torchdynamo_disable_msg") or ""


def is_of_the_compiler(function: types.FunctionType) -> bool:
    """Whether a function sets something of torch's compiler (``torch.compiler.reset``, ``torch._dynamo.graph_break``), or is
    forbidden in graphs by it.
    """
    module, name = function.__globals__.get("__name__") or "", function.__name__
    if "_dynamo_forbidden" in function.__dict__:
        return True
    if function.__module__ != module or name.startswith("is_") or name == "__getattr__":
        return False
    is_dynamos = module.startswith("torch._dynamo.") and module != "torch._dynamo.external_utils"
    return is_dynamos or module in ("torch.compiler", "torch.utils._config_module")


def method_behind_tagging(function: types.FunctionType) -> types.FunctionType | None:
    """``torch.nn.Module.__init__`` or ``__setstate__``, which the first use of ``torch.compile`` wraps to count new modules; None
    for all else.
    """
    maker, _, name = function.__qualname__.partition(".<locals>.patched_")
    if maker != "install_generation_tagging_init" or name not in function.__code__.co_freevars:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents


def without_torch_compile(function: Any) -> Any:
    """The argument of ``torch.compile`` or ``torch.compiler.disable``, found from their result; anything else is returned as it is.

    A wrapper of theirs switches torch's compiler on or off for the thread that calls it: under a trace of ours, for good.
    """
    # Imported only where somebody uses it: the import takes a second.
    wrappers = sys.modules.get("torch._dynamo.eval_frame")
    if wrappers is None:
        return function
    if isinstance(function, wrappers.OptimizedModule):
        return function._orig_mod
    is_theirs = isinstance(function, types.FunctionType) and function.__module__ is not None
    if is_theirs and function.__globals__.get("__name__") == "torch._dynamo.eval_frame":
        return getattr(function, "_torchdynamo_orig_callable", function)
    return function


#: The blocks that are decorators, too.
_BLOCKS = {
    "ErrorOnGraphBreakDecoratorContextManager": "error_on_graph_break",
    "CudagraphOverrideContextManager": "override_cudagraphs",
    "DynamoConfigPatchProxy": "patch_dynamo_config",
}


def decorated_in_vain(function: Any) -> tuple[Any, str]:
    """The function inside of a decorator that changes how torch.compile captures it, and the decorator's name; "" without one."""
    if not isinstance(function, types.FunctionType):
        return function, ""
    module = function.__globals__.get("__name__")
    if module == "torch._higher_order_ops.invoke_subgraph" and "__marked_compile_region_fn__" in function.__dict__:
        return function.__dict__["__marked_compile_region_fn__"], "torch.compiler.nested_compile_region"
    if module == "torch._dynamo.external_utils" and function.__qualname__.startswith("wrap_dunder_call_ctx_manager."):
        cells = inspect.getclosurevars(function).nonlocals
        if (name := _BLOCKS.get(type(cells.get("self")).__name__)) is not None:
            return cells["func"], f"torch._dynamo.{name}"
    return function, ""


def computes_with_numpy(function: Any) -> bool:
    """Whether ``torch.compiler.wrap_numpy`` has made a function."""
    code = function.__code__ if isinstance(function, types.FunctionType) else None
    return code is not None and code.co_qualname == "wrap_numpy.<locals>.wrap" and "external_utils" in code.co_filename


def shows_artifact(name: str) -> bool:
    """Whether ``TORCH_LOGS`` or ``torch._logging.set_logs`` asks for a kind of message, such as "graph_breaks"."""
    state = torch._logging._internal.log_state
    return bool(state.is_artifact_enabled(name))


def show_generated_code() -> None:
    """Have Inductor's code shown, as by ``TORCH_LOGS=output_code``, which is left alone where it is set."""
    if "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(output_code=True)
