"""The code that Inductor generates for a graph, as data; and that data as a callable, without loading Inductor.

Inductor writes a Python module for each graph: the sources of kernels, and a class ``Runner`` whose method ``call`` runs them.
The class and the names of the files with the compiled kernels are enough to run the graph again. Only code that reads nothing but
plain names of torch is taken; whatever else a version of Inductor writes stays in Inductor's cache. Checked on torch 2.13 and 2.15.
"""

from __future__ import annotations

import ast
import base64
import dis
import functools
import json
import marshal
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dovetail.torch_private.inductor_kernels import key_of_loaded, loaded_kernels

_EXTERN = re.compile(r"\bextern_kernels\.(\w+)")
_FILE = "<code that Inductor has generated>"
_OPERATORS = re.compile(r"\btorch\.ops\.(\w+)")
#: Operators that exist in a process without Inductor.
_NAMESPACES = ("aten", "mkldnn")


@functools.cache
def _plain_names() -> dict[str, Any]:
    """The objects that generated code finds under the names of Inductor's usual imports."""
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
    }


def _helpers(kind: str) -> Any:
    """One of the modules from which generated code takes functions: native checks, allocations and views, or those in Python."""
    if kind == "native":
        return torch._C._dynamo.guards
    from torch._inductor.runtime import runtime_utils

    return runtime_utils


def _place(value: Any) -> list[str] | None:
    """The kind of helpers that has this function, and its name there."""
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        for kind in ("native", "Python"):
            if vars(_helpers(kind)).get(name := value.__name__) is value:
                return [kind, name]
    return None


def code_as_data(compiled: Any) -> dict[str, Any] | None:
    """The code of a graph that Inductor has compiled for the CPU; None where it needs more than can be written down."""
    call = getattr(compiled, "current_callable", None)
    if not isinstance(call, types.MethodType) or type(call.__self__).__name__ != "Runner":
        return None
    if call.__self__.partitions or set(compiled.device_types) != {"cpu"} or compiled.inputs_to_check:
        return None
    if compiled.torchbind_constants or getattr(compiled, "opaque_value_type_classes", None):
        return None
    found = [item for item in ast.parse(compiled.source_code).body if isinstance(item, ast.ClassDef)]
    source = ast.get_source_segment(compiled.source_code, found[0]) if len(found) == 1 else None
    if source is None or found[0].name != "Runner":
        return None
    # Without comments: they name the operators that a kernel stands for.
    if not set(_OPERATORS.findall(ast.unparse(found[0]))) <= set(_NAMESPACES):
        return None
    return _with_kernels(source, call.__func__.__globals__, call.__func__.__code__, compiled.constants or {})


def _with_kernels(
    source: str, names: Mapping[str, Any], code: types.CodeType, constants: Mapping[str, Any]
) -> dict[str, Any] | None:
    kernels: dict[str, list[str]] = {}
    helpers: dict[str, list[str]] = {}
    for name in sorted(set(_global_names(code)) - set(constants)):
        value = names.get(name)
        if (place := _place(value)) is not None:
            helpers[name] = place
            continue
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType):
            key = key_of_loaded(value.__self__)
            if key is not None:
                kernels[name] = [key, value.__name__]
                continue
        is_plain = name in _plain_names() and value is _plain_names()[name]
        if not is_plain and name != "extern_kernels" and not (name not in names and name in vars(math) | _BUILTINS):
            return None
    extern = sorted(set(_EXTERN.findall(source)))
    if any(getattr(names["extern_kernels"], name) is not getattr(torch, name, None) for name in extern):
        return None
    bytecode = marshal.dumps(compile(source, _FILE, "exec"))
    packed = base64.b64encode(bytecode).decode()
    return {"source": source, "bytecode": packed, "kernels": kernels, "helpers": helpers, "extern": extern,
            "constants": dict(constants)}  # fmt: skip


_BUILTINS = dict.fromkeys(("range", "len", "min", "max", "int", "float", "bool", "tuple", "list", "abs"))


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from _global_names(item)


def code_from_data(data: Mapping[str, Any]) -> Any:
    """The callable that :func:`code_as_data` has written down; None where a kernel is not in the cache any more.

    This runs the bytecode, as to compile the source takes ten times as long: call it for data of this user's cache only, whose
    kernels are machine code too. The source is for people.
    """
    names = {**_plain_names(), **data["constants"]}
    names.update({name: getattr(_helpers(kind), function) for name, (kind, function) in data["helpers"].items()})
    modules: dict[str, Any] = {}
    for name, (key, function) in data["kernels"].items():
        if key not in modules:
            modules[key] = loaded_kernels(key)
        if modules[key] is None:
            return None
        names[name] = getattr(modules[key], function)
    names["extern_kernels"] = types.SimpleNamespace(**{name: getattr(torch, name) for name in data["extern"]})
    exec(marshal.loads(base64.b64decode(data["bytecode"])), names)
    return names["Runner"](partitions=[]).call


def define_prims() -> None:
    """Define the operators of Inductor's own decompositions: ``prims.fma``, say, which is in the gradient of a softmax."""
    from torch._inductor import inductor_prims  # noqa: F401


#: Settings that say where things lie, who compiles and which caches are looked at, and decide about no code.
_WITHOUT_EFFECT = (
    "worker_start_method", "compile_threads", "cutlass.cutlass_dir", "cuda.cutlass_dir", "xpu.cutlass_dir",
    "fx_graph_cache", "fx_graph_remote_cache", "autotune_local_cache", "autotune_remote_cache",
)  # fmt: skip


def is_known(rule: Any) -> bool:
    """Whether a decomposition is torch's own or Dovetail's: keys have the version of both."""
    while isinstance(rule, functools.partial):
        rule = rule.func
    return str(getattr(rule, "__module__", "")).startswith(("torch.", "dovetail."))


def settings_as_text() -> str | None:
    """Inductor's settings; None where one of them is an object (a pass of the program's), or wants a compilation to be seen, and
    where the program has decompositions of its own in Inductor's table.
    """
    from torch._inductor import config

    values = {name: value for name, value in config.get_config_copy().items() if name not in _WITHOUT_EFFECT}
    common = sys.modules.get("torch._inductor.codegen.common")
    is_watched = config.force_disable_caches or config.trace.enabled or config.trace.provenance_tracking_level
    if is_watched or (common is not None and any(common.custom_backend_passes.values())):
        return None
    # Who has registered one has loaded the module.
    table = getattr(sys.modules.get("torch._inductor.decomposition"), "decompositions", {})
    if not all(map(is_known, table.values())):
        return None
    try:
        return json.dumps(values, sort_keys=True)
    except (TypeError, ValueError):
        return None
