"""``dovetail.compile`` as people call it: torch.compile's options, messages for wrong ones, types."""

from __future__ import annotations

import collections
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import BackendError, InputError, OptionError, UnknownBackendError
from dovetail.surface.compile import CompileOptions
from dovetail.surface.modes import MODES, without_modes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"full_graph": True}, "did you mean 'fullgraph'"),
        ({"modee": "default"}, "did you mean 'mode'"),
        ({"nonsense": 1}, "the options are: backend, fullgraph, dynamic, mode"),
        ({"mode": "max_autotune"}, "no mode 'max_autotune'(.|\n)*did you mean 'max-autotune'"),
        ({"mode": "fast"}, "the modes are: default, reduce-overhead"),
        ({"mode": "max-autotune", "options": {"max_autotune": True}}, "mode and options are given together"),
        ({"mode": "reduce-overhead", "backend": "aten"}, "mode='reduce-overhead' is for generated kernels"),
        ({"options": 3}, "options must be a mapping"),
        ({"disable": "no"}, "disable must be True or False"),
        ({"backend": "inductor", "options": {"max_autotun": True}}, "did you mean .*max_autotune"),
    ],
)
def test_wrong_options_are_told_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dovetail.compile(torch.sin, **given)
    with pytest.raises(UnknownBackendError, match="did you mean 'inductor'"):
        dovetail.compile(torch.sin, backend="inductr")


def test_what_the_modes_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = torch._inductor.list_mode_options()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for mode in MODES:
        made = without_modes({"mode": mode, "fullgraph": True})
        assert made.pop("fullgraph") is True
        records = made.get("backend") == "cudagraphs"
        settings = {name: value for name, value in made.get("backend_options", {}).items() if name != "kernels"}
        expected = dict(torchs.get(mode, {}))
        assert records == expected.pop("triton.cudagraphs", False)
        assert settings == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert without_modes({"mode": "reduce-overhead"}) == {"backend": "inductor", "backend_options": {}}


def test_options_reach_the_backend() -> None:
    seen: list[Any] = []

    def backend(graph: Any, example_inputs: Any, *, kind: str, options: Any) -> Any:
        seen.append(options["level"])
        return lambda inputs: list(graph(*inputs))

    assert dovetail.compile(torch.sin, backend=backend, options={"level": 3})(torch.zeros(1)).item() == 0
    assert seen == [3]


def test_disabled_is_the_function_itself() -> None:
    model = torch.nn.Linear(1, 1)
    assert dovetail.compile(model, disable=True) is model
    assert dovetail.compile(disable=True)(model) is model
    with pytest.raises(OptionError):
        dovetail.compile(model, disable=True, dynmic=True)


def test_each_option_is_named_and_described() -> None:
    names = {*CompileOptions.__annotations__}
    assert {item.name for item in fields(dovetail.Options)} | {"mode", "options", "disable", "regional"} == names
    assert {*inspect.signature(dovetail.compile).parameters} == names | {"function"}
    text = inspect.getdoc(dovetail.compile) or ""
    assert [name for name in names if f"``{name}``:" not in text] == []


def test_the_list_of_backends_says_a_word_on_each() -> None:
    names = dovetail.list_backends()
    text = repr(names)
    assert [name for name in names if name not in text] == []
    assert text.index("inductor  ") < text.index("aten  ") < text.index("dovetail  ")
    assert "<td>aten</td>" in names._repr_html_()
    assert (ROOT / "dovetail" / "py.typed").exists()


def made_of_class(kind: Any) -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    class Derived(Block):
        pass

    class Scale:
        def __init__(self) -> None:
            self.factor = 2.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.factor

    return {"module": Block, "derived": Derived, "object": Scale}[kind]


@pytest.mark.parametrize("kind", ("module", "derived", "object"))
@pytest.mark.parametrize("bare", (False, True))
def test_a_class_is_given_back_with_its_calls_compiled(kind: str, bare: bool) -> None:
    original, name = made_of_class(kind), "__call__" if kind == "object" else "forward"
    eager, inherited = getattr(original, name), vars(original.__base__).get(name)
    options = {} if bare else {"backend": "aten", "fullgraph": True}
    made: Any = dovetail.compile(original, **options) if bare else dovetail.compile(**options)(original)
    assert made is original and issubclass(type("Further", (made,), {}), original)
    for _ in range(20):
        item, x = made(), torch.ones(2, 3)
        assert torch.equal(item(x), eager(item, x))
    # One entry for all objects, and not one for each of them.
    assert 0 < len(getattr(made, name).entries) <= 2
    # What it inherits from stays as it is.
    assert vars(original.__base__).get(name) is inherited


def test_classes_of_torch_and_of_data_are_left_alone() -> None:
    forward = nn.Linear.forward
    assert dovetail.compile(nn.Linear, backend="aten")(2, 1)(torch.ones(1, 2)).shape == (1, 1)
    assert nn.Linear.forward is forward
    pair = dovetail.compile(collections.namedtuple("Pair", "a b"), backend="aten")(torch.ones(1), 2)  # noqa: PYI024
    assert pair.a.item() == 1 and pair.b == 2


@pytest.mark.parametrize("passes", (lambda joint: joint, "identity", None, ("identity",), 3))
def test_passes_are_functions_in_a_tuple(passes: Any) -> None:
    with pytest.raises(OptionError, match="passes must be a tuple of functions"):
        dovetail.compile(lambda x: x * 2, backend="aten", passes=passes)


@pytest.mark.parametrize("take", (dovetail.capture, dovetail.compare))
def test_arguments_come_in_a_tuple(take: Any) -> None:
    for args in (torch.ones(1, 3), torch.ones(3), {"x": torch.ones(3)}):
        with pytest.raises(InputError, match=rf"args is a {type(args).__name__}, and must be a tuple(.|\n)*\(x,\)"):
            take(lambda x: x * 2, args)


def test_a_backend_that_cannot_be_called() -> None:
    with pytest.raises(BackendError, match="a backend is a callable, not int"):
        dovetail.register_backend("three", 3)  # type: ignore[call-overload]
    assert "three" not in dovetail.list_backends()


def errors_found(command: list[str], folder: Path) -> tuple[set[int], set[int], str]:
    """The lines of the user's program that have an error, those in which a type checker finds one, and what it prints."""
    text = Path(__file__).with_name("user_program.py").read_text()
    expected = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# error")}
    copy = folder / "program.py"
    copy.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", *command, str(copy)],
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        cwd=folder,
    )
    found = {int(line) for line in re.findall(r"program\.py:(\d+):.*\berror\b", done.stdout)}
    return expected, found, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_finds_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    options = [
        "--no-error-summary",
        "--config-file",
        os.devnull,
        "--cache-dir",
        str(tmp_path),
        "--python-version",
        "3.11",
    ]
    expected, found, output = errors_found(["mypy", *options, "--follow-imports=silent"], tmp_path)
    assert found == expected, output


@pytest.mark.slow
def test_pyright_finds_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    expected, found, output = errors_found(["pyright", "--pythonpath", sys.executable, "-p", str(tmp_path)], tmp_path)
    assert found == expected, output
