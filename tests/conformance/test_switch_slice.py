"""A slice of the switches in the default tests, and checks of their harness."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.conformance import switch_runner
from tests.conformance.switch_runner import Switch

SLICE = """
torch.set_default_dtype torch.set_warn_always torch.set_printoptions torch.set_autocast_ipu_dtype torch.no_grad
torch.distributed.init_process_group torch.utils._pytree.register_pytree_node torch.backends.opt_einsum.enabled
torch.distributions.Distribution.set_default_validate_args torch.serialization.set_crc32_options
torch.nn.modules.module.register_module_forward_hook decimal.getcontext decimal.setcontext os.environ
warnings.simplefilter Logger.setLevel sys.setrecursionlimit sys.modules math.sqrt
""".split()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SLICE)
def test_switch(name: str) -> None:
    results = switch_runner.run([name], trains=False)
    assert results or name in ("math.sqrt", "torch.no_grad", "torch.nn.modules.module.register_module_forward_hook")
    assert [result for result in results if result.verdict != "same"] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ("math.sqrt", "register_module_forward_hook", "set_default_device", "mha.set_fastpath_enabled")
)
def test_training_beside_a_switch(name: str) -> None:
    results = switch_runner.run([name])
    assert "training" in [result.reader for result in results]
    assert [result for result in results if result.verdict != "same"] == []


def test_the_harness_sees_what_is_stale() -> None:
    hidden = [1]

    @contextlib.contextmanager
    def flipped():  # type: ignore[no-untyped-def]
        hidden[0] = 2
        yield
        hidden[0] = 1

    switch = Switch("hidden", flipped)
    stale = switch_runner.compare(switch, "reader", lambda: hidden[0], lambda: 1)
    assert (stale.verdict, stale.detail) == ("stale", "call 1: eager 2, compiled 1")
    raised = switch_runner.compare(switch, "reader", lambda: hidden[0], lambda: torch.ones(hidden[0]).item())
    assert raised.verdict == "stale"
    raised = switch_runner.compare(switch, "reader", lambda: 1.0, lambda: torch.ones(hidden[0]).item())
    assert raised.verdict == "raised"
    assert switch_runner.compare(switch, "reader", lambda: hidden[0], lambda: hidden[0]).verdict == "same"


def test_what_is_enumerated() -> None:
    names = {switch.name for switch in switch_runner.switches()}
    assert len(names) > 70
    assert {
        "torch.set_warn_always",
        "torch.backends.opt_einsum.enabled",
        "torch.serialization.set_crc32_options",
    } <= names
    assert len(switch_runner.getters()) > 40
