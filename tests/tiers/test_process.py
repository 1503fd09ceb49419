"""The background process: it does jobs, and is gone with its parent, whatever happens to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.tiers import process
from dovetail.tiers.process import Answer, Job, Worker
from tests import layout
from tests.tiers import jobs
from tests.tiers.jobs import job


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(f"{jobs.HERE}:nothing")
    yield made
    made.stop()
    assert not made.folder.exists()


def answer_of(item: Job, seconds: float = 20.0) -> Answer:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = item.answer()
        if answer is not None:
            return answer
        time.sleep(0.01)
    raise AssertionError("no answer")


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is left behind"
        time.sleep(0.02)


def test_does_jobs_in_order_and_says_how_far_it_is(worker: Worker, tmp_path: Path) -> None:
    first = worker.submit(job("write", path=str(tmp_path / "one")))
    second = worker.submit(job("fail"))
    third = worker.submit(job("refuse"))
    assert answer_of(first).status == "compiled"
    assert first.stage == "half-way"
    assert (tmp_path / "one").read_text() == str(min(19, os.nice(0) + process.NICENESS))
    assert answer_of(second) == Answer("failed", "RuntimeError: no such instruction")
    assert answer_of(third) == Answer("unfit", "UnportableError: other switches")


def test_it_is_a_group_of_its_own_in_the_session_of_the_program(worker: Worker) -> None:
    """The group can be ended as a whole; a session would make the niceness one among strangers (autogroup)."""
    worker.start()
    assert worker.pid is not None
    assert os.getsid(worker.pid) == os.getsid(0)
    assert os.getpgid(worker.pid) == worker.pid


def test_a_program_that_takes_all_cores_takes_turns_with_it(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    computed = [10.0]
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(process.time, "sleep", slept.append)
    monkeypatch.setattr(process.time, "process_time", lambda: computed[0])
    monkeypatch.setattr(process.torch, "get_num_threads", lambda: cores)
    worker._rested_at = 10.0
    worker.let_it_work()
    assert slept == []
    computed[0] += cores * 0.1
    worker.let_it_work()
    worker.let_it_work()
    assert slept == [pytest.approx(process.REST * 0.1)]
    computed[0] += cores * 100.0
    worker.let_it_work()
    assert slept[1:] == [process._LONGEST_REST]
    computed[0] += cores * 100.0
    monkeypatch.setattr(process.torch, "get_num_threads", lambda: cores - 1)
    worker.let_it_work()
    assert len(slept) == 2, "a core is free for it"


def test_a_crash_fails_its_job_and_no_other(worker: Worker, tmp_path: Path) -> None:
    first, second = worker.submit(job("die")), worker.submit(job("write", path=str(tmp_path / "two")))
    answer = answer_of(first)
    assert answer.status == "failed"
    assert "status 3" in answer.reason
    # The process ended for a reason of its own: nobody starts it for ever.
    assert answer_of(second).status in ("compiled", "failed")


def test_a_killed_process_is_started_again_for_the_others(worker: Worker, tmp_path: Path) -> None:
    first = worker.submit(job("hang", path=str(tmp_path / "child")))
    second = worker.submit(job("write", path=str(tmp_path / "two")))
    child = int(wait_for(tmp_path / "child"))
    worker.kill()
    assert answer_of(first).status == "failed"
    assert answer_of(second).status == "compiled"
    wait_until_gone(child)


@pytest.mark.slow
def test_a_job_that_hangs_is_stopped(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS", 1.0)
    item = worker.submit(job("hang", path=str(tmp_path / "child")))
    answer = answer_of(item)
    assert (answer.status, answer.reason) == ("failed", "it took longer than 1 seconds and was stopped")
    wait_until_gone(int(wait_for(tmp_path / "child")))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": 3, "seconds": "x"}', "\x00\xff"])
def test_a_damaged_answer_is_a_failure(worker: Worker, text: str, tmp_path: Path) -> None:
    item = worker.submit(job("write", path=str(tmp_path / "one")))
    assert answer_of(item).status == "compiled"
    (worker.folder / "1.done").write_text(text)
    time.sleep(0.06)
    assert answer_of(item).status == "failed"


def test_a_cancelled_job_ends_its_process(worker: Worker, tmp_path: Path) -> None:
    item = worker.submit(job("hang", path=str(tmp_path / "child")))
    child, pid = int(wait_for(tmp_path / "child")), worker.pid
    assert pid is not None
    item.cancel()
    wait_until_gone(child)
    wait_until_gone(pid)


def test_a_cancelled_job_that_has_not_begun_is_never_done(worker: Worker, tmp_path: Path) -> None:
    running = worker.submit(job("hang", path=str(tmp_path / "child")))
    wait_for(tmp_path / "child")
    waiting = worker.submit(job("write", path=str(tmp_path / "two")))
    waiting.cancel()
    assert worker.exit_status() is None
    worker.kill()
    assert answer_of(running).status == "failed"
    assert not (tmp_path / "two").exists()


def test_no_space_left(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        worker.submit(job("fail"))


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "raise SystemExit"])
@pytest.mark.sampled(3)
def test_gone_with_its_parent(end: str) -> None:
    program = (
        "import os, sys\n"
        "from dovetail.tiers.process import Worker\n"
        "from tests.tiers.jobs import job\n"
        "worker = Worker('tests.tiers.jobs:nothing')\n"
        "item = worker.submit(job('hang', path=str(worker.folder / 'child')))\n"
        "while not (worker.folder / 'child').exists() or not (worker.folder / 'child').read_text(): pass\n"
        "print(worker.pid, (worker.folder / 'child').read_text(), worker.folder, flush=True)\n"
        f"{end}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(layout.ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    pid, child, folder = done.stdout.split()
    wait_until_gone(int(pid))
    wait_until_gone(int(child))
    assert not Path(folder).exists()


def test_a_fork_leaves_the_process_to_its_parent(worker: Worker, tmp_path: Path) -> None:
    item = worker.submit(job("hang", path=str(tmp_path / "child")))
    child = int(wait_for(tmp_path / "child"))
    pid = os.fork()
    if pid == 0:
        answer = item.answer()
        item.cancel()
        worker.kill()
        worker.stop()
        os._exit(0 if answer is not None and answer.status == "left" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_running(child)
    assert worker.exit_status() is None


def test_a_process_that_ends_again_and_again_is_given_up(worker: Worker) -> None:
    for _ in range(process.MOST_STARTS):
        worker.start()
        worker.reap()
    with pytest.raises(OSError, match="too often"):
        worker.start()


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("executable", None), ("frozen", True)])
def test_a_program_that_no_interpreter_runs(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(OSError, match="interpreter"):
        worker.start()


@pytest.mark.parametrize(("text", "number"), [("12", 12.0), ("", 7), ("soon", 7), ("1e2", 100.0)])
def test_numbers_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, number: float) -> None:
    monkeypatch.setenv("DOVETAIL_TIERS_SECONDS", text)
    assert process.number_of("DOVETAIL_TIERS_SECONDS", 7) == number


def test_stopped_from_outside_at_any_time(worker: Worker, tmp_path: Path) -> None:
    item = worker.submit(job("hang", path=str(tmp_path / "child")))
    wait_for(tmp_path / "child")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGTERM)
    answer = answer_of(item)
    assert answer.status == "failed"
    assert "status -15" in answer.reason


@pytest.mark.parametrize("files", [["dovetail/__init__.py"], ["dovetail.py"], ["json.py", "torch/__init__.py"]])
def test_what_lies_in_the_current_directory_is_not_imported(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('this is another one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    worker = Worker(f"{jobs.HERE}:nothing")
    try:
        assert answer_of(worker.submit(job("write", path=str(tmp_path / "one"))), 60).status == "compiled"
    finally:
        worker.stop()
