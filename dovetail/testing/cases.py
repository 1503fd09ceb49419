"""Cases of the conformance suite: small programs that run eagerly and with a backend, and must leave the same behind.

A program takes a ``compile`` function (the identity for eager, ``dovetail.compile`` with the backend under test otherwise) and
returns everything that a user can see afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import dovetail
from dovetail.backends import Backend
from dovetail.backends.debug.processes import Lost
from dovetail.backends.debug.values import difference, used_gpus
from dovetail.errors import DovetailError, UnsupportedGraphError
from dovetail.torch_private import state as private_state

Group = Literal["operators", "models", "mutation", "aliasing", "dynamic shapes", "second order", "errors", "probe"]
#: The groups of the suite, in the order of its table.
GROUPS: tuple[Group, ...] = ("operators", "models", "mutation", "aliasing", "dynamic shapes", "second order", "errors")
Status = Literal["passed", "refused", "failed", "crashed", "timed out"]
Compile = Callable[..., Any]
Program = Callable[[Compile], Any]
#: Returns in words how a backend (with options, on a device) differs from eager; empty if it does not.
Check = Callable[[Backend, Mapping[str, Any], str], str]


@dataclass(frozen=True)
class CaseResult:
    """The result of one case; ``problem`` says in words why it did not pass."""

    group: str
    case: str
    status: Status
    problem: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.group}: {self.case}: {self.status}" + (f": {self.problem}" if self.problem else "")


@dataclass(frozen=True)
class Case:
    """One entry of the suite.

    ``may_refuse`` allows any error of Dovetail's as a refusal; a backend may always refuse with an
    :class:`UnsupportedGraphError`.
    """

    group: Group
    name: str
    check: Check = field(repr=False)
    may_refuse: bool = False

    def run(self, backend: Backend, options: Mapping[str, Any] | None = None, device: str = "cpu") -> CaseResult:
        """Run the case in this process, with its tensors on ``device``."""
        begun = time.perf_counter()
        with warnings.catch_warnings(), private_state.preserved_rng_state():
            warnings.simplefilter("ignore")
            try:
                problem = self.check(backend, dict(options or {}), device)
                status: Status = "failed" if problem else "passed"
            except DovetailError as error:
                problem = str(error)
                status = "refused" if self.may_refuse or isinstance(error, UnsupportedGraphError) else "failed"
            except Exception as error:  # noqa: BLE001  (a backend may raise anything)
                problem, status = f"{type(error).__name__}: {error}", "failed"
        return CaseResult(self.group, self.name, status, problem, time.perf_counter() - begun)

    def lost(self, lost: Lost) -> CaseResult:
        """Return the result of a case whose process crashed or was stopped."""
        status: Status = "timed out" if lost.status == "timed out" else "crashed"
        return CaseResult(self.group, self.name, status, lost.problem)


def program_case(group: Group, name: str, program: Program, *, may_refuse: bool = False) -> Case:
    """Return the case of a program."""
    # Dovetail leaves an exception of the user's to eager, which needs a graph break.
    return Case(group, name, functools.partial(check_program, program, group != "errors"), may_refuse)


def check_program(program: Program, fullgraph: bool, backend: Backend, options: Mapping[str, Any], device: str) -> str:
    """Run a program eagerly and with a backend; say in words how the results, or the random numbers drawn, differ."""
    compiler = functools.partial(
        dovetail.compile, backend=backend, fullgraph=fullgraph, tiers="wait", backend_options=dict(options)
    )
    with torch.device(device) if device != "cpu" else contextlib.nullcontext():
        torch.manual_seed(0)
        wanted = [program(lambda function=None, **_settings: function), private_state.random_states(used_gpus())]
        torch.manual_seed(0)
        found = [program(compiler), private_state.random_states(used_gpus())]
    return deep_difference(found, wanted, backend.with_options(options))


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of parameters, buffers and gradients by name."""
    found: dict[str, torch.Tensor | None] = {
        name: value.detach().clone() for name, value in [*module.named_parameters(), *module.named_buffers()]
    }
    for name, parameter in module.named_parameters():
        found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
    return found


def deep_difference(found: Any, wanted: Any, backend: Backend, path: str = "result") -> str:
    """Say in words where ``found`` differs from ``wanted``, as far as the backend's promise goes; empty if it does not.

    >>> from dovetail.backends import ATEN
    >>> deep_difference([1, torch.ones(2)], [1, torch.zeros(2)], ATEN)
    'result[1] differs by up to 1: 1.0 instead of 0.0'
    """
    if isinstance(wanted, torch.Tensor):
        problem = difference(found, wanted, backend, ("dtype", "shape", "requires_grad"))
        if not problem and found.stride() != wanted.stride() and found.numel():
            problem = f"has strides {found.stride()} instead of {wanted.stride()}"
        return problem and f"{path} {problem}"
    if type(found) is not type(wanted):
        return f"{path} is of type {type(found).__name__} instead of {type(wanted).__name__}"
    if isinstance(wanted, dict):
        if list(found) != list(wanted):
            return f"{path} has the keys {list(found)} instead of {list(wanted)}"
        pairs = [(found[key], wanted[key], f"{path}[{key!r}]") for key in wanted]
    elif isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            return f"{path} has {len(found)} entries instead of {len(wanted)}"
        pairs = [(one, other, f"{path}[{index}]") for index, (one, other) in enumerate(zip(found, wanted, strict=True))]
    else:
        return "" if found == wanted else f"{path} is {found!r} instead of {wanted!r}"
    return next(
        (problem for one, other, place in pairs if (problem := deep_difference(one, other, backend, place))), ""
    )
