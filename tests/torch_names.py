"""The private names of torch that Dovetail uses, looked up in the torch that runs, or in several of them.

``python -m tests.torch_names`` prints each name, whether this torch has it, and the functions that use it. With
``--with PYTHON ...`` other interpreters look the names up too, and the table says by version of torch what is there, what is
missing, and where the signature of a Python function is another one than in this torch. ``--docs`` writes the table to
``docs/inside/torch_names.md``. Exit status 1: a name that is needed is missing somewhere.

Names are read from the syntax of ``dovetail/torch_private``, the only room with private names; a name that is read by ``getattr``
or ``hasattr`` with a text is optional, and so is one in a ``try`` that handles its absence. Attributes of objects
(``tensor._base``) are not found this way: the tests use them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRIVATE = ROOT / "dovetail" / "torch_private"
PAGE = ROOT / "docs" / "inside" / "torch_names.md"
MISSING, PRESENT = "missing", "present"


@dataclass
class Use:
    """One private name: the functions that use it, and whether each does without it where it is missing."""

    users: set[str] = field(default_factory=set)
    optional: bool = True


def is_private(name: str) -> bool:
    """Whether a dotted name has a private part; a special name is none.

    >>> is_private("torch._C._autograd"), is_private("torch.fx.Graph"), is_private("torch.Tensor.__add__")
    (True, False, False)
    """
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


class _Reader(ast.NodeVisitor):
    """Collects the private names in one module; ``names`` are what its own names stand for."""

    def __init__(self, module: str, uses: dict[str, Use]) -> None:
        self._module = module
        self._uses = uses
        self._names: dict[str, str] = {}
        self._scope: list[str] = []
        self._handled = False

    def _note(self, name: str, optional: bool = False) -> None:
        if is_private(name):
            use = self._uses.setdefault(name, Use())
            use.users.add(".".join([self._module, *self._scope]))
            use.optional &= optional or self._handled

    def _name_of(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._name_of(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None

    def visit_Try(self, node: ast.Try) -> None:
        """What a ``try`` reads is optional where the error of a missing name is handled."""
        handled = {name.id for item in node.handlers for name in ast.walk(item) if isinstance(name, ast.Name)}
        before, self._handled = self._handled, bool(handled & {"ImportError", "AttributeError", "Exception"})
        for child in node.body:
            self.visit(child)
        self._handled = before
        for child in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self._names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                self._note(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._note(f"{node.module}.{alias.name}")

    def visit_Assign(self, node: ast.Assign) -> None:
        self._bind(node.targets, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind([node.target], node.value)
        self.generic_visit(node)

    def _bind(self, targets: list[ast.expr], value: ast.AST | None) -> None:
        """A name for a module or class of torch stands for it from here on."""
        name = None if value is None else self._name_of(value)
        if name is not None:
            self._names.update({target.id: name for target in targets if isinstance(target, ast.Name)})

    def _inside(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        names = dict(self._names)
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        self._names = names

    visit_FunctionDef = _inside
    visit_ClassDef = _inside

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._name_of(node)
        if name is None:
            self.generic_visit(node)
        else:
            self._note(name)

    def visit_Call(self, node: ast.Call) -> None:
        is_question = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "_instead")
        if is_question and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
            owner = self._name_of(node.args[0])
            most = {"hasattr": 2, "getattr": 3, "_instead": 4}[node.func.id]  # type: ignore[attr-defined]
            has_answer = len(node.args) == most
            if owner is not None:
                self._note(f"{owner}.{node.args[1].value}", optional=has_answer)
        self.generic_visit(node)


def uses_of(sources: dict[str, str]) -> dict[str, Use]:
    """The private names in sources, by the name of their module.

    >>> found = uses_of({"sizes": "import torch\\ndef f():\\n    return torch._C._get(1), getattr(torch, '_new', None)"})
    >>> {name: (sorted(use.users), use.optional) for name, use in found.items()}
    {'torch._C._get': (['sizes.f'], False), 'torch._new': (['sizes.f'], True)}
    """
    uses: dict[str, Use] = {}
    for module, text in sources.items():
        _Reader(module, uses).visit(ast.parse(text))
    return uses


def private_uses() -> dict[str, Use]:
    """The private names that Dovetail uses."""
    return uses_of({path.stem: path.read_text(encoding="utf-8") for path in sorted(PRIVATE.glob("*.py"))})


def look_up(name: str) -> str:
    """What the torch that runs has under a name: "missing", "present", or the signature of a Python function.

    >>> look_up("torch.no_such_thing"), look_up("torch.overrides.is_tensor_like")
    ('missing', '(inp)')
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return MISSING
            found = getattr(found, part)
        if inspect.isfunction(found):
            return str(inspect.signature(found)).split(" -> ")[0]
        return PRESENT
    return MISSING


def answers(python: str, names: list[str]) -> tuple[str, dict[str, str]]:
    """The version of the torch of another interpreter, and what it has under each name."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.torch_names import answer; answer()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [python, "-c", code], input=json.dumps(names), capture_output=True, text=True, check=True, env=environment
    )
    version, found = json.loads(done.stdout.splitlines()[-1])
    return version, found


def answer() -> None:
    """What a process that was started by :func:`answers` does."""
    names = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        found = {name: look_up(name) for name in names}
    print(json.dumps([torch.__version__, found]))


def rows(uses: dict[str, Use], versions: dict[str, dict[str, str]]) -> Iterator[tuple[str, ...]]:
    """The lines of the table; the first version is the one that others are compared with."""
    reference = next(iter(versions.values()))
    for name, use in sorted(uses.items()):
        words = []
        for found in versions.values():
            word = found[name] if found[name] == MISSING else PRESENT
            changed = reference[name] != MISSING != found[name] != reference[name]
            words.append("changed" if changed else word)
        yield name, *words, "yes" if use.optional else "", ", ".join(sorted(use.users))


def table(uses: dict[str, Use], versions: dict[str, dict[str, str]]) -> str:
    """The table as Markdown."""
    titles = ["name", *(f"torch {version.split('+')[0]}" for version in versions), "optional", "used by"]
    lines = [titles, ["---"] * len(titles), *([f"`{first}`", *rest] for first, *rest in rows(uses, versions))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Print the table; 1 where a name that is needed is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="others", nargs="*", default=[], metavar="PYTHON", help="other interpreters")
    parser.add_argument("--docs", action="store_true", help=f"write the table to {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    uses = private_uses()
    versions = dict(answers(python, list(uses)) for python in (sys.executable, *options.others))
    text = table(uses, versions)
    print(text)
    if options.docs:
        PAGE.write_text(
            "# Private names of torch\n\n`make torch-names` wrote this page: the private names that `dovetail/torch_private` "
            "uses, and what each\nversion of torch has under them. *Changed*: a Python function with another signature than in "
            "the first version.\n*Optional*: where the name is missing, its users do without it.\n\n"
            f"{text}\n",
            encoding="utf-8",
        )
    lacking = sorted(
        f"torch {version} has no {name}, which {', '.join(sorted(use.users))} needs"
        for version, found in versions.items()
        for name, use in uses.items()
        if found[name] == MISSING and not use.optional
    )
    print(f"\n{len(uses)} private names; missing where they are needed: {len(lacking)}", *lacking, sep="\n  ")
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main())
