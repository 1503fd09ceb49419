"""Tables for calls: modules whose functions run natively, functions that are impure, methods that write."""

from __future__ import annotations

import builtins
import functools
import itertools
import math
import operator
import threading
import types
from typing import Any

from dovetail.frontend.code.frame import Break

# Python code of torch that is interpreted like the user's: it reads module state that must be guarded.
_INTERPRETED_TORCH = {
    *("torch.nn.modules", "torch.utils._contextlib", "torch.autograd.grad_mode", "torch.amp.autocast_mode")
}
# The interpreter's own generators, iterators and helpers.
OWN_MODULES = ("dovetail.frontend.", "dovetail.rules.")
# Python code of the standard library that runs natively: it is pure, or (warnings, logging) kept once.
NATIVE_PYTHON = (
    *("re", "inspect", "typing", "warnings", "logging", "abc", "copyreg", "importlib", "weakref", "textwrap"),
    *("enum", "numbers", "_py_warnings", "annotationlib"),
)
PURE_MODULES = frozenset(
    {
        *("builtins", "math", "cmath", "_operator", "operator", "itertools", "_functools", "functools"),
        *("_collections", "collections", "_abc", "abc", "typing", "types", "re", "_struct", "numbers", "enum"),
        *("string", "_string", "copy", "inspect", "_typing", "math.integer"),
    }
)
IMPURE_BUILTINS: dict[Any, str] = {
    print: "print writes to the terminal",
    input: "input reads from the terminal",
    open: "open reads or writes a file",
    **{function: f"{function.__name__} runs code from a string" for function in (exec, eval)},
    compile: "compile makes code",
    **dict.fromkeys((builtins.__build_class__, type.__new__), "a class is defined"),
    globals: "globals() hands out the module's dictionary",
    locals: "locals() hands out the frame's variables",
    dir: "dir() lists what nobody guards",
    breakpoint: "breakpoint stops the program",
    id: "id() is another number at every call",
}
IMPURE_TORCH = frozenset(
    {
        *("manual_seed", "seed", "set_rng_state", "get_rng_state", "initial_seed", "get_num_threads"),
        *("get_num_interop_threads", "set_default_dtype", "set_default_device", "set_default_tensor_type", "save"),
        *("load", "set_num_threads", "use_deterministic_algorithms", "set_printoptions", "synchronize", "compile"),
        *("from_numpy", "from_file", "frombuffer", "set_float32_matmul_precision", "fork_rng", "backward"),
        *("retain_grad", "Generator", "swap_tensors", "set_warn_always", "set_flush_denormal"),
    }
)
LOCKS = (type(threading.Lock()), type(threading.RLock()))
# Methods of a tensor that hand out its memory or its values.
_ADDRESSES = ("data_ptr", "const_data_ptr", "storage", "untyped_storage", "_typed_storage")
DATA_METHODS = frozenset((*_ADDRESSES, "numpy", "tolist", "__array__", "__dlpack__", "from_dlpack", "apply_", "map_"))
# Functions that give a symbolic number for a symbolic number.
SYMBOLIC_FUNCTIONS = frozenset({math.floor, math.ceil, math.trunc, operator.index, slice})
# Methods of lists, dictionaries and sets that write.
WRITERS = frozenset(
    {
        *("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "popitem", "setdefault"),
        *("move_to_end", "add", "discard", "difference_update", "intersection_update", "symmetric_difference_update"),
        *("__setitem__", "__delitem__", "__iadd__", "__imul__", "__ior__", "__iand__", "__isub__", "__ixor__"),
        *("__init__", "__missing__", "appendleft", "extendleft", "popleft", "rotate"),
    }
)
# Methods of lists and tuples that compare their items, and those of dictionaries that look a key up: the most arguments they take.
SEARCHES = {"count": 1, "index": 3, "remove": 1, "__contains__": 1}
LOOKUPS = {"get": 2, "__getitem__": 1, "__contains__": 1}
# Functions that compare what they are given, or its items, by ``==`` or by hash.
COMPARING = frozenset({itertools.groupby, operator.countOf, operator.indexOf, dict.fromkeys})
# Functions that compare, keep or describe the functions they are given, and call none of them; rules add more.
LOOKING: set[Any] = {operator.is_, operator.is_not, operator.eq, operator.ne}
LOOKING |= {operator.contains, operator.countOf, operator.indexOf}
NATIVE_CALLABLES = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    types.ClassMethodDescriptorType,
)


@functools.lru_cache(maxsize=8192)
def runs_natively(module_name: str) -> bool:
    """Whether Python functions of a module run natively instead of being interpreted."""
    if module_name == "torch" or module_name.startswith("torch."):
        return not any(module_name == prefix or module_name.startswith(prefix + ".") for prefix in _INTERPRETED_TORCH)
    # The interpreter's own generators and iterators.
    return module_name.split(".", 1)[0] in NATIVE_PYTHON or module_name.startswith(OWN_MODULES)


def interpret_modules(*names: str) -> None:
    """Have Python code of more modules of torch interpreted."""
    _INTERPRETED_TORCH.update(names)
    runs_natively.cache_clear()


def check_loading(module_name: str | None) -> None:
    """Refuse code that loads data: it takes batches from a loader, reads files or starts processes, also while tracing."""
    name = module_name or ""
    if name.startswith("torch.utils.data.") and runs_natively(name) and not name.endswith("._utils.collate"):
        raise Break("a DataLoader loads data", "compile a function of one batch, and go through the loader outside")


_STORING_METHODS: dict[type | None, frozenset[str]] = {
    list: frozenset({"append", "extend", "insert"}),
    dict: frozenset({"get", "pop", "setdefault", "update"}),
}


def stores_its_arguments(function: Any) -> bool:
    """Whether a bound method of a list or dictionary puts its arguments there as they are; keys become plain by themselves."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    # ``tuple.__new__`` makes named tuples.
    return name == "__new__" if owner is tuple else name in _STORING_METHODS.get(type(owner), frozenset())
