"""The backend protocol: a backend turns one flat ATen graph into a callable that takes one list and returns one list.

Dovetail calls a backend as ``compile(graph, example_inputs, kind=..., options=...)``:

* ``graph`` is a functional ``torch.fx.GraphModule`` whose output node holds one flat list of nodes, numbers and None;
* ``example_inputs`` are the fake values of its placeholders;
* ``kind`` is ``"forward"``, ``"backward"`` or ``"inference"``;
* ``options`` are the user's ``backend_options`` and Dovetail's own (:data:`PIPELINE_OPTIONS`):
  ``static_inputs`` lists the inputs whose address is stable; ``user_visible_outputs`` lists the outputs that the user gets,
  whose strides must be those of the fake values; ``write_backs``, given only to a backend that says ``writes_back``, maps
  outputs to the inputs whose new values they are: the backend may write the input itself, and then returns it;
  ``guarded_inputs``: before each run guards look at all sizes and strides that are not symbolic.

The callable may empty its list of inputs to free memory early.

>>> import torch
>>> from dovetail.backends.protocol import Backend, compile_with
>>> plain = Backend("plain", lambda graph, inputs, *, kind, options: lambda values: list(graph(*values)))
>>> class Double(torch.nn.Module):
...     def forward(self, x):
...         return [torch.ops.aten.mul.Tensor(x, 2)]
>>> run = compile_with(plain, torch.fx.symbolic_trace(Double()), [torch.ones(2)], "inference", {})
>>> run([torch.ones(2)])
[tensor([2., 2.])]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from dovetail.errors import BackendError, OptionError, UnsupportedGraphError
from dovetail.torch_private import sizes as private_sizes

Kind = Literal["forward", "backward", "inference"]
Numerics = Literal["bitwise", "tolerance"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "inference")

#: The options that Dovetail sets; all others are the user's.
PIPELINE_OPTIONS = frozenset({"guarded_inputs", "static_inputs", "user_visible_outputs", "write_backs"})

CompiledCallable = Callable[[list[Any]], list[Any]]


class CompileFunction(Protocol):
    """The signature of a backend."""

    def __call__(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        """Compile ``graph`` to a callable that takes one list and returns one list."""
        ...


def _no_decompositions() -> dict[Any, Callable[..., Any]] | None:
    return None


@dataclass(frozen=True)
class Backend:
    """A backend and the facts that the pipeline needs about it.

    ``compile``: the backend itself, a :class:`CompileFunction`.
    ``decompositions``: returns the table of decompositions that the graph gets before ``compile``, or None.
    ``takes_program``: runs the torch-level program instead of ATen graphs (the ``eager`` backend).
    ``data_sizes``: accepts sizes computed from data (``nonzero``, masks), and raises where an assumption about one fails.
    ``numerics``: "bitwise" promises eager's results to the last bit, "tolerance" promises ``tolerances``.
    ``tolerances``: the relative and the absolute error of results in float32.
    ``takes_symbolic_shapes``: accepts symbolic sizes; without it, each new size is compiled anew.
    ``kinds``: the kinds of graph that it accepts; ``("inference",)`` cannot train.
    ``writes_back``: understands the option ``write_backs``.
    ``slow_to_compile``: compiling costs more than one eager run (:mod:`dovetail.passes.first_run`).
    ``leaves_fused_updates``: decomposes fused optimizers, and prefers that one which ends a step runs after the graph.
    ``for_options``: returns the backend for the user's options, where options change any of these facts.

    >>> Backend("mine", lambda graph, inputs, *, kind, options: graph).numerics
    'tolerance'
    """

    name: str
    compile: CompileFunction
    decompositions: Callable[[], Mapping[Any, Callable[..., Any]] | None] = _no_decompositions
    takes_program: bool = False
    numerics: Numerics = "tolerance"
    description: str = ""
    data_sizes: bool = False
    tolerances: tuple[float, float] = (1e-4, 1e-5)
    takes_symbolic_shapes: bool = True
    kinds: tuple[Kind, ...] = KINDS
    writes_back: bool = False
    slow_to_compile: bool = False
    leaves_fused_updates: bool = False
    for_options: Callable[[Mapping[str, Any]], Backend] | None = None
    has_options: bool = True

    def with_options(self, options: Mapping[str, Any]) -> Backend:
        """Return the backend for these options; its decompositions and numerics may depend on them."""
        if options and not self.has_options:
            raise OptionError(
                f"backend {self.name!r} has no option {min(options)!r}", advice="leave backend_options out"
            )
        return self if self.for_options is None else self.for_options(options)

    def __str__(self) -> str:
        text = f"backend {self.name!r} ({self.numerics})"
        return f"{text}: {self.description}" if self.description else text


def output_arguments(graph: torch.fx.GraphModule) -> list[Any]:
    """Return the entries of the graph's output list: nodes, numbers or None.

    Raises :class:`BackendError` for a graph that does not return one flat list.
    """
    advice = "end the graph with graph.output([...])"
    for node in graph.graph.find_nodes(op="output"):
        if not isinstance(node.args[0], (list, tuple)):
            returned = type(node.args[0]).__name__
            raise BackendError(f"the graph returns {returned}, a backend needs one flat list", advice=advice)
        return list(node.args[0])
    raise BackendError("the graph has no output node", advice=advice)


def compile_with(
    backend: Backend,
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kind: Kind,
    options: Mapping[str, Any] | None = None,
) -> CompiledCallable:
    """Compile ``graph`` with ``backend``; anything that violates the protocol becomes a :class:`BackendError`.

    Every call checks the number of outputs. The first call also checks that tensors are where the graph has tensors (with
    the graph's dtype and shape, for outputs that the user sees), and None where it has None.
    """
    if kind not in KINDS:
        raise BackendError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    _refuse_unfit(backend, example_inputs, kind)
    entries = output_arguments(graph)
    visible = set((options or {}).get("user_visible_outputs", range(len(entries))))
    declared = [_declared(entry, index in visible) for index, entry in enumerate(entries)]
    try:
        compiled = backend.compile(graph, list(example_inputs), kind=kind, options=dict(options or {}))
    except (BackendError, OptionError):
        raise
    except Exception as error:
        raise BackendError(
            f"backend {backend.name!r} raised {type(error).__name__} while compiling the {kind} graph: {error}",
            advice='run with backend="aten" to see whether the graph itself is sound, or report this to the backend',
        ) from error
    if not callable(compiled):
        raise BackendError(
            f"backend {backend.name!r} returned {type(compiled).__name__} for the {kind} graph, which cannot be called",
            advice="return a callable that takes one list of inputs and returns one list of outputs",
        )
    return _checked(compiled, declared, f"the {kind} graph compiled by backend {backend.name!r}")


def _refuse_unfit(backend: Backend, example_inputs: Sequence[Any], kind: Kind) -> None:
    """Raise for a graph that the backend has declared it does not accept."""
    if kind not in backend.kinds:
        raise UnsupportedGraphError(
            f"backend {backend.name!r} takes {' and '.join(backend.kinds)} graphs only, and this is a {kind} graph",
            advice='call the function under torch.no_grad(), or use another backend for training, such as backend="aten"',
        )
    if not backend.takes_symbolic_shapes and any(map(private_sizes.has_symbols, example_inputs)):
        raise UnsupportedGraphError(
            f"backend {backend.name!r} takes no symbolic sizes, and the {kind} graph has some",
            advice="use dynamic=False for this function",
        )


def _declared(entry: Any, is_visible: bool) -> Callable[[Any], str]:
    """Return a function that says in words how an output differs from the graph's declaration; "" if it does not.

    Only visible outputs are checked for dtype and shape: fake kernels are wrong about what some kernels save for their own
    backward (workspaces of LSTM, the statistics of a bfloat16 batch norm).
    """
    value = entry.meta.get("val") if isinstance(entry, torch.fx.Node) else entry
    is_none, is_tensor, is_number = entry is None, isinstance(value, torch.Tensor), value is not None
    dtype, shape = None, None
    if isinstance(value, torch.Tensor) and is_visible:
        dtype = value.dtype
        shape = tuple(value.shape) if all(type(size) is int for size in value.shape) else None

    def mismatch(output: Any) -> str:
        if is_none:
            return "" if output is None else f"{type(output).__name__} instead of None"
        if not is_tensor:
            wrong = is_number and isinstance(output, torch.Tensor)
            return f"{type(output).__name__} instead of a number" if wrong else ""
        if not isinstance(output, torch.Tensor):
            return f"{type(output).__name__} instead of a tensor"
        if dtype not in (None, output.dtype):
            return f"a tensor of {output.dtype} instead of {dtype}"
        return "" if shape in (None, output.shape) else f"a tensor of shape {tuple(output.shape)} instead of {shape}"

    return mismatch


def _checked(compiled: CompiledCallable, declared: list[Callable[[Any], str]], subject: str) -> CompiledCallable:
    count = len(declared)
    seen = False

    def misfit(problem: str) -> BackendError:
        advice = 'use another backend, such as backend="aten"; a backend must return what the output node lists'
        return BackendError(f"{subject} returned {problem}", advice=advice)

    def run(inputs: list[Any]) -> list[Any]:
        nonlocal seen
        outputs = compiled(inputs)
        if type(outputs) is not list:
            if not isinstance(outputs, (list, tuple)):
                raise misfit(f"{type(outputs).__name__} instead of one list")
            outputs = list(outputs)
        if len(outputs) != count:
            raise misfit(f"{len(outputs)} outputs, the graph has {count}")
        if not seen:
            for index, (output, mismatch) in enumerate(zip(outputs, declared, strict=True)):
                problem = mismatch(output)
                if problem:
                    raise misfit(f"{problem} as output {index}")
            seen = True
        return outputs

    return run
