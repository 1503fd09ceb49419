"""Any call of a function as one node: with numbers, constants, nested containers and arguments that it writes to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.outputs import number_as_tensor
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import data_rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace import Trace
from dovetail.trace.trace import open_trace
from dovetail.whole_calls.call import whole_call
from dovetail.whole_calls.examples import example_of
from dovetail.whole_calls.facts import SizesRule
from dovetail.whole_calls.handles import is_handle


class Whole:
    """A function that is one call of the graph wherever the program is traced, and itself elsewhere.

    With ``sizes`` it is a function of tensors that returns tensors, and these have the sizes that ``sizes`` says, given the same
    arguments (:data:`dovetail.whole_calls.facts.SizesRule`); with ``draws`` it may draw random numbers of the CPU then. Without,
    it takes and returns anything that holds tensors and numbers, and the results have the sizes that they have for an example.
    """

    def __init__(
        self, function: Callable[..., Any], sizes: SizesRule | None = None, *, draws: bool = False, name: str = ""
    ) -> None:
        self.function = function
        self.sizes = sizes
        self.draws = draws
        self.__name__ = name or getattr(function, "__name__", "function")
        self.__qualname__ = name or getattr(function, "__qualname__", self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as one operator while tracing. Raises :class:`CaptureError`."""
        trace = open_trace()
        if trace is None:
            return self.function(*args, **kwargs)
        if self.sizes is None:
            return _recorded(trace, self, args, kwargs)
        with trace.recorder.paused():
            found = whole_call(trace, self.__name__, self.function, args, self.sizes, draws=self.draws)
        trace.recorder.record(self, args, kwargs, found)
        return found


def call_whole(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as one node of the open trace; raises :class:`Break` for a function that cannot be one."""
    whole = Whole(function)
    if private_state.is_any_autocast_on():
        raise Break(f"{whole.__name__} cannot be kept whole under autocast")
    try:
        return whole(*args, **kwargs)
    except CaptureError as error:
        raise Break(error.what, error.advice) from error


@data_rule
def _needs_data(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep a call whole that torch cannot trace."""
    return call_whole(function, args, kwargs)


def _recorded(trace: Trace, whole: Whole, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``whole(*args, **kwargs)`` as one node of the graph and one call of the program.

    Numbers that depend on data, and numbers that the function returns, are tensors without dimensions. An argument that it writes
    to is written to by the graph. Raises :class:`CaptureError` for a function that cannot be one node.
    """
    with trace.recorder.paused():
        call = _FlatCall(whole, args, kwargs)
        written = call.written(trace)
        if any(call.tensors[at].requires_grad for at, _ in written):
            raise CaptureError(f"{call.name} writes to a tensor that requires a gradient and cannot be kept whole")

        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            own = list(given)
            for at, _ in written:
                own[at] = own[at].clone()
            return [*call.run(own), *[own[at] for at, _ in written]]

        results = whole_call(trace, call.name, run, call.tensors)
        count = len(results) - len(written)
        for (at, is_counted), value in zip(written, results[count:], strict=True):
            target = call.tensors[at]
            (target if is_counted else target.data).copy_(value)
        result = call.result(trace, results[:count])
    trace.recorder.record(whole, tuple(args), kwargs, result)
    return result


class _FlatCall:
    """A call as a function of tensors that returns tensors."""

    def __init__(self, whole: Whole, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.name = whole.__name__
        self._function = whole.function
        leaves, self._arguments = private_trees.tree_flatten((tuple(args), dict(kwargs)))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        count = 0
        self._leaves: list[Callable[[Sequence[torch.Tensor]], Any]] = []
        for leaf in leaves:
            self._leaves.append(_tensor_at(count) if isinstance(leaf, torch.Tensor) else self._reader(leaf))
            count += isinstance(leaf, torch.Tensor)
        #: How the results are nested, and which are numbers; known when the function has run once.
        self._results: private_trees.TreeSpec | None = None
        self._numbers: list[bool] = []

    def _reader(self, leaf: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
        """The reader of an argument that is no tensor, from the tensors."""
        if private_sizes.is_data_number(leaf):
            self.tensors.append(number_as_tensor(leaf))
            at = len(self.tensors) - 1
            return lambda given: given[at].item()
        if isinstance(leaf, torch.SymInt):
            leaf = int(leaf)  # a guard: the call is a graph for each of them
        if not is_leaf_value(leaf) and not _is_settings(leaf):
            raise CaptureError(f"{self.name} cannot be kept whole: an argument of it is an object")
        return lambda given: leaf

    def run(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the function; numbers that it returns as tensors."""
        args, kwargs = private_trees.tree_unflatten([read(given) for read in self._leaves], self._arguments)
        results, spec = private_trees.tree_flatten(self._function(*args, **kwargs))
        if self._results is None:
            self._results, self._numbers = spec, [type(item) in (bool, int, float) for item in results]
        return [_number_tensor(item) if type(item) in (bool, int, float) else item for item in results]

    def written(self, trace: Trace) -> list[tuple[int, bool]]:
        """The arguments that the function writes to, and whether it counts that, found by an example call.

        The running statistics of a batch norm are written to by its kernel, which counts no writes.
        """
        with (
            private_tracing.disable_current_modes(),
            private_calls.no_torch_function(),
            private_state.preserved_rng_state(),
            private_libraries.outside_inference_mode(),
        ):
            examples = [example_of(trace, tensor).requires_grad_(tensor.requires_grad) for tensor in self.tensors]
            before = [(tensor._version, tensor.detach().clone()) for tensor in examples]
            with torch.no_grad():
                self.run(examples)
            return [
                (at, tensor._version != version)
                for at, (tensor, (version, values)) in enumerate(zip(examples, before, strict=True))
                if tensor._version != version or _differ(tensor, values)
            ]

    def result(self, trace: Trace, values: Sequence[torch.Tensor]) -> Any:
        """The result that the program sees, made of the tensors that the node returns."""
        made = [_number(trace, item) if flag else item for item, flag in zip(values, self._numbers, strict=True)]
        assert self._results is not None
        return private_trees.tree_unflatten(made, self._results)


def _tensor_at(index: int) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    return lambda given: given[index]


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that lie alike hold other bytes: a NaN is the same as itself then."""
    if is_handle(one) or one.is_quantized:
        return False
    plain = (item.detach().resolve_conj().resolve_neg().contiguous() for item in (one, other))
    return not torch.equal(*(item.view(-1).view(torch.uint8) for item in plain))


def _is_settings(value: Any) -> bool:
    """Whether a value is a dataclass of torch's that holds plain values only."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    is_plain = all(is_leaf_value(getattr(value, field.name)) for field in dataclasses.fields(value))
    return is_plain and type(value).__module__.split(".", 1)[0] == "torch"


def _number(trace: Trace, value: torch.Tensor) -> Any:
    with trace.reading_truths() if value.dtype == torch.bool else contextlib.nullcontext():
        return value.item()


def _number_tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
