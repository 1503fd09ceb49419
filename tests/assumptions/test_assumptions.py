"""Each assumption about torch holds here, and fails where torch is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.assumptions import assumptions
from tests.assumptions.assumptions import ASSUMPTIONS, Sine
from tests.layout import ROOMS

aten = torch.ops.aten


@pytest.mark.parametrize("name", ASSUMPTIONS)
def test_assumption(name: str) -> None:
    ASSUMPTIONS[name].check()


def test_rooms_that_stand_on_assumptions_are_there() -> None:
    rooms = {room.split("/")[0] for one in ASSUMPTIONS.values() for room in one.rooms}
    assert rooms <= {name.split("/")[0] for name in ROOMS}


def _recording_forward(patch: pytest.MonkeyPatch) -> None:
    plain = Sine.forward

    def forward(ctx: Any, *args: Any) -> Any:
        with torch.enable_grad():
            return plain(ctx, *args)

    patch.setattr(Sine, "forward", staticmethod(forward))


def _whole_functions(patch: pytest.MonkeyPatch) -> None:
    plain = Sine.apply

    def apply(*args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return plain(*args)

    patch.setattr(Sine, "apply", apply)


def _saves_copies(patch: pytest.MonkeyPatch) -> None:
    plain = Sine.forward
    patch.setattr(Sine, "forward", staticmethod(lambda ctx, x, y: plain(ctx, x, y.clone())))


def _keeps_saved(patch: pytest.MonkeyPatch) -> None:
    plain = torch.Tensor.backward
    patch.setattr(torch.Tensor, "backward", lambda self, *args, **kwargs: plain(self, retain_graph=True))


def _oldest_first(patch: pytest.MonkeyPatch) -> None:
    """The cosine gets a node that is older than the sine's."""
    made: list[torch.Tensor] = []
    ones = torch.ones

    def leaf(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = ones(*args, **kwargs)
        made.append(found * 3)
        return found

    patch.setattr(torch, "ones", leaf)
    patch.setattr(torch.Tensor, "cos", lambda x: made[-1])


def _hooks_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def register(self: torch.Tensor, hook: Any) -> Any:
        return self.grad_fn.register_hook(lambda results, gradients: hook(gradients[0]))  # type: ignore[union-attr]

    patch.setattr(torch.Tensor, "register_hook", register)


def _uncounted_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "add_", lambda self, other: self.data.copy_(self.data + other))


def _views_without_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "t", lambda self: self.detach().mT)


def _contiguous_fakes(patch: pytest.MonkeyPatch) -> None:
    plain = FakeTensorMode.from_tensor
    patch.setattr(FakeTensorMode, "from_tensor", lambda self, x: plain(self, x.contiguous()))


def _sizes_of_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "nonzero", lambda self: self.new_zeros(3, 1))


def _other_operators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "add_", lambda self, other: self.copy_(self + other))


def _numbers_without_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.functional, "dropout", lambda x, rate: x * rate)


def _autocast_of_the_forward(patch: pytest.MonkeyPatch) -> None:
    plain = torch.Tensor.backward

    def backward(self: torch.Tensor) -> None:
        with torch.autocast("cpu", enabled=False):
            plain(self)

    patch.setattr(torch.Tensor, "backward", backward)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "custom_functions_run_without_recording": _recording_forward,
    "modes_see_inside_of_custom_functions": _whole_functions,
    "saved_tensors_notice_writes": _saves_copies,
    "saved_tensors_are_freed": _keeps_saved,
    "the_engine_runs_the_newest_node_first": _oldest_first,
    "hooks_run_in_their_order": _hooks_in_another_order,
    "versions_count_writes": _uncounted_writes,
    "views_know_their_base": _views_without_base,
    "fake_kernels_keep_strides": _contiguous_fakes,
    "sizes_made_of_data_are_refused_without_symbols": _sizes_of_data,
    "traced_graphs_are_flat_calls_of_operators": _other_operators,
    "random_numbers_follow_the_state": _numbers_without_state,
    "backwards_run_in_the_autocast_of_the_caller": _autocast_of_the_forward,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_change_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    with pytest.raises(AssertionError):
        getattr(assumptions, name)()
