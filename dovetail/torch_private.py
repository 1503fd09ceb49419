"""The only door to torch's private names: one small function or re-export each.

Checked on torch 2.13 (CPU) and meant for 2.11 and later; where versions differ, the difference is handled here and nowhere else.
"""

from __future__ import annotations


# --- trace ------------------------------------------------------------------------------------------------------------
import bisect  # noqa: E402
import contextlib  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch._dispatch.python import enable_python_dispatcher  # noqa: E402
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import (  # noqa: E402
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    decompose,
    disable_autocast_cache,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes  # noqa: E402

DATA_DEPENDENT_ERRORS: tuple[type[BaseException], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def is_functional(value: object) -> bool:
    """Whether a value is a functional wrapper, the outside of a traced tensor."""
    return isinstance(value, FunctionalTensor)


def is_fake(value: object) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def compiling_flag() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true; optimizers then keep their step on tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def autograd_sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def running_autograd_node() -> Any:
    """The autograd node that the engine evaluates right now in this thread, or None."""
    return torch._C._current_autograd_node()


class LineTable:
    """Which user line was running when an autograd node was made: an ordered table of sequence numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lines: list[Any] = []

    def add(self, start: int, line: Any) -> None:
        """From sequence number ``start`` on, nodes belong to ``line``."""
        if self._starts and self._starts[-1] == start:
            self._lines[-1] = line
        else:
            self._starts.append(start)
            self._lines.append(line)

    def find(self, number: int) -> Any:
        """The line of the node with this sequence number, or None."""
        position = bisect.bisect_right(self._starts, number) - 1
        return self._lines[position] if position >= 0 else None

from torch._ops import OpOverload, OpOverloadPacket  # noqa: E402, F401


def global_module_hooks() -> dict[str, Any]:
    """The dictionaries of hooks that run on every module, by name."""
    from torch.nn.modules import module

    return {
        name: getattr(module, name)
        for name in (
            "_global_backward_pre_hooks",
            "_global_backward_hooks",
            "_global_forward_pre_hooks",
            "_global_forward_hooks",
        )
    }


def is_tracing() -> bool:
    """Whether a dispatch mode that traces (fake, functional, proxy) is active in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextlib.contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Put back the state of the default generators after the block, so that tracing draws no random numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
