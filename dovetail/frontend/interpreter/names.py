"""Names: globals, builtins, closure cells, defaults and imports, with guards on what was read."""

from __future__ import annotations

import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame, Unread
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.instructions.shared import unbound_variable
from dovetail.frontend.interpreter.lookup import MISSING
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_trusted, may_be_switched
from dovetail.guards import AttributeSource, CellSource, HasNoKey, Identity, ItemSource, SameObject, Source, Unbound


class Names(TracingInterpreter):
    """The part of the interpreter that reads and writes names."""

    def __init__(self) -> None:
        self.cells: dict[int, Source] = {}
        self._seen_globals: dict[tuple[int, str], Any] = {}
        self._seen_functions: dict[int, types.FunctionType] = {}

    def forget_reads(self) -> None:
        """Take every name for unread."""
        self._seen_globals.clear()
        self._seen_functions.clear()

    def first_read(self, value: Unread) -> Any:
        return self.values.read(value.value, value.source)

    # --- globals ------------------------------------------------------------------------------------------------------

    def load_global(self, frame: Frame, name: str) -> Any:
        table = frame.globals
        if name not in table:
            return self._load_builtin(table, name)
        module, value = table.get("__name__"), table[name]
        is_tensor = isinstance(value, torch.Tensor)
        is_fixed = is_trusted(module) and not is_tensor and not may_be_switched(module, name, value)
        if is_fixed or self.effects.written(table, name):
            return self.values.wrap(value)
        key = (id(table), name)
        seen = self._seen_globals.get(key, MISSING)
        if seen is not MISSING and not is_tensor:
            return seen
        # A number may be read as a symbol, the second time as well as the first.
        read = self._seen_globals[key] = self.values.read(value, ItemSource(self.values.pin(table, "G"), name))
        return read

    def _load_builtin(self, table: dict[str, Any], name: str) -> Any:
        builtin_table = table.get("__builtins__", {})
        builtins_dict = builtin_table.__dict__ if isinstance(builtin_table, types.ModuleType) else builtin_table
        key = (id(table), name)
        is_open = not is_trusted(table.get("__name__")) and not self.effects.written(table, name)
        is_new = is_open and key not in self._seen_globals
        values = self.values
        if is_new:
            reason = f"{name} is {'the builtin' if name in builtins_dict else 'not defined'}"
            values.guard(values.pin(table, "G"), HasNoKey(name), reason)
            if name not in builtins_dict:
                values.guard(values.pin(builtins_dict, "builtins"), HasNoKey(name), reason)
        if name not in builtins_dict:
            raise NameError(f"name {name!r} is not defined", name=name)
        value = builtins_dict[name]
        if is_new:
            self._seen_globals[key] = values.read(value, ItemSource(values.pin(builtins_dict, "builtins"), name))
        return value

    def store_global(self, frame: Frame, name: str, value: Any) -> None:
        self.values.note(frame.globals, self.values.pin(frame.globals, "G"))
        self.effects.set_item(frame.globals, name, value)

    def delete_global(self, frame: Frame, name: str) -> None:
        if name not in frame.globals:
            raise NameError(f"name {name!r} is not defined")
        self.load_global(frame, name)
        self.values.note(frame.globals, self.values.pin(frame.globals, "G"))
        self.effects.delete_item(frame.globals, name)

    # --- functions and cells ------------------------------------------------------------------------------------------

    def guard_closure(self, function: types.FunctionType) -> None:
        if id(function) in self._seen_functions:
            return
        self._seen_functions[id(function)] = function
        if self.is_created(function):
            return
        if not is_trusted(function.__globals__.get("__name__")):
            source = self.values.pin(function, function.__qualname__)
            self.values.guard(AttributeSource(source, "__code__"), Identity(function.__code__), "the function's code")
            self.note_closure(function, source)
        elif function.__closure__:
            # The code of a library may be taken as fixed; what it closes over is the user's (a callback, a decorated function).
            self.note_closure(function, self.values.pin(function, function.__qualname__))

    def note_closure(self, function: types.FunctionType, source: Source) -> None:
        for position, cell in enumerate(function.__closure__ or ()):
            if self.is_created(cell):
                continue
            own = ItemSource(AttributeSource(source, "__closure__"), position)
            known = self.values.source_of(cell)
            if known is None:
                self.values.note(cell, own)
                self.cells[id(cell)] = CellSource(source, position)
            elif known != own:
                self.values.guard(own, SameObject((known,)), f"{own.name} and {known.name} are one cell")

    def note_cell(self, cell: types.CellType, source: Source) -> None:
        self.values.read(cell, source)
        self.cells.setdefault(id(cell), AttributeSource(source, "cell_contents"))

    def load_default(self, function: types.FunctionType, name: str, position: int | None) -> Any:
        """The default of a parameter; ``position`` is None for one that is passed by keyword only."""
        attribute, key = ("__kwdefaults__", name) if position is None else ("__defaults__", position)
        value = getattr(function, attribute)[key]
        if self.is_created(function) or is_trusted(function.__globals__.get("__name__")):
            return self.values.wrap(value)
        source = self.values.pin(function, function.__qualname__)
        return self.values.read(value, ItemSource(AttributeSource(source, attribute), key))

    def load_cell(self, frame: Frame, name: str) -> Any:
        cell = frame.cells[name]
        if not is_bound(cell):
            source = self.cells.get(id(cell))
            if isinstance(source, CellSource):
                self.values.guard(source.cell, Unbound(), f"{name} is unbound")
            raise unbound_variable(frame.code, name)
        value = cell.cell_contents
        source = self.cells.get(id(cell))
        return value if source is None or self.effects.written(cell) else self.values.read(value, source)

    def store_cell(self, frame: Frame, name: str, value: Any) -> None:
        self.effects.set_cell(frame.cells[name], value)

    def delete_cell(self, frame: Frame, name: str) -> None:
        cell = frame.cells[name]
        if self.cells.get(id(cell)) is not None:
            raise Break(f"the variable {name} of an enclosing function is deleted")
        self.load_cell(frame, name)
        del cell.cell_contents
