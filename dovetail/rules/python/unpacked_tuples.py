"""``images, labels, number, path = batch``: a number or a text of a tuple that nothing reads is no reason for another entry.

Such an item goes into its variable unread, as an argument does: it is guarded when the variable is first used.
"""

from __future__ import annotations

from typing import Any

from dovetail.frontend.code.frame import Frame, Instruction, Unread
from dovetail.frontend.instructions import SETS, Handler
from dovetail.frontend.instructions.shared import TABLE
from dovetail.frontend.interpreter.machine import Machine
from dovetail.frontend.protocol import FrameRunner
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import ItemSource
from dovetail.rules.python import python314, python315  # noqa: F401  (their tables)

#: Into how many variables an instruction stores.
_STORES = {"STORE_FAST": 1, "STORE_FAST_STORE_FAST": 2}


def _items(runner: Any, frame: Frame, instruction: Instruction) -> list[Any] | None:
    """The items of a tuple that existed before, for local variables; None where the tuple is gone through as any iterable."""
    given, count = frame.stack[-1], instruction.arg
    if type(given) is not tuple or len(given) != count or isinstance(runner, Machine):
        return None
    source, position = runner.values.source_of(given), frame.position
    if source is None or runner.values.in_backward or not any(map(is_leaf_value, given)):
        return None
    while count > 0:
        position += 1
        stores = _STORES.get(frame.decoded.instructions[position].opname)
        if stores is None:
            return None
        count -= stores
    runner.guard_length(given)
    return [
        Unread(item, ItemSource(source, at)) if is_leaf_value(item) else runner.load_item(given, at)
        for at, item in enumerate(given)
    ]


def _unread(handler: Handler) -> Handler:
    def unpack(runner: FrameRunner, frame: Frame, instruction: Instruction) -> Any:
        items = _items(runner, frame, instruction)
        if items is None:
            return handler(runner, frame, instruction)
        frame.stack[-1:] = reversed(items)
        return None

    return unpack


for _table in (TABLE, *SETS.values()):
    if "UNPACK_SEQUENCE" in _table:
        _table["UNPACK_SEQUENCE"] = _unread(_table["UNPACK_SEQUENCE"])
