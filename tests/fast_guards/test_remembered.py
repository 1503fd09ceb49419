"""A check that remembers the last hit says what the full check says, whatever is changed in between."""

from __future__ import annotations

import collections
import copy
import gc
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dovetail
from dovetail.errors import GraphBreakError
from dovetail.fast_guards.remembered import Remembering
from dovetail.guards import Checker, compile_checker
from dovetail.reports.explanation import compiled_function
from dovetail.torch_private import guard_managers as private_guard_managers

pytestmark = pytest.mark.skipif(
    not private_guard_managers.sees_changed_dictionaries(),
    reason="this torch or Python cannot tell changed dictionaries",
)

RATE = 0.5
TABLE = {"a": 1.0, "b": 2.0}


class Config:
    """Attributes behind a ``__getattribute__`` of its own, and a slot's worth of class state."""

    kind = "plain"

    def __init__(self) -> None:
        self.scale = 2.0
        self.names = {"first": 1.0, "second": 2.0}
        self.sizes = (3, [4.0])

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Slotted:
    __slots__ = ("amount",)

    def __init__(self) -> None:
        self.amount = 1.0


class Part(torch.nn.Module):
    gain = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.fc = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.norm(self.fc(x))) + self.shift

    def mix(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return x * self.gain * by * self.config.scale


def make_model() -> Any:
    """A fresh class each time, because some changes are made to it."""
    amount = 3.0
    config = Config()

    class Fresh(Part):
        gain = 1.5

        def mix(self, x: torch.Tensor, by: float = 1.25) -> torch.Tensor:
            return super().mix(x, by) + amount

        @staticmethod
        def shrink(x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

    class Model(torch.nn.Module):
        weight_of = {"x": 1.0}

        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.parts = torch.nn.ModuleList([Fresh(config), Fresh(config)])
            self.hidden = [torch.nn.Linear(3, 3)]
            self.head = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
            self.head[0].weight = self.parts[0].fc.weight
            self.options = collections.OrderedDict(a=1.0, b=2.0)
            self.slotted = Slotted()
            self.constants = [1.0, 2.0]
            self.maybe = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part.shrink(part(x))
            for layer in self.hidden:
                x = layer(x)
            x = self.head(x) * RATE * TABLE["a"]
            for key, value in self.options.items():
                x = x * value if key == "a" else x + value
            for value in self.config.names.values():
                x = x - value
            if self.maybe is not None:
                x = x * 100
            return (x + self.slotted.amount * self.weight_of["x"]) * sum(self.constants) + self.config.sizes[1][0]

    return Model()


def on_class(model: Any) -> Any:
    return type(model.parts[0])


def set_cell(function: Any, name: str, value: Any) -> None:
    function.__closure__[function.__code__.co_freevars.index(name)].cell_contents = value


def reclass(model: Any) -> None:
    model.parts[1].__class__ = type("Other", (type(model.parts[1]),), {"gain": 9.0})


def new_dict(model: Any) -> None:
    model.parts[1].__dict__ = {**model.parts[1].__dict__, "gain": 9.0}


def own_method(model: Any) -> None:
    model.parts[1].mix = types.MethodType(lambda self, x: x * 11, model.parts[1])


def tell_about(module: Any, args: Any) -> None:
    """A hook."""


CHANGES: dict[str, Callable[[Any], Any]] = {
    "training flag": lambda m: m.parts[0].norm.eval(),
    "training flag of all": lambda m: m.eval(),
    "attribute of the root": lambda m: setattr(m, "maybe", 1),
    "attribute by __dict__": lambda m: m.__dict__.update(maybe=1),
    "attribute of a nested object": lambda m: setattr(m.config, "scale", 4.0),
    "object replaced": lambda m: setattr(m.parts[0], "config", Config()),
    "instance attribute shadows the class": lambda m: setattr(m.parts[0], "gain", 7.0),
    "class attribute": lambda m: setattr(on_class(m), "gain", 8.0),
    "class attribute gone": lambda m: delattr(on_class(m), "gain"),
    "method on the class": lambda m: setattr(on_class(m), "mix", lambda self, x: x),
    "static method on the class": lambda m: setattr(on_class(m), "shrink", staticmethod(lambda x: x)),
    "plain function instead of static method": lambda m: setattr(on_class(m), "shrink", lambda self, x: x),
    "property instead of a constant": lambda m: setattr(on_class(m), "gain", property(lambda self: 3.0)),
    "method on the instance": own_method,
    "code of a method": lambda m: setattr(Part.mix, "__code__", (lambda self, x, by=1.0: x * by).__code__),
    "default of a method": lambda m: setattr(on_class(m).mix, "__defaults__", (3.0,)),
    "closure cell": lambda m: set_cell(on_class(m).mix, "amount", 4.0),
    "dictionary item": lambda m: m.config.names.update(first=5.0),
    "dictionary order": lambda m: m.config.names.update(first=m.config.names.pop("first")),
    "dictionary key new": lambda m: m.config.names.update(third=5.0),
    "ordered dictionary order": lambda m: m.options.move_to_end("a"),
    "ordered dictionary item": lambda m: m.options.update(b=9.0),
    "list item": lambda m: m.constants.__setitem__(0, 5.0),
    "list length": lambda m: m.constants.append(5.0),
    "list inside a tuple": lambda m: m.config.sizes[1].__setitem__(0, 5.0),
    "slot": lambda m: setattr(m.slotted, "amount", 5.0),
    "property instead of a slot": lambda m: setattr(Slotted, "amount", property(lambda self: 9.0)),
    "slot's object replaced": lambda m: setattr(m, "slotted", Slotted()),
    "dictionary on the class": lambda m: type(m).weight_of.update(x=3.0),
    "parameter replaced": lambda m: setattr(m.parts[1].fc, "weight", torch.nn.Parameter(torch.ones(3, 3))),
    "parameter replaced in the table": lambda m: m.head[0]._parameters.update(bias=torch.nn.Parameter(torch.ones(3))),
    "parameter untied": lambda m: setattr(m.head[0], "weight", torch.nn.Parameter(torch.ones(3, 3))),
    "parameter becomes None": lambda m: setattr(m.head[0], "bias", None),
    "parameter of another size": lambda m: setattr(m.parts[1].fc, "bias", torch.nn.Parameter(torch.ones(1))),
    "parameter frozen": lambda m: m.parts[0].fc.weight.requires_grad_(False),
    "parameter's data of another type": lambda m: setattr(m.head[0].bias, "data", torch.ones(3, dtype=torch.float64)),
    "parameter's strides": lambda m: setattr(m.parts[1].fc.weight, "data", torch.ones(3, 3).t()),
    "buffer replaced": lambda m: setattr(m.parts[1], "shift", torch.zeros(3)),
    "buffer of another type": lambda m: setattr(m.parts[1], "shift", torch.zeros(3, dtype=torch.float64)),
    "hook": lambda m: m.parts[0].fc.register_forward_hook(lambda module, args, out: out * 2),
    "hook before": lambda m: m.head.register_forward_pre_hook(tell_about),
    "hook on the root": lambda m: m.register_forward_pre_hook(tell_about),
    "hook for the backward": lambda m: m.parts[1].register_full_backward_hook(lambda module, into, out: None),
    "submodule replaced": lambda m: setattr(m.parts[0], "fc", torch.nn.Linear(3, 3, bias=False)),
    "submodule replaced by another class": lambda m: m.parts.__setitem__(0, torch.nn.Identity()),
    "submodule added": lambda m: m.head.append(torch.nn.ReLU()),
    "submodule in a list replaced": lambda m: m.hidden.__setitem__(0, torch.nn.Linear(3, 3, bias=False)),
    "submodule in a list changed": lambda m: setattr(m.hidden[0], "bias", None),
    "submodules in another order": lambda m: m.head._modules.update({"0": m.head._modules.pop("0")}),
    "forward on the instance": lambda m: setattr(m.head, "forward", lambda x: x),
    "type of a submodule": reclass,
    "dictionary of a submodule": new_dict,
    "global": lambda m: globals().update(RATE=0.75),
    "global dictionary": lambda m: TABLE.update(a=3.0),
    "builtin shadowed": lambda m: globals().update(sum=lambda values: 1.0),
}


#: The changes that give the graph another tensor of the same kind; the entry may still be used after no other one.
OTHER_TENSORS = {"parameter replaced", "parameter replaced in the table", "buffer replaced", "slot's object replaced"}
MIX = Part.mix.__code__
AMOUNT = Slotted.__dict__["amount"]


def restore() -> None:
    """Undo the changes to what models share."""
    globals().update(RATE=0.5)
    globals().pop("sum", None)
    TABLE.update(a=1.0, b=2.0)
    Part.mix.__code__ = MIX
    Slotted.amount = AMOUNT


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    restore()


def is_remembering(checker: Checker) -> bool:
    return isinstance(checker.check, types.FunctionType) and "again" in str(checker.check.__code__.co_names)


def warm(compiled: Any, *args: Any) -> Checker:
    """Call until the newest entry's check remembers."""
    checker: Checker
    for _ in range(8):
        compiled(*args)
        checker = compiled_function(compiled).entries[0].checker
        if is_remembering(checker):
            return checker
    raise AssertionError("nothing was remembered")


def full_check(checker: Checker) -> Any:
    """The check of the same guards that remembers nothing."""
    check: Any = checker.check
    while isinstance(check, types.FunctionType):
        check = next((value for name, value in check.__globals__.items() if name.startswith("again_")), None)
        if check is None:
            return checker.check
    assert isinstance(check.__self__, Remembering)
    return check.__self__._full


def same_answer(checker: Checker, full: Any, model: Any, args: tuple[Any, ...]) -> bool:
    """Whether both checks agree, on the tensors too; gives whether it is a hit."""
    expected, actual = full(model, args, {}), checker.check(model, args, {})
    assert (expected is None) == (actual is None), checker.explain(model, args, {})
    if expected is not None:
        assert actual is not None and len(actual) == len(expected)
        assert all(one is other for one, other in zip(expected, actual, strict=True))
    return expected is not None


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sampled(10)
def test_every_change_is_seen(name: str) -> None:
    model = make_model()
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    checker = warm(compiled, x)
    full = full_check(checker)
    assert same_answer(checker, full, model, (x,))
    CHANGES[name](model)
    hit = same_answer(checker, full, model, (x,))
    assert hit == (not checker.explain(model, (x,), {})) == (name in OTHER_TENSORS)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        expected = model(x)
    except Exception as error:  # noqa: BLE001  (whatever eager raises)
        with pytest.raises(type(error)):
            compiled(x)
        return
    model.load_state_dict(state)
    try:
        actual = compiled(x)
    except GraphBreakError:
        return  # refused in words
    assert torch.equal(expected, actual) and expected.requires_grad == actual.requires_grad


@settings(max_examples=6, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(sorted(CHANGES)), st.none()), min_size=1, max_size=8))
def test_changes_one_after_the_other(names: list[str | None]) -> None:
    model = make_model()
    twin = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    checker = warm(twin, x)
    full = full_check(checker)
    try:
        for name in names:
            if name is not None:
                try:
                    CHANGES[name](model)
                except (AttributeError, TypeError, KeyError, IndexError, ValueError):
                    continue  # an earlier change has taken away what this one changes
            for _ in range(3):
                same_answer(checker, full, model, (x,))
    finally:
        restore()


def test_a_change_that_is_undone_is_a_hit_again() -> None:
    model = make_model()
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    checker = warm(compiled, x)
    model.config.scale = 4.0
    assert checker.check(model, (x,), {}) is None
    model.config.scale = 2.0
    for _ in range(8):
        assert checker.check(model, (x,), {}) is not None
    assert is_remembering(checker)


def test_an_attribute_that_changes_at_every_call_is_left_out() -> None:
    model = make_model()
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    checker = warm(compiled, x)
    for number in range(600):
        model.step_number = number
        assert checker.check(model, (x,), {}) is not None
    assert is_remembering(checker)
    remembered = checker.check
    for number in range(20):
        model.step_number = -number
        assert checker.check(model, (x,), {}) is not None
    assert checker.check is remembered
    model.maybe = 1
    assert checker.check(model, (x,), {}) is None
    model.maybe = None
    model.parts[0].fc.bias = None
    assert checker.check(model, (x,), {}) is None


def test_an_entry_that_fits_each_second_call_is_not_remembered_anew_each_time() -> None:
    model = make_model()
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    checker = warm(compiled, x)
    made = [checker.check]
    for number in range(200):
        model.maybe = number % 2 or None
        assert (checker.check(model, (x,), {}) is None) == bool(number % 2)
        if is_remembering(checker) and checker.check is not made[-1]:
            made.append(checker.check)
    assert len(made) < 10


def test_two_models_for_one_entry() -> None:
    def f(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x) + 1  # type: ignore[no-any-return]

    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    models = [torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)]) for _ in range(2)]
    x = torch.randn(4, 3)
    warm(compiled, models[0], x)
    for number in range(60):
        model = models[number % 2]
        assert torch.equal(compiled(model, x), f(model, x))
    assert len(compiled.entries) == 1
    models[1][0].bias = None
    for model in models:
        assert torch.equal(compiled(model, x), f(model, x))


def test_a_model_in_an_argument_is_remembered_and_not_kept() -> None:
    def f(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x) + 1  # type: ignore[no-any-return]

    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    warm(compiled, model, torch.randn(4, 3))
    seen = [weakref.ref(model), weakref.ref(model[0]), weakref.ref(model[1].weight)]
    del model
    gc.collect()
    assert [one() for one in seen] == [None, None, None]


def test_objects_that_each_call_makes_anew_are_not_remembered_each_time() -> None:
    def f(models: Any, x: torch.Tensor) -> torch.Tensor:
        return models.first(x) + models.second(x)  # type: ignore[no-any-return]

    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    parts = [torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)]) for _ in range(2)]
    x = torch.randn(4, 3)

    def models() -> Any:
        return types.SimpleNamespace(first=copy.deepcopy(parts[0]), second=parts[1])

    compiled(models(), x)
    checker = compiled.entries[0].checker
    made = 0
    for _ in range(100):
        given = models()
        assert torch.equal(compiled(given, x), f(given, x))
        made += is_remembering(checker)
        del given
    assert len(compiled.entries) == 1 and 0 < made < 15


def test_a_replaced_parameter_is_let_go_at_the_next_call() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    with torch.no_grad():
        warm(compiled, x)
        gone = weakref.ref(model[0].weight)
        model[0].weight = torch.nn.Parameter(torch.ones(3, 3))
        assert torch.equal(compiled(x), model(x))
    gc.collect()
    assert gone() is None


def test_reads_that_raise_are_misses() -> None:
    class Liar:
        """Neither equal nor true nor of its own class."""

        __class__ = int  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise KeyboardInterrupt

        def __bool__(self) -> bool:
            raise KeyboardInterrupt

        __hash__ = None  # type: ignore[assignment]

    for name in ("maybe", "config", "constants", "options", "slotted", "_modules", "_parameters", "_forward_hooks"):
        model = make_model()
        compiled = dovetail.compile(model, backend="aten", fullgraph=True)
        x = torch.randn(4, 3)
        checker = warm(compiled, x)
        full = full_check(checker)
        if name == "_forward_hooks":
            del model.head[0].__dict__[name]
        else:
            model.__dict__[name] = Liar()
        assert same_answer(checker, full, model, (x,)) == (name == "_parameters"), name  # the root has none to read


def test_threads_that_change_and_call() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(8)])
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    with torch.no_grad():
        checker = warm(compiled, x)
    full = full_check(checker)
    stop = time.monotonic() + 1.0
    problems: list[str] = []

    def change() -> None:
        number = 0
        while time.monotonic() < stop:
            number += 1
            layer = torch.nn.Linear(3, 3)
            model._modules[str(number % 8)] = layer
            with torch.no_grad():
                tensors = checker.check(model, (x,), {})
                expected = full(model, (x,), {})
            # No other thread writes: what was just written is what both checks must have found.
            if tensors is None or expected is None or any(a is not b for a, b in zip(tensors, expected, strict=True)):
                problems.append("stale tensors")

    def call() -> None:
        while time.monotonic() < stop:
            with torch.no_grad():
                if checker.check(model, (x,), {}) is None:
                    problems.append("a miss")

    threads = [threading.Thread(target=change), *[threading.Thread(target=call) for _ in range(3)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_without_versions_the_full_check_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_guard_managers, "sees_changed_dictionaries", lambda: False)
    model = make_model()
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    for _ in range(5):
        compiled(x)
    checker = compiled_function(compiled).entries[0].checker
    assert not is_remembering(checker)
    assert compile_checker(checker.guards, checker.ambient).check(model, (x,), {}) is not None
    model.maybe = 1
    assert checker.check(model, (x,), {}) is None


GLOBAL_CHANGES = {
    "function": "helper = lambda x: x * 11",
    "constant": "FACTOR = 5.0",
    "class": "Base = Other",
    "hidden_builtin": "len = lambda x: 7",
    "own_attribute": "Child.own = 13.0",
    "inherited_attribute": "Base.inherited = 17.0",
    "nearer_attribute": "Middle.inherited = 19.0",
    "own_static_method": "Child.method = staticmethod(lambda x: x * 23)",
    "inherited_static_method": "Middle.deep = staticmethod(lambda x: x * 29)",
    "base": "Middle.__bases__ = (Other,)",
    "abstract": "Abstract.inherited = 31.0",
    "nearer_abstract": "Concrete.inherited = 37.0",
    "code": "helper.__code__ = (lambda x: x * 41).__code__",
    "unrelated": "unrelated = 1",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", GLOBAL_CHANGES.values(), ids=GLOBAL_CHANGES)
def test_every_change_of_a_global_or_a_class_is_seen(change: str) -> None:
    names = [f"name_{index}" for index in range(24)]
    namespace: dict[str, Any] = {"torch": torch, "__name__": "program"}
    exec(
        f"""
import abc
class Base:
    inherited = 2.0
    deep = staticmethod(lambda x: x * 3)
class Other:
    inherited = 4.0
    deep = staticmethod(lambda x: x * 7)
class Middle(Base): pass
class Child(Middle):
    own = 6.0
    method = staticmethod(lambda x: x * 8)
class Abstract(abc.ABC):
    inherited = 9.0
class Concrete(Abstract): pass
FACTOR = 10.0
helper = lambda x: x * 12
{"; ".join(f"{name} = {index}" for index, name in enumerate(names))}
def function(x):
    y = helper(x) * FACTOR + Base.inherited + len([x]) + {" + ".join(names)}
    y = y + Child.own + Child.inherited + Concrete.inherited
    return Child.method(y) + Child.deep(y)
""",
        namespace,
    )
    compiled = dovetail.compile(namespace["function"], backend="aten", fullgraph=True)
    x = torch.randn(3)
    checker = warm(compiled, x)
    assert is_remembering(checker)
    exec(change, namespace)
    for _ in range(3):
        assert torch.equal(compiled(x), namespace["function"](x))
    assert len(compiled_function(compiled).entries) == (1 if change.startswith("unrelated") else 2)


def test_a_global_that_changes_at_every_call_is_left_out() -> None:
    names = [f"name_{index}" for index in range(24)]
    namespace: dict[str, Any] = {"torch": torch, "__name__": "program", "step": 0}
    values = "; ".join(f"{name} = {index}" for index, name in enumerate(names))
    exec(f"{values}\ndef function(x):\n    return x + {' + '.join(names)}", namespace)
    compiled = dovetail.compile(namespace["function"], backend="aten", fullgraph=True)
    x = torch.randn(3)
    checker = warm(compiled, x)
    assert is_remembering(checker)
    for step in range(2000):
        namespace["step"] = step
        compiled(x)
    assert not is_remembering(checker)
    namespace[names[0]] = 100
    assert torch.equal(compiled(x), namespace["function"](x))


class _Cache:
    """What a program makes anew for each call."""

    def __init__(self, *sizes: int) -> None:
        self.layers = [f"layer {size}" for size in sizes]


def test_another_object_in_the_place_of_a_remembered_one_is_a_hit_where_it_is_alike() -> None:
    def f(model: Any, x: torch.Tensor, cache: _Cache) -> torch.Tensor:
        names = [name for name in cache.layers if name.startswith("layer")]
        return model(x) + len(names)  # type: ignore[no-any-return]

    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    remembered, changed = _Cache(*range(8)), _Cache(*range(8))
    warm(compiled, model, x, remembered)
    remembered.layers[0] = "of a call that is over"
    for cache in (changed, _Cache(*range(8))):
        assert torch.equal(compiled(model, x, cache), f(model, x, cache))
    assert len(compiled_function(compiled).entries) == 1
    changed.layers.append("one more")
    assert torch.equal(compiled(model, x, changed), f(model, x, changed))
