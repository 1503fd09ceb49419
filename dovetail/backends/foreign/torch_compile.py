"""``torch.compile(backend="dovetail")``: torch captures the function, and its graph is compiled like any other function.

Guards are asked twice: torch's own, then those of the graph, so that what the backward or the inner backend assumes of a size is
Dovetail's to guard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.compile_joint import choose_backend
from dovetail.backends import Backend
from dovetail.errors import OptionError
from dovetail.events import EventLog
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.dispatcher import compile_lock
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import method_rule
from dovetail.options import Options, make_options
from dovetail.torch_private import dynamo as private_dynamo

TorchCompiled = Callable[..., Any]
_OPTION_NAMES = ("inner", "fullgraph", "passes", "memory_budget", "numerics", "backend_options")


@method_rule("autograd_function_apply", "tag_activation_checkpoint")
def _on_graphs(interpreter: TracingInterpreter, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch makes of a custom Function and of a checkpoint: run with its graphs, which compute of their arguments alone."""
    given, named = interpreter.values.for_native(args), interpreter.values.for_native(kwargs)
    return interpreter.values.wrap(operator(*given, **named))


class _CompiledGraph(CompiledFunction):
    """A graph of torch.compile. Nobody chose its inputs for Dovetail: unsupported ones make it run eagerly."""

    _refuses_inputs = False

    def __init__(self, function: Callable[..., Any], options: Options, events: EventLog) -> None:
        super().__init__(function, options)
        self._part.shared.events = events

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # While torch compiles in another thread, torch.compiler.is_compiling() is true here too: no guard holds, no capture begins.
        with compile_lock, private_dynamo.compile_lock():
            found = self._find(args, kwargs)
            return super()._miss(args, kwargs) if found is None else found()


@dataclass(frozen=True, eq=False)
class TorchBackend:
    """A backend for ``torch.compile``; made by :func:`torch_backend`. ``events`` says what it did."""

    options: Options
    inner: Backend
    events: EventLog = field(default_factory=EventLog)

    @property
    def __name__(self) -> str:
        return f"dovetail_{self.inner.name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchBackend:
        """Itself: nothing changes it. Models that it compiles are copied with it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its options."""
        return _with_options, (self.options,)

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], mode: str | None = None, **more: Any
    ) -> TorchCompiled:
        """Compile a graph that torch has captured. One that cannot be compiled runs as it is, with a warning."""
        _refuse_mode(mode, more)
        if self.inner.takes_program and not self.options.passes:
            return graph.forward
        # A module of its own: torch makes the code of the caller's one only when that is called.
        module = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
        numbers = _read_numbers(module)
        compiled = _CompiledGraph(module.forward, self.options, self.events)
        # A plain function: torch follows the attributes of a compiled one to the original.
        return lambda *args: compiled(*(item.item() if at in numbers else item for at, item in enumerate(args)))


def _read_numbers(module: torch.fx.GraphModule) -> frozenset[int]:
    """Let a graph take changing floats as numbers, which torch hands over in tensors; returns their places."""
    found = set()
    for place, node in enumerate(module.graph.find_nodes(op="placeholder")):
        readers = [user for user in node.users if (user.op, user.target) == ("call_method", "item")]
        is_number = getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
        if is_number and readers and len(readers) == len(node.users):
            found.add(place)
            for reader in readers:
                reader.replace_all_uses_with(node)
                module.graph.erase_node(reader)
    module.recompile()
    return frozenset(found)


def _refuse_mode(mode: str | None, more: Mapping[str, Any]) -> None:
    if mode not in (None, "default"):
        raise OptionError(
            f"backend 'dovetail' has no mode {mode!r}",
            advice='use options={"inner": "inductor", "backend_options": {...}} with the settings that the mode stands for',
        )
    if more:
        raise OptionError(f"backend 'dovetail' takes no argument {next(iter(more))!r}")


def _with_options(options: Options) -> TorchBackend:
    return TorchBackend(options, choose_backend(options.backend, options.numerics))


def torch_backend(
    inner: str | Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    passes: Sequence[Callable[[Any], Any]] = (),
    memory_budget: float | int | None = None,
    numerics: str = "fast",
    backend_options: Mapping[str, Any] | None = None,
) -> TorchBackend:
    """A backend for ``torch.compile``: its graphs go through Dovetail's stages, compiled by the backend ``inner``.

    ``passes``, ``memory_budget``, ``numerics`` and ``backend_options`` are those of :func:`dovetail.compile`. A graph that
    cannot be compiled runs as torch captured it, with one :class:`EagerFallbackWarning`; with ``fullgraph=True`` it is an error.

    >>> import torch, dovetail
    >>> doubled = torch.compile(lambda x: x * 2, backend=dovetail.torch_backend("aten"))
    """
    options = make_options(
        backend=inner,
        fullgraph=fullgraph,
        passes=tuple(passes),
        memory_budget=memory_budget,
        numerics=numerics,
        backend_options=dict(backend_options or {}),
    )
    return _with_options(options)


def dovetail(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **more: Any
) -> TorchCompiled:
    """The backend that torch finds by the name "dovetail"; ``options`` are the arguments of :func:`torch_backend` by name."""
    given = dict(options or {})
    for name in given:
        if name not in _OPTION_NAMES:
            raise OptionError(
                f"backend 'dovetail' has no option {name!r}", advice=f"the options are: {', '.join(_OPTION_NAMES)}"
            )
    return torch_backend(**given)(graph, inputs, **more)
