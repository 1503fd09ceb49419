"""Exported graphs run without the user's code; files that are not as they were written are refused."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dovetail
from dovetail import aot, errors
from dovetail.artefacts.schema import validate

ROOT = Path(__file__).parents[2]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.second = torch.nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.25, self.training)
        y = self.second(hidden) * self.scale
        return {"loss": y.square().mean(), "parts": [y, 3], "shape": "kept"}


def train(call: Any, parameters: list[torch.Tensor], batches: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(4)
    found: list[torch.Tensor] = []
    for x in batches:
        result = call(x)
        gradients = torch.autograd.grad(result["loss"], parameters)
        found += [result["loss"].detach(), result["parts"][0].detach(), *gradients]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
    return [*found, *[parameter.detach() for parameter in parameters], torch.rand(1)]


OTHER_PROCESS = """
import sys, torch, dovetail
sys.path.insert(0, sys.argv[4])
from tests.artefacts.test_artefacts import train
# As in this process: a sum over several threads is rounded in another way.
torch.set_num_threads(1)
step = dovetail.load(sys.argv[1])
batches = torch.load(sys.argv[2])
names = [name for name, value in step.state.items() if value.requires_grad]
torch.save((names, train(step, [step.state[name] for name in names], batches)), sys.argv[3])
"""


@pytest.mark.slow
def test_training_in_another_process_with_other_batch_sizes(tmp_path: Path) -> None:
    net = Net()
    x = dovetail.mark_dynamic(torch.randn(6, 4), 0, minimum=2, maximum=64)
    joint = dovetail.capture(net, (x,))
    path = joint.export(tmp_path / "step", values=net.state_dict())
    batches = [torch.randn(rows, 4) for rows in (6, 2, 17, 64)]
    torch.save(batches, tmp_path / "batches.pt")
    command = [sys.executable, "-c", OTHER_PROCESS, path, tmp_path / "batches.pt", tmp_path / "out.pt", ROOT]
    subprocess.run([str(item) for item in command], check=True, cwd=ROOT)
    names, actual = torch.load(tmp_path / "out.pt")
    parameters = [dict(net.named_parameters())[name] for name in names]
    assert len(names) == len(list(net.parameters()))
    expected = train(net, parameters, batches)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))


def test_the_result_keeps_its_form_and_the_bounds_hold(tmp_path: Path) -> None:
    net = Net().eval()
    x = dovetail.mark_dynamic(torch.randn(6, 4), 0, minimum=2, maximum=64)
    joint = dovetail.capture(net, (x,))
    loaded = dovetail.load(joint.export(tmp_path / "step", values=net.state_dict()))
    assert loaded.open_inputs == ("L['x']",) and loaded.derivative_order == 1
    result = loaded(x)
    assert set(result) == {"loss", "parts", "shape"} and result["parts"][1] == 3 and result["shape"] == "kept"
    for bad in (torch.randn(65, 4), torch.randn(1, 4), torch.randn(6, 5), torch.randn(6), torch.randn(6, 4).double()):
        with pytest.raises(errors.InputError):
            loaded(bad)
    with pytest.raises(errors.InputError, match="requires a gradient"):
        loaded(torch.randn(6, 4, requires_grad=True))
    with pytest.raises(errors.InputError, match="strides"):
        loaded(torch.randn(4, 6).t())
    with pytest.raises(errors.InputError):
        loaded()
    gradient = torch.autograd.grad(result["loss"], loaded.state["first.weight"], create_graph=False)[0]
    assert gradient.shape == (8, 4)
    again = dovetail.load(loaded.joint.export(tmp_path / "again", values=loaded.state))
    assert torch.equal(again(x)["parts"][0], net(x)["parts"][0])


def test_without_values_they_are_given_by_name(tmp_path: Path) -> None:
    net, x = Net().eval(), torch.randn(6, 4)
    loaded = dovetail.load(dovetail.capture(net, (x,)).export(tmp_path / "step"))
    assert set(loaded.open_inputs) >= {"first.weight", "scale", "L['x']"}
    assert torch.equal(loaded.bind(dict(net.state_dict(keep_vars=True)))(x)["loss"], net(x)["loss"])
    with pytest.raises(errors.InputError, match="no input"):
        loaded.bind({"third.weight": x})


def test_a_whole_step_with_writes_and_views(tmp_path: Path) -> None:
    def step(weight: torch.Tensor, momentum: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (x @ weight).sin().square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            momentum.mul_(0.9).add_(gradient)
            weight.sub_(0.1 * momentum)
        return loss.detach(), gradient[0], gradient

    def values() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        weight, x = torch.randn(4, 3, generator=generator), torch.randn(5, 4, generator=generator)
        return weight.requires_grad_(), torch.zeros(4, 3), x

    path = dovetail.capture(step, values()).export(tmp_path / "step")
    loaded = dovetail.load(path)
    expected, actual = values(), values()
    for _ in range(3):
        left, right = step(*expected), loaded(*actual)
        assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
        assert right[1]._base is right[2]._base or right[1].data_ptr() == right[2].data_ptr()
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    with pytest.raises(errors.InputError, match="shares memory"):
        loaded(actual[0], actual[0].detach(), actual[2])


def test_without_numpy_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    joint = dovetail.capture(torch.nn.Linear(2, 1), (torch.ones(3, 2),))
    with pytest.raises(errors.ArtefactError, match="pip install numpy"):
        joint.export(tmp_path / "joint", values=joint.capture.function.state_dict())
    assert not list(tmp_path.iterdir())


def test_a_loaded_graph_is_a_joint_graph(tmp_path: Path) -> None:
    net = Net().eval()
    x = dovetail.mark_dynamic(torch.randn(6, 4), 0, minimum=2)
    loaded = dovetail.load(dovetail.capture(net, (x,)).export(tmp_path / "step", values=net.state_dict()))
    other = loaded.compile("aten", memory_budget=0.0)
    for rows in (6, 9):
        batch = torch.randn(rows, 4)
        assert torch.equal(other(batch)["loss"], loaded(batch)["loss"])
    assert other.compiled is not None and other.compiled.memory is not None
    assert "parameter 'first.weight'" in str(loaded.joint)
    with pytest.raises(errors.InputError, match="does not know the function"):
        loaded.joint.compile("aten")(x)
    with pytest.raises(errors.CaptureError, match="loaded from a file"):
        loaded.compile("eager")


def test_the_second_derivative_of_a_loaded_graph_is_refused(tmp_path: Path) -> None:
    x = torch.randn(3, requires_grad=True)
    loaded = dovetail.load(dovetail.capture(lambda x: x.sin().sum(), (x,)).export(tmp_path / "step"))
    (gradient,) = torch.autograd.grad(loaded(x), x, create_graph=True)
    assert torch.equal(gradient, x.cos())
    with pytest.raises(errors.HigherOrderGradientError, match="create_graph"):
        gradient.sum().backward()


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    class Counter(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return x * 2

    with torch.library._scoped_library("dovetailtest", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        custom = dovetail.capture(lambda x: torch.ops.dovetailtest.twice(x), (torch.ones(3),))
        for joint in (dovetail.capture(Counter(), (torch.ones(3),)), custom):
            with pytest.raises(errors.ArtefactError):
                joint.export(tmp_path / "step")
    with pytest.raises(errors.ArtefactError, match="was captured for"):
        dovetail.capture(Net(), (torch.randn(2, 4),)).export(tmp_path / "step", values={"scale": torch.ones(4)})
    assert list(tmp_path.iterdir()) == []


# --- bad input --------------------------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    """``self.count += 1`` reads a tensor, writes to it in place, and sets the attribute to what it was."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("other", torch.ones(2))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "put back":
            self.count += x.sum()
            self.other = self.other
        elif self.how == "swapped":
            self.count, self.other = self.other, self.count
        elif self.how == "one of two":
            self.count += 1
            self.other = self.count
        elif self.how == "given":
            self.count = x
        return x * self.count


def test_a_tensor_that_is_put_back_is_no_effect(tmp_path: Path) -> None:
    module, x = Counting("put back"), torch.randn(2)
    loaded = dovetail.load(dovetail.capture(module, (x,)).export(tmp_path / "step", values=module.state_dict()))
    for _ in range(2):
        assert torch.equal(loaded(x), module(x)) and torch.equal(loaded.state["count"], module.count)


class Noting(torch.nn.Module):
    """Notes something for the length of a call, as libraries do."""

    after: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mode = "running"
        y = x * 2
        self.mode = self.after
        return y


@pytest.mark.parametrize(("before", "after"), [(None, None), ("idle", "idle"), ("idle", None), (1, True), (0.0, 0)])
def test_a_note_that_is_taken_back_is_no_effect(before: object, after: object, tmp_path: Path) -> None:
    module, x = Noting(), torch.randn(2)
    module.mode, module.after = before, after  # type: ignore[assignment]
    joint = dovetail.capture(module, (x,))
    if type(before) is type(after) and before == after:
        assert torch.equal(dovetail.load(joint.export(tmp_path / "step"))(x), x * 2)
    else:
        with pytest.raises(errors.ArtefactError, match="writes to Python objects"):
            joint.export(tmp_path / "step")


class Stepping(torch.nn.Module):
    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.steps


def test_a_count_that_another_call_has_made_since_is_no_note(tmp_path: Path) -> None:
    module, x = Stepping(), torch.randn(2)
    module.steps = 0
    joint = dovetail.capture(module, (x,))
    module(x)
    with pytest.raises(errors.ArtefactError, match="writes to Python objects"):
        joint.export(tmp_path / "step")


@pytest.mark.parametrize("how", ["swapped", "one of two", "given"])
def test_other_tensors_in_a_place_are_an_effect(how: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ArtefactError, match="writes to Python objects"):
        dovetail.capture(Counting(how), (torch.randn(2),)).export(tmp_path / "step")


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adadelta": {},
    "Rprop": {},
    "Muon": {},
    # These read their count of steps as a number.
    "Adam": {},
    "AdamW": {"amsgrad": True, "foreach": True},
    "NAdam": {},
    "Adamax": {},
    "Adagrad": {"lr_decay": 0.1},
}


def values_of(
    names: tuple[str, ...], net: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """The parameters and the optimizer's state by the names of inputs: the second tensor of a name ends in `` (2)``."""
    parameters = list(net.parameters())
    rest, found = iter(parameters), {}
    for name in names:
        of_state = re.fullmatch(r".*\.state\[<Parameter>\]\['(\w+)'\](?: \((\d+)\))?", name)
        value = optimizer.state[parameters[int(of_state[2] or 1) - 1]][of_state[1]] if of_state else next(rest)
        found[name] = value.detach().clone().requires_grad_(value.requires_grad)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_an_optimizer_of_torch(name: str, tmp_path: Path) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip("this torch does not have it")
    net = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 2, bias=False))
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01, **OPTIMIZERS[name])
    step = step_of(optimizer, net)
    step(torch.randn(6, 4))
    loaded = dovetail.load(dovetail.capture(step, (torch.randn(6, 4),)).export(tmp_path / "step"))
    assert len(set(loaded.names)) == len(loaded.names)
    loaded = loaded.bind(values_of(loaded.names[1:], net, optimizer))
    for _ in range(3):
        x = torch.randn(6, 4)
        assert torch.equal(loaded(x), step(x))
    expected = values_of(loaded.names[1:], net, optimizer)
    assert all(torch.equal(loaded.state[name], value) for name, value in expected.items())


def step_of(optimizer: torch.optim.Optimizer, net: torch.nn.Module) -> Any:
    """A whole step of training, called once so that the optimizer has its state."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(torch.randn(6, 4))
    return step


def test_the_values_that_the_function_finds_by_itself_go_along(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 2)
    step = step_of(torch.optim.Adam(net.parameters(), lr=0.01), net)
    joint = dovetail.capture(step, (torch.randn(6, 4),))
    step(torch.randn(6, 4))
    loaded = dovetail.load(joint.export(tmp_path / "step", values="current"))
    assert loaded.open_inputs == ("L['x']",)
    for _ in range(3):
        x = torch.randn(6, 4)
        assert torch.equal(loaded(x), step(x))
    again = loaded.joint.export(tmp_path / "again", values=loaded.state)
    assert torch.equal(dovetail.load(again)(x), step(x))
    with pytest.raises(errors.OptionError, match="not 'weight'"):
        joint.export(tmp_path / "third", values="weight")  # type: ignore[arg-type]
    with pytest.raises(errors.ArtefactError, match="no function to read values from"):
        loaded.joint.export(tmp_path / "third", values="current")


@pytest.mark.parametrize("name", ["RAdam", "ASGD"])
def test_a_way_that_the_data_decide_is_refused(name: str) -> None:
    """RAdam has another formula from the sixth step on: a graph of one of the two would be wrong without a guard."""
    net = torch.nn.Linear(4, 2)
    step = step_of(getattr(torch.optim, name)(net.parameters(), lr=0.01), net)
    with pytest.raises(errors.CaptureError, match="depends on data"):
        dovetail.capture(step, (torch.randn(6, 4),))


def test_a_way_that_a_mask_decides_is_refused(tmp_path: Path) -> None:
    """torch asks whether a mask is causal; the graph holds for that answer alone."""
    layer = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 1)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
    joint = dovetail.capture(lambda x, mask: layer(x, mask=mask), (torch.randn(3, 2, 4), mask))
    with pytest.raises(errors.ArtefactError, match="the data of its inputs decide"):
        joint.export(tmp_path / "step")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net = Net()
    x = dovetail.mark_dynamic(torch.randn(6, 4), 0, minimum=2, maximum=64)
    path = dovetail.capture(net, (x,)).export(tmp_path_factory.mktemp("good") / "step", values=net.state_dict())
    dovetail.load(path)
    return path


def write(folder: Path, good: Path, edit: Any) -> Path:
    """A copy of the artefact with another graph and the checksum that fits it: what somebody malicious would write."""
    document = json.loads((good / "graph.json").read_text())
    edit(document["graph"])
    body = json.dumps(document["graph"], sort_keys=True)
    document["graph_sha256"] = hashlib.sha256(body.encode()).hexdigest()
    folder.mkdir(parents=True)
    (folder / "graph.json").write_text(json.dumps(document, sort_keys=True))
    (folder / "tensors.safetensors").write_bytes((good / "tensors.safetensors").read_bytes())
    return folder


def call(graph: dict[str, Any]) -> dict[str, Any]:
    return next(node for node in graph["nodes"] if node["op"] == "call_function" and node["args"])


def first_placeholder(graph: dict[str, Any]) -> dict[str, Any]:
    return graph["nodes"][0]


def gradient_place(graph: dict[str, Any]) -> int:
    count = graph["num_forward_outputs"]
    return next(place for place, name in enumerate(graph["results"]) if place >= count and name is not None)


def insert(graph: dict[str, Any], target: str, *args: Any) -> None:
    """A call in front of the others, which nothing reads."""
    place = graph["nodes"].index(call(graph))
    node = {"op": "call_function", "name": "c", "target": target, "args": list(args), "kwargs": [], "phase": "forward"}
    graph["nodes"].insert(place, node)


EDITS: dict[str, Any] = {
    "a text repeated": lambda g: insert(g, "operator.mul", "many", 1 << 39),
    "a list repeated": lambda g: insert(g, "operator.imul", [1], 1 << 39),
    "a large product": lambda g: insert(g, "operator.mul", 1 << 39, 1 << 39),
    "a large power": lambda g: insert(g, "dovetail.power", 10, 1 << 39),
    "a number too many": lambda g: insert(g, "operator.neg", 1, 2, 3),
    "a number of a text": lambda g: insert(g, "math.sqrt", "4"),
    "sizes made of data": lambda g: insert(g, "aten::nonzero.default", {"node": g["nodes"][0]["name"]}),
    "a file is read": lambda g: call(g).update(target="aten::from_file.default", args=["/etc/passwd", False, 10]),
    "an operator that writes": lambda g: call(g).update(target="aten::add_.Tensor"),
    "an operator of another namespace": lambda g: call(g).update(target="debugprims::load_tensor.default"),
    "a python function": lambda g: call(g).update(target="os.system"),
    "a dunder": lambda g: call(g).update(target="aten::__class__.default"),
    "code in an operator's name": lambda g: call(g).update(target="aten::mul.Tensor;import os"),
    "code in a keyword": lambda g: call(g).update(kwargs=[["x=__import__('os').system('true')", 1]]),
    "code in a node's name": lambda g: call(g).update(name="x\nimport os"),
    "a keyword for a name": lambda g: call(g).update(name="class"),
    "a path for a constant": lambda g: g["nodes"].insert(8, {"op": "get_attr", "name": "c", "target": "../../x"}),
    "a method for a constant": lambda g: g["nodes"].insert(8, {"op": "get_attr", "name": "c", "target": "forward"}),
    "an unknown kind of node": lambda g: call(g).update(op="call_method"),
    "an unknown field": lambda g: call(g).update(extra=1),
    "a missing field": lambda g: g.pop("spec"),
    "a later node": lambda g: call(g).update(args=[{"node": g["nodes"][-1]["name"]}]),
    "two nodes of one name": lambda g: g["nodes"].append(dict(g["nodes"][-1])),
    "another shape": lambda g: first_placeholder(g).update(shape=[7, 7]),
    "a huge shape": lambda g: first_placeholder(g).update(shape=[1 << 39, 1 << 39, 1 << 39]),
    "a negative shape": lambda g: first_placeholder(g).update(shape=[-1, 4]),
    "a symbol that is not there": lambda g: first_placeholder(g).update(shape=[{"symbol": 9}, 4]),
    "a power": lambda g: g["guards"].append({"call": "Pow", "args": [10, 1 << 39]}),
    "a function of sizes": lambda g: g["guards"].append({"call": "eval", "args": [1]}),
    "a guard that does not hold": lambda g: g["guards"].append({"call": "Equality", "args": [{"symbol": 0}, 5]}),
    "another dtype": lambda g: first_placeholder(g).update(dtype="torch.float16"),
    "no dtype": lambda g: first_placeholder(g).update(dtype="torch.os"),
    "another device": lambda g: first_placeholder(g).update(device="meta"),
    "a lost gradient": lambda g: g["results"].__setitem__(gradient_place(g), None),
    "a swapped gradient": lambda g: g["results"].__setitem__(gradient_place(g), g["results"][0]),
    "a forward output of the backward": lambda g: g["results"].__setitem__(0, g["nodes"][-1]["name"]),
    "fewer outputs": lambda g: g["results"].pop(),
    "fewer inputs": lambda g: g["inputs"].pop(),
    "an output that is not there": lambda g: g["spec"]["outputs"][0].update(index=99),
    "a write that is not there": lambda g: g["spec"]["mutations"].append(
        {"input_index": 99, "output_index": 0, "differentiable": False}
    ),
    "a result that is not there": lambda g: g.update(result={"tensor": 99}),
    "another order": lambda g: g.update(derivative_order=2),
    "more primals": lambda g: g.update(num_primals=99),
    "a value for no input": lambda g: g["state"].append(["other", "state.1"]),
    "a value twice": lambda g: g["state"].append(g["state"][0]),
    "true for a number": lambda g: g.update(num_primals=True),
    "deep nesting": lambda g: call(g).update(args=json.loads("[" * 900 + "]" * 900)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EDITS)
def test_a_malicious_graph_is_refused(name: str, good: Path, tmp_path: Path, capfd: Any) -> None:
    path = write(tmp_path / "bad", good, EDITS[name])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(errors.ArtefactError):
        dovetail.load(path)
    assert sorted(tmp_path.rglob("*")) == before and capfd.readouterr().out == ""


def test_only_plain_files_are_read(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "graph.json").symlink_to(good / "graph.json")
    (folder / "tensors.safetensors").symlink_to("/dev/zero")
    with pytest.raises(errors.ArtefactError, match="not a plain file"):
        dovetail.load(folder)
    with pytest.raises(errors.ArtefactError):
        dovetail.load(tmp_path / "nowhere")


def test_the_schema_is_what_is_written(good: Path) -> None:
    document = json.loads((good / "graph.json").read_text())
    assert document["version"] == 4
    validate(document["graph"])


def test_edits_that_break_a_descriptor_are_refused() -> None:
    joint = dovetail.capture(Net().eval(), (torch.randn(2, 4),))
    nodes = joint.graph.find_nodes(op="placeholder")
    nodes[0].meta["desc"], nodes[1].meta["desc"] = nodes[1].meta["desc"], nodes[0].meta["desc"]
    with pytest.raises(errors.GraphInvalidError):
        aot.export_joint(None, joint, "never-written")
    assert not Path("never-written").exists()


FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_fuzzed_bytes_are_refused(data: Any, good: Path, tmp_path: Path) -> None:
    """Bits flipped, bytes cut out, put in or doubled: refused, with one exception."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    names = ("graph.json", "tensors.safetensors")
    which = data.draw(st.sampled_from(names))
    for name in names:
        blob = bytearray((good / name).read_bytes())
        if name == which:
            original = bytes(blob)
            place = data.draw(st.integers(0, len(blob) - 1))
            kind = data.draw(st.sampled_from(["flip", "cut", "drop", "insert", "double"]))
            if kind == "flip":
                blob[place] ^= 1 << data.draw(st.integers(0, 7))
            elif kind == "cut":
                del blob[place:]
            elif kind == "drop":
                del blob[place : place + data.draw(st.integers(1, 40))]
            elif kind == "insert":
                blob[place:place] = data.draw(st.binary(min_size=1, max_size=20))
            else:
                blob[place:place] = blob[place : place + 30]
            unchanged = bytes(blob) == original
        (folder / name).write_bytes(bytes(blob))
    try:
        dovetail.load(folder)
    except errors.ArtefactError:
        return
    # White space between the tokens of JSON means nothing; everything else must have been noticed.
    document = json.loads((folder / "graph.json").read_text())
    assert unchanged or document == json.loads((good / "graph.json").read_text())


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for key, item in enumerate(value) for leaf in leaves(item, (*path, key))]
    return [path]


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.just(1 << 70),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.sampled_from(["aten::from_file.default", "aten::mm.default", "aten::as_strided.default", "nan", "0x1p9999"]),
    st.just({"node": "primals_1"}),
    st.just({"float": "nan"}),
    st.just({"symbol": 0}),
)


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_fuzzed_graphs_are_refused_or_load(data: Any, good: Path, tmp_path: Path) -> None:
    """Values in a graph replaced, with a checksum that fits: an ArtefactError, or a graph that lints."""

    def edit(graph: dict[str, Any]) -> None:
        places = leaves(graph)
        for _ in range(data.draw(st.integers(1, 3))):
            *path, last = data.draw(st.sampled_from(places))
            target: Any = graph
            try:
                for key in path:
                    target = target[key]
                target[last] = data.draw(JUNK)
            except (KeyError, IndexError, TypeError):
                return

    path = write(tmp_path / str(len(list(tmp_path.iterdir()))), good, edit)
    try:
        dovetail.load(path).joint.lint()
    except errors.ArtefactError as error:
        assert error.what


def test_a_file_of_format_4_from_another_version_of_dovetail() -> None:
    """``format_4`` was written on 2026-11-22: a model with a buffer, a dynamic batch, and a view of a parameter in its result."""
    loaded = dovetail.load(Path(__file__).parent / "format_4")
    assert loaded.open_inputs == ("L['x']",)
    linear = torch.nn.functional.linear
    values = {name: value.detach().clone() for name, value in loaded.state.items()}
    for rows in (4, 9):
        x = torch.linspace(-1, 1, 3 * rows).reshape(rows, 3)
        values["calls"] += x.sum(0)[:2]
        first = values["first.weight"].clone().requires_grad_()
        hidden = torch.tanh(linear(x, first, values["first.bias"]))
        out = linear(hidden, values["second.weight"], values["second.bias"])
        found = loaded(x)
        assert torch.equal(found["loss"], out.square().mean())
        assert torch.equal(found["parts"][0], out)
        assert torch.equal(found["parts"][1], first[:, 0])
        assert found["scale"] == 0.5
        assert torch.equal(loaded.state["calls"], values["calls"])
        (gradient,) = torch.autograd.grad(found["loss"], [loaded.state["first.weight"]])
        assert torch.equal(gradient, torch.autograd.grad(out.square().mean(), [first])[0])
    with pytest.raises(errors.InputError, match="at most 64"):
        loaded(torch.ones(65, 3))


@pytest.mark.slow
def test_an_operator_that_may_raise_travels_with_what_reads_it(tmp_path: Path) -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        torch.nn.functional.embedding(index, x)
        return (x * x.sum()).sum()

    x = torch.ones(3, 2, requires_grad=True)
    dovetail.capture(function, (x, torch.tensor([1]))).export(tmp_path / "graph")
    program = (
        "import sys, torch, dovetail\n"
        "run = dovetail.load(sys.argv[1])\n"
        "x = torch.ones(3, 2, requires_grad=True)\n"
        "assert run(x, torch.tensor([1])).item() == 36\n"
        "try:\n"
        "    run(x, torch.tensor([7]))\n"
        "except IndexError:\n"
        "    print('raised')\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "graph")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "raised\n"
