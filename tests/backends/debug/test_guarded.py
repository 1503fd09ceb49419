"""Bad backends: training goes on without one, with one warning that says what to do, or there is one clear exception."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch

import dovetail
from dovetail.backends import ATEN, Backend, guarded, lookup_backend, registry
from dovetail.backends.aten import compile_aten
from dovetail.backends.debug import processes
from dovetail.errors import BackendError, EagerFallbackWarning
from dovetail.testing.cases import program_case
from dovetail.testing.models import MODEL_CASES, Transformer


def raising():
    raise NotImplementedError("not this graph")


FAULTS_WHILE_COMPILING = {
    "raises": raising,
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda: time.sleep(1000),
    "leaves": lambda: os._exit(0),
}
FAULTS_IN_OUTPUTS = {
    "too few": lambda outputs: outputs[:-1],
    "too many": lambda outputs: [*outputs, None],
    "no list": lambda outputs: 3,
    "dtype": lambda outputs: [value.double() if isinstance(value, torch.Tensor) else value for value in outputs],
    "shape": lambda outputs: [value[None] if isinstance(value, torch.Tensor) else value for value in outputs],
    "no tensors": lambda outputs: [None for _ in outputs],
}


def bad_backend(fault, only="forward"):
    def compile_graph(graph, inputs, *, kind, options):
        run = compile_aten(graph, inputs, kind=kind)
        if kind != only:
            return run
        if fault in FAULTS_WHILE_COMPILING:
            FAULTS_WHILE_COMPILING[fault]()
        return lambda values: FAULTS_IN_OUTPUTS[fault](run(values))

    return Backend("bad", compile_graph)


def train(compile_):
    torch.manual_seed(1)
    model = Transformer(0.3)
    compiled = compile_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(compiled(torch.randint(11, (3, 5))), torch.randint(11, (3,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()], torch.rand(1)


@pytest.mark.parametrize("only", ["forward", "backward"])
@pytest.mark.parametrize("fault", [*FAULTS_WHILE_COMPILING, *FAULTS_IN_OUTPUTS])
@pytest.mark.sampled(12)
def test_training_goes_on_with_one_warning(fault, only):
    wanted = train(lambda model: model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(lambda model: dovetail.compile(model, backend=guarded(bad_backend(fault, only), seconds=3)))
    mine = [item for item in caught if issubclass(item.category, EagerFallbackWarning)]
    assert len(mine) == 1, [str(item.message) for item in mine]
    text = str(mine[0].message)
    assert "backend 'bad' is not used any more" in text and "what to do" in text
    assert found[0] == wanted[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], wanted[1]))
    assert torch.equal(found[2], wanted[2]), "random numbers go on as in eager"


def test_where_nothing_can_be_forked_what_is_raised_is_caught(monkeypatch):
    """As in a process that uses CUDA."""
    monkeypatch.setattr(processes, "can_fork", lambda: False)
    f = dovetail.compile(lambda x: x.exp(), backend=guarded(bad_backend("raises", "inference")))
    with torch.no_grad(), pytest.warns(EagerFallbackWarning, match="not this graph"):
        assert torch.equal(f(torch.ones(2)), torch.ones(2).exp())


def test_a_size_that_only_data_decides_is_no_fault():
    """The backward is given a tensor of such a size, of which there is no example."""

    def program(x):
        return x[x > 0].exp().sum()

    f = dovetail.compile(program, backend=guarded("aten"), fullgraph=True)
    x, same = (torch.tensor([-1.0, 1.0, 2.0], requires_grad=True) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(x).backward()
    program(same).backward()
    assert torch.equal(x.grad, same.grad)


def test_symbolic_sizes_are_tried_as_well():
    """A crash for a graph with symbols is not this process's."""

    def compile_graph(graph, inputs, *, kind, options):
        if any(isinstance(value, torch.SymInt) for value in inputs):
            os.kill(os.getpid(), signal.SIGSEGV)
        return compile_aten(graph, inputs, kind=kind)

    f = dovetail.compile(lambda x: x.reshape(-1) * x.shape[0], backend=guarded(compile_graph), dynamic=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (3, 4, 5):
            x = torch.randn(size, 2, requires_grad=True)
            f(x).sum().backward()
            assert torch.equal(x.grad, torch.full((size, 2), float(size)))
    assert sum("SIGSEGV" in str(item.message) for item in caught) == 1


def test_without_a_name_it_is_the_default_backend():
    assert guarded().name == registry.default_backend().name


def test_a_fault_that_only_real_values_show_is_caught_here():
    def compile_graph(graph, inputs, *, kind, options):
        run = compile_aten(graph, inputs, kind=kind)

        def call(values):
            torch.rand(3)
            if any(bool(value.any()) for value in values):
                values.clear()
                raise ValueError("numbers other than zero")
            return run(values)

        return call

    x = torch.randn(3)
    torch.manual_seed(0)
    wanted = torch.nn.functional.dropout(x * 2, 0.5)
    f = dovetail.compile(lambda x: torch.nn.functional.dropout(x * 2, 0.5), backend=guarded(compile_graph))
    torch.manual_seed(0)
    with pytest.warns(EagerFallbackWarning, match="numbers other than zero"):
        assert torch.equal(f(x), wanted)


def test_a_sound_backend_is_used():
    calls = []

    def compile_graph(graph, inputs, *, kind, options):
        calls.append(kind)
        return compile_aten(graph, inputs, kind=kind)

    backend = guarded(Backend("sound", compile_graph, numerics="bitwise"))
    case = next(case for case in MODEL_CASES if case.name == "transformer with dropout, trained")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert case.run(backend).status == "passed"
    assert calls == ["forward", "backward"]


def test_sizes_that_change_under_a_guard():
    backend = guarded(ATEN)

    def program(compile_):
        f = compile_(lambda x: (x * x.shape[0]).sum(0))
        return [f(torch.randn(size, 2)) for size in (2, 5, 9)]

    assert program_case("dynamic shapes", "sizes", program).run(backend).status == "passed"


def test_the_program_tape_needs_no_net():
    assert guarded("eager") is lookup_backend("eager")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [*FAULTS_IN_OUTPUTS, "raises"])
def test_without_a_net_there_is_one_clear_exception(fault):
    f = dovetail.compile(Transformer(), backend=bad_backend(fault))
    with pytest.raises(BackendError) as caught:
        f(torch.randint(11, (3, 5)))
    text = str(caught.value)
    assert "'bad'" in text and "what to do" in text


def test_the_default_backend_that_cannot_compile_is_replaced_with_one_warning(monkeypatch):
    broken = Backend("broken", lambda graph, inputs, *, kind, options: raising())
    monkeypatch.setattr(registry, "default_backend", lambda: broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(lambda model: dovetail.compile(model))
    mine = [item for item in caught if issubclass(item.category, EagerFallbackWarning)]
    assert len(mine) == 1
    assert "dovetail doctor" in str(mine[0].message) and "not this graph" in str(mine[0].message)
    assert found[0] == train(lambda model: model)[0]


def test_the_rest_after_a_graph_break_uses_the_replacement_too(monkeypatch):
    monkeypatch.setattr(
        registry, "default_backend", lambda: Backend("broken", lambda graph, inputs, *, kind, options: raising())
    )

    def program(x):
        y = x * 2
        if y.sum().item() > 0:
            y = y + 1
        return y.exp()

    f = dovetail.compile(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(f(torch.ones(2)), program(torch.ones(2)))
    assert sum("one by one" in str(item.message) for item in caught) == 1


def test_no_compiler_at_all_is_one_warning(monkeypatch):
    monkeypatch.setattr(registry.private_compilers, "cpp_compiler", lambda: None)
    monkeypatch.setattr(registry, "_warned_no_compiler", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(dovetail.compile(torch.sin)(torch.ones(2)), torch.ones(2).sin())
    texts = [str(item.message) for item in caught if "no C++ compiler" in str(item.message)]
    assert len(texts) == 1 and "what to do: install g++" in texts[0]


def test_kinds_and_symbolic_sizes_are_promises():
    only = Backend("only", compile_aten, kinds=("inference",))
    f = dovetail.compile(torch.nn.Linear(2, 2), backend=only)
    with torch.no_grad():
        f(torch.ones(1, 2))
    with pytest.raises(BackendError, match=r"takes inference graphs only.*\n.*torch.no_grad"):
        f(torch.ones(1, 2))
    seen = []

    def compile_graph(graph, inputs, *, kind, options):
        seen.append([type(size) for value in inputs for size in value.shape])
        return compile_aten(graph, inputs, kind=kind)

    static = dovetail.compile(
        lambda x: x * 2, backend=Backend("s", compile_graph, takes_symbolic_shapes=False), dynamic=True
    )
    for size in (2, 3, 4):
        assert static(torch.ones(size)).shape == (size,)
    assert seen == [[int], [int], [int]]
