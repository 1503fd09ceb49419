"""Runs a function in several processes that form one gloo process group, and collects what each of them returns or raises."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

# Processes are forked from one that has torch loaded and has run nothing yet: 20 ms each instead of 3 s.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.distributed.preloaded"])


def run(scenario: Callable[..., Any], size: int, *args: Any, seconds: float = 180.0) -> list[Any]:
    """``scenario(rank, *args)`` on ``size`` ranks; a list of what they return. Raises AssertionError if one raises."""
    outcomes = outcomes_of(scenario, size, *args, seconds=seconds)
    for rank, (kind, value) in enumerate(outcomes):
        assert kind == "returned", f"rank {rank} {kind}:\n{value}"
    return [value for _, value in outcomes]


def outcomes_of(scenario: Callable[..., Any], size: int, *args: Any, seconds: float = 180.0) -> list[tuple[str, Any]]:
    """The same, with "returned", "raised" or "died" before each value."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [_context.Process(target=_child, args=(scenario, rank, size, folder, args)) for rank in range(size)]
        for process in processes:
            process.start()
        found: list[tuple[str, Any]] = []
        for rank, process in enumerate(processes):
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
            path = Path(folder) / f"outcome{rank}"
            found.append(torch.load(path, weights_only=False) if path.exists() else ("died", process.exitcode))
        return found


def init(rank: int, size: int, folder: str, name: str = "store", seconds: float = 60.0) -> None:
    """Join the process group."""
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(Path(folder) / name), size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )


#: Where the ranks of this process's world meet: rank, size, folder.
here: tuple[int, int, str] = (0, 1, "")


def _child(scenario: Callable[..., Any], rank: int, size: int, folder: str, args: tuple[Any, ...]) -> None:
    global here
    here = rank, size, folder
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    init(rank, size, folder)
    try:
        outcome = ("returned", scenario(rank, *args))
    except BaseException:  # noqa: BLE001  (all of it is for the parent to judge)
        outcome = ("raised", traceback.format_exc())
    torch.save(outcome, Path(folder) / f"outcome{rank}.new")
    (Path(folder) / f"outcome{rank}.new").rename(Path(folder) / f"outcome{rank}")
    if torch.distributed.is_initialized() and outcome[0] == "returned":
        torch.distributed.destroy_process_group()
