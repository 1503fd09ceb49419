"""The house rules that a program can check: rooms, import direction, sizes, private names of torch, docs everywhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import layout

MODULES = layout.MODULES
#: Folders of tests that cut across the rooms; all others are named as the room they test.
OWN_FOLDERS_OF_TESTS = ("assumptions", "conformance", "core", "ecosystem", "footguns", "fuzz", "gpu")


def _name(path: Path) -> str:
    return str(path.relative_to(layout.ROOT))


def private_torch_names(tree: ast.AST) -> list[str]:
    """Where a module uses a name of torch that starts with one underscore."""

    def private(name: str) -> bool:
        return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))

    found = []
    torch_modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    torch_modules.add(alias.asname or "torch")
                    if any(private(part) for part in alias.name.split(".")):
                        found.append(f"line {node.lineno}: import {alias.name}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for alias in node.names:
                torch_modules.add(alias.asname or alias.name)
                if any(private(part) for part in (*str(node.module).split("."), alias.name)):
                    found.append(f"line {node.lineno}: from {node.module} import {alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            # Operators are data, found by name: torch.ops.aten._to_copy is as public as torch.ops.aten.add.
            is_operator = ast.unparse(node).startswith("torch.ops.")
            if isinstance(root, ast.Name) and root.id in torch_modules and not is_operator:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if function.endswith(("import_module", "__import__", "find_spec")):
                found += [f"line {node.lineno}: {text}" for text in texts if re.match(r"torch(\.\w+)*\._", text)]
            elif function in ("getattr", "hasattr", "setattr") and isinstance(node.args[0], (ast.Name, ast.Attribute)):
                root_name = ast.unparse(node.args[0]).split(".")[0]
                if root_name in torch_modules:
                    found += [f"line {node.lineno}: {ast.unparse(node)}" for text in texts if private(text)]
    return found


def test_imports_run_downward() -> None:
    found = []
    for path in MODULES:
        assert layout.room_of(layout.parts_of(path)) is not None, f"{_name(path)} is in no room of {layout.MAP.name}"
        violations = layout.import_violations(layout.parts_of(path), layout.parse(path))
        found += [f"{_name(path)}, {violation}" for violation in violations]
    assert not found, "\n".join(found)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert layout.import_circles() == []


def test_functions_and_files_are_short() -> None:
    long = [f"{_name(path)}, {item}" for path in MODULES for item in layout.long_functions(layout.parse(path))]
    long += [_name(path) for path in MODULES if layout.lines_of(path) > layout.LONGEST_FILE]
    assert not long, "\n".join(long)


def test_the_house_does_not_grow() -> None:
    counts = layout.lines_by_kind()
    assert counts["core"] <= layout.MOST_CORE_LINES
    assert sum(counts.values()) <= layout.MOST_LINES


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name != "torch_private"], ids=_name)
def test_private_torch_names_come_from_torch_private(path: Path) -> None:
    assert private_torch_names(layout.parse(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert (ast.get_docstring(layout.parse(path)) or "").strip(), f"{_name(path)} has no docstring"


def test_every_folder_is_a_package() -> None:
    for folder in layout.PACKAGE.rglob("*"):
        if folder.is_dir() and folder.name != "__pycache__":
            assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"


def test_tests_lie_in_the_rooms_of_the_package() -> None:
    tests = layout.ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.glob("*/**/test_*.py")}
    strangers = [
        str(folder)
        for folder in folders
        if not (layout.PACKAGE / folder).is_dir() and str(folder) not in OWN_FOLDERS_OF_TESTS
    ]
    assert strangers == [], "tests/README.md says where a test goes"


def test_the_package_is_typed() -> None:
    assert (layout.PACKAGE / "py.typed").exists()


@pytest.mark.parametrize(
    ("parts", "source", "wrong"),
    [
        (("trace", "trace"), "from dovetail.aot.state import AOTState", True),
        (("trace", "trace"), "def f():\n    import dovetail.face.compile", True),
        (("trace", "trace"), "from dovetail import events, torch_private", False),
        (("guards", "x"), "from dovetail import capture", True),
        (("errors",), "from dovetail.events import EventLog", True),
        (("aot", "state"), "from dovetail.trace import Trace\nfrom dovetail.aot import joint_graph", False),
        (("backends", "registry"), "from dovetail.backends.inductor import backend", True),
        (("cli", "demo"), "import dovetail", False),
        (("guards", "x"), "from dovetail.torch_private import inductor as private_inductor", True),
        (("torch_private", "x"), "from dovetail.torch_private import dynamo", True),
        (("backends", "inductor", "x"), "from dovetail.torch_private import inductor as private_inductor", False),
        (("torch_private", "inductor"), "from dovetail.torch_private.operators import OpOverload", False),
    ],
)
def test_the_import_check_sees(parts: tuple[str, ...], source: str, wrong: bool) -> None:
    assert bool(layout.import_violations(parts, ast.parse(source))) is wrong


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import torch._dynamo", True),
        ("from torch._subclasses import FakeTensorMode", True),
        ("from torch.utils import _pytree", True),
        ("import torch\ntorch._C._get_tracing_state()", True),
        ("from torch import fx as graphs\ngraphs._symbolic_trace", True),
        ("import importlib\nimportlib.import_module('torch._inductor')", True),
        ("import torch\ngetattr(torch, '_C')", True),
        ("import torch\ntorch.ops.aten._to_copy.default", False),
        ("import torch\ntorch.__version__\ntorch.nn.Module", False),
        ("from dovetail.torch_private import tensors\ntensors.is_fake(self._x)", False),
    ],
)
def test_the_private_name_check_sees(source: str, wrong: bool) -> None:
    assert bool(private_torch_names(ast.parse(source))) is wrong
