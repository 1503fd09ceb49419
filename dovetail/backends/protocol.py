"""What a backend is: a function from one flat ATen graph to a callable that takes one list and returns one list.

A backend is called as ``compile(graph, example_inputs, kind=..., options=...)``:

* ``graph`` is a functional ``torch.fx.GraphModule`` whose output node holds one flat list of nodes, numbers and None;
* ``example_inputs`` are the fake values of its placeholders;
* ``kind`` is ``"forward"``, ``"backward"`` or ``"inference"``;
* ``options`` is a mapping. Dovetail itself sets ``static_inputs`` (indices of inputs whose address is stable) and
  ``user_visible_outputs`` (indices of outputs that the user gets, whose strides must be the promised ones), and for a
  backend that says ``writes_back`` also ``write_backs`` (a mapping from outputs to the inputs that they are the new values
  of; the backend may write them there itself, and then returns the input). The rest are the user's ``backend_options``.

The result is called with one list of inputs, which it may empty to free them early, and returns one list of outputs.

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
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from dovetail.errors import BackendError, OptionError, UnsupportedGraphError
from dovetail.torch_private import sizes as private_sizes

Kind = Literal["forward", "backward", "inference"]
Numerics = Literal["bitwise", "tolerance"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "inference")

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
    """A backend with what the pipeline has to know about it.

    ``compile``: the backend itself, see :mod:`dovetail.backends.protocol`.
    ``decompositions``: gives the table of decompositions to apply to a graph before ``compile``, or None.
    ``takes_program``: run the torch-level program tape instead of ATen graphs (the ``eager`` backend).
    ``data_sizes``: whether graphs may compute sizes from data (``nonzero``, masks), and raise where an assumption about one fails.
    ``numerics``: "bitwise" if results equal eager's to the last bit, else "tolerance".
    ``tolerances``: for "tolerance", how far results may be from eager's in float32: relative and absolute.
    ``takes_symbolic_shapes``: whether sizes may be symbolic in the graphs it is given; if not, every new size is compiled anew.
    ``kinds``: the kinds of graph that it takes; ``("inference",)`` for one that cannot train.
    ``writes_back``: whether ``compile`` understands the option ``write_backs``, see :mod:`dovetail.backends.protocol`.
    ``slow_to_compile``: whether a graph that is expected to run once is not worth compiling (:mod:`dovetail.aot.first_run`).
    ``leaves_fused_updates``: whether it decomposes torch's fused optimizers, and is glad to be spared them where they end a step.
    ``for_options``: gives the backend as it is with the user's options, where these change what it says of itself.

    >>> Backend("mine", lambda graph, inputs, *, kind, options: graph).numerics
    'tolerance'
    """

    name: str
    compile: CompileFunction
    decompositions: Callable[[], dict[Any, Callable[..., Any]] | None] = _no_decompositions
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

    def with_options(self, options: Mapping[str, Any]) -> Backend:
        """The backend as it is with these options: its decompositions and numerics may depend on them."""
        return self if self.for_options is None else self.for_options(options)

    def __str__(self) -> str:
        text = f"backend {self.name!r} ({self.numerics})"
        return f"{text}: {self.description}" if self.description else text


def output_arguments(graph: torch.fx.GraphModule) -> list[Any]:
    """The entries of the graph's output list: nodes, numbers or None.

    Raises :class:`BackendError` where the graph does not return one flat list.
    """
    for node in reversed(graph.graph.nodes):
        if node.op != "output":
            continue
        outputs = node.args[0]
        if not isinstance(outputs, (list, tuple)):
            raise BackendError(
                f"the graph returns {type(outputs).__name__}, a backend needs one flat list",
                advice="end the graph with graph.output([...])",
            )
        return list(outputs)
    raise BackendError("the graph has no output node", advice="end the graph with graph.output([...])")


def compile_with(
    backend: Backend,
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kind: Kind,
    options: Mapping[str, Any] | None = None,
) -> CompiledCallable:
    """Compile ``graph`` with ``backend``; whatever does not fit the protocol becomes a :class:`BackendError`.

    The number of outputs is checked on every call; on the first call also that there is a tensor (of the promised dtype
    and shape, for outputs that the user sees) where the graph's output is a tensor, and None where it is None.
    """
    if kind not in KINDS:
        raise BackendError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    _refuse_unfit(backend, example_inputs, kind)
    expected = output_arguments(graph)
    every = range(len(expected))
    visible = set((options or {}).get("user_visible_outputs", every))
    # What a kernel saves for its own backward is its own business: fake kernels know workspaces of LSTM and the statistics
    # of a bfloat16 batch norm wrongly.
    promised = [
        _promise(entry) if index in visible else _loosely(_promise(entry)) for index, entry in enumerate(expected)
    ]
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
    return _checked(compiled, backend.name, kind, promised)


def _refuse_unfit(backend: Backend, example_inputs: Sequence[Any], kind: Kind) -> None:
    """Raise where the backend has said that it does not take such a graph."""
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


@dataclass(frozen=True)
class _Promise:
    """What the graph says about one output; ``what`` is "tensor", "none", "other" or "unknown"."""

    what: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None


def _promise(entry: Any) -> _Promise:
    if entry is None:
        return _Promise("none")
    if not isinstance(entry, torch.fx.Node):
        return _Promise("other")
    value = entry.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return _Promise("unknown" if value is None else "other")
    static = all(type(size) is int for size in value.shape)
    return _Promise("tensor", value.dtype, tuple(value.shape) if static else None)


def _loosely(promise: _Promise) -> _Promise:
    return replace(promise, dtype=None, shape=None)


def _checked(compiled: CompiledCallable, name: str, kind: Kind, promised: list[_Promise]) -> CompiledCallable:
    count = len(promised)
    seen = False

    def run(inputs: list[Any]) -> list[Any]:
        nonlocal seen
        outputs = compiled(inputs)
        if type(outputs) is not list:
            if not isinstance(outputs, (list, tuple)):
                raise _misfit(name, kind, f"returned {type(outputs).__name__} instead of one list")
            outputs = list(outputs)
        if len(outputs) != count:
            raise _misfit(name, kind, f"returned {len(outputs)} outputs, the graph has {count}")
        if not seen:
            for index, (output, promise) in enumerate(zip(outputs, promised, strict=True)):
                problem = _mismatch(output, promise)
                if problem:
                    raise _misfit(name, kind, f"returned {problem} as output {index}")
            seen = True
        return outputs

    return run


def _mismatch(output: Any, promise: _Promise) -> str:
    if promise.what == "none":
        return "" if output is None else f"{type(output).__name__} instead of None"
    if promise.what == "other":
        return f"{type(output).__name__} instead of a number" if isinstance(output, torch.Tensor) else ""
    if promise.what != "tensor":
        return ""
    if not isinstance(output, torch.Tensor):
        return f"{type(output).__name__} instead of a tensor"
    if promise.dtype is not None and output.dtype != promise.dtype:
        return f"a tensor of {output.dtype} instead of {promise.dtype}"
    if promise.shape is not None and tuple(output.shape) != promise.shape:
        return f"a tensor of shape {tuple(output.shape)} instead of {promise.shape}"
    return ""


def _misfit(name: str, kind: Kind, problem: str) -> BackendError:
    return BackendError(
        f"the {kind} graph compiled by backend {name!r} {problem}",
        advice='use another backend, such as backend="aten"; a backend must return what the output node lists',
    )
