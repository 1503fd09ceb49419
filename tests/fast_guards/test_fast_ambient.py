"""The fast check of torch's state says what :meth:`AmbientState.matches` says, whatever was changed in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

import dovetail
from dovetail.face.loading import load_rules
from dovetail.guards import AmbientState
from dovetail.torch_private.guard_managers import INLINED

load_rules()


@contextlib.contextmanager
def patched(kind: type, name: str) -> Iterator[None]:
    """A class of tensors with a method of the program's."""
    setattr(kind, name, lambda tensor: tensor)
    try:
        yield
    finally:
        delattr(kind, name)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """As inside of an export."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "forward level": torch.autograd.forward_ad.dual_level,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "compiling": compiling,
    "method of tensors": lambda: patched(torch.Tensor, "doubled"),
    "method of parameters": lambda: patched(torch.nn.Parameter, "doubled"),
    "stance": lambda: dovetail.set_stance("eager_on_recompile"),
    "torch's stance": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "inference": torch.inference_mode,
    "anomaly": torch.autograd.detect_anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_its_end_too(change: str) -> None:
    state = AmbientState.snapshot()
    matches = state.matcher()
    for _ in range(3):
        assert matches() and matches()
        with CHANGES[change]():
            assert not state.matches()
            assert not matches() and not matches()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_taken_within_a_change_fits_there_only(change: str) -> None:
    with CHANGES[change]():
        state = AmbientState.snapshot()
        matches = state.matcher()
        # A patch is known by the function that is there.
        assert matches() and matches()
    assert not matches() and not matches()


def test_a_write_that_leaves_the_classes_of_tensors_as_they_were_costs_no_entry() -> None:
    state = AmbientState.snapshot()
    matches = state.matcher()
    assert matches()
    for _ in range(2):
        with patched(torch.Tensor, "doubled"):
            pass
        assert matches() and matches()


def test_a_method_patched_between_calls_is_the_one_that_runs() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.chosen() + 1  # type: ignore[attr-defined, no-any-return]

    x = torch.ones(3)
    compiled = dovetail.compile(program, backend="aten")
    for factor in (2, 3, 2):
        torch.Tensor.chosen = lambda tensor, factor=factor: tensor * factor  # type: ignore[attr-defined]
        try:
            for _ in range(4):
                assert torch.equal(compiled(x), x * factor + 1)
        finally:
            del torch.Tensor.chosen  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [None, *CHANGES])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_an_expression_says_what_its_function_says(change: str | None) -> None:
    assert len(INLINED) >= 3
    with CHANGES[change]() if change else contextlib.nullcontext():
        for function, (text, names) in INLINED.items():
            assert eval(text, dict(names)) == function()
