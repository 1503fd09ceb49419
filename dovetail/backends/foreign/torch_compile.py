"""``torch.compile(backend="dovetail")``: torch captures the function, and Dovetail enters at stage 0."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dovetail.aot.capture_joint import capture_joint
from dovetail.aot.compile_joint import choose_backend, compile_joint
from dovetail.aot.state import create_state
from dovetail.backends import Backend
from dovetail.backends.foreign.callers_graph import CallersFrontend
from dovetail.errors import BackendError, CaptureError, DovetailError, EagerFallbackWarning, InputError, OptionError
from dovetail.events import EventLog
from dovetail.face.loading import load_rules
from dovetail.options import Options, make_options
from dovetail.torch_private import dynamo as private_dynamo
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing

TorchCompiled = Callable[..., Any]
_OPTION_NAMES = ("inner", "fullgraph", "passes", "memory_budget", "numerics", "backend_options")


@dataclass(frozen=True, eq=False)
class TorchBackend:
    """A backend for ``torch.compile``; made by :func:`torch_backend`. ``events`` is its log."""

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
        try:
            return self._compile(graph, inputs)
        except (CaptureError, InputError) as error:
            return self._fall_back(graph, error)
        except BackendError as error:
            return self._with_operators(error)(graph, inputs)
        except DovetailError:
            raise
        except Exception as error:  # noqa: BLE001  (a graph that cannot be captured is still a graph that runs)
            return self._fall_back(graph, CaptureError(f"capture failed with {type(error).__name__}: {error}"))

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> TorchCompiled:
        load_rules()
        with contextlib.ExitStack() as outer:
            outer.enter_context(private_state.preserved_rng_state())
            outer.enter_context(self.events.span("compile", caller="torch.compile"))
            with self.events.span("capture"), contextlib.ExitStack() as stack:
                fake_mode = private_dynamo.callers_fake_mode(inputs) or private_tracing.FakeTensorMode(
                    shape_env=ShapeEnv()
                )
                outer.enter_context(private_dynamo.symbolic_sizes_in(fake_mode))
                given = private_dynamo.callers_inputs(graph, inputs, fake_mode)
                frontend = CallersFrontend()
                state = create_state(stack, graph, tuple(given), frontend=frontend, fake_mode=fake_mode)
                for item, real in zip(given, inputs, strict=True):
                    if isinstance(real, torch.Tensor) and real is not item.value:
                        state.trace.check_input(real, item.name)
                joint = capture_joint(state)
            for graph_pass in self.options.passes:
                joint = joint.apply(graph_pass)
            compiled = compile_joint(
                None,
                joint,
                self.inner,
                options=self.options.backend_options,
                events=self.events,
                memory_budget=self.options.memory_budget,
                numerics=self.options.numerics,
            )
            return frontend.call.runtime(compiled)

    def _with_operators(self, error: BackendError) -> TorchBackend:
        """The backend "aten" in the place of one that does not work; raises for one of the user's own, which is to be mended."""
        chosen = self.options.backend
        if self.inner.name == "aten" or not (chosen is None or (chosen == "inductor" and not self.options.fullgraph)):
            raise error
        self.events.note("backend given up", instead="aten", reason=error.what)
        warnings.warn(
            f"a graph of torch.compile runs the captured ATen operators one by one, because {error.what}",
            EagerFallbackWarning,
            stacklevel=3,
        )
        return TorchBackend(self.options, choose_backend("aten", self.options.numerics), self.events)

    def _fall_back(self, graph: torch.fx.GraphModule, error: CaptureError | InputError) -> TorchCompiled:
        self.events.note("runs as torch captured it", reason=error.what, where=error.where)
        if self.options.fullgraph:
            raise error
        warnings.warn(f"a graph of torch.compile runs eagerly: {error}", EagerFallbackWarning, stacklevel=2)
        return graph.forward


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
