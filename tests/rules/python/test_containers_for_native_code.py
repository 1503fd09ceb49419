"""Containers of tensors stay the program's own objects where native code gets copies of them, with traced tensors."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import operator
import types
import warnings

import pytest
import torch

import dovetail
from tests.differential import same

Pair = collections.namedtuple("Pair", "a b")


class Items(list):
    """A list of the program's own class."""


class Marked(tuple):
    """Tuples with an attribute."""

    def __new__(cls, *items):
        made = super().__new__(cls, items)
        made.extra = items[0]
        return made


class Table(collections.OrderedDict):
    """A dictionary of the program's own class."""


def joined(x, items):
    ([items] + [[]])[0].append(x)
    ([items] * 2)[1].append(x + 1)
    ((items,) * 2)[0].append(x + 2)
    ((items,) + (1,))[0].append(x + 3)
    return x


def joined_in_place(x, items):
    other = [1]
    other += [items]
    other *= 2
    other[3].append(x)
    return operator.concat([items], other)[0] is items


def merged(x, items):
    ({1: items} | {})[1].append(x)
    dict.fromkeys([1, 2], items)[1].append(x)
    table = {}
    table.update({"k": [items]}, other=items)
    table["k"][0].append(x)
    table["other"].append(x + 1)
    table |= {"c": items}
    table["c"].append(2)
    return table.setdefault("z", items) is items, table.pop("z") is items


def chained(x, items):
    for each in itertools.chain([items], reversed([items]), itertools.repeat(items, 2)):
        each.append(x)
    functools.reduce(lambda left, right: right, [items, items]).append(x)
    return list(itertools.product([items], [1]))[0][0] is items


def put_in(x, items):
    other = [1]
    other.insert(0, items)
    other[1:1] = [items]
    other.extend([items])
    for each in other[:2]:
        each.append(x)
    queue = collections.deque([[x], items], maxlen=2)
    queue.appendleft(items)
    queue.extend([items])
    queue.rotate(1)
    queue[0].append(3)
    return [each is items for each in (*other, *queue)]


def in_named_tuples(x, items):
    pair = Pair(items, x)
    pair.a.append(x)
    made = Pair._make([items, [items]])
    made.b[0].append(x + 1)
    return pair.a is items, made.a is items, pair._replace(b=3).a is items, (pair + (1,))[0] is items, pair


def in_classes(x, items):
    own, marked, table = Items([items]), Marked(items, x), Table([("a", items)])
    own[0].append(x)
    own.append(items)
    own[1].append(1)
    marked.extra.append(x)
    table["a"].append(2)
    space = types.SimpleNamespace(a=items, b=[items])
    space.a.append(3)
    made = collections.defaultdict(list, {"a": items})
    made["a"].append(x)
    return marked[0] is items, space.b[0] is items, own[1] is items, table, dict(made)


def in_keys(x, items):
    def length(each):
        each.append(x)
        return len(each)

    longest = max([items, [x]], key=length)
    longest.append(5)
    first = sorted([items, [x]], key=length)[0]
    first.append(6)
    return longest is items, list(map(lambda each, n: each.append(n), [items], [7]))


def copied(x, items):
    copy.copy({"a": items})["a"].append(x)
    copy.copy(([items],))[0][0].append(2)
    return [items, x].copy()[0] is items


def returned(x, items):
    return (items,) * 2, [items] + [x], {1: items} | {2: x}, Pair(items, [items]), collections.deque([items])


def stacked(x, items):
    pair = Pair._make(items + [x])
    other = [items] + [[x]]
    other[0][0] = torch.stack([each for part in other for each in part])
    return torch.stack(pair), torch.stack(items[1:] + [x]), torch.cat([*items[1:], x])


def in_exceptions(x, items):
    error = ValueError([items], items, {"k": items})
    try:
        raise KeyError(error.args[2]["k"])
    except KeyError as other:
        other.args[0].append(x)
    error.args[0][0].append(2)
    return error.args[1] is items, error.args[2]["k"] is items


FUNCTIONS = [
    *(joined, joined_in_place, merged, chained, put_in, in_named_tuples, in_classes, in_keys, copied, returned),
    *(stacked, in_exceptions),
]


def shown(value, items):
    """A result with the places where the list of the call stands in it."""
    if value is items:
        return "items"
    if isinstance(value, dict):
        return [(key, shown(item, items)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [shown(item, items) for item in value]
    return value


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_program_sees_its_own_containers(function):
    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in range(3):
            x, items, others = torch.full((2,), float(call)), [torch.ones(2)], [torch.ones(2)]
            expected, found = function(x, items), compiled(x, others)
            same(shown(expected, items), shown(found, others))
            same(items, others)


def test_exceptions_over_a_graph_break_hold_the_programs_own_containers():
    def function(x, items):
        outer = [items]
        try:
            raise ValueError(outer, items)
        except ValueError as error:
            print(end="")
            error.args[0][0].append(x)
            return error.args[0] is outer, error.args[1] is items

    items, others = [torch.ones(2)], [torch.ones(2)]
    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(function(torch.zeros(2), items), compiled(torch.zeros(2), others))
    same(items, others)


def later(make):
    """A function that puts tensors into its list after it has made an iterator over it."""

    def function(x, items):
        iterator = make(x, items)
        items[0] = x * 3
        items.append(x * 2)
        items.append(x)
        return list(iterator)

    return function


LAZY = {
    "chain": lambda x, items: itertools.chain(items, [x]),
    "chain_of_all": lambda x, items: itertools.chain.from_iterable([items, [x]]),
    "islice": lambda x, items: itertools.islice(items, 2),
    "cycle": lambda x, items: itertools.islice(itertools.cycle(items), 5),
    "zip_longest": lambda x, items: itertools.zip_longest(items, [1, 2]),
    "pairwise": lambda x, items: itertools.pairwise(items),
    "accumulate": lambda x, items: itertools.accumulate(items),
    "takewhile": lambda x, items: itertools.takewhile(lambda each: True, items),
    "reversed": lambda x, items: reversed(items),
    "map": lambda x, items: map(lambda each: each + 1, items),
    "zip": lambda x, items: zip(items, items),
    "enumerate": lambda x, items: enumerate(items),
    "product": lambda x, items: itertools.product(items, [1, 2]),
}


@pytest.mark.parametrize("name", LAZY)
def test_an_iterator_sees_what_is_put_into_its_list_later(name):
    function = later(LAZY[name])
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for call in range(3):
        x, items, others = torch.full((2,), float(call)), [torch.ones(2)], [torch.ones(2)]
        same(function(x, items), compiled(x, others))
        same(items, others)


def test_lists_that_are_joined_later_are_seen():
    def function(x, items):
        outer = [items]
        iterator = itertools.chain.from_iterable(outer)
        items.append(x)
        outer.append([x * 2])
        return list(iterator)

    items, others = [torch.ones(2)], [torch.ones(2)]
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    same(function(torch.zeros(2), items), compiled(torch.zeros(2), others))
    same(items, others)


def test_tables_of_tensors_that_existed_before_and_others_are_not_joined():
    weight = torch.ones(2)
    known = {weight}

    def function(x):
        y = x * weight
        return len(known | {weight, y}), y

    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(function(torch.ones(2)), compiled(torch.ones(2)))
