"""Weak references to tensors, which a capture would keep alive."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakWarning
from tests.differential import check_training, same

WEIGHT = torch.nn.Parameter(torch.ones(2))
TO_WEIGHT = weakref.ref(WEIGHT)


def dropped(x: torch.Tensor) -> Any:
    value = x * 2
    reference = weakref.ref(value)
    del value
    return x + 1, reference() is None


def kept(x: torch.Tensor) -> Any:
    value = x * 2
    reference = weakref.ref(value)
    return reference() is value, value + 1


@pytest.mark.parametrize("program", [dropped, kept], ids=lambda item: item.__name__)
def test_a_tensor_of_the_functions_own(program: Any) -> None:
    with pytest.warns(GraphBreakWarning, match="weak reference"):
        same(program(torch.ones(2)), dovetail.compile(program, backend="aten")(torch.ones(2)))


def test_tensors_that_existed_before() -> None:
    def program(x: torch.Tensor) -> Any:
        return TO_WEIGHT() * weakref.ref(x)(), TO_WEIGHT() is WEIGHT  # type: ignore[operator]

    same(program(torch.ones(2)), dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2)))


LIVING: Any = weakref.WeakSet()
BY_NAME: Any = weakref.WeakValueDictionary()
ABOUT: Any = weakref.WeakKeyDictionary()


def in_a_set(x: torch.Tensor) -> Any:
    for factor in range(3):
        value = x * factor
        LIVING.add(value)
    del value
    return len(LIVING), x + 1


def by_name(x: torch.Tensor) -> Any:
    value, own = x * 2, weakref.WeakValueDictionary(first=x)
    BY_NAME["value"], own["second"] = value, value
    before = len(BY_NAME), len(own)
    total = value.sum()
    del value
    return before, len(BY_NAME), sorted(own), "value" in BY_NAME, total


def as_a_key(x: torch.Tensor) -> Any:
    value = x * 2
    ABOUT[value] = 1
    before = len(ABOUT)
    del value
    return before, len(ABOUT), x + 1


def by_proxy(x: torch.Tensor) -> Any:
    value = x * 2
    return weakref.proxy(value).sum()


@pytest.mark.parametrize("program", [in_a_set, by_name, as_a_key, by_proxy], ids=lambda item: item.__name__)
def test_containers_forget_what_the_program_lets_go(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten")
    expected = [program(torch.ones(2)) for _ in range(3)]
    with pytest.warns(EagerFallbackWarning, match="weak reference"):
        first = compiled(torch.ones(2))
    same(expected, [first, *[compiled(torch.ones(2)) for _ in range(2)]])
    assert not LIVING and not BY_NAME and not ABOUT


def test_a_container_of_what_existed_before() -> None:
    counts: Any = weakref.WeakKeyDictionary()
    module = torch.nn.Linear(2, 2)

    def program(x: torch.Tensor) -> torch.Tensor:
        counts[module] = counts.get(module, 0) + 1
        return x * counts[module]

    compiled = dovetail.compile(program, backend="aten")
    same([torch.ones(2), torch.ones(2) * 2], [compiled(torch.ones(2)), compiled(torch.ones(2))])


class Holder:
    pass


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("lets_go", [True, False])
def test_callbacks_are_called_when_the_object_goes(is_own: bool, lets_go: bool, capfd: Any) -> None:
    def calls(wrap: Any) -> list[int]:
        gone: list[int] = []
        references = []
        holder: Any = Holder()

        def program(x: torch.Tensor) -> Any:
            value = x + 1
            references.append(weakref.ref(value if is_own else holder, lambda _: gone.append(len(gone))))
            return x * 2 if lets_go else (value, x * 2)

        compiled, counts = wrap(program), []
        for _ in range(2):
            result = compiled(torch.ones(2))
            counts.append(len(gone))
            del result
            counts.append(len(gone))
        references.append(None)
        holder = None
        return [*counts, len(gone)]

    expected = calls(lambda program: program)
    assert calls(dovetail.compile(backend="aten")) == expected
    # What a callback raises is written, and nobody hears of it.
    assert "Exception ignored" not in capfd.readouterr().err


class DroppedWeights(torch.nn.Module):
    """The recurrent weights are computed anew at every call, as in AWD-LSTM; the network refers to its weights weakly."""

    def __init__(self, kind: type, p: float) -> None:
        super().__init__()
        self.inner, self.p = kind(3, 4), p
        weight = self.inner._parameters.pop("weight_hh_l0")
        self.raw = torch.nn.Parameter(weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.weight_hh_l0 = torch.nn.functional.dropout(self.raw, self.p, training=self.training)
        result: torch.Tensor = self.inner(x)[0]
        return result


@pytest.mark.parametrize(("kind", "p"), [(torch.nn.LSTM, 0.0), (torch.nn.LSTM, 0.4), (torch.nn.RNN, 0.4)])
def test_recurrent_networks_refer_to_weights_made_anew(kind: type, p: float) -> None:
    batches = [(torch.randn(5, 2, 3),) for _ in range(3)]
    check_training(
        DroppedWeights(kind, p),
        lambda module, x: module(x).square().mean(),
        batches,
        dovetail.compile(backend="aten", fullgraph=True),
    )


def test_a_reference_that_nothing_is_known_to_hold() -> None:
    """Autograd may hold what the program lets go: the call is eager's."""

    def program(x: torch.Tensor) -> Any:
        value = x * 2
        return weakref.ref(value), (value * value).sum(), weakref.ref(x)

    compiled = dovetail.compile(program, backend="aten")
    x = torch.ones(2, requires_grad=True)
    with pytest.warns(EagerFallbackWarning, match="a weak reference made by the function leaves it"):
        reference, total, to_input = compiled(x)
    assert reference() is not None and to_input() is x
    total.backward()
