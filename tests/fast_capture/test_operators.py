"""A joint graph is the same, node for node, whether its operators were recorded by torch or as the last time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail import cache
from dovetail.face.loading import load_rules
from dovetail.fast_capture import inputs, operators
from dovetail.fast_capture.memory import MEMORIES, Memory
from dovetail.torch_private import fast_capture as private
from dovetail.trace.overrides import EVERY, INPUTS
from tests.differential import same

pytestmark = pytest.mark.skipif(not private.IS_KNOWN, reason="with this torch, every operator goes torch's way")

load_rules()


class Block(nn.Module):
    """An attention block like those of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.attention(self.norm(x)).split(8, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + nn.functional.dropout(self.out(mixed.transpose(1, 2).flatten(-2)), 0.5)


class Convolutions(nn.Module):
    """A convolution with statistics, in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.norm(self.convolution(x)), inplace=True)


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 + 0 * ctx.saved_tensors[0]


def written_views(x: Tensor) -> Tensor:
    """Writes to views, and views of what was written to, of equal sizes each time."""
    total = x.new_zeros(())
    for _ in range(3):
        y = x * 2
        view = y.view(-1)
        view[1:3].mul_(3)
        first, second = y[:, :2], y[:, 2:]
        first.add_(second)
        total = total + (y * y.t()).sum() + view[0]
    return total


def unsafe_views(x: Tensor) -> Tensor:
    """``matmul`` ends with a view of which autograd knows nothing; it is written to."""
    batch = x.expand(2, 4, 4)
    for _ in range(3):
        batch = torch.matmul(batch, x)
        batch.add_(1)
    return batch


def constants(x: Tensor) -> list[Tensor]:
    """Numbers that compare equal and are not."""
    return [
        x * 1,
        x * 1.0,
        x * True,
        x + 0.0,
        x + -0.0,
        x * 1,
        x * 1.0,
        x * True,
        x + 0.0,
        x + -0.0,
        x.clamp(1),
        x.clamp(1.0),
    ]


def several_results(x: Tensor) -> list[Tensor]:
    """Operators with more than one result, and with lists; some results are not used."""
    found = []
    for _ in range(2):
        found += [*x.topk(2), *x.unbind(), x.sort(dim=0).values, *torch.var_mean(x, 1), torch.cat([x, x.t()])]
        found += [*torch.linalg.qr(x), x.max(dim=1).indices, *x.tensor_split(3)]
    return found


def indices(x: Tensor) -> list[Tensor]:
    """Integers as indices, and a mask that chooses by ``where``."""
    place = torch.arange(2)
    return [
        y
        for _ in range(2)
        for y in (x[place], x[:, place], x[place, place], x.where(x > 0, 0), x.gather(0, (x > 0).long()))
    ]


def strided(x: Tensor) -> list[Tensor]:
    """Equal sizes and strides, in memory of different sizes and at different places."""
    small, large = x[:2].clone(), x * 2
    return [
        y * 3
        for y in (
            large[:2],
            small,
            large[2:],
            large[:2],
            x.as_strided((2, 2), (4, 1), 3),
            small.as_strided((2, 2), (4, 1), 1),
        )
    ]


def kinds(x: Tensor) -> list[Tensor]:
    """Types that are promoted, and complex numbers with their lazy conjugates."""
    counts = (x > 0).long()
    found = [y for _ in range(2) for y in (counts / 2, counts.sqrt(), x.double() + x, counts + x, (x > 0) + 1)]
    z = torch.complex(x, x)
    return [
        *found,
        *(
            y
            for _ in range(2)
            for y in (z.conj() * z, torch.view_as_real(z.conj().resolve_conj()), z.imag, z.conj().imag)
        ),
    ]


def ambient(x: Tensor) -> Tensor:
    """The same operators with and without gradients, inference tensors, autocast, and in regions that run again."""
    for _ in range(2):
        with torch.no_grad():
            scale = x.sin().cos().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x.sin().cos() + (x @ x).float() * scale
        x = x + checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False) + Doubled.apply(x)
    return x


def transformed(x: Tensor) -> Tensor:
    """Operators below ``vmap`` and ``grad``, and outside of them."""
    slope = torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))
    return slope(x) + slope(x) + x.sin() + torch.func.jvp(torch.sin, (x,), (x,))[1] + x.sin()


def twice(x: Tensor) -> Tensor:
    """A derivative inside of the function that is differentiated again."""
    (slope,) = torch.autograd.grad(x.sin().square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return again + slope.sin().square()


def nothing(x: Tensor) -> list[Tensor]:
    """Empty tensors, and a tensor as it is."""
    return [
        y
        for _ in range(2)
        for y in (x[:0] * 2, x[:0].sum(0), x.expand(2, 4, 4) + 1, x.contiguous(), x.flatten(), x.detach() * 2)
    ]


def writes(x: Tensor) -> list[Tensor]:
    """Writes to tensors of its own, to views of them, to the whole behind a view, to other types, and to the input."""
    made = []
    for _ in range(2):
        y = x.detach() * 2
        column, halves = y[:, 1], y.half()
        y.mul_(3).add_(x.detach(), alpha=2)
        column.sub_(1).clamp_(min=0)
        y.t().addcmul_(x.detach(), x.detach(), value=0.5)
        halves.mul_(column).div_(2)
        y[0].fill_(1)
        made.append(torch.empty_strided((8, 2), (1, 8)).mul_(3).neg_())
        made.append(x.detach().exp())
        made[-1].view(2, 8).t().mul_(3).neg_()
        made += [y, column.clone(), halves, y.relu_() + column]
    with torch.no_grad():
        x.mul_(0.5).lerp_(y, 0.25)
    return made


def model(block: Callable[[], nn.Module]) -> nn.Module:
    """Two equal blocks."""
    torch.manual_seed(0)
    return nn.Sequential(block(), block())


FUNCTIONS = [written_views, unsafe_views, constants, several_results, indices, strided]
FUNCTIONS += [kinds, ambient, transformed, twice, nothing, writes]
PROGRAMS: dict[str, Callable[[], Any]] = {
    "attention": lambda: model(Block),
    "convolutions": lambda: model(Convolutions),
    "recurrent": lambda: nn.GRU(4, 4),
}
SHAPES = {"attention": (2, 4, 8), "convolutions": (2, 3, 5, 5), "recurrent": (2, 4)}


def shown(value: Any, storages: dict[int, int]) -> Any:
    """What can be seen of a value on a node: of tensors everything, with their storages by number."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shown(item, storages) for item in value]
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.layout is not torch.strided:
        return value.layout, value.dtype, value.shape
    storage = value.untyped_storage()
    facts: list[Any] = [type(value), value.dtype, value.shape, value.stride(), value.storage_offset(), value.device]
    facts += [torch._C._dispatch_keys(value), value.requires_grad, sorted(value.__dict__)]
    return str([*facts, storages.setdefault(storage._cdata, len(storages)), storage.nbytes()])


def description(joint: Any) -> list[Any]:
    """Every node with all that is noted on it, the descriptors, the program."""
    storages: dict[int, int] = {}
    found: list[Any] = []
    for node in joint.graph.nodes:
        notes = {name: shown(item, storages) for name, item in node.meta.items() if name != "in_backward"}
        found.append([node.name, node.op, str(node.target), repr(node.args), repr(node.kwargs), sorted(notes.items())])
    found += [joint.input_descriptors, joint.output_descriptors, joint.spec, str(joint.program)]
    # Addresses, and the numbers that whole calls have in the process.
    return [
        re.sub(r"0x[0-9a-f]+|(?<=whole_call.default', '\()\d+|(?<=whole_call\()\d+", "", str(item)) for item in found
    ]


def captured(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], int]:
    """The description of a program's joint graph, and how many operators were recorded as the last time."""
    count, record = [0], operators._record

    def counting(*args: Any) -> Any:
        count[0] += 1
        return record(*args)

    x = torch.rand(SHAPES.get(name, (4, 4)), generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    with monkeypatch.context() as patched:
        patched.setattr(operators, "_record", counting)
        joint = dovetail.capture(PROGRAMS[name]() if name in PROGRAMS else globals()[name], (x.requires_grad_(),))
    return description(joint), count[0]


@pytest.mark.parametrize("name", [*PROGRAMS, *(function.__name__ for function in FUNCTIONS)])
@pytest.mark.sampled(4)
def test_graphs_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    EVERY.remove(operators.known_operator)
    INPUTS.remove(inputs.known_input)
    try:
        # Torch's own memory of fake tensors leaves out where some lie in their storage, from the second time on.
        captured(name, monkeypatch)
        slow, none = captured(name, monkeypatch)
    finally:
        EVERY.append(operators.known_operator)
        INPUTS.append(inputs.known_input)
    MEMORIES.clear()
    inputs._KNOWN.clear()
    fast, hits = captured(name, monkeypatch)
    again, more = captured(name, monkeypatch)
    assert fast == slow
    assert again == slow
    assert more > hits > none == 0


def asked_numbers(x: Tensor) -> list[Tensor]:
    """Numbers of the data as plain arguments, as optimizers have them."""
    factor = 1 - 0.9 ** (x.sum() + 1).item()
    return [y for _ in range(2) for y in (x / factor, x.clone().addcdiv_(x, x + 1, value=-factor), x * 2.0, x > factor)]


def test_numbers_that_are_asked_of_data_are_arguments_of_the_same_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured_in_a_call() -> tuple[list[Any], int]:
        graphs: list[Any] = []
        compiled = dovetail.compile(
            asked_numbers, backend="aten", fullgraph=True, passes=(lambda joint: graphs.append(joint) or joint,)
        )
        x = torch.rand(3, generator=torch.Generator().manual_seed(0))
        same(asked_numbers(x), compiled(x))
        found = {}
        for node in graphs[0].graph.nodes:
            found[node.name] = [str(node.target), repr(node.args), repr(node.kwargs), shown(node.meta.get("val"), {})]
        return list(found.items()), sum(what is not None for one in MEMORIES.values() for what in one.known.values())

    EVERY.remove(operators.known_operator)
    try:
        slow, _ = captured_in_a_call()
    finally:
        EVERY.append(operators.known_operator)
    MEMORIES.clear()
    learned, count = captured_in_a_call()
    again, as_many = captured_in_a_call()
    assert learned == again == slow
    assert as_many == count >= 5


def test_every_operator_of_a_forward_and_its_backward_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    MEMORIES.clear()
    captured("attention", monkeypatch)
    known = [(key[0].operator, what) for memory in MEMORIES.values() for key, what in memory.known.items()]
    assert len(known) > 20 and not [operator for operator, what in known if what is None]


def test_facts_are_asked_of_plain_operators_alone() -> None:
    others = [*private.FunctionalTensor.metadata_fns, torch.ops.aten.normal_.default, torch.ops.higher_order.cond]
    assert not any(operators.Operator.of(item).recorded for item in [*others, torch.ops.aten.t_.default])
    assert operators.Operator.of(torch.ops.aten.add_.Tensor).recorded is torch.ops.aten.add.Tensor
    assert operators.Operator.of(torch.ops.aten.add.Tensor) is operators.Operator.of(torch.ops.aten.add.Tensor)


def _kept(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graph of a program whose operators are learned anew; what was learned is on disk, and forgotten here."""
    MEMORIES.clear()
    made, _ = captured(name, monkeypatch)
    for memory in MEMORIES.values():
        memory.keep()
    MEMORIES.clear()
    return made


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", ["attention", "constants", "several_results", "ambient"])
def test_another_process_knows_what_was_learned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _kept(name, monkeypatch)
    learned: list[Any] = []
    learn = operators._learn

    def counting(*args: Any) -> Any:
        learned.append(learn(*args))
        return learned[-1]

    with monkeypatch.context() as patched:
        patched.setattr(operators, "_learn", counting)
        again, _ = captured(name, patched)
    assert again == made and not any(learned)
    assert [entry.kind for entry in cache.ls()] == ["operators"] * len(MEMORIES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("content", ["", "[3]", "[" * 100_000, "{}x", '{"": 1}', "names", "shapes", "sequences"])
def test_entries_that_mean_nothing_are_learned_again(
    content: str, own_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _kept("kinds", monkeypatch)
    ((kind, key),) = [(entry.kind, entry.key) for entry in cache.ls()]
    whole = (cache.read(kind, key) or b"").decode()
    wrong = {"names": whole.replace("torch.float32", "torch.save"), "shapes": whole.replace('"shape"', '"shade"')}
    wrong["sequences"] = whole.replace("null]", '"dict"]')
    assert cache.write(kind, key, wrong.get(content, content).encode())
    assert captured("kinds", monkeypatch)[0] == made


@pytest.mark.usefixtures("own_cache")
def test_what_decides_about_a_fake_kernel_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Memory(("switches",))._entry
    assert entry == Memory(("switches",))._entry != Memory(("others",))._entry
    with monkeypatch.context() as patched:
        patched.setattr(private, "registered_kernels", lambda: ["aten/sin/Meta"])
        assert Memory(("switches",))._entry not in ("", entry)
    with monkeypatch.context() as patched:
        patched.setattr(cache, "software", lambda: ("others",))
        assert Memory(("switches",))._entry not in ("", entry)
    memory = Memory(("switches",))
    memory.learn((operators.Operator.of(torch.ops.aten.sin.default), nothing), operators.Known(1, (), (None,), None))
    memory.keep()
    assert "nothing" not in (cache.read("operators", entry) or b"").decode()
    cache.switch(False)
    assert Memory(("switches",))._entry == ""
