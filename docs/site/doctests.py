"""Docstrings on the pages of the reference: examples (``>>>``) become blocks of code, and roles (``:class:``) go."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:(?=`)")


def fenced(text: str) -> str:
    """The text with each example, and what it prints, in a block of code."""
    lines, inside = [], False
    for line in text.splitlines():
        begins = line.lstrip().startswith(">>>")
        if begins and not inside:
            lines += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line.strip() if begins else line)
    return "\n".join([*lines, "```"] if inside else lines)


class Doctests(griffe.Extension):
    """Applied to each object that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change its docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(_ROLE.sub("", obj.docstring.value))
