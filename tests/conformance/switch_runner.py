"""Switches: every piece of state that torch or the standard library lets a program set, flipped between two calls.

What is flipped is found mechanically: pairs of a setter and a getter, properties of ``torch.backends``, globals of torch's public
modules, context managers, and a list of the standard library's switches (:data:`STANDARD_LIBRARY`). What reads it is found as well:
each public function without arguments whose answer in eager is another one while the switch is flipped. A compiled function asks
that reader, and a small model is trained beside it: before the flip, during, and after, with eager's answers each time.

``make conformance-switches`` runs all of it and prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import decimal
import importlib
import inspect
import locale
import logging
import math
import os
import sys
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dovetail

#: Public modules of torch whose setters, getters and globals are looked through.
MODULES = (
    *("torch", "torch.autograd", "torch.autograd.graph", "torch.autograd.grad_mode", "torch.backends", "torch.jit"),
    *("torch.backends.cpu", "torch.backends.cuda", "torch.backends.cudnn", "torch.backends.mha", "torch.backends.mkl"),
    *("torch.backends.mkldnn", "torch.backends.mps", "torch.backends.nnpack", "torch.backends.openmp"),
    *(
        "torch.backends.opt_einsum",
        "torch.backends.quantized",
        "torch.backends.xnnpack",
        "torch.random",
        "torch.overrides",
    ),
    *("torch.distributions", "torch.distributions.distribution", "torch.distributed", "torch.amp", "torch.compiler"),
    *("torch.nn", "torch.nn.attention", "torch.nn.functional", "torch.nn.init", "torch.nn.parameter", "torch.nn.utils"),
    *("torch.nn.modules.module", "torch.nn.utils.parametrize", "torch.optim", "torch.optim.optimizer", "torch.special"),
    *(
        "torch.optim.lr_scheduler",
        "torch.utils",
        "torch.utils.checkpoint",
        "torch.utils.data",
        "torch.utils.deterministic",
    ),
    *(
        "torch.utils.dlpack",
        "torch.serialization",
        "torch.sparse",
        "torch.fx",
        "torch.linalg",
        "torch.fft",
        "torch.cuda",
    ),
    *(
        "torch.multiprocessing",
        "torch.profiler",
        "torch.autograd.profiler",
        "torch.__future__",
        "torch.backends.kleidiai",
    ),
)
#: They ask for hardware that is not here, start processes or threads, or end the process.
_NOT_ASKED = ("torch.cuda.", "torch.multiprocessing.", "torch.profiler.", "torch.fx.", "torch.serialization.get_unsafe")
_LEAVES = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Switch:
    """``flipped`` is a block in which the switch is another one; ``readers`` ask for it, beside those that are found."""

    name: str
    flipped: Callable[[], AbstractContextManager[Any]]
    readers: tuple[Callable[[Tensor], Any], ...] = ()


@dataclass(frozen=True)
class Result:
    """``verdict``: "same", "stale" (the answer of another state), "raised" (an error that eager does not give) or "not flipped"."""

    switch: str
    reader: str
    verdict: str
    detail: str = ""


# --- what can be flipped ----------------------------------------------------------------------------------------------


def other_value(value: Any) -> Any:
    """Another value of the same kind; None where none is known."""
    by_kind: dict[type, Callable[[Any], Any]] = {
        bool: lambda old: not old,
        int: lambda old: old + 1,
        float: lambda old: old + 0.5,
        str: lambda old: old + "x",
        torch.dtype: lambda old: torch.float64 if old is torch.float32 else torch.float32,
    }
    return by_kind[type(value)](value) if type(value) in by_kind else None


@contextlib.contextmanager
def set_to(write: Callable[[Any], Any], old: Any, new: Any) -> Iterator[None]:
    """``new`` in the block, ``old`` behind it."""
    write(new)
    try:
        yield
    finally:
        write(old)


def _modules() -> Iterator[types.ModuleType]:
    for name in MODULES:
        with contextlib.suppress(ImportError):
            yield importlib.import_module(name)


def _takes_nothing(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return isinstance(function, types.BuiltinFunctionType)
    return all(
        item.default is not item.empty or item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD) for item in parameters
    )


def getters() -> dict[str, Callable[[], Any]]:
    """Public functions without arguments that answer with a constant, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for module in _modules():
        for name, value in [*vars(module).items()]:
            full = f"{module.__name__}.{name}"
            is_question = name.startswith(("is_", "are_", "get_", "has_", "default_")) or name.endswith("_enabled")
            if name.startswith("_"):
                continue
            if not is_question or full.startswith(_NOT_ASKED) or not callable(value) or isinstance(value, type):
                continue
            if value in found.values() or not _takes_nothing(value):
                continue
            with contextlib.suppress(Exception):
                if isinstance(value(), _LEAVES):
                    found[full] = value
    return found


def setter_switches() -> Iterator[Switch]:
    """Pairs of a setter and a getter in one module."""
    for module in _modules():
        for name, write in [*vars(module).items()]:
            if not name.startswith("set_") or not callable(write) or isinstance(write, type):
                continue
            what = name.removeprefix("set_")
            for question in (
                f"get_{what}",
                f"is_{what}",
                f"is_{what}_enabled",
                f"{what}_enabled",
                f"get_{what}_enabled",
            ):
                read = getattr(module, question, None)
                if read is None or not _takes_nothing(read):
                    continue
                with contextlib.suppress(Exception):
                    old = read()
                    new = {"highest": "medium", "none": "ieee"}.get(old, other_value(old)) if old != "" else None
                    if new is not None:
                        yield Switch(f"{module.__name__}.{name}", _setter(write, old, new))
                break


def _setter(write: Callable[[Any], Any], old: Any, new: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: set_to(write, old, new)


def property_switches() -> Iterator[Switch]:
    """Properties of modules that are objects: most of ``torch.backends``."""
    for module in _modules():
        owners = [(module.__name__, module)]
        parts = [(f"{module.__name__}.{key}", getattr(module, key, None)) for key in ("matmul", "conv", "rnn")]
        owners += [part for part in parts if part[1] is not None]
        for path, owner in owners:
            for name in dir(type(owner)):
                if type(inspect.getattr_static(type(owner), name, None)).__name__ not in (
                    "ContextProp",
                    "property",
                    "_FP32Precision",
                ):
                    continue
                with contextlib.suppress(Exception):
                    old = getattr(owner, name)
                    new = (
                        {"none": "ieee", "ieee": "none"}.get(old, other_value(old))
                        if isinstance(old, str)
                        else other_value(old)
                    )
                    if new is not None:
                        yield _attribute_switch(path, owner, name, old, new)


def global_switches() -> Iterator[Switch]:
    """Plain data among the globals of torch's public modules; names in capitals are constants."""
    for module in _modules():
        # Modules of ``torch.backends`` are objects around the real ones.
        real = vars(module).get("m", module)
        for name, value in [*vars(real if isinstance(real, types.ModuleType) else module).items()]:
            new = other_value(value) if type(value) in (bool, int, float, str) else None
            if new is None or name.isupper() or name.startswith("__") or type(value) is str and name.startswith("_"):
                continue
            yield _attribute_switch(module.__name__, module, name, value, new)


def _attribute_switch(path: str, owner: Any, name: str, old: Any, new: Any) -> Switch:
    def write(value: Any) -> None:
        setattr(owner, name, value)

    return Switch(f"{path}.{name}", lambda: set_to(write, old, new), (lambda values: getattr(owner, name),))


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch.no_grad": torch.no_grad,
    "torch.inference_mode": torch.inference_mode,
    "torch.set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "torch.autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "torch.autograd.set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
    "torch.autograd.detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "torch.nn.attention.sdpa_kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "torch.utils.deterministic.fill_uninitialized_memory": lambda: set_to(
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value), True, False
    ),
    "torch.set_default_dtype": lambda: set_to(torch.set_default_dtype, torch.float32, torch.float64),
    "torch.set_default_device": lambda: torch.device("meta"),
    "torch.use_deterministic_algorithms": lambda: set_to(torch.use_deterministic_algorithms, False, True),
    "torch.set_warn_always": lambda: set_to(torch.set_warn_always, False, True),
    "torch.set_num_threads": lambda: set_to(
        torch.set_num_threads, torch.get_num_threads(), torch.get_num_threads() + 1
    ),
    "torch.set_float32_matmul_precision": lambda: set_to(torch.set_float32_matmul_precision, "highest", "medium"),
    "torch.set_printoptions": lambda: set_to(lambda value: torch.set_printoptions(precision=value), 4, 1),
    "torch.backends.mha.set_fastpath_enabled": lambda: set_to(torch.backends.mha.set_fastpath_enabled, True, False),
    "torch.distributions.Distribution.set_default_validate_args": lambda: set_to(
        torch.distributions.Distribution.set_default_validate_args, True, False
    ),
    "torch.__future__.set_overwrite_module_params_on_conversion": lambda: set_to(
        torch.__future__.set_overwrite_module_params_on_conversion, False, True
    ),
    "torch.__future__.set_swap_module_params_on_conversion": lambda: set_to(
        torch.__future__.set_swap_module_params_on_conversion, False, True
    ),
    "torch.utils.checkpoint.set_checkpoint_early_stop": lambda: torch.utils.checkpoint.set_checkpoint_early_stop(False),
    "torch.utils.checkpoint.set_checkpoint_debug_enabled": lambda: torch.utils.checkpoint.set_checkpoint_debug_enabled(
        True
    ),
    "torch.jit.optimized_execution": lambda: torch.jit.optimized_execution(False),
    "torch.manual_seed": lambda: set_to(torch.manual_seed, 0, 1),
    "torch.nn.modules.module.register_module_forward_hook": lambda: _removed(
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: result * 2)
    ),
    "torch.nn.modules.module.register_module_forward_pre_hook": lambda: _removed(
        torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0] * 2,))
    ),
    "torch.nn.modules.module.register_module_full_backward_hook": lambda: _removed(
        torch.nn.modules.module.register_module_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))
    ),
    "torch.nn.modules.module.register_module_full_backward_pre_hook": lambda: _removed(
        torch.nn.modules.module.register_module_full_backward_pre_hook(lambda module, outer: (outer[0] * 2,))
    ),
    "torch.nn.modules.module.register_module_parameter_registration_hook": lambda: _removed(
        torch.nn.modules.module.register_module_parameter_registration_hook(lambda module, name, value: None)
    ),
    "torch.optim.optimizer.register_optimizer_step_pre_hook": lambda: _removed(
        importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: optimizer.zero_grad()
        )
    ),
    "torch.distributed.init_process_group": lambda: _process_group(),
    "torch.utils._pytree.register_pytree_node": lambda: _registered_node(),
}


@contextlib.contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class _Pair:
    """An object that a registration makes a node of trees."""

    first, second = 1, 2


@contextlib.contextmanager
def _registered_node() -> Iterator[None]:
    trees: Any = torch.utils._pytree
    trees.register_pytree_node(_Pair, lambda pair: ([pair.first, pair.second], None), lambda items, _: _Pair())
    try:
        yield
    finally:
        trees._deregister_pytree_node(_Pair)


@contextlib.contextmanager
def _variable() -> Iterator[None]:
    os.environ["DOVETAIL_TEST_SWITCH"] = "1"
    try:
        yield
    finally:
        del os.environ["DOVETAIL_TEST_SWITCH"]


@contextlib.contextmanager
def _decimals() -> Iterator[None]:
    before = decimal.getcontext().prec
    with set_to(lambda value: setattr(decimal.getcontext(), "prec", value), before, 3):
        yield


@contextlib.contextmanager
def _warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield


def _warned(values: Tensor) -> str:
    try:
        warnings.warn("noted", ResourceWarning, stacklevel=1)
    except ResourceWarning:
        return "raised"
    return "not raised"


_LOGGER = logging.getLogger("dovetail.test.switches")
STANDARD_LIBRARY = (
    Switch("decimal.getcontext().prec", _decimals, (lambda values: float(decimal.Decimal(1) / 3),)),
    Switch(
        "decimal.setcontext",
        lambda: decimal.localcontext(decimal.Context(prec=2)),
        (lambda values: str(+decimal.Decimal("1.234")),),
    ),
    Switch(
        "os.environ",
        _variable,
        (
            lambda values: os.environ.get("DOVETAIL_TEST_SWITCH"),
            lambda values: os.getenv("DOVETAIL_TEST_SWITCH", "no"),
            lambda values: "DOVETAIL_TEST_SWITCH" in os.environ,
        ),
    ),
    Switch("warnings.simplefilter", _warnings_as_errors, (_warned,)),
    Switch(
        "logging.disable",
        lambda: set_to(logging.disable, logging.NOTSET, logging.CRITICAL),
        (lambda values: _LOGGER.isEnabledFor(logging.ERROR),),
    ),
    Switch(
        "Logger.setLevel",
        lambda: set_to(_LOGGER.setLevel, logging.NOTSET, logging.ERROR),
        (
            lambda values: _LOGGER.isEnabledFor(logging.WARNING),
            lambda values: _LOGGER.getEffectiveLevel(),
            lambda values: _LOGGER.level,
        ),
    ),
    Switch(
        "sys.setrecursionlimit",
        lambda: set_to(sys.setrecursionlimit, sys.getrecursionlimit(), sys.getrecursionlimit() + 7),
        (lambda values: sys.getrecursionlimit(),),
    ),
    Switch(
        "sys.setswitchinterval",
        lambda: set_to(sys.setswitchinterval, sys.getswitchinterval(), 0.25),
        (lambda values: sys.getswitchinterval(),),
    ),
    Switch(
        "sys.set_int_max_str_digits",
        lambda: set_to(sys.set_int_max_str_digits, sys.get_int_max_str_digits(), 700),
        (lambda values: sys.get_int_max_str_digits(),),
    ),
    Switch(
        "sys.path",
        lambda: set_to(lambda value: sys.path.append(value) if value else sys.path.pop(), "", "nowhere"),
        (lambda values: len(sys.path),),
    ),
    Switch(
        "sys.argv",
        lambda: set_to(lambda value: setattr(sys, "argv", value), sys.argv, ["other"]),
        (lambda values: len(sys.argv), lambda values: sys.argv[-1]),
    ),
    Switch(
        "sys.modules",
        lambda: set_to(
            lambda value: sys.modules.update(switch_made_up=sys) if value else sys.modules.pop("switch_made_up"),
            False,
            True,
        ),
        (lambda values: "switch_made_up" in sys.modules,),
    ),
    Switch(
        "locale.setlocale",
        lambda: set_to(lambda value: locale.setlocale(locale.LC_ALL, value), "C", "C.UTF-8"),
        (lambda values: locale.setlocale(locale.LC_ALL), lambda values: locale.getlocale()[1]),
    ),
    Switch(
        "threading.current_thread().name",
        lambda: set_to(
            lambda value: setattr(threading.current_thread(), "name", value), threading.current_thread().name, "other"
        ),
        (lambda values: threading.current_thread().name,),
    ),
    Switch("os.chdir", lambda: contextlib.chdir("/"), (lambda values: os.getcwd(),)),
    Switch(
        "math.pi", lambda: set_to(lambda value: setattr(math, "pi", value), math.pi, 3.0), (lambda values: math.pi,)
    ),
    Switch(
        "math.sqrt",
        lambda: set_to(lambda value: setattr(math, "sqrt", value), math.sqrt, math.cbrt),
        (lambda values: math.sqrt(8.0),),
    ),
)


def switches() -> list[Switch]:
    """All of them, each name once."""
    leaves: Any = torch.utils._pytree.tree_leaves
    extra: dict[str, tuple[Callable[[Tensor], Any], ...]] = {
        "torch.utils._pytree.register_pytree_node": (lambda values: len(leaves([_Pair(), 3])),),
        "torch.distributed.init_process_group": (
            lambda values: torch.distributed.group.WORLD is None,
            lambda values: torch.distributed.is_initialized() and torch.distributed.get_world_size(),
        ),
        "torch.set_printoptions": (lambda values: str(torch.tensor(1.23456)),),
        "torch.set_default_dtype": (lambda values: torch.ones(1).dtype, lambda values: torch.tensor(1.5).dtype),
        "torch.set_default_device": (lambda values: torch.ones(1).device.type,),
        "torch.distributions.Distribution.set_default_validate_args": (_validated,),
    }
    blocks = [Switch(name, block, extra.get(name, ())) for name, block in BLOCKS.items()]
    found = [*blocks, *STANDARD_LIBRARY, *setter_switches(), *property_switches(), *global_switches()]
    return list({switch.name: switch for switch in reversed(found)}.values())[::-1]


def _validated(values: Tensor) -> str:
    try:
        torch.distributions.Bernoulli(torch.tensor(2.0))
    except ValueError:
        return "refused"
    return "accepted"


# --- what is compared -------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A little of what models have, trained by a whole step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(3), torch.nn.GELU(), torch.nn.Dropout(0.5)
        )

    def forward(self, values: Tensor) -> Tensor:
        attended, _ = self.attention(values, values, values)
        return torch.einsum("bij,bkj->bik", self.layers(attended), values).square().mean()


def trained(model: Model, step: Callable[[Tensor], Tensor]) -> list[Any]:
    """What one step gives: the loss, the gradients, the random state behind it."""
    torch.manual_seed(3)
    values = torch.linspace(-1, 1, 24, dtype=torch.float32, device="cpu").reshape(2, 3, 4)
    model.zero_grad()
    loss = step(values)
    if loss.requires_grad:
        loss.backward()
    gradients = [None if item.grad is None else item.grad.tolist() for item in model.parameters()]
    return [loss.tolist(), loss.dtype, loss.requires_grad, gradients]


def attempt(run: Callable[[], Any]) -> Any:
    """A result, or the error in its place."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def compare(switch: Switch, label: str, expected: Callable[[], Any], actual: Callable[[], Any]) -> Result:
    """Ask both before the flip, while flipped, behind it, and flipped again."""
    states: list[tuple[Any, Any]] = [(attempt(expected), attempt(actual))]
    for _ in range(2):
        with switch.flipped():
            states.append((attempt(expected), attempt(actual)))
        states.append((attempt(expected), attempt(actual)))
    wrong = [(index, left, right) for index, (left, right) in enumerate(states) if repr(left) != repr(right)]
    if not wrong:
        return Result(switch.name, label, "same")
    index, left, right = wrong[0]
    is_error = isinstance(right, str) and "Error: " in right and not (isinstance(left, str) and "Error: " in left)
    detail = f"call {index}: eager {str(left)[:120]}, compiled {str(right)[:120]}"
    return Result(switch.name, label, "raised" if is_error else "stale", detail)


def _read_by(reader: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda values: (values * 2, reader(values))


def check(switch: Switch, questions: dict[str, Callable[[], Any]], backend: str, trains: bool = True) -> list[Result]:
    """All that reads one switch."""
    try:
        before = {name: attempt(question) for name, question in questions.items()}
        with switch.flipped():
            changed = [name for name, question in questions.items() if repr(attempt(question)) != repr(before[name])]
    except Exception as error:
        return [Result(switch.name, "", "not flipped", f"{type(error).__name__}: {error}"[:120])]
    readers = [(f"reader {index}", reader) for index, reader in enumerate(switch.readers)]
    readers += [(name, _asks(questions[name])) for name in changed]
    results = []
    for label, reader in readers:
        program = _read_by(reader)
        compiled = dovetail.compile(_read_by(reader), backend=backend)
        values = torch.ones(2)
        results.append(compare(switch, label, lambda: program(values)[1], lambda: compiled(values)[1]))  # noqa: B023
    if trains:
        model, twin = Model(), Model()
        compiled_twin = dovetail.compile(copy.deepcopy(twin), backend=backend)
        shadow: Any = compiled_twin.original if hasattr(compiled_twin, "original") else compiled_twin
        results.append(
            compare(switch, "training", lambda: trained(model, model), lambda: trained(shadow, compiled_twin))
        )
    return results


def _asks(question: Callable[[], Any]) -> Callable[[Tensor], Any]:
    return lambda values: question()


def run(names: Sequence[str] = (), backend: str = "aten", trains: bool = True) -> list[Result]:
    """Check the switches whose names contain one of these texts; all of them by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        questions, found = getters(), switches()
    results: list[Result] = []
    for switch in found:
        if not names or any(name in switch.name for name in names):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results += check(switch, questions, backend, trains)
    return results


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", default="aten")
    parser.add_argument("--no-training", action="store_true")
    arguments = parser.parse_args()
    results = run(arguments.names, arguments.backend, not arguments.no_training)
    for result in results:
        if result.verdict != "same":
            print(f"{result.verdict:12} {result.switch}  [{result.reader}]  {result.detail}")
    print(
        dict(Counter(result.verdict for result in results)),
        "of",
        len({result.switch for result in results}),
        "switches",
    )
    sys.exit(any(result.verdict in ("stale", "raised") for result in results))


if __name__ == "__main__":
    main()
