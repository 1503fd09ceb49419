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
