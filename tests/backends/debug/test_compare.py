"""``dovetail.compare``: which value differs, the first operator that does, and that nothing of the user's is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from tests.backends.debug import planted  # noqa: F401  (registers the backend)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = self.norm(self.first(x)).relu()
        return {"chosen": y.softmax(-1), "dropped": torch.dropout(y, 0.5, True)}


def test_backends_that_agree() -> None:
    found = dovetail.compare(Net(), (torch.randn(3, 4),), backends=["aten", "planted", "aten"])
    assert found.agrees and repr(found) == "aten     equal to the last bit\nplanted  equal to the last bit"


def test_the_first_operator_that_differs_and_its_line() -> None:
    (found,) = dovetail.compare(Net(), (torch.randn(3, 4),), backends=["planted"], options={"fault": "wrong"})
    assert not found.agrees and found.problem.startswith("output['chosen'] differs by up to")
    assert found.operator.startswith("operator aten._softmax.default") and found.largest_in
    assert found.where is not None and "y.softmax(-1)" in found.where.text
    assert found.where.text in dovetail.compare(
        Net(), (torch.randn(3, 4),), backends=["planted"], options={"fault": "wrong"}
    )._repr_html_().replace("&quot;", '"')


def test_operators_that_are_wrong_together_alone() -> None:
    (found,) = dovetail.compare(
        lambda x: x.sin().cos(), (torch.randn(3),), backends=["planted"], options={"fault": "pair"}
    )
    assert not found.agrees and "but not all of them together" in found.operator


def test_a_backend_that_raises() -> None:
    (found,) = dovetail.compare(Net(), (torch.randn(3, 4),), backends=["planted"], options={"fault": "raise"})
    assert not found.agrees and found.problem.startswith("raises BackendError") and "no softmax here" in found.problem
    assert "aten._softmax" in found.operator and found.where is not None


def test_a_gradient_that_differs_is_named() -> None:
    @dovetail.register_backend("wrong_backward")
    def wrong_backward(graph: Any, inputs: Any, *, kind: str, options: Any) -> Any:
        return lambda given: [
            item * 2 if kind == "backward" and isinstance(item, torch.Tensor) else item for item in graph(*given)
        ]

    try:
        (found,) = dovetail.compare(torch.nn.Linear(2, 1), (torch.ones(3, 2),), backends=["wrong_backward"])
    finally:
        from dovetail.backends.registry import unregister_backend

        unregister_backend("wrong_backward")
    assert not found.agrees and found.problem.startswith("the gradient of weight differs")


def test_nothing_of_the_users_is_changed() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(3, 4, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x)["chosen"].square().sum()
        loss.backward()
        optimizer.step()
        x.detach().add_(1)
        return loss.detach()

    before = [item.detach().clone() for item in (x, *net.state_dict().values())]
    random = torch.get_rng_state()
    assert dovetail.compare(step, (x,), backends=["aten"]).agrees
    assert all(torch.equal(old, new) for old, new in zip(before, (x, *net.state_dict().values())))
    assert torch.equal(random, torch.get_rng_state()) and x.grad is None and net.first.weight.grad is None
    assert not optimizer.state


def test_a_change_of_state_that_is_forgotten_is_found() -> None:
    """A backend that does not write: what differs is a buffer after the call."""

    def forgets(graph: Any, inputs: Any, *, kind: str, options: Any) -> Any:
        return lambda given: [item * 0 if item.shape == (4,) else item for item in graph(*given)]

    norm = torch.nn.BatchNorm1d(4)
    with torch.no_grad():
        (found,) = dovetail.compare(norm, (torch.randn(3, 4),), backends=[forgets])
    assert not found.agrees and found.problem.startswith("running_mean after the call differs")
    assert norm.num_batches_tracked == 0


def test_what_runs_eagerly_is_said() -> None:
    def talks(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x.sin()

    (found,) = dovetail.compare(talks, (torch.ones(2),), backends=["aten"])
    assert found.agrees and "print writes to the terminal" in found.notes[0]


def test_exact_and_a_backend_of_tolerances() -> None:
    def slightly(graph: Any, inputs: Any, *, kind: str, options: Any) -> Any:
        return lambda given: [item * (1 + 1e-6) for item in graph(*given)]

    x = torch.rand(50) + 1
    found = dovetail.compare(torch.sin, (x,), backends=[slightly])
    assert found.agrees and 0 < found[0].largest < 1e-4 and "agrees; the largest difference" in repr(found)
    (exact,) = dovetail.compare(torch.sin, (x,), backends=[slightly], exact=True)
    assert not exact.agrees and exact.operator.startswith("operator aten.sin.default")


def test_what_eager_raises_and_unknown_backends() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dovetail.compare(torch.nn.Linear(2, 1), (torch.ones(3, 5),), backends=["aten"])
    with pytest.raises(dovetail.errors.UnknownBackendError):
        dovetail.compare(torch.sin, (torch.ones(2),), backends=["atem"])


@pytest.mark.parametrize("x", [torch.ones(2).expand(3, 2), torch.ones(3, 2).t(), torch.ones(2, requires_grad=True) * 2])
def test_layouts_and_tensors_with_a_history(x: torch.Tensor) -> None:
    found = dovetail.compare(lambda x: (x.sin(), x.shape[0], "text"), (x,), backends=["aten"])
    assert found.agrees
