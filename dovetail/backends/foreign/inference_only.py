"""Backends for inference by libraries that read whole models: ``onnxruntime`` and ``openvino``.

Both take graphs of pure operators with sizes that are known, run them with code of their own, and refuse what they cannot
keep to eager's numbers: random numbers, writes, dtypes that they do not have. The first results of each graph are compared with
ATen's, and a graph that is converted wrongly is refused. Neither library is installed with Dovetail.

>>> from dovetail.backends import lookup_backend
>>> lookup_backend("onnxruntime").kinds
('inference',)
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends.aten import compile_aten
from dovetail.backends.common.outputs import guard_outputs, own_copy, promised_strides
from dovetail.backends.debug.subgraphs import UNINITIALISED, line_of
from dovetail.backends.debug.values import difference
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, output_arguments
from dovetail.errors import OptionError, UnsupportedGraphError
from dovetail.torch_private import operators as private_operators

#: A module with its example inputs becomes a function of contiguous tensors.
Build = Callable[[torch.fx.GraphModule, list[torch.Tensor], Mapping[str, Any]], Callable[[list[Any]], list[Any]]]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PIPELINE = ("static_inputs", "user_visible_outputs")


@dataclass(frozen=True)
class _Library:
    """One library: its name, what has to be importable, the dtypes it has, and what builds a callable."""

    name: str
    packages: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    build: Build
    computes_whole_numbers: bool = True

    def compile(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        """Compile one graph, or refuse it."""
        missing = [name for name in self.packages if not _can_be_imported(name)]
        if missing:
            raise UnsupportedGraphError(
                f"backend {self.name!r} needs {' and '.join(missing)}, which cannot be imported here",
                advice=f"pip install {' '.join(self.packages)}",
            )
        self._refuse(graph)
        outputs = output_arguments(graph)
        computed, wanted, read = _computed_outputs(graph)
        settings = {name: value for name, value in options.items() if name not in _PIPELINE}
        if computed is None:
            run: Callable[[list[Any]], list[Any]] = lambda inputs: []  # noqa: E731
        else:
            given = [example_inputs[place] for place in read]
            examples = [torch.zeros(tuple(value.shape), dtype=value.dtype) for value in given]
            try:
                with _quietly():
                    run = self.build(computed, examples, settings)
            except OptionError:
                raise
            except Exception as error:
                first = _COLOURS.sub("", str(error)).strip().splitlines() or [""]
                raise UnsupportedGraphError(
                    f"{self.name} cannot take this graph: {type(error).__name__}: {first[0][:300]}",
                    advice='use another backend, such as backend="aten"',
                ) from error
        places = {node: number for number, node in enumerate(wanted)}
        parameters = {node: number for number, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        compared = False

        def call(inputs: list[Any]) -> list[Any]:
            nonlocal compared
            kept = list(inputs)
            inputs.clear()
            values = run([kept[place].detach().contiguous() for place in read])
            results = [_pick(entry, kept, values, parameters, places) for entry in outputs]
            if not compared:
                self._compare(graph, kept, results)
                compared = True
            return results

        return guard_outputs(call, promised_strides(outputs, range(len(outputs))))

    def _refuse(self, graph: torch.fx.GraphModule) -> None:
        """Raise for what this library would get wrong, or has no word for."""
        for node in graph.graph.nodes:
            problem = self._problem(node)
            if problem:
                raise UnsupportedGraphError(
                    f"{self.name} cannot take {node.target}: {problem}",
                    where=line_of(node),
                    advice='use another backend, such as backend="aten"',
                )

    def _compare(self, graph: torch.fx.GraphModule, inputs: list[Any], results: list[Any]) -> None:
        """Raise where the first results are not ATen's: what converts a graph may do it wrongly without a word."""
        promise = Backend(self.name, self.compile)
        wanted = compile_aten(graph)(list(inputs))
        entries = output_arguments(graph)
        for index, (entry, found, want) in enumerate(zip(entries, results, wanted, strict=True)):
            undefined = isinstance(entry, torch.fx.Node) and entry.target in UNINITIALISED
            problem = "" if undefined else difference(found, want, promise)
            if problem:
                raise UnsupportedGraphError(
                    f"{self.name} computes this graph wrongly: result {index} ({entry}) {problem}",
                    where=line_of(entry) if isinstance(entry, torch.fx.Node) else None,
                    advice='use another backend; backend="bisect" with this one as "inner" finds the operator',
                )

    def _problem(self, node: torch.fx.Node) -> str:
        if isinstance(node.target, private_operators.OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                return "it would draw other random numbers than eager"
            if node.target._schema.is_mutable:
                return "it writes to memory"
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(item, torch.Tensor):
                continue
            whole = not (item.is_floating_point() or item.dtype is torch.bool)
            if whole and node.op == "call_function" and not self.computes_whole_numbers:
                return "it computes with 32 bits, and these are whole numbers of any size"
            if item.dtype not in self.dtypes:
                return f"it has no {item.dtype}"
            if item.device.type != "cpu":
                return f"it runs on the CPU, and this tensor is on {item.device}"
            if item.layout is not torch.strided:
                return f"it has no {item.layout}"
        return ""


def _can_be_imported(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _computed_outputs(
    graph: torch.fx.GraphModule,
) -> tuple[torch.fx.GraphModule | None, list[torch.fx.Node], list[int]]:
    """A copy of the graph that returns each computed value once; which nodes of ``graph`` those are; which inputs it reads."""
    entries = output_arguments(graph)
    wanted = list(
        dict.fromkeys(item for item in entries if isinstance(item, torch.fx.Node) and item.op != "placeholder")
    )
    if not wanted:
        return None, [], []
    copied = own_copy(graph)
    by_name = {node.name: node for node in copied.graph.nodes}
    copied.graph.output_node().args = (tuple(by_name[node.name] for node in wanted),)
    copied.graph.eliminate_dead_code()
    read = []
    for place, node in enumerate(copied.graph.find_nodes(op="placeholder")):
        if node.users:
            read.append(place)
        else:
            copied.graph.erase_node(node)
    copied.recompile()
    return copied, wanted, read


def _pick(
    entry: Any,
    inputs: list[Any],
    values: list[Any],
    parameters: Mapping[torch.fx.Node, int],
    places: Mapping[torch.fx.Node, int],
) -> Any:
    if not isinstance(entry, torch.fx.Node):
        return entry
    return inputs[parameters[entry]] if entry in parameters else values[places[entry]]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The exporters talk a lot, on every channel."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _no_settings(name: str, settings: Mapping[str, Any]) -> None:
    if settings:
        raise OptionError(
            f"backend {name!r} has no option {next(iter(settings))!r}", advice="leave backend_options out"
        )


def _onnxruntime(
    graph: torch.fx.GraphModule, examples: list[torch.Tensor], settings: Mapping[str, Any]
) -> Callable[[list[Any]], list[Any]]:
    import onnxruntime

    _no_settings("onnxruntime", settings)
    program: Any = torch.onnx.export(graph, tuple(examples), dynamo=True, verbose=False, optimize=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    if len(names) != len(examples):
        raise ValueError(f"the model has {len(names)} inputs, the graph {len(examples)}")

    def run(inputs: list[Any]) -> list[Any]:
        feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return run


def _openvino(
    graph: torch.fx.GraphModule, examples: list[torch.Tensor], settings: Mapping[str, Any]
) -> Callable[[list[Any]], list[Any]]:
    import openvino

    _no_settings("openvino", settings)
    exported = torch.export.export(graph, tuple(examples), strict=False)
    model = openvino.convert_model(exported)
    if len(model.inputs) != len(examples):
        raise ValueError(f"the model has {len(model.inputs)} inputs, the graph {len(examples)}")
    model.reshape({port: list(value.shape) for port, value in zip(model.inputs, examples, strict=True)})
    # Its default on some processors is bfloat16, which is not what the graph says.
    config = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    compiled = openvino.Core().compile_model(model, "CPU", config)
    count = len(compiled.outputs)

    def run(inputs: list[Any]) -> list[Any]:
        # A request of its own for each call: the results of one lie in the request's memory, which the next would use again.
        request = compiled.create_infer_request()
        results = request.infer([value.numpy() for value in inputs])
        return [torch.from_numpy(results[index].copy()) for index in range(count)]

    return run


_COMMON = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8, torch.int8})


def _backend(library: _Library, description: str) -> Backend:
    return Backend(
        library.name,
        library.compile,
        takes_symbolic_shapes=False,
        kinds=("inference",),
        description=description,
    )


ONNXRUNTIME = _backend(
    _Library("onnxruntime", ("onnxruntime", "onnx", "onnxscript"), _COMMON | {torch.float16}, _onnxruntime),
    "ONNX Runtime on the CPU, for inference",
)
OPENVINO = _backend(
    _Library("openvino", ("openvino",), _COMMON - {torch.float64}, _openvino, False),
    "OpenVINO on the CPU, for inference",
)
