"""What calls are told apart by: what runs natively, what is impure."""

from __future__ import annotations

import builtins
import decimal
import functools
import inspect
import itertools
import logging
import math
import operator
import sys
import threading
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.attributes import class_attribute
from dovetail.runtime.recipe_builder import interpreted_of

# Python code of torch that is interpreted like the user's: it reads module state that must be guarded.
INLINED_TORCH = (
    "torch.testing",
    "torch.nn.modules",
    "torch.utils._contextlib",
    "torch.autograd.grad_mode",
    "torch.amp.autocast_mode",
    "torch.optim",
    "torch.nn.parallel.distributed",
    # They read .grad, which a traced parameter has only where the interpreter reads it.
    "torch.nn.utils.clip_grad",
    "torch.amp.grad_scaler",
    "torch.nn.utils.parametrize",
    "torch.nn.utils.parametrizations",
    "torch.nn.utils.stateless",
    # Hooks of modules that are objects: they compute a parameter and set it as an attribute.
    "torch.nn.utils.weight_norm",
    "torch.nn.utils.spectral_norm",
    "torch.nn.utils.prune",
    "torch.nn.utils._named_member_accessor",
    # Switches.
    "torch.backends.mha",
    "torch.__future__",
    # They set parameters, or make modules.
    "torch.nn.utils.convert_parameters",
    "torch.nn.utils.fusion",
    "torch.nn.utils.init",
    "torch.nn.utils.memory_format",
    "torch._functorch.functional_call",
    "torch.utils._pytree",
    # They call one another, and those of the user.
    "torch.distributions.transforms",
    "torch.utils.data.dataset",
)
# Generator functions of torch that are interpreted although their module is not: the graph may break while they are suspended,
# and what they change is state that a capture makes again and takes back.
INTERPRETED_GENERATORS = frozenset({inspect.unwrap(torch.backends.cudnn.flags)})
# The interpreter's own generators, iterators and helpers.
OWN_MODULES = ("dovetail.frontend.", "dovetail.rules.")
# Python code of the standard library that runs natively: it is pure, or (warnings, logging) kept once.
NATIVE_PYTHON = (
    *("re", "inspect", "typing", "warnings", "logging", "abc", "copyreg", "importlib", "weakref", "textwrap"),
    *("enum", "numbers"),
)
PURE_MODULES = frozenset(
    {
        *("builtins", "math", "cmath", "_operator", "operator", "itertools", "_functools", "functools"),
        *("_collections", "collections", "_abc", "abc", "typing", "types", "re", "_struct", "numbers", "enum"),
        *("string", "_string", "copy", "inspect", "_typing"),
    }
)
# Hashed by identity, and no state of theirs is what a cached result depends on.
CACHE_KEYS = (logging.Logger, types.FunctionType, types.ModuleType, type)
IMPURE_BUILTINS: dict[Any, str] = {
    print: "print writes to the terminal",
    input: "input reads from the terminal",
    open: "open reads or writes a file",
    exec: "exec runs code from a string",
    eval: "eval runs code from a string",
    compile: "compile makes code",
    builtins.__build_class__: "a class is defined",
    globals: "globals() hands out the module's dictionary",
    locals: "locals() hands out the frame's variables",
    dir: "dir() lists what nobody guards",
    breakpoint: "breakpoint stops the program",
    id: "id() is another number at every call",
    decimal.getcontext: "decimal.getcontext() hands out state that nobody guards",
    decimal.localcontext: "decimal.localcontext() hands out state that nobody guards",
}
IMPURE_TORCH = frozenset(
    {
        *("manual_seed", "seed", "set_rng_state", "get_rng_state", "initial_seed", "get_num_threads"),
        *("get_num_interop_threads", "set_default_dtype", "set_default_device", "set_default_tensor_type", "save"),
        *("load", "set_num_threads", "use_deterministic_algorithms", "set_printoptions", "synchronize", "compile"),
        *("from_numpy", "from_file", "frombuffer", "set_float32_matmul_precision", "fork_rng", "backward"),
        *("retain_grad", "Generator", "swap_tensors"),
    }
)
LOCKS = (type(threading.Lock()), type(threading.RLock()))
# Methods of a tensor that hand out its memory or its values.
DATA_METHODS = frozenset(
    {"data_ptr", "storage", "untyped_storage", "_typed_storage", "numpy", "tolist", "__array__", "__dlpack__"}
)
# torch 2.13 aborts the process where one of these is traced: the call stays whole.
COMPRESSED_LAYOUTS = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
MAKES_COMPRESSED = frozenset(
    {
        *(f"to_sparse_{kind}" for kind in ("csr", "csc", "bsr", "bsc")),
        *(f"sparse_{kind}_tensor" for kind in ("csr", "csc", "bsr", "bsc", "compressed")),
    }
)
# Functions that give a symbolic number for a symbolic number.
SYMBOLIC_FUNCTIONS = frozenset({math.floor, math.ceil, math.trunc, operator.index, slice})
LIST_WRITERS = frozenset(
    {
        *("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "__setitem__", "__delitem__"),
        *("__iadd__", "__imul__", "__init__"),
    }
)
# Methods of lists and tuples that compare their items.
SEARCHES = frozenset({"count", "index", "remove"})
DICT_WRITERS = frozenset(
    {
        *("update", "pop", "popitem", "clear", "setdefault", "__setitem__", "__delitem__", "move_to_end"),
        *("__ior__", "__init__", "__missing__"),
    }
)
SET_WRITERS = frozenset(
    {
        *("add", "remove", "discard", "pop", "clear", "update", "difference_update", "intersection_update"),
        *("symmetric_difference_update", "__ior__", "__iand__", "__isub__", "__ixor__", "__init__"),
    }
)
# Functions that compare what they are given, or its items, by ``==`` or by hash.
COMPARING = frozenset({itertools.groupby, operator.countOf, operator.indexOf, dict.fromkeys})
CALLED_BY_RULE = frozenset({types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial})
# Which positional argument a function of the standard library calls.
CALLS_ARGUMENT: tuple[tuple[Any, int], ...] = (
    (functools.reduce, 0),
    (itertools.starmap, 0),
    (itertools.filterfalse, 0),
    (itertools.takewhile, 0),
    (itertools.dropwhile, 0),
    (itertools.accumulate, 1),
    (itertools.groupby, 1),
)
NATIVE_CALLABLES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)


@functools.lru_cache(maxsize=8192)
def runs_natively(module_name: str) -> bool:
    """Whether Python functions of a module run natively instead of being interpreted."""
    if module_name == "torch" or module_name.startswith("torch."):
        return not any(module_name == prefix or module_name.startswith(prefix + ".") for prefix in INLINED_TORCH)
    # The interpreter's own generators and iterators.
    return module_name.split(".", 1)[0] in NATIVE_PYTHON or module_name.startswith(OWN_MODULES)


def check_loading(module_name: str | None) -> None:
    """Refuse code that loads data: it takes batches from a loader, reads files or starts processes, also while tracing."""
    name = module_name or ""
    if name.startswith("torch.utils.data.") and runs_natively(name) and not name.endswith("._utils.collate"):
        raise Break("a DataLoader loads data", "compile a function of one batch, and go through the loader outside")


def wraps_user_code(function: types.FunctionType, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a decorator of torch's (``torch.autocast(...)``) wraps a function that must be interpreted."""
    if interpreted_of(function) is not function or id(function) in seen:
        return False
    # A decorated function may hold itself in a cell, as that of ``Tensor.__rsub__`` does.
    seen |= {id(function)}
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:
            continue
        inside = inside.__func__ if type(inside) is types.MethodType else inside
        if type(inside) is types.FunctionType:
            if not runs_natively(inside.__globals__.get("__name__") or "") or wraps_user_code(inside, seen):
                return True
        elif isinstance(inside, torch.nn.Module) or is_user_callable(inside):
            return True
    return False


def is_overridable(function: types.FunctionType) -> bool:
    """Whether a Python function of torch's hands its call to tensor subclasses and modes first, and is plain torch calls below.

    Interpreted, its parts are on the program tape; as one call it is not if it calls user code, which no replay may run.
    Methods of tensors do not count: they keep what they are given (hooks) for later.
    """
    is_method = getattr(torch.Tensor, function.__name__, None) is function
    return "handle_torch_function" in function.__code__.co_names and not is_method


def is_method_of_users_class(function: types.FunctionType, args: tuple[Any, ...]) -> bool:
    """Whether a method of a class of torch's, or a descriptor of torch's, is called for an object of a class that others have
    derived from torch's.

    What it calls in turn may be theirs (``torch.distributions.Transform.__call__`` calls ``_call``). Tensors and modules have
    ways of their own.
    """
    owner = args[1] if function.__name__ == "__get__" and len(args) > 1 else args[0] if args else None
    kind = type(owner)
    if kind in _NO_CLASSES_OF_USERS or kind.__module__.split(".", 1)[0] == "torch":
        return False
    if isinstance(owner, (torch.Tensor, type, *NATIVE_CALLABLES, types.FunctionType)):
        return False
    name, where = function.__qualname__, function.__module__ or ""
    if where.split(".", 1)[0] != "torch":
        # The standard library's own classes run natively.
        return False
    is_getter = function.__name__ == "__get__"
    return any(
        (base.__module__ == where and name.startswith(f"{base.__qualname__}."))
        or (is_getter and base.__module__.startswith("torch."))
        for base in kind.__mro__
        if not issubclass(base, torch.nn.Module)
    )


_NO_CLASSES_OF_USERS = frozenset({int, float, bool, str, bytes, tuple, list, dict, set, type(None)})


def calls_user_code(value: Any) -> bool:
    """Whether an argument is user code that the function which is given it will call."""
    value = value.__func__ if type(value) is types.MethodType else value
    if type(value) is types.FunctionType:
        return not runs_natively(value.__globals__.get("__name__") or "")
    return type(value) is functools.partial or isinstance(value, torch.nn.Module) or is_user_callable(value)


def is_user_callable(value: Any) -> bool:
    """Whether a value is an object with a ``__call__`` in Python that is interpreted when it is called."""
    kind = type(value)
    if kind in CALLED_BY_RULE or isinstance(value, type) or kind.__module__.split(".", 1)[0] == "torch":
        return False
    caller, _ = class_attribute(kind, "__call__")
    return isinstance(caller, types.FunctionType) and not runs_natively(caller.__globals__.get("__name__") or "")


_STORING_METHODS: dict[type | None, frozenset[str]] = {
    list: frozenset({"append", "extend", "insert"}),
    dict: frozenset({"get", "pop", "setdefault", "update"}),
}


def stores_its_arguments(function: Any) -> bool:
    """Whether a bound method of a list or dictionary puts its arguments there as they are; keys become plain by themselves."""
    owner = getattr(function, "__self__", None)
    if owner is tuple:
        # What a named tuple is made by.
        return getattr(function, "__name__", "") == "__new__"
    return getattr(function, "__name__", "") in _STORING_METHODS.get(type(owner), frozenset())


_LIBRARIES = ("site-packages", "dist-packages")


def is_of_library(function: Any) -> bool:
    """Whether a function belongs to an installed package: what it keeps in a cache is taken to follow from its arguments."""
    code = getattr(function, "__code__", None)
    return code is not None and any(place in code.co_filename for place in _LIBRARIES)


def is_library_module(module: Any) -> bool:
    """Whether a module is Python's own or belongs to an installed package: nobody puts another one in its place."""
    name, place = getattr(module, "__name__", None) or "", getattr(module, "__file__", None) or ""
    return name.split(".", 1)[0] in sys.stdlib_module_names or any(part in place for part in _LIBRARIES)
