"""The layout of the package as data: rooms, sizes of rooms, and what breaks the house rules.

``python -m tests.layout`` prints lines by kind and room, and every violation. The table of rooms is ``docs/inside/map.md``.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dovetail"
MAP = ROOT / "docs" / "inside" / "map.md"
MODULES = sorted(PACKAGE.rglob("*.py"))
KINDS = ("core", "rules", "quirks", "wing")
LONGEST_FUNCTION = 80
LONGEST_FILE = 500
MOST_CORE_LINES = 20_000
#: The aim is 42,000. Until then what there is, so that a change that adds to it says so.
MOST_LINES = 73_722


@dataclass(frozen=True)
class Room:
    """One row of the table; ``level`` counts from the top of the house."""

    name: str
    kind: str
    level: int


def rooms() -> dict[str, Room]:
    """The rooms by name, as ``docs/inside/map.md`` has them."""
    rows = re.findall(r"^\| `([\w/]+)` \| (\w+) \|", MAP.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: Room(name, kind, level) for level, (name, kind) in enumerate(rows)}


ROOMS = rooms()
#: ``dovetail/__init__.py`` offers what the face makes.
TOP = "face"


def room_of(parts: tuple[str, ...]) -> Room | None:
    """The room of ``dovetail.<parts>``; None for a name that is no module."""
    if not parts or parts == ("__init__",):
        return ROOMS[TOP]
    return ROOMS.get("/".join(parts[:2])) or ROOMS.get(parts[0])


def parts_of(path: Path) -> tuple[str, ...]:
    """A module's path below ``dovetail``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _is_module(parts: tuple[str, ...]) -> bool:
    place = PACKAGE.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").exists()


def imported(tree: ast.AST) -> Iterator[tuple[int, tuple[str, ...], bool]]:
    """Line, path below ``dovetail`` and whether it is for types only, of everything that a module imports from the package."""
    for_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, *rest = alias.name.split(".")
                if head == "dovetail":
                    yield node.lineno, tuple(rest), node in for_types
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            head, *rest = node.module.split(".")
            if head == "dovetail":
                for alias in node.names:
                    full = (*rest, alias.name)
                    yield node.lineno, full if _is_module(full) else tuple(rest), node in for_types


def import_violations(parts: tuple[str, ...], tree: ast.AST) -> list[str]:
    """What a module ``dovetail.<parts>`` imports against the order of the rooms."""
    room = room_of(parts)
    if room is None:
        return [f"{'/'.join(parts)} is in no room of {MAP.name}"]
    found = []
    for line, target, _ in imported(tree):
        other = room_of(target)
        if other is None:
            found.append(f"line {line}: dovetail.{'.'.join(target)} is in no known room")
        elif other.level < room.level:
            found.append(
                f"line {line}: {room.name} imports {other.name} (dovetail.{'.'.join(target)}), which is above it"
            )
        elif room.kind == "core" != other.kind:
            found.append(
                f"line {line}: {room.name} imports {other.name} (dovetail.{'.'.join(target)}), which is not of the core"
            )
    return found


def import_circles() -> list[list[str]]:
    """Groups of modules that import one another at module level or inside functions; imports for types alone do not count."""
    edges: dict[str, set[str]] = {}
    for path in MODULES:
        parts = parts_of(path)
        own = ".".join(parts)
        edges[own] = {
            ".".join(target) for _, target, only_types in imported(parse(path)) if not only_types and target
        } - {own}
    return [sorted(group) for group in _components(edges) if len(group) > 1]


def _components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components (Tarjan's algorithm, without recursion over the stack limit: the package is small)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for following in edges.get(node, ()):
            if following not in edges:
                continue
            if following not in index:
                visit(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], index[following])
        if low[node] == index[node]:
            group = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            found.append(group)

    for node in edges:
        if node not in index:
            visit(node)
    return found


def long_functions(tree: ast.AST) -> list[str]:
    """Functions with more lines than allowed."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                found.append(f"line {node.lineno}: {node.name} has {length} lines")
    return found


def lines_of(path: Path) -> int:
    """The number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_by_kind() -> dict[str, int]:
    """Lines of the package by kind of code."""
    counts = dict.fromkeys(KINDS, 0)
    for path in MODULES:
        room = room_of(parts_of(path))
        assert room is not None, f"{path} is in no room"
        counts[room.kind] += lines_of(path)
    return counts


def main() -> None:
    """Print the sizes and every violation."""
    by_room: dict[str, int] = {}
    for path in MODULES:
        room = room_of(parts_of(path))
        name = room.name if room is not None else "?"
        by_room[name] = by_room.get(name, 0) + lines_of(path)
    for name, room in ROOMS.items():
        print(f"{by_room.get(name, 0):6d}  {room.kind:6s}  {name}")
    counts = lines_by_kind()
    print(", ".join(f"{kind} {count}" for kind, count in counts.items()), f"all {sum(counts.values())}")
    for path in MODULES:
        tree = parse(path)
        wrong = import_violations(parts_of(path), tree) + long_functions(tree)
        if lines_of(path) > LONGEST_FILE:
            wrong.append(f"{lines_of(path)} lines")
        for item in wrong:
            print(f"{path.relative_to(ROOT)}: {item}")
    for circle in import_circles():
        print("circle:", ", ".join(circle))


if __name__ == "__main__":
    main()
