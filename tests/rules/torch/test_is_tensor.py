"""``torch.is_tensor`` of any object asks for its class alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.differential import check_calls, leaf


class Holder:
    """An object of the user's with a state that changes."""

    def __init__(self, value: float) -> None:
        self.value = value


class Posing:
    """An object that says that it is a tensor."""

    @property
    def __class__(self) -> Any:
        return torch.Tensor

    value = 3.0


def scaled(x: torch.Tensor, other: Any) -> torch.Tensor:
    if torch.is_tensor(other) and not hasattr(other, "value"):
        return x * other
    return x * other.value + int(torch.is_tensor(other))


@pytest.mark.parametrize(
    "others", [(Holder(2.0), Holder(3.0)), (torch.ones(3), torch.zeros(3)), (Holder(2.0), torch.ones(3), Holder(2.0))]
)
def test_objects_and_tensors(others: tuple[Any, ...]) -> None:
    check_calls(scaled, [(leaf(3), other) for other in others], fullgraph=True)


def test_an_object_that_poses_as_a_tensor() -> None:
    posing = Posing()
    check_calls(lambda x: x * 2 if torch.is_tensor(posing) else x, [(leaf(3),)], fullgraph=False)


def test_an_object_made_inside() -> None:
    check_calls(lambda x: scaled(x, Holder(2.0)) + scaled(x, x), [(leaf(3),), (leaf(4),)], fullgraph=True)
