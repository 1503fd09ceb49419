"""Names that come to lead to one object, or no longer do."""

from __future__ import annotations

import pytest

from tests.footguns.test_fuzz_finds import check

BODIES = {
    "compared": "return x * 2, other is thing, other is not thing",
    "written": "thing.count = 1; other.count = 2; return x * thing.count",
    "deleted": "thing.count = 1; del other.count; return x, hasattr(thing, 'count')",
    "lists": "numbers.append(1); tags.append(2); return x, len(numbers), numbers[:3]",
    "dictionaries": "table['a'] = 1; counts['a'] = 2; return x * table['a']",
    "after_a_break": "thing.scale = min(x.sum().item(), 3); return x, other is thing",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_two_objects_become_one_and_two_again(body: str) -> None:
    check(f"""
class Item:
    def __init__(self):
        self.count = 0
first, second = Item(), Item()
one_list, two_list, one_table, two_table = [], [], {{}}, {{}}
def function(x):
    {body}
def reset(first_other, first_tags, first_counts):
    global thing, other, numbers, tags, table, counts
    first.count = second.count = 0
    thing, other = first, first_other
    numbers, tags, table, counts = one_list, first_tags, one_table, first_counts
def call_0(run):
    reset(second, two_list, two_table)
    return run(torch.ones(2))
def call_1(run):
    reset(first, one_list, one_table)
    return run(torch.ones(2))
def call_2(run):
    reset(second, two_list, two_table)
    return run(torch.ones(2))
""")


COMPARISONS = {
    "equal": "other == thing, other != thing, (other, 1) == (thing, 1), [[other]] == [[thing]], {1: other} == {1: thing}",
    "list": "other in items, items.count(other), tuple(items).count(other), place(items, other), place((thing,), other)",
    "remove": "len(without(items, other))",
    "look_up": "table.get(other), table.get((other, 1)), other in table, found(table, other)",
    "set": "other in bag, len(bag - {other}), len(bag.union([other])), other in (bag | {1})",
    "new_set": "len({other, thing}), len({o for o in (other, thing)}), len(set([other, thing])), len(added(thing, other))",
    "new_dictionary": "len({other: 1, thing: 2}), len({o: 1 for o in (other, thing)}), len(dict.fromkeys([other, thing]))",
    "frozen": "frozenset([other]) == frozenset([thing]), len(dict([(other, 1), (thing, 2)]))",
    "standard_library": "sorted(Counter([other, thing]).values()), [len(list(g)) for _, g in groupby([other, thing])]",
    "hash": "hash(other) == hash(thing), hash((other, 1)) == hash((thing, 1))",
}
CLASSES = {
    "plain": """class Item:
    def __init__(self, value): self.value = value
    def __repr__(self): return "Item" + str(self.value)""",
    "dataclass": "@dataclass(unsafe_hash=True)\nclass Item:\n    value: int",
    "slots": "@dataclass(unsafe_hash=True, slots=True)\nclass Item:\n    value: int",
    "own_methods": """class Item:
    def __init__(self, value): self.value = value
    def __eq__(self, item): return isinstance(item, Item) and self.value == item.value
    def __hash__(self): return hash(self.value)
    def __repr__(self): return "Item" + str(self.value)""",
}


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("asked", COMPARISONS.values(), ids=COMPARISONS)
@pytest.mark.sampled(4)
def test_objects_are_compared_anew(asked: str, kind: str) -> None:
    check(f"""
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
{kind}
def place(items, item):
    try:
        return items.index(item)
    except ValueError:
        return None
def without(items, item):
    items = list(items)
    if item in items:
        items.remove(item)
    return items
def found(table, key):
    try:
        return table[key]
    except KeyError:
        return None
def added(one, two):
    items = set()
    items.add(one)
    items.add(two)
    return items
thing, second = Item(1), Item(2)
def program(items, table, bag):
    def function(x):
        return x * 2, {asked}
    return function
function = program([thing], {{thing: 5, (thing, 1): 6}}, {{thing}})
def call_0(run):
    global other
    other = second
    return run(torch.ones(2))
def call_1(run):
    global other
    other = thing
    return run(torch.ones(2))
def call_2(run):
    global other
    other, second.value = second, 1
    return run(torch.ones(2))
""")


@pytest.mark.parametrize(
    "search",
    ["[1, 2].index(3)", "(1, 2).index(3)", "[1].remove(3)", "[1, 2, 1].index(1, 1)", "[1, 2, 1, 1].index(1, -2, 3)"],
)
def test_a_search_ends_as_in_python(search: str) -> None:
    check(f"""
def function(x):
    return x * 2, {search}
def call_0(run):
    return run(torch.ones(2))
""")
