"""Code of torch that is interpreted, though most of torch runs natively: it reads state to be guarded, or calls user code."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch

from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES, interpret_modules
from dovetail.frontend.interpreter.user_code import is_user_callable, is_user_function
from dovetail.frontend.rules import Arguments, Keywords, interpreted_rule
from dovetail.rules.refusals import refuse
from dovetail.torch_private import libraries as private_libraries

interpret_modules(
    *("torch.testing", "torch.optim", "torch.nn.parallel.distributed", "torch.nn.parallel.data_parallel"),
    # They read .grad, which a traced parameter has only where the interpreter reads it.
    *("torch.nn.utils.clip_grad", "torch.amp.grad_scaler", "torch.nn.utils.parametrize"),
    *("torch.nn.utils.parametrizations", "torch.nn.utils.stateless"),
    # Hooks of modules that are objects: they compute a parameter and set it as an attribute.
    *("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm", "torch.nn.utils.prune"),
    # The classes of one device derive from torch.autocast, which is interpreted too.
    *("torch.cpu.amp.autocast_mode", "torch.cuda.amp.autocast_mode"),
    # Switches.
    *("torch.backends", "torch.backends.mha", "torch.__future__"),
    # They set parameters, or make modules.
    *("torch.nn.utils.convert_parameters", "torch.nn.utils.fusion", "torch.nn.utils.init"),
    "torch.nn.utils.memory_format",
    # Modules, of observers and of layers that round as a quantised model would.
    "torch.ao",
    *private_libraries.READS_THE_PROGRAM,
    # They call one another, and those of the user.
    "torch.utils.data.dataset",
)
# Functions of torch that are interpreted although their module is not: of a generator function, the graph may break while it is
# suspended, and what it changes is state that a capture makes again and takes back; others say the name of what they are given.
_INTERPRETED = frozenset({inspect.unwrap(torch.backends.cudnn.flags), torch.typename})
_NO_CLASSES_OF_USERS = frozenset({int, float, bool, str, bytes, tuple, list, dict, set, type(None)})


@interpreted_rule
def _reaches_user_code(function: types.FunctionType, args: Arguments, kwargs: Keywords) -> bool:
    return (
        function in _INTERPRETED
        or (is_overridable(function) and any(map(calls_user_code, (*args, *kwargs.values()))))
        or is_method_of_users_class(function, args)
    )


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


def calls_user_code(value: Any) -> bool:
    """Whether an argument is user code that the function which is given it will call."""
    value = value.__func__ if type(value) is types.MethodType else value
    if type(value) is types.FunctionType:
        return is_user_function(value)
    return type(value) is functools.partial or isinstance(value, torch.nn.Module) or is_user_callable(value)


#: A hook for all modules runs around modules that are called in the graph.
_REGISTERING = ("forward_pre_hook", "forward_hook", "backward_hook", "full_backward_pre_hook", "full_backward_hook")
refuse(
    [getattr(torch.nn.modules.module, f"register_module_{name}") for name in _REGISTERING],
    "a hook for all modules is registered",
)
