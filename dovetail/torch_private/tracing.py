"""The parts of an open trace: modes, tracers, the proxies of numbers, and switches of torch that matter while one is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    decompose,
    disable_autocast_cache,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "FakeTensorMode",
    "FunctionalTensorMode",
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
    "TorchDispatchMode",
    "decompose",
    "disable_autocast_cache",
    "disable_current_modes",
    "enable_python_dispatcher",
    "from_fun",
    "get_proxy_slot",
    "to_fun",
    "track_tensor_tree",
]

#: Parts of torch that log an error before they raise it.
LOGGING = ("torch._subclasses.fake_tensor", "torch.fx.experimental.recording", "torch.fx.experimental.symbolic_shapes")
#: Errors that torch raises where a fake tensor cannot answer because only the data can.
DATA_DEPENDENT_ERRORS: tuple[type[BaseException], ...] = (
    *(DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode),
    *(UnsupportedFakeTensorException, UnsupportedOperatorException),
)


def needs_real_data(error: BaseException) -> bool:
    """Whether an error says that a kernel has tried to read the data of a fake tensor (the text of torch 2.13)."""
    return isinstance(error, RuntimeError) and "its data is not allocated yet" in str(error)


def is_tracing_mode(mode: object) -> bool:
    """Whether a dispatch mode is one of those that an open trace is made of."""
    return isinstance(mode, (FunctionalTensorMode, ProxyTorchDispatchMode, FakeTensorMode))


@contextlib.contextmanager
def compiling_flag(value: bool = True) -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true (or not); where it is, optimizers keep their step on tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = value
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def effects_as_plain_operators() -> Iterator[None]:
    """Record operators with an ordered effect (``_linalg_check_errors``) as plain nodes, without effect tokens."""
    from torch._higher_order_ops import effects
    from torch._subclasses import functional_tensor as functional

    original = effects.has_effects

    def no_effects(op: Any) -> bool:
        return False if getattr(op, "namespace", "") == "aten" else bool(original(op))

    patched = [module for module in (effects, functional) if hasattr(module, "has_effects")]
    for module in patched:
        module.has_effects = no_effects
    try:
        yield
    finally:
        for module in patched:
            module.has_effects = original


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph module that generates its Python code when it is first run; most captured graphs never are."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        module: torch.fx.GraphModule = _make_graph_module(root, graph)
    return module
