"""``import dovetail`` is quick: it loads neither torch nor a wing, and every public name is loaded on first use."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail
from tests import layout

WINGS = [room.name.replace("/", ".") for room in layout.ROOMS.values() if room.kind == "wing"]


def modules_after(program: str) -> set[str]:
    """The modules that a new interpreter has loaded after running ``program``."""
    code = f"{program}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(layout.ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_loads_no_torch_and_no_room() -> None:
    loaded = modules_after("import dovetail")
    assert "torch" not in loaded
    assert {name for name in loaded if name.startswith("dovetail")} == {
        "dovetail",
        "dovetail.errors",
        "dovetail.neighbours",
        "dovetail.versions",
    }


def test_names_of_backends_load_no_wing() -> None:
    loaded = modules_after(
        "import dovetail\n"
        "names = dovetail.list_backends()\n"
        "assert {'inductor', 'cudagraphs', 'bisect', 'aot_eager'} <= set(names)\n"
        "from dovetail.backends import lookup_backend\n"
        "try:\n    lookup_backend('inducter')\n"
        "except dovetail.errors.UnknownBackendError as error:\n    assert \"'inductor'\" in str(error)\n"
        "else:\n    raise SystemExit('no error')"
    )
    wings = tuple(f"dovetail.{name}" for name in WINGS if name.startswith("backends"))
    assert not {name for name in loaded if name.startswith(wings)}


def test_every_public_name_loads() -> None:
    for name in dovetail.__all__:
        assert getattr(dovetail, name) is not None
        assert name in dir(dovetail)
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        dovetail.compil  # noqa: B018


@pytest.mark.slow
def test_a_function_is_not_hidden_by_the_room_of_its_name() -> None:
    """Whatever is imported first. Torch is loaded once, in front of the forks."""
    modules_after(
        "import os, torch\n"
        "for first in ('from dovetail import compile', 'import dovetail.face.compile'):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        exec(first)\n"
        "        import dovetail\n"
        "        dovetail.compile\n"
        "        os._exit(0 if callable(dovetail.compiled_autograd) else 1)\n"
        "    assert os.waitpid(child, 0)[1] == 0, first\n"
    )


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse(Path(dovetail.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    declared = {alias.asname for alias in aliases if alias.asname is not None}
    declared |= {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert set(dovetail.__all__) <= declared <= set(dir(dovetail))


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["demo", "--help"]])
def test_commands_that_need_no_torch_do_not_load_it(arguments: list[str]) -> None:
    program = f"from dovetail.cli import main\ntry:\n    main({arguments})\nexcept SystemExit:\n    print()"
    assert "torch" not in modules_after(program)
