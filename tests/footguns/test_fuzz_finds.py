"""Programs that the fuzzer (``python -m tests.fuzz``) found to go wrong, made small: one test for each cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
import dovetail.errors
from tests.fuzz.runner import FALL_BACK, Outcome, run_program

HEAD = "import torch\nclass Thing: pass\nthing = Thing()\n"


def check(source: str) -> Outcome:
    outcome = run_program(HEAD + source)
    assert outcome.has_begun, "the program raises before its first call"
    assert not outcome.kind, outcome.failure
    assert outcome.category != FALL_BACK, outcome.reasons
    return outcome


def test_a_view_made_without_recording_takes_no_gradient() -> None:
    # It says that it requires a gradient, because its base does, but has no grad_fn: nothing flows through it.
    check("""
w = torch.ones(3, requires_grad=True)
def function(x):
    h = x * 2
    with torch.no_grad():
        return w[:2], h[0], h
def call_0(run): return run(torch.ones(3, requires_grad=True))
def call_1(run): return run(torch.ones(3, requires_grad=True))
""")


def test_such_a_view_returned_alone_takes_none_either() -> None:
    check("""
def function(x):
    h = x * 2
    with torch.no_grad():
        v = h[:2]
    return v, x * 3
def call_0(run): return run(torch.ones(3, requires_grad=True))
""")


def test_a_leaf_made_inside_is_a_leaf() -> None:
    check("""
def function(x):
    return torch.ones(3, requires_grad=True), x * 2
def call_0(run): return run(torch.ones(3, requires_grad=True))
""")


def test_a_leaf_made_inside_beside_what_comes_of_it_is_not_cut_off() -> None:
    outcome = run_program("""
import torch
def function(x):
    w = torch.ones(3, requires_grad=True)
    return w, w * x
def call_0(run): return run(torch.ones(3))
""")
    assert outcome.has_begun, "the program raises before its first call"
    assert not outcome.kind, outcome.failure


def test_a_write_of_the_value_that_was_there_is_a_write() -> None:
    check("""
thing.seen = 1
Thing.level = 1
table = {'a': 1}
def function(x):
    thing.seen = 1
    Thing.level = 1
    table['a'] = 1
    return x * 2
def call_0(run): return run(torch.ones(3))
def call_1(run):
    thing.seen, Thing.level, table['a'] = 2, 2, 2
    return run(torch.ones(3))
""")


def test_a_new_attribute_deleted_again_is_deleted_where_it_was_there_before() -> None:
    check("""
def function(x):
    thing.late = 1
    del thing.late
    return x * 2
def call_0(run): return run(torch.ones(3))
def call_1(run):
    thing.late, thing.other = 5, 6
    return run(torch.ones(3))
""")


def test_the_grad_mode_before_a_block_with_a_break_in_it_is_not_a_constant() -> None:
    check("""
w = torch.ones(3, requires_grad=True)
def function(x):
    with torch.set_grad_enabled(bool(x.sum() > 0)):
        number = x.sum().item()
    return w * number
def call_0(run):
    with torch.no_grad():
        return run(torch.ones(1))
def call_1(run): return run(torch.ones(1)), torch.is_grad_enabled()
""")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "hashed", ["{*numbers, v}", "{v}", "{v: 1}", "set([v])", "{n for n in numbers}", "dict([(v, 1)])"]
)
def test_a_number_that_changes_from_call_to_call_can_be_hashed(hashed: str) -> None:
    check(f"""
numbers = [1]
def function(x, n):
    v = numbers[0]
    try:
        seen = {hashed}
    except Exception:
        return x * 100
    return x * n, seen
def call_0(run): return run(torch.ones(2), 1)
def call_1(run):
    numbers[:] = [2]
    return run(torch.ones(2), 2)
def call_2(run):
    numbers[:] = [5]
    return run(torch.ones(2), 5)
""")


def test_a_refusal_of_ours_is_not_for_the_handlers_of_the_program() -> None:
    sparse = torch.eye(3).to_sparse()

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.mv(sparse, x)
        except Exception:
            return x * 100

    compiled = dovetail.compile(function, backend="aten")
    try:
        assert torch.equal(compiled(torch.ones(3)), torch.ones(3))
    except dovetail.errors.InputError as refusal:
        assert "sparse" in str(refusal).lower()


@pytest.mark.parametrize(
    "stops", ["any(bump() for i in numbers)", "all(not bump() for i in numbers)", "1 in (bump() for i in numbers)"]
)
def test_a_search_ends_at_the_first_hit(stops: str) -> None:
    check(f"""
numbers = [1, 2, 3]
count = 0
def bump():
    global count
    count += 1
    return count
def function(x):
    return x * 2, {stops}
def call_0(run): return run(torch.ones(2))
""")


def test_numbers_in_a_list_that_is_gone_through_are_guarded() -> None:
    check("""
numbers = [1]
def function(x):
    return x * 2, [number for number in numbers], numbers.index(numbers[0])
def call_0(run): return run(torch.ones(2))
def call_1(run):
    numbers[0] = 2
    return run(torch.ones(2))
def call_2(run):
    numbers[0] = 3
    return run(torch.ones(2))
""")


def test_a_view_of_a_leaf_is_written_to_under_no_grad() -> None:
    check("""
leaf = torch.ones(3, requires_grad=True)
def function(x):
    with torch.no_grad():
        x[0] += 2
        thing.view += 1
    return x * 2, thing.view * 3
def call_0(run):
    thing.view = leaf[:2]
    return run(torch.ones(3))
def call_1(run):
    thing.view = (leaf * 2)[:2]
    return run(torch.ones(3, requires_grad=True) * 2)
""")


def test_a_class_is_defined_after_a_break() -> None:
    check("""
def function(x):
    number = x.sum().item()
    class Local:
        amount = 2.0
        def value(self): return x * self.amount
    return Local().value() * number
def call_0(run): return run(torch.ones(2))
def call_1(run): return run(torch.ones(2) * 2)
""")


@pytest.mark.parametrize("taken", ["next(stream([x, x * 2]))", "[*stream([x, x * 2])][0]"])
def test_a_generator_dropped_inside_of_its_try_block_cleans_up_at_once(taken: str) -> None:
    check(f"""
log = []
def stream(values):
    try:
        for value in values:
            yield value
    finally:
        log.append("end")
def function(x):
    first = {taken}
    log.append("after")
    return first * 2
def call_0(run): return run(torch.ones(2))
def call_1(run): return run(torch.ones(2))
""")


@pytest.mark.parametrize(
    "called",
    [
        "list(map(net, [x, x]))",
        "list(map(thing, [x, x]))",
        "sorted([x, x], key=thing)",
        "functools.reduce(thing, [x, x])",
        "list(itertools.accumulate([x, x], thing))",
    ],
)
def test_objects_that_native_functions_call_are_interpreted(called: str) -> None:
    check(f"""
import functools, itertools
class Net(torch.nn.Module):
    seen = 0
    def forward(self, x):
        self.seen += 1
        return x * self.seen
class Counter:
    seen = 0
    def __call__(self, x, y=0):
        self.seen += 1
        return self.seen
net, thing = Net(), Counter()
def function(x):
    return x * 2, {called}
def call_0(run): return run(torch.ones(2))
def call_1(run): return run(torch.ones(2))
""")


def test_a_returned_view_is_written_to_with_a_gradient_later() -> None:
    check("""
square, weight = torch.ones(3, 3), torch.ones(3, requires_grad=True)
def function(x):
    thing.row = square[0]
    return x * 2
def call_0(run): return run(torch.ones(2))
def call_1(run):
    thing.row *= weight
    return square
""")


def test_an_error_of_an_operator_keeps_its_text_over_a_break() -> None:
    outcome = run_program(
        HEAD
        + """
thing.weight = torch.ones(3)
def function(x):
    try:
        thing.weight += x[None]
    finally:
        print("done")
def call_0(run): return run(torch.ones(3))
"""
    )
    assert outcome.has_begun, "the program raises before its first call"
    assert not outcome.kind, outcome.failure


@pytest.mark.parametrize(
    "write",
    [
        "thing.state.copy_(thing.state[0])",
        "thing.state[1:].add_(thing.state[:2])",
        "thing.state[:1].expand(3).mul_(2)",
        "x.add_(x.t())",
        "thing.state.add_(thing.state.flip(0))",
        "thing.state[1:].add_(thing.state[:1])",
        "x.add_(x.view(3, 3))",
    ],
)
def test_writes_to_memory_that_is_read_are_refused_as_in_eager(write: str) -> None:
    check(f"""
thing.state = torch.arange(3.0)
def function(x):
    try:
        {write}
    except RuntimeError as error:
        return x * 2, str(error)
    return x * 3, ""
def call_0(run): return run(torch.arange(9.0).reshape(3, 3))
def call_1(run): return run(torch.arange(9.0).reshape(3, 3))
""")


def test_a_generator_is_not_kept_alive_by_an_error_that_was_handled() -> None:
    check("""
import collections.abc
class Items(collections.abc.Sequence):
    def __len__(self): return 2
    def __getitem__(self, index):
        if index > 1:
            raise IndexError(index)
        return index
def function(x):
    for item in Items():
        if getattr(thing, "never_there", None) is None:
            break
    try:
        [{}["absent"] for _ in Items()]
    except KeyError:
        x = x + 1
    return x * 2, any(item == 0 for item in Items())
def call_0(run): return run(torch.ones(2))
""")


@pytest.mark.parametrize("start", ["0.5", "3"])
def test_a_number_that_changes_is_read_twice(start: str) -> None:
    check(f"""
factor = {start}
def function(x):
    global factor
    factor = factor + factor
    return x * factor * factor
def call_0(run): return run(torch.ones(2))
def call_1(run): return run(torch.ones(2))
def call_2(run): return run(torch.ones(2))
def call_3(run): return run(torch.ones(2))
""")


def test_a_view_made_under_no_grad_and_written_to_after_a_break() -> None:
    check("""
square = torch.randn(3, requires_grad=True)
def function(y):
    with torch.no_grad():
        square[0].mul_(y.sum().item())
    return bool(square.square().sum())
def call_0(run): return run(torch.randn(3))
def call_1(run): return run(torch.randn(3))
""")


def test_a_number_made_of_data_that_is_printed_inside_of_a_try_block() -> None:
    check("""
leaf = torch.ones(3)
def function(x):
    try:
        print(leaf.sum().item())
        thing.table["missing"]
    except Exception:
        pass
    return x * 2
thing.table = {}
def call_0(run): return run(torch.ones(2))
def call_1(run): return run(torch.ones(2))
""")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("test", ["factor < factor", "factor != factor", "factor == factor", "not factor <= factor"])
@pytest.mark.parametrize("start", ["square.sum().item()", "rate"])
def test_a_float_compared_with_itself(test: str, start: str) -> None:
    check(f"""
rate = 0.5
square = torch.ones(3)
weight = torch.nn.Parameter(torch.ones(3))
def function(x):
    factor = {start}
    if {test}:
        return square
    return x * weight
def call_0(run): return run(torch.ones(3))
def call_1(run):
    global rate
    rate = 0.25
    return run(torch.ones(3))
def call_2(run):
    global rate
    rate = float("nan")
    square[0] = float("nan")
    return run(torch.ones(3))
""")


@pytest.mark.parametrize("y", ["torch.nn.Parameter(torch.ones(2))", "torch.nn.Parameter()", "torch.ones(2)"])
def test_a_second_gradient_through_what_the_first_has_freed_in_part(y: str) -> None:
    source = f"""
leaf = torch.randn(3, requires_grad=True)
def function(y):
    part = y.sum()
    one = torch.autograd.grad(part + leaf.square().sum(), leaf)
    two = torch.autograd.grad(part + leaf.square().sum(), leaf)
    return one, two
def call_0(run): return run({y})
"""
    # Left to eager where a part is freed.
    outcome = run_program(HEAD + source)
    assert outcome.has_begun, "the program raises before its first call"
    assert not outcome.kind, outcome.failure


def test_a_detached_parameter_that_is_written_to_has_a_derivative_of_its_own() -> None:
    # Seed 10000597: in the memory of the weight, but not a view of it. Refused, and run by eager.
    outcome = run_program(
        HEAD
        + """
net = torch.nn.Linear(3, 1)
def function(x):
    last = net.weight.detach()
    last += net.weight.sigmoid()
    return last
def call_0(run): return run(torch.ones(3))
def call_1(run): return run(torch.ones(3))
"""
    )
    assert not outcome.kind, outcome.failure
    assert outcome.category == FALL_BACK and "a derivative of its own" in outcome.reasons[0]


def test_a_result_has_no_edge_to_the_one_that_it_replaces() -> None:
    # Seed 10019827: the old result was an input, and the new one's backward went on into the old one's.
    check("""
square, table = torch.randn(3, requires_grad=True), {}
def function(x):
    table.pop("last", None)
    table["last"] = square * x
def call_0(run): run(torch.ones(3))
def call_1(run):
    table["last"].sum().backward()
    run(torch.ones(3))
def call_2(run):
    table["last"].sum().backward()
    run(torch.ones(3))
""")


@pytest.mark.parametrize("make", [list, tuple, lambda one: [*one], lambda one: [0, *one]])
def test_a_list_made_of_an_object_asks_for_its_length_first(make: Any) -> None:
    class Items:
        def __init__(self) -> None:
            self.asked = 0

        def __iter__(self) -> Any:
            yield self.asked

        def __len__(self) -> Any:
            self.asked += 1
            return None if self.asked > 2 else 3

    for _ in range(3):
        ours, theirs = Items(), Items()
        x = torch.ones(2)
        compiled = dovetail.compile(lambda x, items=ours: x * sum(make(items)), backend="aten")
        assert torch.equal(compiled(x), x * sum(make(theirs)))
        assert ours.asked == theirs.asked


def test_errors_of_in_and_of_truth_have_their_own_text() -> None:
    check("""
class Things:
    def __iter__(self): return iter([torch.ones(3)])
things, said = Things(), []
def function(x):
    for container in (things, Thing):
        try:
            0 in container
        except Exception as error:
            said.append(str(error))
    try:
        if x: pass
    except RuntimeError as error:
        said.append(str(error))
    return x + 1
def call_0(run): run(torch.ones(3))
def call_1(run): run(torch.ones(0))
""")
