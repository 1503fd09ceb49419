"""Ranks that hang, are slow, have other versions or other graphs, or die: words on every rank in time, and nothing is lost."""

from __future__ import annotations

import datetime
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.distributed import data_parallel, plan, shard
from dovetail.errors import CollectiveError, RanksDifferError
from tests.distributed.models import OPTIMIZERS, batches, build, make_step, weights
from tests.distributed.world import outcomes_of, run

#: Seconds after which an exchange has failed.
PATIENCE = 3.0


def lose_patience() -> None:
    """From here on exchanges fail early: what comes before may take as long as compiling does."""
    torch.distributed.barrier()
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=PATIENCE))


def prepared(way: str) -> tuple[Any, Callable[..., Any]]:
    """A model and its compiled step, with parameters on all ranks or in shards."""
    model: Any = build("deep")
    if way == "sharded":
        model = shard(model)
    step = make_step(model, OPTIMIZERS["adamw"](model.parameters()))
    if way == "sharded":
        return model, dovetail.compile(step, backend="aten", fullgraph=True)
    return model, data_parallel(step, backend="aten")


def hangs(rank: int, way: str) -> Any:
    model, step = prepared(way)
    (first, second, _) = batches(3, rank, 2)
    step(*first)
    lose_patience()
    before = [value.detach().clone() for value in model.parameters()]
    if rank == 1:
        time.sleep(2 * PATIENCE)
    started = time.monotonic()
    with pytest.raises(CollectiveError) as error:
        step(*second)
    took = time.monotonic() - started
    unchanged = all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    return took, unchanged, str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_a_rank_that_hangs(way: str) -> None:
    for took, unchanged, text in run(hangs, 2, way, seconds=120.0):
        assert took < 10 * PATIENCE and unchanged
        assert "an exchange with the other ranks has failed" in text


def is_slow(rank: int) -> Any:
    model, step = prepared("replicated")
    for number, (x, y) in enumerate(batches(3, rank, 2)):
        if rank == number % 2:
            time.sleep(0.5)
        step(x, y)
    return weights(model)


def in_time(rank: int) -> Any:
    model, step = prepared("replicated")
    for x, y in batches(3, rank, 2):
        step(x, y)
    return weights(model)


def slow_and_in_time(rank: int) -> tuple[Any, Any]:
    return is_slow(rank), in_time(rank)


@pytest.mark.slow
def test_a_rank_that_is_slow_changes_nothing() -> None:
    for late, wanted in run(slow_and_in_time, 2):
        assert all(torch.equal(late[name], value) for name, value in wanted.items())


def other_versions(rank: int) -> list[str]:
    """What is said before anything is sent, and in a step whose graphs were made by different versions."""
    texts = []
    real = plan.made_by
    for way in ("replicated", "sharded"):
        model, step = prepared(way)
        before = [value.detach().clone() for value in model.parameters()]
        if rank == 1:
            plan.made_by = lambda: "torch 2.99 and Dovetail 9.0"
        for x, y in batches(2, rank, 2):
            with pytest.raises(RanksDifferError) as error:
                step(x, y)
            texts.append(str(error.value))
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        plan.made_by = real
    return texts


@pytest.mark.slow
def test_other_versions_are_refused_by_name() -> None:
    for rank, texts in enumerate(run(other_versions, 2)):
        assert len(texts) == 4
        assert all(f"rank {rank} has torch" in text and "torch 2.99 and Dovetail 9.0" in text for text in texts)


# --- from a checkpoint ------------------------------------------------------------------------------------------------


def train_with_checkpoints(rank: int, path: Path, end: int, dies_at: int | None = None, way: str = "replicated") -> Any:
    """Go on from the checkpoint if there is one; one is written after every second step, by the first rank, beside the last one."""
    from dovetail.distributed import load_whole_optimizer_state, whole_optimizer_state

    ranks = torch.distributed.get_world_size()
    model: Any = build("deep")
    if way == "sharded":
        model = shard(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    start = 0
    if path.exists():
        start, parameters, state = torch.load(path)
        model.load_state_dict(parameters)
        load_whole_optimizer_state(model, optimizer, state) if way == "sharded" else optimizer.load_state_dict(state)
    step = make_step(model, optimizer)
    compiled = (
        dovetail.compile(step, backend="aten", fullgraph=True)
        if way == "sharded"
        else data_parallel(step, backend="aten")
    )
    for number, (x, y) in enumerate(batches(end, rank, ranks)):
        if number < start:
            continue
        if number == dies_at and rank == ranks - 1:
            os._exit(3)
        compiled(x, y)
        if number % 2:
            state = whole_optimizer_state(model, optimizer) if way == "sharded" else optimizer.state_dict()
            found = number + 1, model.state_dict(), state
            if rank == 0:
                torch.save(found, path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
    return model.state_dict()


def numbers(state: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in state.values()]


def goes_on(rank: int, folder: str, name: str, dies_at: int | None, way: str) -> Any:
    return numbers(train_with_checkpoints(rank, Path(folder) / name, 6, dies_at, way))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_what_starts_again_goes_on_bit_for_bit(tmp_path: Path, way: str) -> None:
    outcomes = outcomes_of(goes_on, 2, str(tmp_path), "broken", 3, way)
    assert outcomes[0][0] == "raised" and "CollectiveError" in outcomes[0][1] and outcomes[1] == ("died", 3)
    again = run(goes_on, 2, str(tmp_path), "broken", None, way)
    wanted = run(goes_on, 2, str(tmp_path), "whole", None, way)
    for found, values in zip(again, wanted, strict=True):
        assert all(map(torch.equal, found, values))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_fewer_ranks_come_back(tmp_path: Path, way: str) -> None:
    """Of four ranks two are left, which share the batches between them: what comes out differs by rounding."""
    outcomes_of(goes_on, 4, str(tmp_path), "broken", 3, way)
    again = run(goes_on, 2, str(tmp_path), "broken", None, way)
    for values in zip(*run(goes_on, 1, str(tmp_path), "whole", None, way), *again, strict=True):
        for value in values[1:]:
            torch.testing.assert_close(value, values[0], rtol=1e-4, atol=1e-5)


def until(rank: int, folder: str, name: str, end: int, way: str) -> None:
    train_with_checkpoints(rank, Path(folder) / name, end, None, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_three_of_four_ranks_come_back(tmp_path: Path, way: str) -> None:
    """They go on bit for bit as three ranks do that were given the checkpoint of four that nothing has happened to."""
    outcomes = outcomes_of(goes_on, 4, str(tmp_path), "broken", 3, way)
    assert [kind for kind, _ in outcomes] == ["raised"] * 3 + ["died"]
    again = run(goes_on, 3, str(tmp_path), "broken", None, way)
    run(until, 4, str(tmp_path), "whole", 2, way)
    wanted = run(goes_on, 3, str(tmp_path), "whole", None, way)
    for found, values in zip(again, wanted, strict=True):
        assert all(map(torch.equal, found, values))


SCRIPT = """
import os, sys
import torch
from pathlib import Path
from tests.distributed.test_faults import numbers, train_with_checkpoints
torch.distributed.init_process_group("gloo")
rank, dies_at = torch.distributed.get_rank(), int(sys.argv[2])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
found = train_with_checkpoints(rank, Path(sys.argv[1] + ".pt"), 6, dies_at if first else None)
if rank == 0:
    torch.save(numbers(found), sys.argv[1] + ".end")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_starts_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    root = str(Path(dovetail.__file__).parents[1])
    torchrun = functools.partial(
        subprocess.run,
        # Without the last the processes of a later round find the addresses of those of the round before, and may wait for them.
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        check=True,
        timeout=280,
        cwd=tmp_path,
    )
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "train.py",
    ]
    torchrun([*start, "broken", "3"])
    torchrun([*start, "whole", "-1"])
    found, wanted = (torch.load(tmp_path / name) for name in ("broken.end", "whole.end"))
    assert all(map(torch.equal, found, wanted))


LOSES_ITS_AGENT = """
import os, signal
def lose_the_machine(code):
    Path("lost").touch()
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
os._exit = lose_the_machine
sys.argv[1:] = ["broken", "-1" if Path("lost").exists() else "3"]
"""


@pytest.mark.slow
def test_torchrun_goes_on_without_a_machine(tmp_path: Path) -> None:
    """One agent of four is killed with its process; the others form a world of three and go on from the checkpoint."""
    lines = SCRIPT.replace("torch.distributed.init", LOSES_ITS_AGENT + "torch.distributed.init", 1)
    (tmp_path / "train.py").write_text(lines.replace("dies_at if first else None", "dies_at if dies_at > 0 else None"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(dovetail.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        # Without it the processes of a later round find the addresses of those of the round before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3:4", "--nproc-per-node=1", "--max-restarts=3"]
    start += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    agents = []
    for place in range(4):
        settings = f"--rdzv-conf=is_host={int(place == 0)},last_call_timeout=5,join_timeout=120"
        command = [*start, settings, "train.py"]
        agents.append(subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL))
    try:
        codes = [agent.wait(timeout=240) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert sorted(codes) == [-9, 0, 0, 0]
    run(until, 4, str(tmp_path), "whole", 2, "replicated")
    wanted = run(goes_on, 3, str(tmp_path), "whole", None, "replicated")
    assert all(map(torch.equal, torch.load(tmp_path / "broken.end"), wanted[0]))
