"""An input is the same, its node and its memory included, whether torch's converter made it or it was made as the last time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.face.loading import load_rules
from dovetail.fast_capture import inputs
from dovetail.torch_private import fast_capture as private
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace import Trace
from dovetail.trace.overrides import INPUTS
from tests.fast_capture.test_operators import shown

pytestmark = pytest.mark.skipif(not private.IS_KNOWN, reason="with this torch, every input goes torch's way")

load_rules()


def one_storage() -> list[Tensor]:
    """Views of one tensor, and the tensor itself."""
    x = torch.rand(4, 4)
    return [x, x[1:], x.t(), x[1:].detach(), torch.rand(4, 4)]


def alike() -> list[Tensor]:
    """Equal facts in memory of their own, of different sizes and at different places."""
    large = [torch.rand(8, 4) for _ in range(4)]
    return [*(torch.rand(4, 4) for _ in range(3)), large[0][:4], large[1][:4], large[2][4:], large[3][4:]]


def flags() -> list[Tensor]:
    """Gradients wanted, results of computations, parameters, buffers."""
    made = [torch.rand(3, 2, requires_grad=True) for _ in range(2)]
    return [
        *made,
        *(x * 2 for x in made),
        *(nn.Parameter(torch.rand(3, 2)) for _ in range(2)),
        nn.Buffer(torch.rand(3, 2)),
    ]


def kinds() -> list[Tensor]:
    """Types, lazy conjugates and negatives, gaps, empty tensors, numbers."""
    z = [torch.rand(2, 2, dtype=torch.complex64) for _ in range(2)]
    found = [*z, *(x.clone().conj() for x in z), *(x.clone().conj().imag for x in z)]
    for _ in range(2):
        found += [
            torch.rand(4, 4)[:, ::2],
            torch.rand(0, 3),
            torch.tensor(3),
            torch.tensor(3.0),
            torch.rand(3, 1).expand(3, 2),
        ]
        found += [torch.rand(1, 3, 2, 2).contiguous(memory_format=torch.channels_last), torch.empty(3, device="meta")]
    return found


def inference() -> list[Tensor]:
    """Tensors of inference mode, and equal ones that are none."""
    with torch.inference_mode():
        made = [torch.rand(2, 2) for _ in range(2)]
    return [*made, torch.rand(2, 2), torch.rand(2, 2)]


def described(tensors: list[Tensor]) -> list[Any]:
    """All that a trace has of its inputs."""
    with contextlib.ExitStack() as stack:
        trace = Trace().open(stack)
        made = [trace.input(item, f"L['x{place}']") for place, item in enumerate(tensors)]
        storages: dict[int, int] = {}
        found: list[Any] = []
        for item in made:
            notes = {name: shown(note, storages) for name, note in item.node.meta.items()}
            fake = private.fake_of(item.value, is_argument=False)  # type: ignore[arg-type]
            facts: list[Any] = [item.node.name, item.node.op, item.node.target, item.node.args, sorted(notes.items())]
            facts += [item.node.prev.name, item.node in trace.graph.find_nodes(op="placeholder"), item.node.type]
            facts += [shown(fake, storages), trace.node_of(item.value) is item.node, str(item.original_grad_fn)[:12]]
            for traced in (item.leaf, item.value):
                facts += [
                    type(traced),
                    traced.shape,
                    traced.stride(),
                    traced.device,
                    traced.dtype,
                    traced.requires_grad,
                ]
                facts += [torch._C._dispatch_keys(traced), traced.is_leaf, isinstance(traced, nn.Parameter)]
                facts += [traced.is_conj(), traced.is_neg(), traced.is_inference(), private_tensors.version_of(traced)]
            found.append(list(map(str, facts)))
    return found


@pytest.mark.parametrize("make", [one_storage, alike, flags, kinds, inference])
def test_inputs_are_those_of_torch(make: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make()
    INPUTS.remove(inputs.known_input)
    try:
        slow = described(tensors)
    finally:
        INPUTS.append(inputs.known_input)
    count, add = [0], private.add_node

    def counting(*args: Any) -> Any:
        count[0] += 1
        return add(*args)

    inputs._KNOWN.clear()
    monkeypatch.setattr(private, "add_node", counting)
    for _ in range(2):
        assert described(tensors) == slow
    assert count[0] > 0


def test_known_inputs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MOST", 2)
    inputs._KNOWN.clear()
    described([torch.rand(size) for size in range(2, 9)])
    assert len(inputs._KNOWN) <= 2
