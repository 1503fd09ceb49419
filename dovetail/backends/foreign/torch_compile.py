"""``torch.compile(backend="dovetail")``: torch captures the function, and Dovetail compiles torch's graph like any function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.compile_joint import choose_backend
from dovetail.backends import Backend
from dovetail.errors import OptionError
from dovetail.events import EventLog
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.dispatcher import Run
from dovetail.frontend.sizes.size_changes import SizeChanges
from dovetail.options import Options, make_options
from dovetail.torch_private import dynamo as private_dynamo
from dovetail.torch_private import sizes as private_sizes

TorchCompiled = Callable[..., Any]
_OPTION_NAMES = ("inner", "fullgraph", "passes", "memory_budget", "numerics", "backend_options")


class _CompiledGraph(CompiledFunction):
    """A graph that torch has captured, compiled when it is called and no other thread is in torch.compile."""

    def __init__(self, graph: torch.fx.GraphModule, options: Options, events: EventLog) -> None:
        super().__init__(graph.forward, options, events)
        sizes: dict[str, frozenset[int]] = {}
        numbers = []
        for node in graph.graph.find_nodes(op="placeholder"):
            name, value = f"L[{node.target!r}]", node.meta.get("example_value")
            if isinstance(value, torch.Tensor):
                sizes[name] = frozenset(at for at, size in enumerate(value.shape) if private_sizes.is_symbolic(size))
            elif private_sizes.is_symbolic(value):
                numbers.append(name)
        # What torch has seen to change is symbolic from the first capture on.
        self._part.shared.learn_part(self._part.point, changes=SizeChanges(sizes, frozenset(numbers)))

    def decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        with private_dynamo.compile_lock():
            return super().decide(args, kwargs)


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
        """A function for a graph that torch has captured, compiled when it is first called."""
        _refuse_mode(mode, more)
        # Where torch makes the graph's code late, it is made now.
        if not graph.code or (self.inner.takes_program and not self.options.passes):
            return graph.forward
        compiled = _CompiledGraph(graph, dataclasses.replace(self.options, tiers="wait"), self.events)

        def call(*args: Any) -> Any:
            return compiled(*args)

        # A function: torch would look for what an object of a class of its own has wrapped, and call that.
        return call


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

    The options are those of :func:`dovetail.compile`: what of a graph cannot be captured breaks it, and is an error with
    ``fullgraph=True``.

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
