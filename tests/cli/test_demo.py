"""The demo as a user runs it, and its parts."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.cli import COMMANDS, demo, main
from dovetail.cli.gpt import GPT, GPTConfig, make_optimizer
from dovetail.cli.settings import Settings
from dovetail.cli.text import read_text
from dovetail.cli.worker import Training, digest, learning_rate_at, serve

TINY = Settings(
    engine="eager",
    layers=1,
    heads=2,
    width=16,
    block=8,
    batch=2,
    steps=4,
    characters=5_000,
    learning_rate=1e-3,
    seed=1,
    threads=1,
)
TINY_FLAGS = ["--layers=1", "--heads=2", "--width=16", "--block=8", "--batch=2", "--characters=5000", "--threads=1"]


def finished_run(engine: str, losses: list[float], weights: str = "a") -> demo.Run:
    summary = {
        "time_to_first_step": 1.0,
        "time_to_full_speed": 1.5,
        "steps_per_second": 2.0,
        "peak_memory_bytes": 2**20,
        "capture_seconds": None,
        "graph_breaks": None,
        "final_loss": losses[-1],
        "weights_sha256": weights,
        "trace": [],
    }
    return demo.Run(engine, losses, [0.5] * len(losses), summary)


@pytest.mark.slow
def test_eager_and_aten_agree_to_the_last_bit_and_everything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY_FLAGS, "--steps=6", "--turn=2", "--engines=eager,dovetail-aten", f"--output={tmp_path}"]
    status = main(["demo", *flags])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "dovetail-aten: all 6 losses and the final weights are bitwise equal to eager's" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    eager, aten = results["runs"]
    assert eager["losses"] == aten["losses"]
    assert len(eager["losses"]) == len(aten["seconds"]) == 6
    assert eager["losses"][-1] < eager["losses"][0]
    assert aten["summary"]["graph_breaks"] == 0
    assert aten["summary"]["capture_seconds"] > 0
    names = {row["name"] for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"process_name", "step", "capture", "partition"} <= names
    page = (tmp_path / "curves.html").read_text()
    assert page.count("<svg") == 3
    assert "<script" not in page and "<link" not in page and "src=" not in page


@pytest.mark.slow
def test_a_failing_engine_is_named_and_the_others_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(TINY, engine="no such engine")
    runs = demo.train_all([TINY, broken], turn=2, logs=tmp_path)
    assert runs[0].failure == "" and len(runs[0].losses) == 4
    assert "there is no engine 'no such engine'" in runs[1].failure
    remarks, agreed = demo.compare(runs)
    assert not agreed and remarks[0].startswith("no such engine failed: ")
    assert "failed" in str(demo.make_table(runs))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--width=100"], "not a multiple of --heads"),
        (["--characters=10", "--block=64"], "--characters must be more than --block"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *flags, f"--output={tmp_path / 'out'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=0"], "'0' is not a whole number of at least 1"),
        (["--batch=x"], "'x' is not a whole number of at least 1"),
        (["--engines=eager,foo"], "there is no engine 'foo'"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["demo", *flags])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_small_changes_defaults_but_not_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Settings] = []

    def train_nothing(settings: list[Settings], **_: Any) -> list[demo.Run]:
        seen.extend(settings)
        return [finished_run(each.engine, [1.0]) for each in settings]

    monkeypatch.setattr(demo, "train_all", train_nothing)
    main(["demo", f"--output={tmp_path}"])
    main(["demo", "--small", "--steps=7", "--engines=eager", f"--output={tmp_path}"])
    assert [each.engine for each in seen[:4]] == ["eager", "torch.compile", "dovetail-aten", "dovetail-inductor"]
    assert (seen[0].layers, seen[0].width, seen[0].heads, seen[0].block, seen[0].batch) == (6, 384, 6, 128, 8)
    assert seen[4].layers == demo.SMALL["layers"] and seen[4].steps == 7


def test_the_comparison_judges_aten_by_bits_and_inductor_by_its_first_fifty_steps() -> None:
    losses = [2.0] * 60
    late = [2.0] * 55 + [3.0] * 5
    eager = finished_run("eager", losses)
    assert demo.compare([eager, finished_run("dovetail-aten", losses)])[1]
    assert not demo.compare([eager, finished_run("dovetail-aten", [2.0 + 1e-15, *losses[1:]])])[1]
    assert not demo.compare([eager, finished_run("dovetail-aten", losses, weights="b")])[1]
    assert demo.compare([eager, finished_run("dovetail-inductor", late)])[1]
    assert not demo.compare([eager, finished_run("dovetail-inductor", [2.001, *losses[1:]])])[1]
    assert not demo.compare([eager, finished_run("dovetail-inductor", [math.nan] * 60)])[1]
    # torch.compile is shown, not judged.
    assert demo.compare([eager, finished_run("torch.compile", [2.1] * 60)])[1]


def test_a_run_that_blew_up_is_still_written(tmp_path: Path) -> None:
    runs = [finished_run("eager", [2.0, math.inf]), finished_run("dovetail-aten", [2.0, math.nan])]
    table, (remarks, agreed) = demo.make_table(runs), demo.compare(runs)
    assert not agreed
    demo.write_results(tmp_path, [TINY], runs, table, remarks)
    text = (tmp_path / "results.json").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_the_text_is_the_same_every_time_and_its_targets_are_the_next_characters() -> None:
    first, second = read_text(3_000), read_text(3_000)
    assert torch.equal(first.tokens, second.tokens)
    assert len(first) == 3_000
    assert sorted(set(first.vocabulary)) == list(first.vocabulary)
    tokens, targets = first.batch(step=3, batch=4, block=16, seed=9)
    again, _ = second.batch(step=3, batch=4, block=16, seed=9)
    other, _ = second.batch(step=4, batch=4, block=16, seed=9)
    assert torch.equal(tokens, again) and not torch.equal(tokens, other)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert any(torch.equal(tokens[0], part) for part in first.tokens.unfold(0, 16, 1))


def test_a_text_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="a block of 16 needs more"):
        read_text(10).batch(step=0, batch=1, block=16, seed=1)
    with pytest.raises(ValueError, match="at least one character"):
        read_text(0)


def test_the_model_is_causal_and_its_embedding_tied() -> None:
    model = GPT(GPTConfig(vocabulary=11, block=8, layers=2, heads=2, width=16))
    assert model.head.weight is model.tokens.weight
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
    with pytest.raises(ValueError, match="more than the model's block"):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="multiple of the number of heads"):
        GPTConfig(vocabulary=11, heads=5, width=16)


def test_only_matrices_decay() -> None:
    decaying, other = make_optimizer(GPT(GPTConfig(vocabulary=11, layers=1, heads=2, width=16)), 1e-3).param_groups
    assert decaying["weight_decay"] > 0 and all(weight.dim() >= 2 for weight in decaying["params"])
    assert other["weight_decay"] == 0 and all(weight.dim() < 2 for weight in other["params"])


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = replace(TINY, steps=100)
    rates = [learning_rate_at(step, settings) for step in range(100)]
    assert rates[0] < rates[4] == max(rates) == settings.learning_rate
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1 * settings.learning_rate, rel=0.01)


def test_training_is_the_same_in_any_turns() -> None:
    whole, parts = Training(TINY), Training(TINY)
    whole.train(4)
    parts.train(1)
    parts.train(3)
    assert whole.losses == parts.losses
    assert digest(whole.model) == digest(parts.model)
    assert digest(whole.model) != digest(Training(TINY).model)


def test_the_demo_needs_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: torch.Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", missing)
    training = Training(TINY)
    assert len(training.train(1)["losses"]) == 1
    assert training.summary()["weights_sha256"] == digest(training.model)


def test_a_worker_answers_each_question() -> None:
    questions, answers = [TINY, 1, 3, 0], []
    serve(SimpleNamespace(recv=lambda: questions.pop(0), send=answers.append))
    ready, first, rest, summary = answers
    assert ready is None
    assert len(first["losses"]) == 1 and len(rest["losses"]) == 3
    assert summary["final_loss"] == rest["losses"][-1]
    assert 0 < summary["time_to_first_step"] < summary["time_to_full_speed"] < 50
    assert summary["peak_memory_bytes"] > 2**20
    assert [row["name"] for row in summary["trace"] if row["ph"] == "X"] == ["step"] * 4
    assert summary["trace"][0]["args"] == {"name": "training (MainThread)"}


def test_without_a_terminal_progress_is_a_few_lines() -> None:
    stream = io.StringIO()
    run = demo.Run("eager")
    with demo.Progress(100, stream) as progress:
        for _ in range(100):
            run.losses.append(1.0)
            progress.show([run], "")
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 12
    assert "100%" in lines[-1] and "eager 1.0000" in lines[-1]


@pytest.mark.parametrize(("term", "columns"), [("xterm", 0), ("xterm", 40), ("dumb", 80)])
def test_a_terminal_that_cannot_write_a_line_anew_gets_lines(
    term: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return 2

    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    stream = Terminal()
    with demo.Progress(4, stream) as progress:
        progress.show([demo.Run("eager")], "x" * 100)
    lines = stream.getvalue().splitlines()
    if term == "dumb":
        assert lines == [line for line in lines if line.startswith("[") and line.endswith("x" * 100)]
    else:
        assert stream.getvalue().startswith("\r\x1b[K") and len(lines[-1]) == len("\x1b[K") + (columns or 80) - 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert f"torch {importlib.metadata.version('torch')}" in capsys.readouterr().out


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert all(name in shown.out for name in COMMANDS) and not shown.err


def test_an_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--output", str(tmp_path / "file")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("dovetail demo: ") and "File exists" in told and "Traceback" not in told


def test_a_report_of_nothing_asks_for_a_script_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["report"])
    assert refusal.value.code == 2
    assert capsys.readouterr().err.endswith("required: script\n")


@pytest.mark.slow
def test_without_numpy_commands_say_nothing_of_it(tmp_path: Path) -> None:
    import subprocess

    script = tmp_path / "train.py"
    script.write_text("import warnings\nwarnings.warn('Failed to initialize NumPy: No module named my_own')\n")
    program = "import sys; sys.modules['numpy'] = None; from dovetail.cli import main; main(sys.argv[1:])"
    start = [sys.executable, "-c", program, "report", "-o", str(tmp_path / "page.html"), str(script)]
    done = subprocess.run(start, capture_output=True, text=True, check=True)
    # What the script itself warns of is not Dovetail's to hide.
    said = [line for line in done.stderr.splitlines() if "Failed to initialize NumPy" in line]
    assert said and all("my_own" in line for line in said)


def test_the_module_runs_as_a_program() -> None:
    import subprocess

    done = subprocess.run([sys.executable, "-m", "dovetail.cli", "version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("dovetail ")


def test_engine_lists_drop_repetitions() -> None:
    assert demo._engines("eager, eager,dovetail-aten") == ("eager", "dovetail-aten")
    with pytest.raises(argparse.ArgumentTypeError):
        demo._engines("")
