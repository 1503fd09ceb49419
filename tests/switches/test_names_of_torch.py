"""Public functions of ``torch.compiler`` and ``torch._dynamo``: each has its effect, breaks the graph, or says that it has none."""

from __future__ import annotations

import binascii
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.compiler
from torch import Tensor

import dovetail
from dovetail.errors import GraphBreakError, GraphBreakWarning
from dovetail.switches import settings

Program = Callable[[Tensor], Any]
COMPILER, DYNAMO = torch.compiler, torch._dynamo

#: What other tests of this folder hold, and tests/rules/torch/test_compiling.py, tests/frontend/sizes, tests/backends.
TESTED_ELSEWHERE = {
    *(
        "disable",
        "set_stance",
        "reset",
        "graph_break",
        "is_compiling",
        "is_dynamo_compiling",
        "cudagraph_mark_step_begin",
    ),
    *("mark_dynamic", "maybe_mark_dynamic", "mark_static", "register_backend", "list_backends", "config"),
}
#: They are about what torch.compile has made, or ask about it, and do nothing to a program.
OF_TORCH_ITSELF = {
    *("compile", "precompile", "PrecompileError", "load_compiled_function", "get_default_backend", "OptimizedModule"),
    *(
        "save_cache_artifacts",
        "load_cache_artifacts",
        "cudagraph_mark_warmup_incomplete",
        "set_enable_guard_collectives",
    ),
    *("export", "lookup_backend", "replay", "is_dynamo_disable_recursive", "reset_recompile_user_contexts"),
    *("set_recursion_limit", "bytecode_debugger", "allow_c_slot", "mark_static_address"),
}


def doubled(values: Tensor) -> Tensor:
    return values * 2


def called(inner: Any) -> Program:
    return lambda values: inner(values) + 1


def region(values: Tensor) -> Tensor:
    return values * 2


def under(name: str, **settings: Any) -> Program:
    decorate = getattr(DYNAMO, name)(**settings)
    return called(decorate(lambda values: values * 2))


#: A program for which the name has no effect; each gives its argument times two plus one.
IN_VAIN: dict[str, Callable[[], Program]] = {
    "allow_in_graph": lambda: called(COMPILER.allow_in_graph(lambda values: values * 2)),
    "nonstrict_trace": lambda: called(DYNAMO.nonstrict_trace(lambda values: values * 2)),
    "assume_constant_result": lambda: called(COMPILER.assume_constant_result(lambda values: values * 2)),
    "nested_compile_region": lambda: called(COMPILER.nested_compile_region(region)),
    "error_on_graph_break": lambda: under("error_on_graph_break", error_on_graph_break=True),
    "patch_dynamo_config": lambda: under("patch_dynamo_config", verbose=True),
    "dont_skip_tracing": lambda: under("dont_skip_tracing"),
    "disable_nested_graph_breaks": lambda: under("disable_nested_graph_breaks"),
    "override_cudagraphs": lambda: under("override_cudagraphs", fwd=False),
    "disallow_in_graph": lambda: called(doubled),
    "set_default_backend": lambda: called(doubled),
}
#: The name of a decorator that another one is made of.
SAID_AS = {"dont_skip_tracing": "patch_dynamo_config", "disable_nested_graph_breaks": "patch_dynamo_config"}
GUARD_FILTERS = [name for name in COMPILER.__all__ if name.endswith("_unsafe")]
#: Calls inside of a compiled function.
BREAKS: dict[str, Callable[[], Any]] = {
    "skip_frame": lambda: DYNAMO.skip_frame(),
    "step_unsupported": lambda: DYNAMO.step_unsupported(),
    "override_optimization_hint": lambda: DYNAMO.override_optimization_hint(3, 4),  # type: ignore[attr-defined]
}
#: What gives a function for another one, of ours here.
AROUND: dict[str, Callable[[Any], Any]] = {
    "run": lambda compiled: DYNAMO.run(compiled)(torch.ones(2)),
    "optimize": lambda compiled: DYNAMO.optimize("eager")(compiled)(torch.ones(2)),
    "optimize_assert": lambda compiled: DYNAMO.optimize_assert("eager")(compiled)(torch.ones(2)),
    "explain": lambda compiled: DYNAMO.explain(compiled)(torch.ones(2)) and compiled(torch.ones(2)),
}
HERE = {"is_exporting", "wrap_numpy", "substitute_in_graph", "forbid_in_graph"}


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(settings, "_told", set())
    with caplog.at_level(logging.WARNING, "dovetail"):
        yield


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dovetail"]


def test_each_name_is_known() -> None:
    known = {*TESTED_ELSEWHERE, *OF_TORCH_ITSELF, *IN_VAIN, *GUARD_FILTERS, *BREAKS, *AROUND, *HERE}
    assert {*COMPILER.__all__, *DYNAMO.__all__} <= known


@pytest.mark.parametrize("name", IN_VAIN)
def test_it_says_once_that_it_has_no_effect(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if not hasattr(COMPILER, name) and not hasattr(DYNAMO, name):
        pytest.skip(f"this torch has no {name}")
    program = IN_VAIN[name]()
    if name == "disallow_in_graph":
        DYNAMO.disallow_in_graph(torch.sub)
    if name == "set_default_backend":
        COMPILER.set_default_backend("aot_eager")
    try:
        for other in (program, lambda values: program(values) + 0):
            compiled = dovetail.compile(other, fullgraph=True, **({} if "backend" in name else {"backend": "aten"}))
            for _ in range(2):
                assert compiled(torch.ones(2)).tolist() == [3, 3]
    finally:
        if name == "disallow_in_graph":
            DYNAMO.allow_in_graph(torch.sub)
        if name == "set_default_backend":
            COMPILER.set_default_backend(None)
    (said,) = messages(caplog)
    assert said.split(" has no effect on dovetail.compile")[0].rsplit(".", 1)[1] == SAID_AS.get(name, name)


class Doubling:
    def __call__(self, values: Tensor) -> Tensor:
        return values * 2


class Box:
    def __init__(self, values: Tensor) -> None:
        self.values = values * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ("an object", "a class", "a builtin", "a method", "a module", "by its class"))
def test_whatever_is_allowed_in_graph_says_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Own(Box):
        pass

    class Module(torch.nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values * 2

    made, module = Doubling(), Module()
    marked, program = {
        "an object": (made, made),
        "a class": (Own, lambda values: Own(values).values),
        "a builtin": (binascii.crc32, lambda values: values * 2),
        "a method": (Module.forward, module),
        "a module": (module, module),
        "by its class": (Doubling.__call__, made),
    }[kind]
    COMPILER.allow_in_graph(marked)
    try:
        for _ in range(2):
            assert dovetail.compile(called(program), backend="aten")(torch.ones(2)).tolist() == [3, 3]
    finally:
        DYNAMO.trace_rules._allowed_callable_ids.remove(id(marked))
    (said,) = messages(caplog)
    assert said.startswith("torch.compiler.allow_in_graph has no effect")
    caplog.clear()
    dovetail.compile(called(doubled), backend="aten")(torch.ones(2))
    assert not messages(caplog)


#: Arguments of torch's ``set_stance``.
WISHES = (("skip_guard_eval_unsafe", True), ("force_backend", "aot_eager"), ("force_backend", lambda *_: 3))


@pytest.mark.parametrize(("wish", "value"), WISHES)
def test_what_a_stance_cannot_ask_for(wish: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    compiled = dovetail.compile(doubled, backend="aten")
    compiled(torch.ones(2))
    with COMPILER.set_stance("default", **{wish: value}):
        assert compiled(torch.ones(2)).tolist() == [2, 2] and len(compiled.entries) == 1
        assert compiled(torch.ones(1, 2)).tolist() == [[2, 2]] and len(compiled.entries) == 2
    assert compiled(torch.ones(1, 2)).tolist() == [[2, 2]] and len(compiled.entries) == 2
    (said,) = messages(caplog)
    assert said.startswith(f"torch.compiler.set_stance({wish}=...) has no effect")


def test_a_budget_of_memory_for_torchs_own_compiler(caplog: pytest.LogCaptureFixture) -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        dovetail.compile(called(doubled), backend="aten")(torch.ones(2))
    (said,) = messages(caplog)
    assert (
        said.startswith("torch._functorch.config.activation_memory_budget has no effect") and "memory_budget=" in said
    )


def test_nothing_is_said_to_a_program_without_wishes(caplog: pytest.LogCaptureFixture) -> None:
    dovetail.compile(called(doubled), backend="aten")(torch.ones(2))
    assert not messages(caplog)


def test_guards_are_never_left_out(caplog: pytest.LogCaptureFixture) -> None:
    scale = [2.0]
    for name in GUARD_FILTERS:
        compiled: Any = dovetail.compile(
            lambda values: values * scale[0],
            backend="aten",
            options={"guard_filter_fn": getattr(COMPILER, name)},  # noqa: B023
        )
        for scale[0] in (2.0, 3.0):
            assert compiled(torch.ones(1)).item() == scale[0]
    assert messages(caplog) == ["guard_filter_fn has no effect on dovetail.compile: no guard is ever left out"]


@pytest.mark.parametrize(
    "setting", ("torch._dynamo.config.skip_torchrec", "torch.compiler.config.force_disable_caches")
)
def test_any_other_setting(setting: str, caplog: pytest.LogCaptureFixture) -> None:
    module, name = setting.rsplit(".", 1)
    config = DYNAMO.config if module == "torch._dynamo.config" else COMPILER.config
    with config.patch(**{name: not getattr(config, name)}):
        for _ in range(2):
            dovetail.compile(lambda values: values * 2, backend="aten")(torch.ones(2))
    (said,) = messages(caplog)
    assert said.startswith(f"{setting} has no effect on dovetail.compile")


@pytest.mark.parametrize("name", BREAKS)
def test_it_breaks_the_graph(name: str) -> None:
    if not hasattr(DYNAMO, name):
        pytest.skip(f"this torch has no {name}")

    def program(values: Tensor) -> Tensor:
        values = values * 2
        BREAKS[name]()
        return values + 1

    with pytest.warns(GraphBreakWarning, match=f"{name} is called"):
        assert dovetail.compile(program, backend="aten")(torch.ones(2)).tolist() == [3, 3]


def test_a_forbidden_function() -> None:
    forbidden = DYNAMO.forbid_in_graph(lambda values: values * 2)
    with pytest.raises(GraphBreakError, match="<lambda> is called inside"):
        dovetail.compile(called(forbidden), backend="aten", fullgraph=True)(torch.ones(2))


@pytest.mark.parametrize("name", AROUND)
def test_around_a_compiled_function(name: str) -> None:
    compiled = dovetail.compile(called(doubled), backend="aten")
    assert AROUND[name](compiled).tolist() == [3, 3]


def test_a_substitute_is_looked_into() -> None:
    offset = [1]

    def checksum(data: Any, crc: int, /) -> int:
        return offset[0]

    # No other test calls it: torch has no way back.
    inside = COMPILER.substitute_in_graph(binascii.crc_hqx)(checksum)
    compiled = dovetail.compile(
        lambda values: values * binascii.crc_hqx(b"", 1) + inside(b"", 1), backend="aten", fullgraph=True
    )
    for offset[0] in (1, 2):
        assert compiled(torch.ones(1)).item() == 2 * offset[0]
    # Torch's own substitutes are no business of the program's.
    assert set(settings.private_dynamo.substitutes()) == {binascii.crc_hqx, inside}


def test_numpys_functions_run_for_real() -> None:
    inner = COMPILER.wrap_numpy(lambda values: np.sin(values))
    with pytest.raises(GraphBreakError, match="computes with NumPy"):
        dovetail.compile(called(inner), backend="aten", fullgraph=True)(torch.ones(2))
    with pytest.warns(GraphBreakWarning, match="computes with NumPy"):
        result = dovetail.compile(called(inner), backend="aten")(torch.ones(2))
    assert torch.equal(result, torch.from_numpy(np.sin(np.ones(2, np.float32))) + 1)


def test_no_program_is_exported_while_it_is_compiled() -> None:
    compiled = dovetail.compile(
        lambda values: values * (2 if COMPILER.is_exporting() else 3), backend="aten", fullgraph=True
    )
    assert compiled(torch.ones(1)).item() == 3
    program = torch.export.export(
        torch.nn.Sequential(dovetail.compile(torch.nn.Linear(2, 2), backend="aten")), (torch.ones(1, 2),)
    )
    assert "linear" in str(program.graph)
