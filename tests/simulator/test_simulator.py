"""Predictions against sums done by hand, on graphs that are captured in a simulated world."""

from __future__ import annotations

import math
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dovetail
from dovetail.cli import main
from dovetail.distributed import data_parallel
from dovetail.errors import DistributedError, OptionError, StageError
from dovetail.reports.cost import memory_of_call
from dovetail.simulator import CLUSTERS, Cluster, Link, Training, plan, simulate, simulated_world
from dovetail.simulator.worlds import simulated_mesh

#: One second for each operation, each byte of an exchange and each message; memory traffic is free.
BY_HAND = Cluster("by hand", 1, Link(1.0, 0.0), Link(1.0, 1.0), flops=1.0, bytes=math.inf, memory=1e9)
INSIDE, WIDTH, ROWS = 8, 16, 4


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(INSIDE, WIDTH, bias=False), torch.nn.GELU(), torch.nn.Linear(WIDTH, INSIDE, bias=False)
    )


def build(tensor_parallel: Any = None) -> Training:
    model = network()
    batch = (torch.randn(ROWS, INSIDE), torch.randn(ROWS, INSIDE))

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(x), y)

    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch, tensor_parallel)


def a_step(wrap: Callable[..., Any]) -> Any:
    made = build()

    def step(*batch: torch.Tensor) -> torch.Tensor:
        made.optimizer.zero_grad()
        loss = made.loss(made.model, *batch)
        loss.backward()
        made.optimizer.step()
        return loss.detach()

    run = wrap(step, modules=[made.model])
    run(*made.batch)
    run(*made.batch)
    return run


FLOPS = 2 * ROWS * INSIDE * WIDTH
#: Two products forward; backward two for the second layer, one for the first, whose input needs no gradient.
STEP_FLOPS = 5 * FLOPS
PARAMETER_BYTES = 2 * INSIDE * WIDTH * 4


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_data_parallel_by_hand(ranks: int) -> None:
    with simulated_world(ranks):
        run = a_step(lambda step, **named: data_parallel(step, backend="aten", check=False, **named))
        found = simulate(run.compiled, BY_HAND)
    (exchange,) = found.exchanges
    assert (exchange.collective, exchange.bytes, exchange.ranks) == ("all_reduce", PARAMETER_BYTES, ranks)
    wanted = 2 * (math.ceil(math.log2(ranks)) + PARAMETER_BYTES * (ranks - 1) / ranks)
    assert found.compute == STEP_FLOPS
    assert exchange.end - exchange.begin == pytest.approx(wanted)
    # One bucket: nothing is left to compute beside it but the update, which costs nothing here.
    assert found.exposed == pytest.approx(wanted)
    assert found.seconds == pytest.approx(STEP_FLOPS + wanted)


def test_an_exchange_beside_the_computation_is_not_waited_for() -> None:
    with simulated_world(2):
        run = a_step(
            lambda step, **named: data_parallel(step, backend="aten", check=False, bucket_megabytes=1e-6, **named)
        )
        beside = simulate(run.compiled, BY_HAND)
        alone = simulate(run.compiled, Cluster(**{**vars(BY_HAND), "overlap": False}))
    assert len(beside.exchanges) == 2
    # The second layer's gradient is on its way while the first layer's is computed: two products.
    assert beside.exposed == pytest.approx(beside.exchanging - min(2 * FLOPS, beside.exchanging / 2))
    assert alone.exposed == pytest.approx(alone.exchanging)
    assert alone.seconds == pytest.approx(alone.compute + alone.exchanging)


def test_shards_take_less_memory() -> None:
    found = plan(build, 8, CLUSTERS["h100"])
    memory = {row.way: row.prediction.peak_memory for row in found.rows if row.prediction is not None}
    assert memory["sharded"] < memory["data parallel"]


@pytest.mark.slow
def test_tensor_parallel_divides_the_products() -> None:
    ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    cluster = Cluster(**{**vars(BY_HAND), "ranks_per_node": 4, "bytes": 1e30})
    rows = {row.way: row for row in plan(lambda: build(ways), 8, cluster).rows}
    assert list(rows) == [
        "data parallel",
        "sharded",
        "sharded 4 x data parallel 2",
        "tensor parallel 2 x data parallel 4",
        "tensor parallel 4 x data parallel 2",
        "tensor parallel 4 x sharded 2",
    ]
    assert all(row.prediction is not None for row in rows.values()), [row.problem for row in rows.values()]
    both = rows["tensor parallel 4 x data parallel 2"]
    assert both.prediction is not None, both.problem
    assert both.batches == 2
    assert both.prediction.compute == pytest.approx(STEP_FLOPS / 4)
    counts = sorted(item.ranks for item in both.prediction.exchanges)
    # The sum of the second layer among four; the gradients, and the check that both ranks have the same plan, among two.
    assert counts == [2, 2, 4]


@pytest.mark.slow
def test_the_optimizer_steps_what_a_way_has_made_of_the_model() -> None:
    """Each way has other parameters than those that the optimizer was made for, and all of them are updated."""
    made = []

    def remembered() -> Training:
        found = build({"0": ColwiseParallel(), "2": RowwiseParallel()})
        made.append(replace(found, optimizer=torch.optim.SGD(found.model.parameters(), lr=0.1, momentum=0.9)))
        return made[-1]

    rows = plan(remembered, 4, Cluster(**{**vars(BY_HAND), "ranks_per_node": 2})).rows
    used = [training for training in made if training.optimizer.state]
    assert len(used) == len(rows) == 5
    for training in used:
        stepped = {parameter for group in training.optimizer.param_groups for parameter in group["params"]}
        assert stepped == set(training.optimizer.state) == set(training.model.parameters())


def test_a_mesh_has_the_groups_of_its_own_rank() -> None:
    with simulated_world(16384):
        mesh = simulated_mesh(copies=2048, tensor=8)
        ranks = {name: torch.distributed.get_process_group_ranks(mesh.get_group(name)) for name in ("copies", "tensor")}
    assert ranks == {"copies": list(range(0, 16384, 8)), "tensor": list(range(8))}


@pytest.mark.slow
def test_the_best_is_the_fastest_that_fits() -> None:
    small = Cluster(**{**vars(CLUSTERS["h100"]), "memory": 1.0})
    assert "no way fits" in plan(build, 4, small).reason
    found = plan(build, 4, CLUSTERS["h100"])
    assert found.best.rate == max(row.rate for row in found.rows) > 0
    assert found.best.way in found.reason


def test_what_cannot_be_is_a_row() -> None:
    """Three heads are not for two ranks: the model's own error stands in the row, and the other ways are predicted."""
    ways = {"0": ColwiseParallel()}

    def whole(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model[2](model[0](x).reshape(ROWS, WIDTH)), y)  # type: ignore[index]

    def broken() -> Training:
        made = build(ways)
        return Training(made.model, made.optimizer, whole, made.batch, made.tensor_parallel)

    rows = {row.way: row for row in plan(broken, 2, CLUSTERS["h100"]).rows}
    assert rows["data parallel"].prediction is not None
    assert rows["tensor parallel 2"].prediction is None
    assert rows["tensor parallel 2"].problem


@pytest.mark.parametrize(
    ("collective", "arguments", "kept"), [("all_gather_into_tensor", (2, "0"), 1), ("all_reduce", ("sum", "0"), 0)]
)
def test_what_an_exchange_reads_is_kept_until_it_is_awaited(collective: str, arguments: Any, kept: int) -> None:
    """But for a sum, which is made in a copy."""
    operators = torch.ops._c10d_functional

    def function(x: torch.Tensor) -> torch.Tensor:
        begun = getattr(operators, collective)(x * 2, *arguments)
        between = (x + 1).sum()
        return operators.wait_tensor(begun).sum() + between  # type: ignore[no-any-return]

    with simulated_world(2):
        compiled: Any = dovetail.compile(function, backend="aten", fullgraph=True)
        compiled(torch.ones(1000))
        memory = memory_of_call(compiled.entries[0].compiled)
    place = [getattr(node.target, "_opname", "") for node in memory.nodes].index("wait_tensor")
    assert memory.alive[place] == memory.inputs + (4000 + 8000 if kept else 4000) + 4


def test_the_world_ends() -> None:
    with simulated_world(3):
        assert torch.distributed.get_world_size() == 3
        with pytest.raises(DistributedError, match="already"), simulated_world(2):
            pytest.fail("two worlds")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "4"])
def test_wrong_numbers_of_ranks(ranks: Any) -> None:
    with pytest.raises(OptionError, match="number of ranks"), simulated_world(ranks):
        pytest.fail("no such world")


def test_nothing_compiled() -> None:
    with pytest.raises(StageError, match="nothing has been compiled"):
        simulate(dovetail.compile(network(), backend="aten"), CLUSTERS["h100"])


SCRIPT = """
import torch
from dovetail.simulator import Training

def build():
    model = torch.nn.Linear(4, 4)
    loss = lambda model, x: model(x).square().mean()
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, (torch.randn(2, 4),))
"""


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, picture = tmp_path / "train.py", tmp_path / "plan.svg"
    script.write_text(SCRIPT)
    assert main(["plan", "--ranks", "2,16", "--cluster", "a100", "--picture", str(picture), str(script)]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks of a100" in printed
    assert "16 ranks of a100" in printed
    assert "of linear" in printed
    assert "data sheet" in printed
    drawn = ElementTree.parse(picture).getroot()
    titles = [text for text in drawn.itertext() if "ranks of a100" in text]
    assert drawn.tag.endswith("svg") and len(titles) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["missing.py", "--ranks", "2"], "there is no file missing.py"),
        (["{script}", "--ranks", "2", "--picture", "{empty}/plan.svg"], "there is no folder"),
        (["{script}", "--ranks", "2", "--cluster", "abacus"], "unknown cluster 'abacus'; known are a100"),
        (["{empty}", "--ranks", "2"], "has no function build()"),
    ],
)
def test_wrong_commands(arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "empty.py").write_text("")
    names = {"script": tmp_path / "script.py", "empty": tmp_path / "empty.py"}
    assert main(["plan", *(item.format(**names) for item in arguments)]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ("0", "8,", "x", "-2"))
def test_numbers_of_ranks_that_the_command_refuses(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["plan", f"--ranks={ranks}", "train.py"])
    assert refusal.value.code == 2
    assert "takes numbers above 0, such as 64 or 8,64,1024" in capsys.readouterr().err


def test_a_script_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch's process groups, of other tests in this process, put the rank in front of each line for good.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    script = tmp_path / "train.py"
    script.write_text("import sys\ndef build():\n    raise ValueError(f'no data in {sys.argv}')\n")
    assert main(["plan", "--ranks", "2", str(script)]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[1].startswith(f'  File "{script}", line 3') and f"no data in ['{script}']" in said


def test_errors_after_a_simulated_world_have_no_rank() -> None:
    before = sys.excepthook
    with simulated_world(2):
        pass
    assert sys.excepthook is before
