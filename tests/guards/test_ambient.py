"""The state of torch: what differs is seen by the slow and the fast check, and said in a sentence."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.guards import AmbientState, GuardSet, compile_checker
from dovetail.torch_private import guards as private_guards
from dovetail.torch_private import tracing as private_tracing


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def switched(setter, getter, value):
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


CHANGES = {
    "grad mode": lambda: torch.no_grad(),
    "inference mode": lambda: torch.inference_mode(),
    "autocast on cpu": lambda: torch.autocast("cpu"),
    "autocast dtype on cpu": lambda: switched(
        lambda dtype: torch.set_autocast_dtype("cpu", dtype), lambda: torch.get_autocast_dtype("cpu"), torch.float16
    ),
    "autocast cache": lambda: switched(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled, False),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "deterministic algorithms": lambda: switched(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
    "float32 matmul precision": lambda: switched(
        torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "high"
    ),
    "flash attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
    "torch function modes": lambda: FunctionMode(),
    "torch dispatch modes": lambda: DispatchMode(),
    "__torch_function__": lambda: torch._C.DisableTorchFunction(),
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "forward-mode level": lambda: torch.autograd.forward_ad.dual_level(),
    "compiling": lambda: private_tracing.compiling_flag(),
}
REFUSED = {
    "torch function modes",
    "torch dispatch modes",
    "__torch_function__",
    "saved-tensor hooks",
    "forward-mode level",
    "compiling",
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_seen(name):
    state = AmbientState.snapshot()
    checker = compile_checker(GuardSet(), ambient=state)
    assert state.refuses_capture is None and state.matches() and state.differences() == []
    assert checker.check(None, (), {}) == []
    with CHANGES[name]():
        assert not state.matches()
        assert any(name in sentence for sentence in state.differences())
        assert checker.check(None, (), {}) is None
        assert checker.explain(None, (), {})
        inside = AmbientState.snapshot()
        assert (inside.refuses_capture is not None) == (name in REFUSED)
        inner = compile_checker(GuardSet(), ambient=inside)
        assert inner.check(None, (), {}) == [] and inner.check(None, (), {}) == []
    assert inner.check(None, (), {}) is None
    assert checker.check(None, (), {}) == []


def test_no_grad_and_inference_mode_differ():
    with torch.no_grad():
        checker = compile_checker(GuardSet(), ambient=AmbientState.snapshot())
        assert checker.check(None, (), {}) == []
        with torch.inference_mode():
            assert checker.check(None, (), {}) is None


def test_functorch_levels():
    state = AmbientState.snapshot()
    checker = compile_checker(GuardSet(), ambient=state)
    seen = []

    def function(x):
        seen.append((checker.check(None, (), {}), state.differences(), AmbientState.snapshot().refuses_capture))
        return x.sum()

    torch.vmap(function)(torch.ones(2, 3))
    torch.func.grad(function)(torch.ones(2))
    for hit, differences, refusal in seen:
        assert hit is None and "functorch level" in differences[0] and "functorch" in refusal


def test_threads_do_not_matter():
    checker = compile_checker(GuardSet(), ambient=AmbientState.snapshot())
    assert checker.check(None, (), {}) == []
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert checker.check(None, (), {}) == [] and checker.check(None, (), {}) == []
    finally:
        torch.set_num_threads(before)
    assert checker.check(None, (), {}) == []


def test_default_devices_differ():
    with torch.device("meta"):
        checker = compile_checker(GuardSet(), ambient=AmbientState.snapshot())
        assert checker.check(None, (), {}) == []
    with torch.device("cpu"):
        assert checker.check(None, (), {}) is None


def test_snapshot_in_a_trace_leaves_the_trace_out():
    outside = AmbientState.snapshot()
    with private_tracing.compiling_flag(), private_tracing.FakeTensorMode(), private_tracing.FunctionalTensorMode():
        inside = AmbientState.snapshot()
        assert inside.refuses_capture is None and inside.differences() == [] and outside.differences() == []
        with torch.no_grad():
            assert inside.differences() == ["grad mode was on, is off"]
    assert inside.matches()
    assert compile_checker(GuardSet(), ambient=inside).check(None, (), {}) == []


def test_bulk_check_sees_duplicates():
    assert private_guards.bulk_check_sees_duplicates()
