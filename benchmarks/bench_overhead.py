"""The cost of a call beside its graph: Dovetail and torch.compile, both with graphs that do nothing, and eager.

Each model is compiled by both with a backend whose graphs return tensors made beforehand, so that a call is nothing but
finding the entry (guards), fetching the inputs, the runtime around the graph and building the result. Eager runs its kernels: its
column says how much time there is to save. Two ways of calling:

- *inference*: under ``no_grad``; torch.compile gets a plain backend, with none of AOTAutograd's wrappers around it;
- *training*: outputs that require a gradient; both run one ``torch.autograd.Function`` (torch.compile by ``aot_autograd``).

The models: chains of ``nn.Linear`` in nested ``nn.Sequential`` with 3, 100 and 400 modules in all, every parameter read by
the forward, and BERT with 4 layers. Each case has a process of its own, in which the engines alternate; the order changes
from round to round, and a round is the mean of many calls. The table shows medians of the rounds, and the median of the rounds'
ratios. Dovetail's guards alone are timed as well. Run it with ``make bench-overhead``.
"""

from __future__ import annotations

import gc
import multiprocessing
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from measuring import alternating, make_parser, save
from torch._dynamo.backends.common import aot_autograd

import dovetail
from dovetail.reports.explanation import compiled_function
from dovetail.reports.table import Table
from dovetail.torch_private import tracing as private_tracing

#: The project's promise: Dovetail's time over that of torch.compile.
PROMISE = 0.5

#: Modules in all: (groups, layers in a group). A group is a module as well, and so is the root.
CHAINS = {3: (1, 1), 100: (9, 10), 400: (21, 18)}

#: No model here returns more tensors than this; the outputs of a graph after them are for its backward.
VISIBLE = 2

EAGER, OURS, THEIRS, GUARDS = "eager", "Dovetail", "torch.compile", "Dovetail's guards alone"


def chain(modules: int) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Return a model of that many modules in all, and arguments for it."""
    groups, layers = CHAINS[modules]
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(layers)]) for _ in range(groups)]
    )
    assert sum(1 for _ in model.modules()) == modules
    return model, (torch.randn(2, 8),)


def bert() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Return BERT with 4 small layers, and token numbers for it."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64
    )
    return transformers.BertModel(config).eval(), (torch.randint(100, (2, 16)),)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]] = {
    **{f"{count} modules": (lambda count=count: chain(count)) for count in CHAINS},
    "BERT, 4 layers": bert,
}


def prepared(graph: torch.fx.GraphModule) -> list[Any]:
    """Return for each output of a graph a tensor like it (or the constant that it is)."""
    (values,) = next(node for node in reversed(graph.graph.nodes) if node.op == "output").args
    made = []
    for node in values if isinstance(values, (list, tuple)) else (values,):
        value = node.meta.get("val", node.meta.get("example_value")) if isinstance(node, torch.fx.Node) else node
        if isinstance(value, torch.Tensor):
            # torch.compile calls its backend inside of a fake mode, which would make slow fake tensors of these.
            with private_tracing.disable_current_modes():
                value = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype).zero_()
            assert type(value) is torch.Tensor
        made.append(value)
    return made


def idle(graph: torch.fx.GraphModule) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that stands for a graph and does nothing.

    Autograd needs new results; saved values may be old. Inputs that the graph saves for its backward as they are, it saves as
    every graph does.
    """
    outputs = prepared(graph)
    results = [value for value in outputs[:VISIBLE] if isinstance(value, torch.Tensor)]
    placeholders = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    (values,) = next(node for node in reversed(graph.graph.nodes) if node.op == "output").args
    saved = list(enumerate(outputs))[len(results) :]
    chosen: Any = operator.itemgetter(
        *[placeholders[values[at]] if values[at] in placeholders else len(placeholders) + at for at, _ in saved], 0, 0
    )

    def run(inputs: Sequence[Any]) -> list[Any]:
        return [*[value.detach() for value in results], *chosen([*inputs, *outputs])[:-2]]

    return run


def idle_dovetail(graph: torch.fx.GraphModule, example_inputs: Any, *, kind: str, options: Any) -> Any:
    """Compile for Dovetail to a graph that does nothing."""
    return idle(graph)


def idle_torch(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """Compile for torch.compile to a graph that does nothing."""
    outputs = idle(graph)
    return lambda *inputs: outputs(inputs)


def idle_torch_boxed(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """Do the same behind AOTAutograd, for one list of inputs as Inductor's graphs take it."""
    outputs = idle(graph)

    def run(inputs: list[Any]) -> list[Any]:
        results = outputs(inputs)
        inputs.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compile_torch(model: torch.nn.Module, training: bool) -> Any:
    """Compile with torch.compile, as it comes."""
    backend = aot_autograd(fw_compiler=idle_torch_boxed, bw_compiler=idle_torch_boxed) if training else idle_torch
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


ENGINES: dict[str, Callable[[torch.nn.Module, bool], Any]] = {
    EAGER: lambda model, training: model,
    OURS: lambda model, training: dovetail.compile(model, backend=idle_dovetail, fullgraph=True),
    THEIRS: compile_torch,
}


def seconds_per_call(call: Callable[[], Any], calls: int) -> float:
    """Return the mean over many calls, with no garbage collection between them."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def measure(make: Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]], training: bool, rounds: int) -> dict[str, Any]:
    """Return seconds per call for each round: of each engine and of Dovetail's guards alone."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, arguments = make()
    calls: dict[str, Callable[[], Any]] = {}
    with torch.set_grad_enabled(training):
        for name, engine in ENGINES.items():
            compiled = engine(model, training)

            def call(compiled: Any = compiled) -> Any:
                return compiled(*arguments)

            for _ in range(5):
                result = call()
            first = result[0] if not isinstance(result, torch.Tensor) else result
            assert first.requires_grad is training
            calls[name] = call
            if name == OURS:
                (entry,) = compiled_function(compiled).entries
                calls[GUARDS] = lambda checker=entry.checker: checker.check(model, arguments, {})
        times: dict[str, list[float]] = {name: [] for name in calls}
        count = max(20, min(2000, int(0.05 / seconds_per_call(calls[THEIRS], 20))))
        for _, name in alternating(list(calls), rounds):
            times[name].append(seconds_per_call(calls[name], count))
    guards = len(entry.checker.guards.guards)
    return {"guards": guards, "tensors": len(entry.checker.guards.tensors), "seconds": times}


def measure_alone(name: str, training: bool, rounds: int, threads: int) -> dict[str, Any]:
    """Run :func:`measure` in a process of its own, whose memory holds nothing of other models."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_named, name, training, rounds, threads).result()


def _measure_named(name: str, training: bool, rounds: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return measure(MODELS[name], training, rounds)


def main() -> int:
    """Measure, print the table, save the raw numbers; 0 if every ratio is as promised."""
    parser = make_parser(__doc__, rounds=15)
    parser.set_defaults(threads=1)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    rows = []
    ratios: dict[str, float] = {}
    for name in options.models:
        for training in (False, True):
            case = f"{name}, {'training' if training else 'inference'}"
            result = results[case] = measure_alone(name, training, options.rounds, options.threads)
            medians = {engine: statistics.median(times) for engine, times in result["seconds"].items()}
            # Both of one round: other work on the machine slows both.
            pairs = zip(result["seconds"][OURS], result["seconds"][THEIRS], strict=True)
            ratios[case] = statistics.median(ours / theirs for ours, theirs in pairs)
            cells = [f"{medians[engine] * 1e6:.1f} us" for engine in (EAGER, THEIRS, OURS, GUARDS)]
            rows.append((case, str(result["guards"]), str(result["tensors"]), *cells, f"{ratios[case]:.2f}"))
            print(f"{case}: {medians[OURS] * 1e6:.1f} us, torch.compile {medians[THEIRS] * 1e6:.1f} us", flush=True)
    print(f"\ntime per call with graphs that do nothing; {options.threads} threads, medians of {options.rounds} rounds")
    head = ("case", "guards", "tensors", "eager (its kernels)", THEIRS, OURS, "its guards alone", "ratio")
    print(Table(head, tuple(rows)))
    print(f"worst ratio {max(ratios.values()):.2f} (promised: at most {PROMISE})")
    save("overhead", options, results=results, ratios=ratios)
    return 0 if max(ratios.values()) <= PROMISE else 1


if __name__ == "__main__":
    raise SystemExit(main())
