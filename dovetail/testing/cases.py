"""What a case of the conformance suite is, how two runs of it are compared, and what came of it.

A case is a small program that is handed a ``compile`` function: the identity for eager, ``dovetail.compile`` with the
backend under test otherwise. It returns everything that a user could see afterwards, and both runs must return the same.

>>> from dovetail.testing.cases import Case, run_case
>>> def square(compile):
...     return [compile(lambda x: x * x)(torch.arange(3.0))]
>>> run_case(Case("operators", "square", square), lookup_backend("aten")).status
'passed'
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

import dovetail
from dovetail.backends import Backend, lookup_backend
from dovetail.backends.debug.conformance import values_agree
from dovetail.backends.random_state import take_random_state
from dovetail.errors import DovetailError, UnsupportedGraphError
from dovetail.torch_private import state as private_state

__all__ = ["Case", "CaseResult", "Compile", "Group", "Status", "difference", "lookup_backend", "run_case", "state_of"]

Group = Literal["operators", "models", "mutation", "aliasing", "dynamic shapes", "second order", "errors"]
GROUPS: tuple[Group, ...] = (
    "operators",
    "models",
    "mutation",
    "aliasing",
    "dynamic shapes",
    "second order",
    "errors",
)
Status = Literal["passed", "refused", "failed", "crashed", "timed out"]
Compile = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One program of the suite.

    ``trains``: whether it needs a backward graph. ``may_refuse``: whether Dovetail may say that it cannot do this, with any
    of its errors. A backend may always say so, with an :class:`UnsupportedGraphError`.
    """

    group: Group
    name: str
    program: Callable[[Compile], Any]
    trains: bool = False
    may_refuse: bool = False


@dataclass(frozen=True)
class CaseResult:
    """What came of one case: "passed", "refused" with an error, "failed", "crashed" the process, or "timed out"."""

    group: str
    case: str
    status: Status
    problem: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.group}: {self.case}: {self.status}" + (f": {self.problem}" if self.problem else "")


def run_case(case: Case, backend: Backend, options: Mapping[str, Any] | None = None, device: str = "cpu") -> CaseResult:
    """Run one case eagerly and with ``backend``, in this process, with its tensors on ``device``, and compare."""
    begun = time.perf_counter()
    # An error of the user's comes from eager, which is asked only where a graph may be left.
    whole = case.group != "errors"
    compiler = functools.partial(
        dovetail.compile, backend=backend, fullgraph=whole, backend_options=dict(options or {})
    )
    status: Status = "passed"
    with warnings.catch_warnings(), private_state.preserved_rng_state(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        if device != "cpu":
            stack.enter_context(torch.device(device))
        torch.manual_seed(0)
        wanted = [case.program(_as_it_is), take_random_state()]
        torch.manual_seed(0)
        try:
            found = [case.program(compiler), take_random_state()]
        except DovetailError as error:
            problem = str(error)
            status = "refused" if case.may_refuse or isinstance(error, UnsupportedGraphError) else "failed"
        except Exception as error:  # noqa: BLE001  (a backend may raise anything)
            problem, status = f"{type(error).__name__}: {error}", "failed"
        else:
            problem = difference(found, wanted, backend.with_options(options or {}))
            status = "failed" if problem else "passed"
    return CaseResult(case.group, case.name, status, problem, time.perf_counter() - begun)


def _as_it_is(function: Any = None, **options: Any) -> Any:
    return function


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Parameters, buffers and gradients by name, as copies."""
    found: dict[str, torch.Tensor | None] = {
        name: value.detach().clone() for name, value in [*module.named_parameters(), *module.named_buffers()]
    }
    for name, parameter in module.named_parameters():
        found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
    return found


def difference(found: Any, wanted: Any, backend: Backend, path: str = "result") -> str:
    """How ``found`` differs from ``wanted``, in words; empty if it does not, as far as the backend's promise goes.

    >>> difference([1, torch.ones(2)], [1, torch.zeros(2)], lookup_backend("aten"))
    'result[1] differs by up to 1'
    """
    if isinstance(wanted, torch.Tensor):
        return _tensor_difference(found, wanted, backend, path)
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
    return next((problem for one, other, place in pairs if (problem := difference(one, other, backend, place))), "")


def _tensor_difference(found: Any, wanted: torch.Tensor, backend: Backend, path: str) -> str:
    if not isinstance(found, torch.Tensor):
        return f"{path} is of type {type(found).__name__} instead of a tensor"
    for name in ("dtype", "shape", "requires_grad"):
        one, other = getattr(found, name), getattr(wanted, name)
        if one != other:
            return f"{path} has {name} {one} instead of {other}"
    if found.stride() != wanted.stride() and found.numel():
        return f"{path} has strides {found.stride()} instead of {wanted.stride()}"
    found, wanted = found.detach(), wanted.detach()
    if values_agree(found, wanted, backend):
        return ""
    largest = (found.to(torch.float64) - wanted.to(torch.float64)).abs().nan_to_num(float("inf")).max().item()
    return f"{path} differs by up to {largest:.3g}"
