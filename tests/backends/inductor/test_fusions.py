"""Inductor's choice of what to fuse: weighed with less work, and with the same answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.scheduler import Scheduler

from dovetail.torch_private import inductor as private_inductor


def node(*names: str) -> Any:
    return SimpleNamespace(read_writes=SimpleNamespace(reads=[SimpleNamespace(name=name) for name in names]))


@pytest.mark.parametrize("answer", [True, False])
def test_memory_is_weighed_where_both_kernels_free_some(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    asked: list[Any] = []

    def weigh(scheduler: Any, one: Any, other: Any) -> bool:
        asked.append((one, other))
        return answer

    monkeypatch.setattr(Scheduler, "can_fusion_increase_peak_memory", weigh)
    users = {"mine": 1, "yours": 1, "ours": 2}
    buffers = {name: SimpleNamespace(users=[None] * count) for name, count in users.items()}
    scheduler: Any = SimpleNamespace(name_to_buf=buffers)
    frees, also, none, inputs = node("ours", "mine"), node("yours"), node("ours"), node("an input")
    with private_inductor._memory_of_fusions_only_where_it_is_shared():
        ask: Any = Scheduler.can_fusion_increase_peak_memory
        assert ask(scheduler, frees, also) is answer and asked == [(frees, also)]
        for one, other in ((frees, none), (none, frees), (inputs, also), (none, inputs), (frees, node())):
            assert ask(scheduler, one, other) is False
    assert len(asked) == 1 and Scheduler.can_fusion_increase_peak_memory is weigh
