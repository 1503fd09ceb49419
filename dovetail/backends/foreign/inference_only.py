"""Inference backends of libraries that read whole models: ``onnxruntime`` and ``openvino``.

Both take graphs of pure operators with static sizes and run them with code of their own. They refuse graphs whose results they
would change: random numbers, writes, missing dtypes. The first results of each graph are compared with ATen's, and a graph that
was converted wrongly is refused. Neither library is installed with Dovetail.
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
from dovetail.backends.debug.subgraphs import line_of, outputs_difference
from dovetail.backends.protocol import PIPELINE_OPTIONS, Backend, CompiledCallable, Kind, output_arguments
from dovetail.errors import OptionError, UnsupportedGraphError
from dovetail.torch_private import operators as private_operators

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
#: Makes a function of contiguous tensors from a module and its example inputs.
Build = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Run]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ELSEWHERE = 'use another backend, such as backend="aten"'
_COMMON = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8, torch.int8})


@dataclass(frozen=True)
class _Library:
    """One library: the packages to import, its dtypes, and the function that builds a callable with it."""

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
        unknown = options.keys() - PIPELINE_OPTIONS
        if unknown:
            raise OptionError(
                f"backend {self.name!r} has no option {min(unknown)!r}", advice="leave backend_options out"
            )
        for node in graph.graph.nodes:
            problem = self._problem(node)
            if problem:
                text = f"{self.name} cannot take {node.target}: {problem}"
                raise UnsupportedGraphError(text, where=line_of(node), advice=_ELSEWHERE)
        part = _Computed.of(graph)
        run = self._build(part, example_inputs) if part.wanted else lambda inputs: []
        return self._checked(graph, part, run)

    def _problem(self, node: torch.fx.Node) -> str:
        """Say why the library would get a node wrong, or lacks something for it; empty if neither."""
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

    def _build(self, part: _Computed, example_inputs: Sequence[Any]) -> Run:
        given = [example_inputs[place] for place in part.read]
        examples = [torch.zeros(tuple(value.shape), dtype=value.dtype) for value in given]
        try:
            with _quietly():
                return self.build(part.graph, examples)
        except Exception as error:
            first = (_COLOURS.sub("", str(error)).strip().splitlines() or [""])[0][:300]
            text = f"{self.name} cannot take this graph: {type(error).__name__}: {first}"
            raise UnsupportedGraphError(text, advice=_ELSEWHERE) from error

    def _checked(self, graph: torch.fx.GraphModule, part: _Computed, run: Run) -> CompiledCallable:
        """Return the callable for the whole graph, which compares its first results with ATen's."""
        outputs = output_arguments(graph)
        computed = {node: number for number, node in enumerate(part.wanted)}
        parameters = {node: number for number, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        compared = False

        def call(inputs: list[Any]) -> list[Any]:
            nonlocal compared
            kept = list(inputs)
            inputs.clear()
            values = run([kept[place].detach().contiguous() for place in part.read])
            results = [
                kept[parameters[entry]]
                if entry in parameters
                else values[computed[entry]]
                if entry in computed
                else entry
                for entry in outputs
            ]
            if not compared:
                wanted = compile_aten(graph)(list(kept))
                problem, where = outputs_difference(graph, results, wanted, Backend(self.name, self.compile))
                if problem:
                    raise UnsupportedGraphError(
                        f"{self.name} computes this graph wrongly: {problem}",
                        where=where,
                        advice='use another backend; backend="bisect" with this one as "inner" finds the operator',
                    )
                compared = True
            return results

        return guard_outputs(call, promised_strides(outputs, range(len(outputs))))


@dataclass(frozen=True)
class _Computed:
    """A copy of a graph that returns each computed value once: ``wanted`` are their nodes, ``read`` the inputs that it reads."""

    graph: torch.fx.GraphModule
    wanted: list[torch.fx.Node]
    read: list[int]

    @classmethod
    def of(cls, graph: torch.fx.GraphModule) -> _Computed:
        """Copy ``graph`` without unused inputs and repeated outputs."""
        entries = [item for item in output_arguments(graph) if isinstance(item, torch.fx.Node)]
        wanted = list(dict.fromkeys(item for item in entries if item.op != "placeholder"))
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
        return cls(copied, wanted, read)


def _can_be_imported(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence logging, warnings and standard output: exporters use all three."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _onnxruntime(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Run:
    import onnxruntime

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

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return run


def _openvino(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Run:
    import openvino

    exported = torch.export.export(graph, tuple(examples), strict=False)
    model = openvino.convert_model(exported)
    if len(model.inputs) != len(examples):
        raise ValueError(f"the model has {len(model.inputs)} inputs, the graph {len(examples)}")
    model.reshape({port: list(value.shape) for port, value in zip(model.inputs, examples, strict=True)})
    # On some processors it computes in bfloat16 unless told otherwise.
    config = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    compiled = openvino.Core().compile_model(model, "CPU", config)
    count = len(compiled.outputs)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        # Results lie in the memory of the request, so each call gets a request of its own.
        results = compiled.create_infer_request().infer([value.numpy() for value in inputs])
        return [torch.from_numpy(results[index].copy()) for index in range(count)]

    return run


def _backend(library: _Library, description: str) -> Backend:
    return Backend(
        library.name, library.compile, takes_symbolic_shapes=False, kinds=("inference",), description=description
    )


ONNXRUNTIME = _backend(
    _Library("onnxruntime", ("onnxruntime", "onnx", "onnxscript"), _COMMON | {torch.float16}, _onnxruntime),
    "ONNX Runtime on the CPU, for inference",
)
OPENVINO = _backend(
    _Library("openvino", ("openvino",), _COMMON - {torch.float64}, _openvino, computes_whole_numbers=False),
    "OpenVINO on the CPU, for inference",
)
