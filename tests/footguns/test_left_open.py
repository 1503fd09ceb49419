"""A capture that ends inside of a ``with`` block leaves torch as it was; what is asked of native containers is guarded."""

from __future__ import annotations

import array
import contextlib
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.face.loading import load_rules
from dovetail.guards import AmbientState
from dovetail.torch_private import state as private_state


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


BLOCKS: dict[str, Callable[[], Any]] = {
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(_same, _same),
    "no_saved_tensors_hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "mutation_on_saved": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "no_subclasses": torch._C.DisableTorchFunctionSubclass,
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "dual_level": torch.autograd.forward_ad.dual_level,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "threads": lambda: torch.autograd.set_multithreading_enabled(False),
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("ends", ["break", "error"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_capture_that_ends_inside_of_a_block_leaves_torch_as_it_was(name: str, ends: str) -> None:
    block = BLOCKS[name]

    def program(x: torch.Tensor) -> torch.Tensor:
        with block():
            y = x * 2
            if ends == "error":
                raise ValueError("the user's own")
            print(end="")
            y = y + 1
        return x + y.detach() if y.device == x.device else x

    def outcome(function: Callable[[torch.Tensor], Any]) -> Any:
        try:
            return function(torch.ones(2, 3)).tolist()
        except ValueError as error:
            return str(error)

    load_rules()  # They add to what is watched.
    with _quiet():
        compiled = dovetail.compile(program, backend="aten")
        ambient, state = AmbientState.snapshot(), private_state.StateOfTorch.now()
        expected = outcome(program)
        for _ in range(2):
            assert outcome(compiled) == expected
            assert ambient.differences() == []
            assert private_state.StateOfTorch.now() == state


def test_anomaly_mode_looks_into_a_backward_inside() -> None:
    def step(x: torch.Tensor) -> torch.Tensor | None:
        (torch.sqrt(x) * 0).sum().backward()
        return x.grad

    compiled = dovetail.compile(step, backend="aten")
    with _quiet():
        assert bool(compiled(torch.zeros(1, requires_grad=True)).isnan())
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0.*nan"):
            compiled(torch.zeros(1, requires_grad=True))
        assert bool(compiled(torch.zeros(1, requires_grad=True)).isnan())


def test_training_in_anomaly_mode_warns_of_nodes_of_eagers_graph_only() -> None:
    """A capture in that mode asked fake values whether they are numbers, and the failure was told as the program's."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.sqrt() * 0).sum()

    compiled = dovetail.compile(loss, backend="aten")
    for function in (loss, compiled):
        for value, is_number in ((4.0, True), (0.0, False)):
            x = torch.full((2,), value, requires_grad=True)
            with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly():
                warnings.simplefilter("always")
                result = function(x)
                assert "Error detected" not in "".join(str(warning.message) for warning in caught)
                with contextlib.nullcontext() if is_number else pytest.raises(RuntimeError, match="SqrtBackward0.*nan"):
                    result.backward()
            detected = [str(warning.message) for warning in caught if "Error detected" in str(warning.message)]
            assert len(detected) == (not is_number) and all("SqrtBackward0" in text for text in detected)


def test_anomaly_mode_that_a_program_leaves_on() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch.autograd.set_detect_anomaly(True)
        return x * 2

    compiled = dovetail.compile(program, backend="aten")
    with _quiet():
        for _ in range(2):
            compiled(torch.ones(1))
            is_on = torch.is_anomaly_enabled()
            torch.autograd.set_detect_anomaly(False)
            assert is_on


TABLE = {"a": 1}
NATIVE: dict[str, tuple[Any, Callable[[], None], Callable[[], None]]] = {}


def _natives() -> None:
    items, numbers, text = deque([1]), array.array("i", [1]), bytearray(b"a")
    NATIVE["deque"] = (items, items.clear, lambda: items.append(1))
    NATIVE["array"] = (numbers, lambda: numbers.__delitem__(0), lambda: numbers.append(1))
    NATIVE["bytearray"] = (text, text.clear, lambda: text.append(1))
    NATIVE["mappingproxy"] = (types.MappingProxyType(TABLE), TABLE.clear, lambda: TABLE.update(a=1))
    NATIVE["dict_keys"] = (TABLE.keys(), TABLE.clear, lambda: TABLE.update(a=1))


_natives()


@pytest.mark.parametrize("name", NATIVE)
def test_the_truth_of_a_native_container_changes(name: str) -> None:
    value, empty, fill = NATIVE[name]

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if value else x * 3

    compiled = dovetail.compile(program, backend="aten")
    with _quiet():
        for change in (fill, empty, fill, empty):
            change()
            assert torch.equal(compiled(torch.ones(2)), program(torch.ones(2)))


def test_a_deque_is_emptied_in_a_loop() -> None:
    def program(x: torch.Tensor, waiting: deque[int]) -> torch.Tensor:
        while waiting:
            x = x * waiting.pop()
        return x

    compiled = dovetail.compile(program, backend="aten")
    with _quiet():
        for items in ([2], [2, 3], [2, 3, 4, 5], []):
            assert torch.equal(compiled(torch.ones(2), deque(items)), program(torch.ones(2), deque(items)))
