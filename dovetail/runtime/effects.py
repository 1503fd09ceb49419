"""Effects that an entry replays after the graph has run: writes to containers, attributes and gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.guards import Source
from dovetail.runtime.recipe import ConstantItem, ObjectItem, Recipe, TensorItem


@dataclass(frozen=True)
class EffectRecipe:
    """One container that is brought to its final state after the graph has run, or (``"call"``) a function that is called.

    ``kind`` says what it is (:data:`WRITERS`), ``deleted`` are the keys or attributes that are gone.
    """

    source: Source
    kind: str
    values: Recipe
    deleted: tuple[Any, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[Recipe, Recipe], ...] | None:
        """The items of a plain dictionary of values; None for values that are more than that."""
        values = self.values
        is_plain = isinstance(values, ObjectItem) and values.cls is dict and not self.deleted
        return values.pairs if is_plain else None  # type: ignore[attr-defined]

    def tensor_attributes(self) -> list[tuple[str, int]] | None:
        """The attributes that are set to results of the graph, each with the index of the result; None if it does more."""
        found = []
        for key, item in (self.pairs if self.kind == "attribute" else None) or ():
            if not isinstance(key, ConstantItem) or not isinstance(item, TensorItem):
                return None
            found.append((key.value, item.index))
        return found or None

    def constant_items(self) -> dict[Any, Any] | None:
        """The items that are written into a dictionary, where they are the same at every call; None if it does more."""
        found = {}
        for key, item in (self.pairs if self.kind == "dict" else None) or ():
            if not isinstance(key, ConstantItem) or not isinstance(item, ConstantItem):
                return None
            found[key.value] = item.value
        return found or None


def dict_class(container: Any) -> Any:
    """The class whose methods write past the container's own: an ordered dictionary keeps a list of its keys beside the table."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def write_items(container: Any, items: Mapping[Any, Any], deleted: tuple[Any, ...] = ()) -> None:
    """Write items into a dictionary, past its own class; in one call for a plain one."""
    if type(container) is dict and not deleted:
        container.update(items)
        return
    base = dict_class(container)
    for key in deleted:
        base.pop(container, key, None)
    for key, item in items.items():
        base.__setitem__(container, key, item)


def _write_all_items(container: Any, items: Mapping[Any, Any], deleted: tuple[Any, ...]) -> None:
    dict_class(container).clear(container)
    write_items(container, items)


def _write_attributes(container: Any, items: Mapping[str, Any], deleted: tuple[str, ...]) -> None:
    setter: Any = type if isinstance(container, type) else object
    for name in deleted:
        if hasattr(container, name):
            setter.__delattr__(container, name)
    for name, item in items.items():
        setter.__setattr__(container, name, item)


def _write_deque(container: Any, items: Any, deleted: tuple[Any, ...]) -> None:
    container.clear()
    container.extend(items)


def _write_set(container: Any, changes: Any, deleted: tuple[Any, ...]) -> None:
    removed, added = changes
    set.difference_update(container, removed)
    set.update(container, added)


WRITERS: dict[str, Callable[[Any, Any, tuple[Any, ...]], None]] = {
    "append": lambda container, items, deleted: type(container).extend(container, items),
    "attribute": _write_attributes,
    "call": lambda container, call, deleted: call[0](*call[1], **call[2]),
    "cell": lambda cell, value, deleted: setattr(cell, "cell_contents", value),
    "deque": _write_deque,
    "dict": write_items,
    "list": lambda container, items, deleted: list.__setitem__(container, slice(None), items),
    "ordered dict": _write_all_items,
    "set": _write_set,
}
"""By the kind of an effect: ``write(container, value, deleted)``."""
