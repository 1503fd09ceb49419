"""The data that the steps of ``compile_joint`` hand on, and the named places between them where passes hook in.

The steps: prepare, decompose, partition, lower forward, lower backward, bind (:mod:`dovetail.aot.compile_joint`). Each takes a
:class:`Lowering` and returns another one. With no hook at any place the result is right; passes make it smaller, faster, or
differentiable more than once. A module that has hooks registers them when it is loaded:

>>> @after_partition
... def count_values(state):
...     print(len(state.parts.saved), "values are saved")
...     return state
>>> after_partition.remove(count_values)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from dovetail.aot.backward_graphs import BackwardGraphs, FlatCallable, Pattern
from dovetail.aot.joint_graph import JointGraph, Pass
from dovetail.aot.partition import ChooseSaved, PartitionedGraph
from dovetail.backends import Backend
from dovetail.backends.protocol import Kind
from dovetail.events import EventLog
from dovetail.runtime.derivatives import DifferentiableBackward
from dovetail.runtime.function import KeepApart
from dovetail.trace import Trace

if TYPE_CHECKING:
    from dovetail.aot.compiled_graph import CompiledGraph

Hook = TypeVar("Hook", bound=Callable[..., Any])
Table = Mapping[Any, Callable[..., Any]]
Wrapper = Callable[[FlatCallable], FlatCallable]
FindReused = Callable[[JointGraph], Mapping[torch.fx.Node, int]]
"""The nodes of a graph whose values the caller has already, each with a number that the caller knows it by."""


class Place(Generic[Hook]):
    """A place where hooks are registered, in the order in which they run; used as a decorator."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []

    def __call__(self, hook: Hook) -> Hook:
        """Register a hook."""
        self._hooks.append(hook)
        return hook

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def remove(self, hook: Hook) -> None:
        """Take a hook away again."""
        self._hooks.remove(hook)


@dataclass(frozen=True)
class CompileSettings:
    """The settings that the caller of ``compile_joint`` gives.

    ``may_run_once``: the entry may never be used again. ``find_reused`` gives values that the caller hands in as further inputs.
    ``guarded_inputs``: guards look at the inputs right before each forward. ``expected``: the tangents of the backward, if known.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    events: EventLog = field(default_factory=EventLog)
    memory_budget: float | int | None = None
    numerics: str = "fast"
    may_run_once: bool = False
    find_reused: FindReused | None = None
    guarded_inputs: bool = False
    expected: Pattern | None = None


@dataclass(frozen=True, eq=False)
class Lowering:
    """The state of one compilation; a step returns another one, with more of it filled in.

    ``write_backs`` are outputs of the forward that are nothing but an input's new value, with that input, for a backend that
    writes in place. ``reused`` are the numbers of the values that the forward takes after its inputs.
    ``gradients_dropped_first`` are inputs, each with the input that is its gradient, whose ``.grad`` the runtime drops before
    the forward runs. ``read_later`` are written inputs. ``measured`` gets the bytes that the last run has kept for the backward.
    ``complete()`` makes the graphs of a compilation that came from the cache with its ``joint`` as captured and without ``parts``.
    """

    joint: JointGraph
    backend: Backend
    settings: CompileSettings
    write_backs: Mapping[int, int] = field(default_factory=dict)
    parts: PartitionedGraph | None = None
    reused: tuple[int, ...] = ()
    gradients_dropped_first: tuple[tuple[int, int], ...] = ()
    read_later: tuple[tuple[int, int, Sequence[int]], ...] = ()
    forward: FlatCallable | None = None
    backward: BackwardGraphs | None = None
    measured: list[int] = field(default_factory=list)
    complete: Callable[[], Lowering] | None = None

    def completed(self) -> Lowering:
        """This lowering with all its graphs."""
        return self if self.complete is None else self.complete()

    @property
    def is_training(self) -> bool:
        """Whether autograd records the call."""
        return any(self.joint.spec.output_differentiable)

    def with_(self, **changes: Any) -> Lowering:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class BackendGraph:
    """One graph on its way to the backend; ``whole`` is the graph as the partition gave it.

    ``visible`` are the outputs whose strides must be the promised ones, ``write_backs`` is as in :class:`Lowering`. ``wrappers``
    are put around what the backend returns, the last one innermost. ``details`` are noted in the event of the compilation.
    """

    kind: Kind
    whole: torch.fx.GraphModule
    graph: torch.fx.GraphModule
    visible: tuple[int, ...]
    write_backs: Mapping[int, int] = field(default_factory=dict)
    wrappers: tuple[Wrapper, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def wrapped(self, wrapper: Wrapper, **changes: Any) -> BackendGraph:
        """A copy with a wrapper inside of the others, and with other changes."""
        return dataclasses.replace(self, wrappers=(*self.wrappers, wrapper), **changes)


#: In stage 1: refuses what leaves a capture, by it and the outputs with a gradient.
checks_outputs: Place[Callable[[Trace, Sequence[torch.Tensor], Sequence[torch.Tensor], int], None]] = Place()
#: In stage 1: for each differentiable output of several, the outputs that its backward leaves without theirs; None: all.
finds_freed: Place[Callable[[Sequence[torch.Tensor]], tuple[frozenset[int], ...] | None]] = Place()
#: In front of all steps: passes that a graph needs because of operators in it, each with a test whether it needs it.
required_passes: Place[Callable[[JointGraph], Pass | None]] = Place()
#: Of a training graph: the written inputs whose new values the backward reads, and how many writes the write-back counts.
reads_later: Place[Callable[[JointGraph], Sequence[tuple[int, int, Sequence[int]]]]] = Place()
#: In place of all steps; None: the steps are done.
instead_of_steps: Place[Callable[[Lowering], CompiledGraph | None]] = Place()
#: The graph by the decompositions of the backend's table; None: the hook before this one does it.
decomposes: Place[Callable[[Lowering, Table], torch.fx.GraphModule | None]] = Place()
#: Choose what the forward saves for the backward; the last hook decides. Without one: all that the backward reads.
choose_saved: Place[Callable[[Lowering], ChooseSaved]] = Place()
#: Behind the partition: hooks may change the two graphs.
after_partition: Place[Callable[[Lowering], Lowering]] = Place()
#: In front of the backend, for each graph that it compiles: hooks may change the graph and wrap its callable.
before_backend: Place[Callable[[Lowering, BackendGraph], BackendGraph]] = Place()
#: Whether a call's data will do for a graph that writes before it is through, as a question about its inputs; None: any will.
asks_data: Place[Callable[[Lowering], Callable[[Sequence[torch.Tensor]], bool] | None]] = Place()
#: Where a call keeps its saved values apart from its node of autograd; the last hook decides.
saved_apart: Place[Callable[[Lowering], KeepApart | None]] = Place()
#: Differentiate the backward; the last hook decides. Without one a second derivative raises HigherOrderGradientError.
differentiable_backward: Place[Callable[[Lowering], DifferentiableBackward | None]] = Place()
