"""Each version's instruction set is whole, and means in every Python on this machine what Python means."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dovetail.errors import UnsupportedVersionError
from dovetail.face.loading import load_rules
from dovetail.frontend.code.frame import Break, decode
from dovetail.frontend.instructions import handlers_of, instruction_set
from tests.frontend.interpreters import VERSIONS, has_torch, interpreter

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
load_rules()
#: Instructions of statements that are never interpreted, of code that no function has, and of Python's own interpreter.
REFUSED = {
    *("ASYNC_GEN_WRAP", "BEFORE_ASYNC_WITH", "END_ASYNC_FOR", "GET_AITER", "GET_ANEXT", "GET_AWAITABLE"),
    *("CHECK_EG_MATCH", "PREP_RERAISE_STAR", "CALL_INTRINSIC_2"),
    *(
        "DELETE_NAME",
        "LOAD_CLASSDEREF",
        "LOAD_FROM_DICT_OR_DEREF",
        "LOAD_FROM_DICT_OR_GLOBALS",
        "LOAD_LOCALS",
        "LOAD_NAME",
    ),
    *("SETUP_ANNOTATIONS", "STORE_NAME", "IMPORT_STAR", "PRINT_EXPR"),
    *("ENTER_EXECUTOR", "EXIT_INIT_CHECK", "INTERPRETER_EXIT", "RESERVED", "TRACE_RECORD"),
}


def run(version: tuple[int, int], *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    python = interpreter(version)
    if python is None:
        pytest.skip(
            f"no Python {version[0]}.{version[1]} on this machine; DOVETAIL_PYTHON_{version[0]}_{version[1]} names one"
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT))))}
    return subprocess.run(
        [python, "-P", *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}.{version[1]}")
def test_no_instruction_is_forgotten(version: tuple[int, int]) -> None:
    answer = run(version, str(HERE / "instruction_names.py"))
    names = json.loads(answer.stdout)
    assert len(names) > 100
    assert {name for name in names if name not in instruction_set(version)} <= REFUSED


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}.{version[1]}")
def test_refused_instructions_have_no_handler(version: tuple[int, int]) -> None:
    assert not REFUSED & instruction_set(version).keys()


def test_code_with_a_refused_instruction_is_not_interpreted() -> None:
    async def function() -> None:
        await function()

    with pytest.raises(Break, match="not interpreted"):
        handlers_of(function.__code__, decode(function.__code__))


def test_another_version_is_refused() -> None:
    with pytest.raises(UnsupportedVersionError, match=r"3\.16"):
        instruction_set((3, 16))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}.{version[1]}")
def test_the_language_by_the_machine(version: tuple[int, int]) -> None:
    # Without torch a stand-in with a few empty classes is enough: nothing in these programs is a tensor.
    python = interpreter(version)
    stand_in = "" if python is not None and has_torch(python) else str(HERE / "without_torch")
    answer = run(version, "-m", "tests.frontend.machine_language", path=stand_in)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"Python {version[0]}.{version[1]}: " in answer.stdout
    assert "0 differ" in answer.stdout


@pytest.mark.parametrize("version", VERSIONS[1:], ids=lambda version: f"{version[0]}.{version[1]}")
def test_the_language_compiled(version: tuple[int, int]) -> None:
    python = interpreter(version)
    if python is None or not has_torch(python):
        pytest.skip(
            f"no Python {version[0]}.{version[1]} with torch; DOVETAIL_PYTHON_{version[0]}_{version[1]} names one"
        )
    answer = run(
        version,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "compiled and aten",
        str(HERE / "test_language.py"),
    )
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
