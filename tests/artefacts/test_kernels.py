"""Artefacts that carry their kernels: at full speed without a compiler; wrong, damaged or unwanted kernels are never run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail import cache, errors
from dovetail.backends.inductor import backend, kept_code
from dovetail.cache import versions
from dovetail.torch_private import inductor_code

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """Has random numbers, a buffer that is written, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.25), nn.LayerNorm(8))
        self.outer = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.outer(self.inner(x))
        self.calls.add_(y.detach().mean(0))
        return {"loss": y.square().mean(), "y": y}


def model() -> tuple[Any, dict[str, Tensor]]:
    """A model for training: the optimizer is outside."""
    net = Net()
    return dovetail.capture(net, (torch.randn(6, 4),)), net.state_dict()


def adam(weight: Tensor, average: Tensor, square: Tensor, count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A whole step, with the arithmetic of an optimizer and its state."""
    loss = (x @ weight).tanh().square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        count += 1
        average.lerp_(gradient, 0.1)
        square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        size = (square / (1 - 0.99**count)).sqrt() + 1e-8
        weight -= 0.05 * average / (1 - 0.9**count) / size
    return loss.detach(), gradient.norm()


def whole_step() -> tuple[Any, dict[str, Tensor]]:
    weight = torch.randn(4, 3)
    values = {
        "L['weight']": weight,
        "L['average']": weight * 0,
        "L['square']": weight * 0,
        "L['count']": torch.zeros(()),
    }
    args = [item.clone() for item in values.values()]
    return dovetail.capture(adam, (args[0].requires_grad_(), *args[1:], torch.randn(6, 4))), values


def optimizer_of_torch() -> tuple[Any, dict[str, Tensor]]:
    """Forward, ``backward()``, the step of an optimizer of torch's with its state, ``zero_grad()``."""
    step, state = with_state("SGD", momentum=0.9, nesterov=True)
    joint = dovetail.capture(step, (torch.randn(6, 4),))
    with tempfile.TemporaryDirectory() as folder:
        _, *names = dovetail.load(joint.export(Path(folder) / "step")).open_inputs
    return joint, dict(zip(names, state, strict=True))


def adam_of_torch() -> tuple[Any, Any]:
    """It reads its count of steps as a number, which the graph then computes with."""
    step, _ = with_state("Adam")
    return dovetail.capture(step, (torch.randn(6, 4),)), "current"


def with_state(name: str, **settings: Any) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """A step that was called once, its parameters, and the optimizer's state."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1, **settings)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(torch.randn(6, 4))
    return step, [*net.parameters(), *(value for item in net.parameters() for value in optimizer.state[item].values())]


def slope(weight: Tensor, x: Tensor) -> Tensor:
    """The second order is inside of the step."""
    (inner,) = torch.autograd.grad((x @ weight).sin().sum(), x, create_graph=True)
    loss = (inner.norm(dim=1) - 1).square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        weight -= 0.05 * gradient
    return loss.detach()


def second_order() -> tuple[Any, dict[str, Tensor]]:
    weight = torch.randn(4, 3)
    args = (weight.clone().requires_grad_(), torch.randn(6, 4).requires_grad_())
    return dovetail.capture(slope, args), {"L['weight']": weight}


PROGRAMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "model": model,
    "whole step": whole_step,
    "optimizer of torch": optimizer_of_torch,
    "Adam of torch": adam_of_torch,
    "second order": second_order,
}


#: Where a byte of the file of kernels is another one; None: there is no such file.
BROKEN = {"damaged": 0.5, "no bundle": 0.0, "damaged at the end": 1.0, "without": None}


def train(step: Any) -> list[Tensor]:
    """Five steps: losses, gradients, random numbers, and all state at the end."""
    torch.manual_seed(4)
    found: list[Tensor] = []
    for _ in range(5):
        x = torch.randn(6, 4)
        result = step(x.requires_grad_(step.joint.spec.input_requires_grad[step.names.index(step.open_inputs[0])]))
        if isinstance(result, dict):
            result["loss"].backward()
            found += [result["y"].detach()]
            with torch.no_grad():
                for value in step.state.values():
                    if value.grad is not None:
                        found.append(value.grad.clone())
                        value -= 0.1 * value.grad
                        value.grad = None
            result = result["loss"]
        found += [item.detach().clone() for item in (result if isinstance(result, tuple) else (result,))]
    return [*found, *(step.state[name].detach().clone() for name in sorted(step.state)), torch.rand(1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefacts")
    torch.manual_seed(0)
    for name, program in PROGRAMS.items():
        joint, values = program()
        joint.export(folder / name, values=values, kernels=True)
        plain = dovetail.load(folder / name)
        torch.save(train(plain.compile("inductor")), folder / f"{name}.compiled")
        torch.save(train(dovetail.load(folder / name)), folder / f"{name}.operators")
    for name, place in BROKEN.items():
        shutil.copytree(folder / "model", folder / name)
        file = folder / name / "kernels.bundle"
        content = bytearray(file.read_bytes())
        if place is not None:
            content[int(place * (len(content) - 1))] ^= 1
            file.write_bytes(content)
        else:
            file.unlink()
    return folder


def main(folder: Path) -> None:
    """Load and train all, in a process without a compiler."""
    torch.set_num_threads(1)
    assert shutil.which("g++") is None and shutil.which("c++") is None
    found: dict[str, Any] = {}
    for name in (*PROGRAMS, *BROKEN):
        if name == next(iter(BROKEN)):
            assert "torch._inductor.compile_fx" not in sys.modules
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = dovetail.load(folder / name, kernels=True)
            numbers = train(step)
        found[name] = (
            step.kernels,
            numbers,
            [str(item.message) for item in caught if item.category is errors.EagerFallbackWarning],
        )
    torch.save(found, folder / "found")


@pytest.mark.slow
def test_in_a_process_without_a_compiler(saved: Path, tmp_path: Path) -> None:
    """Bitwise the saving process's kernels; where they are not whole, bitwise operators, with one warning."""
    kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY") if name in os.environ}
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i"), "DOVETAIL_CACHE_DIR": str(tmp_path / "d")}
    environment = {**kept, **folders, "HOME": str(tmp_path), "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.artefacts.test_kernels", str(saved)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=300)
    found = torch.load(saved / "found")
    for name, (where, actual, messages) in found.items():
        is_whole = name in PROGRAMS
        assert where.startswith("from the file" if is_whole else "none: "), (name, where, messages)
        assert is_whole or "runs by ATen operators" in messages[0]
        assert len(messages) == (not is_whole), (name, messages)
        expected = torch.load(saved / (f"{name}.compiled" if is_whole else "model.operators"))
        assert len(actual) == len(expected) and all(map(torch.equal, actual, expected)), name
    assert not (tmp_path / "d").exists() or "code" not in os.listdir(tmp_path / "d")


@pytest.mark.slow
def test_the_step_of_an_optimizer_of_torch_is_that_of_eager(saved: Path) -> None:
    torch.manual_seed(3)
    step, state = with_state("SGD", momentum=0.9, nesterov=True)
    loaded = dovetail.load(saved / "optimizer of torch")
    loaded = loaded.bind(
        dict(
            zip(
                loaded.names[1:],
                [item.detach().clone().requires_grad_(item.requires_grad) for item in state],
                strict=True,
            )
        )
    )
    for _ in range(3):
        x = torch.randn(6, 4)
        assert torch.equal(loaded(x), step(x))
    assert all(map(torch.equal, [loaded.state[name] for name in loaded.names[1:]], state))


def test_with_kernels_or_without_the_numbers_agree(saved: Path) -> None:
    for name in PROGRAMS:
        torch.testing.assert_close(torch.load(saved / f"{name}.compiled"), torch.load(saved / f"{name}.operators"))


def test_kernels_are_code_and_not_read_unless_asked_for(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "model", tmp_path / "model")
    file = tmp_path / "model" / "kernels.bundle"
    file.unlink()
    # Whoever opened it would wait for ever.
    os.mkfifo(file)
    loaded = dovetail.load(tmp_path / "model")
    assert loaded.kernels == "" and loaded.compiled is None
    assert all(map(torch.equal, train(loaded), torch.load(saved / "model.operators")))


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise errors.BackendError("no compiler is there")

    monkeypatch.setattr(backend, "_compile", fail)


OTHERS: dict[str, tuple[Any, str, Any]] = {
    "another version": (versions, "software", lambda: ("another torch",)),
    "another processor": (kept_code, "_cpu", lambda: "another processor"),
    "another number of threads": (torch, "get_num_threads", lambda: 77),
    "an operating system that loads no such code": (inductor_code, "loaded_kernels", lambda key: None),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("other", OTHERS)
def test_kernels_for_something_else_are_not_run(other: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, value = OTHERS[other]
    without_compiler(monkeypatch)
    monkeypatch.setattr(owner, name, value)
    if name == "software":
        monkeypatch.setattr(cache, name, value)
    with pytest.warns(errors.EagerFallbackWarning, match="no compiler is there") as caught:
        step = dovetail.load(saved / "model", kernels=True)
    assert len(caught) == 1 and step.kernels.startswith("none: ")
    assert all(map(torch.equal, train(step), torch.load(saved / "model.operators")))


@pytest.mark.slow
def test_damaged_kernels_are_not_run(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    shutil.copytree(saved / "whole step", tmp_path / "step")
    file, expected = tmp_path / "step" / "kernels.bundle", torch.load(saved / "whole step.operators")
    whole, dice = file.read_bytes(), random.Random(0)
    for number in range(30):
        place, length = dice.randrange(len(whole)), dice.choice((1, 1, 7, 4096))
        between = (bytes([whole[place] ^ (1 << number % 8)]), b"", dice.randbytes(length))[number % 3]
        file.write_bytes(whole[:place] + between + whole[place + (number % 3 < 2) * length :])
        with pytest.warns(errors.EagerFallbackWarning):
            step = dovetail.load(tmp_path / "step", kernels=True)
        assert step.kernels.startswith("none: ") and all(map(torch.equal, train(step), expected)), (number, place)


def test_kernels_of_another_graph_are_not_run(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    shutil.copytree(saved / "whole step", tmp_path / "step")
    shutil.copy(saved / "second order" / "kernels.bundle", tmp_path / "step" / "kernels.bundle")
    with pytest.warns(errors.EagerFallbackWarning):
        step = dovetail.load(tmp_path / "step", kernels=True)
    assert all(map(torch.equal, train(step), torch.load(saved / "whole step.operators")))


def test_a_backward_that_was_not_saved_runs_by_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are those of the gradients of all results."""

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos() * 2

    path = dovetail.capture(two, (torch.ones(3, requires_grad=True),)).export(tmp_path / "step", kernels=True)
    without_compiler(monkeypatch)
    step, operators = dovetail.load(path, kernels=True), dovetail.load(path)
    assert step.kernels == "from the file"
    for place in (1, 0):
        found = []
        for call in (step, operators):
            x = torch.randn(3, requires_grad=True, generator=torch.Generator().manual_seed(place))
            with pytest.warns(errors.EagerFallbackWarning) if call is step else contextlib.nullcontext():
                call(x)[place].sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(*found)


def test_what_does_not_fit_is_compiled(saved: Path, tmp_path: Path) -> None:
    """And leaves nothing of the file in the cache."""
    step = dovetail.load(saved / "damaged", kernels=True)
    assert step.kernels.startswith("compiled here: ") and "damaged" in step.kernels
    assert all(map(torch.equal, train(step), torch.load(saved / "model.compiled")))


def test_loading_writes_nothing_to_the_cache(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path))
    cache.switch(True)
    try:
        assert dovetail.load(saved / "model", kernels=True).kernels == "from the file"
        assert cache.ls() == []
        cache.switch(False)
        assert dovetail.load(saved / "model", kernels=True).kernels == "from the file"
    finally:
        cache.switch(None)


@pytest.mark.parametrize("is_on", [True, False])
def test_export_without_a_cache_on_disk(is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of kernels that this process has loaded before, and with an empty cache behind."""
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path / "cache"))
    cache.switch(is_on)
    try:
        for name in ("first", "second"):
            joint = dovetail.capture(lambda x: (x.sin() * 3).exp(), (torch.randn(5, requires_grad=True),))
            step = dovetail.load(joint.export(tmp_path / name, kernels=True), kernels=True)
            assert step.kernels == "from the file"
            assert bool(cache.ls()) == is_on
            if is_on:
                cache.clear()
    finally:
        cache.switch(None)


@pytest.mark.parametrize("order", [0, 1])
def test_kernels_for_sizes_that_change(order: int, tmp_path: Path) -> None:
    x = dovetail.mark_dynamic(torch.randn(6, 4), 0, minimum=2, maximum=64).requires_grad_(order == 1)

    def model(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(nn.functional.layer_norm(x, (4,))) / x.shape[0]

    path = dovetail.capture(model, (x,)).export(tmp_path / "step", kernels=True)
    step = dovetail.load(path, kernels=True)
    assert step.kernels == "from the file"
    for size in (6, 2, 33, 64):
        given = torch.randn(size, 4, requires_grad=order == 1)
        expected, found = model(given), step(given)
        torch.testing.assert_close(found, expected)
        if order:
            (slope,) = torch.autograd.grad(found.square().sum(), given)
            torch.testing.assert_close(slope, torch.autograd.grad(expected.square().sum(), given)[0])
    for size in (1, 65):
        with pytest.raises(errors.DovetailError, match="must be at (least 2|most 64)"):
            step(torch.randn(size, 4))


def test_kernels_that_are_not_kept_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    joint = dovetail.capture(lambda x: x + torch.tensor([[1.0] * 512] * 600), (torch.randn(600, 512),))
    with pytest.raises(errors.ArtefactError, match="cannot be exported: the graph is not kept"):
        joint.export(tmp_path / "step", kernels=True)
    assert os.listdir(tmp_path) == []


def test_code_that_cannot_be_written_down_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_code, "code_as_data", lambda compiled: None)
    joint = dovetail.capture(lambda x: x.sin() * 7, (torch.randn(5),))
    with pytest.raises(errors.ArtefactError, match="cannot be exported: the code of the inference graph is not there"):
        joint.export(tmp_path / "step", kernels=True)
    assert os.listdir(tmp_path) == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
