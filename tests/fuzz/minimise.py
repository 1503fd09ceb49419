"""Make a failing program small: drop statements, whole branches and arguments, as long as it fails in the same way."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def minimise(source: str, fails: Callable[[str], bool], most_runs: int = 600) -> str:
    """The smallest program found for which ``fails`` still holds.

    >>> minimise("a = 1\\nb = 2\\nif a:\\n    c = 3\\n", lambda text: "c = 3" in text)
    'c = 3\\n'
    """
    tree = ast.parse(source)
    runs = 0
    shrinking = True
    while shrinking and runs < most_runs:
        shrinking = False
        position = 0
        while runs < most_runs:
            smaller = _smaller(tree, position)
            if smaller is None:
                break
            runs += 1
            text = _text(smaller)
            if text is not None and len(text) < len(_text(tree) or "") and fails(text):
                tree = ast.parse(text)
                shrinking = True
            else:
                position += 1
    return _text(tree) or source


def _text(tree: ast.Module) -> str | None:
    try:
        text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
        compile(text, "<smaller>", "exec")
    except (SyntaxError, ValueError, RecursionError):
        return None
    return text


def _smaller(tree: ast.Module, position: int) -> ast.Module | None:
    """The tree with its edit of that number made; None where there are no more."""
    result = copy.deepcopy(tree)
    for number, edit in enumerate(_edits(result)):
        if number == position:
            edit()
            return result
    return None


def _edits(tree: ast.AST) -> Iterator[Callable[[], None]]:
    """Edits of a tree in place, the large ones first."""
    nodes = list(ast.walk(tree))
    for node in nodes:
        yield from _edits_of_blocks(node)
    for node in nodes:
        for items in _removable(node):
            for index in range(len(items)):
                yield lambda items=items, index=index: _delete(items, index)
        yield from _edits_of_expressions(node)


def _edits_of_blocks(node: ast.AST) -> Iterator[Callable[[], None]]:
    for name in _BLOCKS:
        block = getattr(node, name, None)
        if not isinstance(block, list):
            continue
        for index in reversed(range(len(block))):
            yield lambda block=block, index=index, name=name: _drop(block, index, name)
        for index, item in enumerate(block):
            if getattr(item, "body", None) and isinstance(item, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                yield lambda block=block, index=index, item=item: _unwrap(block, index, item.body)


def _removable(node: ast.AST) -> tuple[list[Any], ...]:
    if isinstance(node, ast.Call):
        return (node.args, node.keywords)
    if isinstance(node, (ast.Tuple, ast.List)):
        return (node.elts,)
    return (node.decorator_list,) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ()


def _edits_of_expressions(node: ast.AST) -> Iterator[Callable[[], None]]:
    """An expression is replaced by one of its parts."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            for child in _parts(value):
                yield lambda name=name, child=child: setattr(node, name, child)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                for child in _parts(item) if isinstance(item, ast.expr) else ():
                    yield lambda value=value, index=index, child=child: value.__setitem__(index, child)


def _parts(value: ast.expr) -> list[ast.expr]:
    return [child for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr)]


def _drop(block: list[ast.AST], index: int, name: str) -> None:
    del block[index]
    if not block and name in ("body", "finalbody"):
        block.append(ast.Pass())


def _unwrap(block: list[ast.AST], index: int, body: list[ast.AST]) -> None:
    block[index : index + 1] = body


def _delete(items: list[ast.AST], index: int) -> None:
    del items[index]
