"""``dovetail.compare``: one call by eager and by each backend; the first operator that differs, by how much, and whose line it is.

Each run has its own copy of the arguments and of a module that is called, the same random numbers, and the same state of modules
and optimizers that a function reads from outside. Results, gradients, changed arguments and changed state are compared.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import html
import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends.debug.check_operators import CHECK_OPERATORS
from dovetail.backends.debug.values import difference, used_gpus
from dovetail.backends.protocol import Backend
from dovetail.backends.registry import lookup_backend
from dovetail.errors import BackendError, EagerFallbackWarning, InputError, UserLocation
from dovetail.face.attempts import capturing
from dovetail.face.compile import compile
from dovetail.face.module import CompiledModule
from dovetail.frontend.code.frame import Break
from dovetail.torch_private import state as private_state

_SEED = 0


@dataclass(frozen=True)
class Compared:
    """The differences of one backend from eager.

    ``agrees``: all values agree, to the last bit or within the tolerances. ``largest`` is the largest difference of two numbers,
    in the value ``largest_in``. ``problem`` is what does not agree, or what was raised; ``operator`` the first operator that
    differs by itself, with its line in ``where``, where one was found. ``notes`` says what ran eagerly.
    """

    backend: str
    agrees: bool
    largest: float = 0.0
    largest_in: str = ""
    problem: str = ""
    operator: str = ""
    where: UserLocation | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The result as sentences."""
        if self.problem:
            found = [self.problem]
            if self.operator:
                found.append(self.operator + (f"\nat {self.where}" if self.where else ""))
        elif self.largest:
            found = [f"agrees; the largest difference is {self.largest:.3g}, in {self.largest_in}"]
        else:
            found = ["equal to the last bit"]
        return [line for text in [*found, *self.notes] for line in text.splitlines()]


class Comparison(tuple[Compared, ...]):
    """The results of all backends; printed, it says a sentence on each."""

    @property
    def agrees(self) -> bool:
        """Whether all backends agree with eager."""
        return all(item.agrees for item in self)

    def __repr__(self) -> str:
        width = max((len(item.backend) for item in self), default=0)
        return "\n".join(
            f"{'' if index else item.backend:{width}}  {line}"
            for item in self
            for index, line in enumerate(item.lines())
        )

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><td>{html.escape(item.backend)}</td><td><pre>{html.escape(chr(10).join(item.lines()))}</pre></td></tr>"
            for item in self
        )
        return f"<table>{''.join(rows)}</table>"


def compare(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backends: Sequence[str | Backend | Callable[..., Any]] | None = None,
    exact: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Comparison:
    """Run one call eagerly and by each backend, and say where they differ.

    ``backends``: names, or what ``compile`` takes; "aten" and the default backend unless given. ``exact``: to the last bit, also
    where a backend promises less. ``options`` go to the backends. Gradients are those of all results, for a fixed vector.

    A module and the arguments are copied, so that the call changes nothing of yours; modules and optimizers that a function reads
    from outside get their state back. What eager raises is raised.

    >>> import torch, dovetail
    >>> dovetail.compare(torch.nn.Linear(2, 1), (torch.ones(3, 2),), backends=["aten"])
    aten  equal to the last bit
    """
    if capturing.active:
        raise Break("dovetail.compare is called inside of a compiled function", "call it outside")
    if isinstance(function, CompiledModule) or hasattr(function, "original"):
        function = function.original
    if not isinstance(args, (tuple, list)):
        raise InputError(f"args is a {type(args).__name__}, and must be a tuple of arguments", advice="write (x,)")
    chosen = [lookup_backend(item) for item in (("aten", None) if backends is None else backends)]
    call = _Call(function, tuple(args), dict(kwargs or {}))
    wanted = call.observe(lambda own: own)
    unique = list({backend.name: backend for backend in chosen}.values())
    return Comparison(_compared(call, wanted, backend, exact, dict(options or {})) for backend in unique)


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def observe(self, prepare: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[str, Any]:
        """Run the call on copies, and return by name all that can be seen of it."""
        memo = {id(tensor): _copied(tensor) for _, tensor in _tensors("", (self.args, self.kwargs))}
        owner = getattr(self.function, "__self__", self.function)
        own, args, kwargs = copy.deepcopy((owner, self.args, self.kwargs), memo)
        if isinstance(self.function, types.MethodType):
            own = types.MethodType(self.function.__func__, own)
        elif owner is not self.function:
            own = self.function
        modules = _modules_of(own)
        random = private_state.random_states(used_gpus())
        with _state_kept(_outside(self.function)):
            try:
                torch.manual_seed(_SEED)
                result = prepare(own)(*args, **kwargs)
                found = _named("output", result)
                found |= _gradients(found, dict(_tensors("input", (*args, kwargs))) | _parameters(modules))
                found |= {f"{name} after the call": tensor for name, tensor in _tensors("input", (*args, kwargs))}
                found |= {f"{name} after the call": value for name, value in _state(modules).items()}
                return {name: _copied(item) if isinstance(item, torch.Tensor) else item for name, item in found.items()}
            finally:
                private_state.set_random_states(random, used_gpus())


def _compared(
    call: _Call, wanted: Mapping[str, Any], backend: Backend, exact: bool, options: dict[str, Any]
) -> Compared:
    judge = dataclasses.replace(backend, numerics="bitwise") if exact else backend
    try:
        with _notes() as notes:
            found = call.observe(
                lambda own: compile(own, backend=backend, tiers="wait", backend_options=options)  # type: ignore[no-any-return]
            )
    except Exception as error:  # noqa: BLE001  (a backend may raise anything)
        operator, where = _first_operator(call, judge, options)
        return Compared(backend.name, False, 0.0, "", f"raises {type(error).__name__}: {error}", operator, where)
    problem = largest_in = ""
    largest = 0.0
    for name, value in wanted.items():
        if name not in found:
            problem = problem or f"{name} is not there"
            continue
        differs = difference(found[name], value, judge)
        problem = problem or (differs and f"{name} {differs}")
        distance = _distance(found[name], value)
        if distance > largest:
            largest, largest_in = distance, name
    problem = problem or next((f"{name} is not there in eager" for name in found.keys() - wanted.keys()), "")
    operator, where = _first_operator(call, judge, options) if problem else ("", None)
    return Compared(backend.name, not problem, largest, largest_in, problem, operator, where, tuple(notes))


def _first_operator(call: _Call, judge: Backend, options: dict[str, Any]) -> tuple[str, UserLocation | None]:
    """The first operator that differs when each runs by itself, as ``check_operators`` finds it."""
    checked = {**options, "inner": judge}
    try:
        with _notes():
            call.observe(lambda own: compile(own, backend=CHECK_OPERATORS, backend_options=checked))  # type: ignore[no-any-return]
    except BackendError as error:
        return error.what, error.where
    except Exception as error:  # noqa: BLE001  (a debugging aid: what it raises is told)
        return f"the operators cannot be checked one by one: {type(error).__name__}: {error}", None
    return "each operator agrees by itself: the difference comes from around the graph", None


@contextlib.contextmanager
def _notes() -> Iterator[list[str]]:
    """The warnings about what runs eagerly, each once, as notes."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    ours = (str(item.message) for item in caught if issubclass(item.category, EagerFallbackWarning))
    notes += dict.fromkeys(ours)


def _distance(found: Any, wanted: Any) -> float:
    """The largest difference of two numbers in two tensors; 0 for what cannot be subtracted."""
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor) or found.shape != wanted.shape:
        return 0.0
    if torch.equal(found, wanted) or not wanted.numel():
        return 0.0
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    distance = (found.detach().to(kind) - wanted.detach().to(kind)).abs()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return float(distance.masked_fill(same, 0.0).nan_to_num(math.inf).max())


# --- what can be seen of a call ---------------------------------------------------------------------------------------


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that belongs to no graph, in the same layout."""
    if tensor.layout is torch.strided and not tensor.is_nested and 0 not in tensor.stride():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        made.copy_(tensor.detach())
    else:
        made = tensor.detach().clone()
    return made.requires_grad_(tensor.requires_grad)


def _named(path: str, value: Any) -> dict[str, Any]:
    """The tensors and constants of a result by name."""
    if isinstance(value, Mapping):
        return {name: item for key in value for name, item in _named(f"{path}[{key!r}]", value[key]).items()}
    if isinstance(value, (list, tuple)):
        return {name: item for index, one in enumerate(value) for name, item in _named(f"{path}[{index}]", one).items()}
    is_plain = isinstance(value, (torch.Tensor, int, float, complex, str, bool, bytes, type(None)))
    return {path: value if is_plain else type(value).__name__}


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, item) for name, item in _named(path, value).items() if isinstance(item, torch.Tensor))


def _modules_of(function: Any) -> list[tuple[str, torch.nn.Module]]:
    """The module that is called, and those that a function reads from outside."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        return [("", owner)]
    return [(f"{name}.", item) for name, item in _outside(function).items() if isinstance(item, torch.nn.Module)]


def _outside(function: Any) -> dict[str, Any]:
    """Modules, optimizers and tensors that a plain function reads from its closure and from globals."""
    if not isinstance(function, types.FunctionType):
        return {}
    found = inspect.getclosurevars(function)
    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
    return {name: value for name, value in {**found.globals, **found.nonlocals}.items() if isinstance(value, kinds)}


def _parameters(modules: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": item for prefix, module in modules for name, item in module.named_parameters()}


def _state(modules: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, Any]:
    """Parameters, buffers and gradients by name."""
    found: dict[str, Any] = {}
    for prefix, module in modules:
        for name, item in [*module.named_parameters(), *module.named_buffers()]:
            found[f"{prefix}{name}"] = item
            if item.grad is not None:
                found[f"{prefix}{name}.grad"] = item.grad
    return found


def _gradients(outputs: Mapping[str, Any], leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of all differentiable results with respect to these tensors, for a fixed vector."""
    differentiable = [item for item in outputs.values() if isinstance(item, torch.Tensor) and item.requires_grad]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not differentiable or not wanted:
        return {}
    generator = torch.Generator().manual_seed(_SEED)
    vectors = [
        (torch.rand(item.shape, generator=generator, dtype=torch.float64) + 0.5).to(item.device, item.dtype)
        for item in differentiable
    ]
    found = torch.autograd.grad(differentiable, list(wanted.values()), vectors, allow_unused=True)
    return {f"the gradient of {name}": item for name, item in zip(wanted, found, strict=True) if item is not None}


@contextlib.contextmanager
def _state_kept(outside: Mapping[str, Any]) -> Iterator[None]:
    """Give modules, optimizers and tensors their state back at the end."""
    modules = [(name, item) for name, item in outside.items() if isinstance(item, torch.nn.Module)]
    tensors = [*_parameters(modules).values(), *(item for _, module in modules for item in module.buffers())]
    tensors += [item for item in outside.values() if isinstance(item, torch.Tensor)]
    optimizers = [item for item in outside.values() if isinstance(item, torch.optim.Optimizer)]
    saved: list[Any] = [
        (item, item.detach().clone(), item.grad, None if item.grad is None else item.grad.detach().clone())
        for item in tensors
    ]
    states = [(item, copy.deepcopy(item.state_dict())) for item in optimizers]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content, gradient, its_content in saved:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)
                tensor.grad = gradient
                if gradient is not None:
                    gradient.copy_(its_content)
        for optimizer, state in states:
            optimizer.load_state_dict(state)
