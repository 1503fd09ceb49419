"""The house rules that a program can check: import direction, one door to torch's private names, docs everywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dovetail"
#: From the top of the house to its ground; a room imports from those after it (and from itself).
ORDER = (
    "cli",
    "testing",
    "distributed",
    "face",  # dovetail/__init__.py, compile.py and compiled_function.py
    "report",
    "frontend",
    "compiled_autograd",
    "aot",
    "runtime",
    "backends",
    "cache",
    "trace",
    "guards",
    "ground",
)
#: The modules of the ground, lowest last; they follow the same rule among each other.
GROUND = (
    "versions",
    "options",
    "torch_private_autograd",
    "torch_private_distributed",
    "torch_private_guards",
    "torch_private_inductor",
    "torch_private_recordings",
    "torch_private_torch_compile",
    "torch_private_sizes",
    "torch_private_state",
    "torch_private",
    "events",
    "errors",
)
#: The doors to torch's private names.
DOORS = (
    "torch_private.py",
    "torch_private_autograd.py",
    "torch_private_distributed.py",
    "torch_private_guards.py",
    "torch_private_inductor.py",
    "torch_private_recordings.py",
    "torch_private_sizes.py",
    "torch_private_state.py",
    "torch_private_torch_compile.py",
)
FACE = ("__init__", "compile", "compiled_function")
MODULES = sorted(PACKAGE.rglob("*.py"))


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _room_of(parts: tuple[str, ...]) -> str | None:
    """The room of ``dovetail.<parts>``; None for a name that is no module."""
    if not parts or parts[0] in FACE:
        return "face"
    if parts[0] in GROUND:
        return "ground"
    return parts[0] if parts[0] in ORDER else None


def _imported(tree: ast.AST) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and path (below ``dovetail``) of everything that a module imports from the package, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, *rest = alias.name.split(".")
                if head == "dovetail":
                    yield node.lineno, tuple(rest)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            head, *rest = node.module.split(".")
            if head == "dovetail":
                for alias in node.names:
                    # "from dovetail import x" names a module, or something that the public face offers
                    is_module = (PACKAGE / alias.name).is_dir() or (PACKAGE / f"{alias.name}.py").exists()
                    yield node.lineno, tuple(rest) if rest or not is_module else (alias.name,)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def import_violations(parts: tuple[str, ...], tree: ast.AST) -> list[str]:
    """What a module ``dovetail.<parts>`` imports against the order of the rooms."""
    room = _room_of(parts)
    assert room is not None, f"{'/'.join(parts)} is in no room of tests/test_layout.py; add it to ORDER or GROUND"
    found = []
    for line, target in _imported(tree):
        other = _room_of(target)
        if other is None:
            found.append(f"line {line}: dovetail.{'.'.join(target)} is in no known room")
        elif ORDER.index(other) < ORDER.index(room):
            found.append(f"line {line}: {room} imports {other}, which is above it")
        elif room == other == "ground" and GROUND.index(target[0]) <= GROUND.index(parts[0]):
            found.append(f"line {line}: {parts[0]} imports {target[0]}, which is not below it")
    return found


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


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_run_downward(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    assert import_violations(parts, _parse(path)) == []


@pytest.mark.parametrize("path", [path for path in MODULES if path.name not in DOORS], ids=_name)
def test_private_torch_names_come_through_the_door(path: Path) -> None:
    assert private_torch_names(_parse(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert (ast.get_docstring(_parse(path)) or "").strip(), f"{_name(path)} has no docstring"


def test_every_room_is_a_package() -> None:
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert folder.name in ORDER, f"{folder.name} is no room of DESIGN.md"
            assert (folder / "__init__.py").exists()


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize(
    ("parts", "source", "wrong"),
    [
        (("trace", "trace"), "from dovetail.aot.state import AOTState", True),
        (("trace", "trace"), "def f():\n    import dovetail.compile", True),
        (("trace", "trace"), "from dovetail import events, torch_private", False),
        (("guards", "x"), "from dovetail import capture", True),
        (("errors",), "from dovetail.events import EventLog", True),
        (("aot", "state"), "from dovetail.trace import Trace\nfrom dovetail.aot import joint_graph", False),
        (("cli", "demo"), "import dovetail", False),
    ],
)
def test_the_import_check_sees(parts: tuple[str, ...], source: str, wrong: bool) -> None:
    assert bool(import_violations(parts, ast.parse(source))) is wrong


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
        ("from dovetail import torch_private\ntorch_private.is_fake(self._x)", False),
    ],
)
def test_the_private_name_check_sees(source: str, wrong: bool) -> None:
    assert bool(private_torch_names(ast.parse(source))) is wrong
