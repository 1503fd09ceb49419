"""Whatever was read is guarded: change it, and the answer changes as eager's does."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import pytest
import torch

import dovetail

SCALE = 2.0
CONFIG: dict[str, Any] = {"k": 1.0}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.drop = torch.nn.Dropout(0.5)
        self.factor = 1.0
        self.parts = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
        self.extra = [1.0, 2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.fc(x))) * self.factor
        for part in self.parts:
            x = part(x)
        return x + sum(self.extra)


def agree(net: Any, compiled: Any, *args: Any) -> None:
    torch.manual_seed(0)
    state = {key: value.clone() for key, value in net.state_dict().items()} if isinstance(net, torch.nn.Module) else {}
    expected = net(*args)
    if state:
        net.load_state_dict(state)
    torch.manual_seed(0)
    actual = compiled(*args)
    assert torch.equal(expected, actual)
    assert expected.requires_grad == actual.requires_grad


def set_factor(net: Net) -> None:
    net.factor = 3.0


def change_list(net: Net) -> None:
    net.extra.append(5.0)


def change_item(net: Net) -> None:
    net.extra[0] = 9.0


def add_module(net: Net) -> None:
    net.parts.append(torch.nn.Linear(3, 3))


def replace_parameter(net: Net) -> None:
    net.fc.weight = torch.nn.Parameter(torch.ones(3, 3))


def freeze(net: Net) -> None:
    for parameter in net.parameters():
        parameter.requires_grad_(False)


def add_hook(net: Net) -> None:
    net.fc.register_forward_hook(lambda module, args, out: out * 2)


def patch_forward(net: Net) -> None:
    net.fc.forward = types.MethodType(lambda self, x: x * 7, net.fc)  # type: ignore[method-assign]


def change_rate(net: Net) -> None:
    net.drop.p = 0.1


def to_double(net: Net) -> None:
    net.fc.weight.data = net.fc.weight.data * 2


CHANGES = [
    lambda net: net.eval(),
    set_factor,
    change_list,
    change_item,
    add_module,
    replace_parameter,
    freeze,
    add_hook,
    patch_forward,
    change_rate,
    to_double,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_module_state_is_guarded(change: Any) -> None:
    net = Net()
    compiled = dovetail.compile(net, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    agree(net, compiled, x)
    agree(net, compiled, x)
    change(net)
    agree(net, compiled, x)
    agree(net, compiled, x)


def test_globals_closures_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    amount = 1.0
    box = [2.0]

    def f(x: torch.Tensor, bias: float = 1.0) -> torch.Tensor:
        return x * SCALE + amount + box[0] + CONFIG["k"] + bias

    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    x = torch.ones(2)
    agree(f, compiled, x)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    agree(f, compiled, x)
    amount = 10.0
    agree(f, compiled, x)
    box[0] = 3.0
    agree(f, compiled, x)
    monkeypatch.setitem(CONFIG, "k", 4.0)
    agree(f, compiled, x)
    f.__defaults__ = (100.0,)
    agree(f, compiled, x)
    assert len(dovetail.compile.__module__) > 0


def test_tensor_properties() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0] + x.stride(0) if x.dtype == torch.float32 else x * 0.5

    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    for x in (
        torch.ones(3, 2),
        torch.ones(4, 2),
        torch.ones(1, 2),
        torch.ones(0, 2),
        torch.ones(2, 3).t(),
        torch.ones(3, 2, dtype=torch.float64),
        torch.ones(3, 2, requires_grad=True),
    ):
        agree(f, compiled, x)


def test_ambient_state() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ x) + torch.zeros(2, 2)

    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    x = torch.ones(2, 2, requires_grad=True)
    agree(f, compiled, x)
    with torch.no_grad():
        agree(f, compiled, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(f, compiled, x)
    torch.set_default_dtype(torch.float64)
    try:
        agree(f, compiled, x)
    finally:
        torch.set_default_dtype(torch.float32)
    agree(f, compiled, x)


def test_explain_names_the_guard_and_the_line() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    compiled = dovetail.compile(f, backend="aten")
    compiled(torch.ones(8))
    text = str(dovetail.explain(compiled)(torch.ones(16)))
    assert "8" in text and "16" in text and "test_guards.py" in text


def test_state_change_is_replayed() -> None:
    class Counter:
        n = 0

    counter = Counter()
    log: list[int] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        counter.n += 1
        log.append(counter.n)
        return x * counter.n

    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    results = [compiled(torch.ones(1)).item() for _ in range(3)]
    assert results == [1.0, 2.0, 3.0]
    assert log == [1, 2, 3]
    assert counter.n == 3


def test_break_falls_back_with_one_warning() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x

    compiled = dovetail.compile(f, backend="aten")
    with pytest.warns(dovetail.errors.EagerFallbackWarning, match=r"test_guards\.py"):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert compiled(-torch.ones(2)).tolist() == [-1.0, -1.0]
    with pytest.raises(dovetail.errors.GraphBreakError, match="torch.where"):
        dovetail.compile(f, backend="aten", fullgraph=True)(torch.ones(2))


def test_the_users_own_error_comes_through() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        dovetail.compile(f, backend="aten", fullgraph=True)(torch.ones(2))


def test_class_attributes_are_guarded() -> None:
    class Base:
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Thing(Base):
        k = 2.0

        @property
        def p(self) -> float:
            return 3.0

        @staticmethod
        def s(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @classmethod
        def c(cls, x: torch.Tensor) -> torch.Tensor:
            return x * cls.k

        def method(self, x: torch.Tensor) -> torch.Tensor:
            return super().method(x) * 2

    thing = Thing()

    def f(x: torch.Tensor) -> torch.Tensor:
        return thing.method(thing.c(thing.s(x * thing.k))) * thing.p + Thing.s(x)

    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    x = torch.ones(2)
    agree(f, compiled, x)
    for owner, name, value in (
        (Thing, "k", 5.0),
        (Thing, "p", property(lambda self: 11.0)),
        (Thing, "s", staticmethod(lambda x: x * 7)),
        (Thing, "c", classmethod(lambda cls, x: x * 13)),
        (Base, "method", lambda self, x: x - 4),
        (Thing, "method", lambda self, x: x * 0.5),
    ):
        setattr(owner, name, value)
        agree(f, compiled, x)
        agree(f, compiled, x)
    assert len(compiled.entries) == 7


def test_the_entry_of_the_last_hit_is_asked_first() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.dtype is torch.float32 else x * 3

    single, double = torch.ones(2), torch.ones(2, dtype=torch.float64)
    compiled = dovetail.compile(f, backend="aten", fullgraph=True)
    for x in (single, double, single, single):
        assert torch.equal(compiled(x), f(x))
    assert [entry.checker.guards.tensors[0].facts.dtype for entry in compiled.entries] == [torch.float32, torch.float64]


def test_an_eager_entry_is_never_asked_first() -> None:
    def f(x: torch.Tensor, number: int) -> torch.Tensor:
        if number:
            x = torch.nn.functional.relu(x)
            x.resize_(1)  # not captured
        return x * 2

    compiled = dovetail.compile(f, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (0, 1, 0, 1, 1):
            assert torch.equal(compiled(torch.ones(2), number), f(torch.ones(2), number))
    runs = [entry.run is None for entry in compiled.entries]
    assert runs == sorted(runs)


def test_at_the_limit_an_error_if_asked_for() -> None:
    compiled = dovetail.compile(lambda x, k: x * k, backend="aten", recompile_limit=1, at_recompile_limit="error")
    x = torch.ones(1)
    assert compiled(x, True).item() == 1
    for _ in range(2):
        with pytest.raises(dovetail.errors.RecompileLimitError, match="was True, is False"):
            compiled(x, False)
    assert compiled(x, True).item() == 1


def test_the_sentence_for_a_recompile_names_value_and_line() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.view(8, -1)

    compiled = dovetail.compile(f, backend="aten", dynamic=False)
    for x in (torch.ones(8, 2), torch.ones(16, 2)):
        compiled(x)
        compiled(x)
    (event,) = [str(event) for event in dovetail.events_of(compiled).events if event.name == "recompile"]
    assert "`x.shape[0]` was 8, is 16; needed at " in event and "test_guards.py" in event and "x.view(8, -1)" in event


def test_settings_of_a_context_manager_made_before_are_guarded() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)
            self.precision = torch.autocast("cpu", dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.precision:
                return self.inner(x)

    model, x = Model(), torch.randn(2, 3)
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    for name, value in (("fast_dtype", torch.bfloat16), ("fast_dtype", torch.float16), ("_enabled", False)):
        setattr(model.precision, name, value)
        for _ in range(2):
            expected, actual = model(x), compiled(x)
            assert expected.dtype == actual.dtype and torch.equal(expected, actual)
    assert len(compiled.compiled_call.entries) == 3


def test_objects_that_native_code_calls_are_interpreted() -> None:
    class Scale:
        def __init__(self) -> None:
            self.factor = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

        def both(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y * self.factor

    scale = Scale()
    compiled = dovetail.compile(
        lambda xs: [*map(scale, xs), functools.reduce(scale.both, xs), functools.partial(scale)(xs[0])],
        backend="aten",
        fullgraph=True,
    )
    for factor in (2.0, 3.0):
        scale.factor = factor
        first, second, folded, applied = compiled([torch.ones(2), torch.ones(2)])
        for value, expected in ((first, factor), (second, factor), (folded, 1 + factor), (applied, factor)):
            assert torch.equal(value, torch.full((2,), expected))


class _DocumentedProperty(property):
    """A property that is more than its base class."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return super().__get__(instance, owner)


class _HasDocumented:
    scale = 2.0

    @_DocumentedProperty
    def factor(self) -> float:
        return self.scale


def test_a_property_of_a_class_of_its_own() -> None:
    holder = _HasDocumented()

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * holder.factor

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.ones(2)
    agree(program, compiled, x)
    _HasDocumented.scale = 3.0
    agree(program, compiled, x)
    _HasDocumented.factor = _DocumentedProperty(lambda self: 5.0)  # type: ignore[method-assign]
    agree(program, compiled, x)
