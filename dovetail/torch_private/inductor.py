"""Inductor: its entry, its decompositions and settings, and the places where it lets others change its graphs and its schedule."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch

from dovetail.torch_private.inductor_cache import refusing_to_compile
from dovetail.torch_private.inductor_kernels import kernels_in_few_files
from dovetail.torch_private.operators import OpOverload


def inductor_decompositions() -> dict[Any, Any]:
    """Inductor's table of decompositions, for graphs that draw random numbers as eager does."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        table = dict(select_decomp_table())
    pools = [target for target, rule in table.items() if getattr(rule, "__name__", "").startswith("max_pool")]
    return table | {target: functools.partial(_behind_lowerings, table[target]) for target in pools}


def _behind_lowerings(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A decomposition that takes Inductor's lowerings for imported, which takes a second of CPU time; none of large windows."""
    from torch._inductor import lowering  # noqa: F401

    is_left = rule.__name__.endswith("_indices") and not _is_unrolled(rule.__name__, args[1])
    return NotImplemented if is_left else rule(*args, **kwargs)


def inductor_compile(
    graph: torch.fx.GraphModule,
    example_inputs: list[Any],
    fake_mode: Any,
    *,
    static_inputs: list[int],
    user_visible_outputs: list[int],
    is_backward: bool,
    is_inference: bool,
    settings: dict[str, Any],
) -> Any:
    """Compile one flat ATen graph, which is changed on the way, with Inductor; the result takes one list of inputs."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    # Inductor keeps the strides that the fake values promise for these outputs only.
    # On a GPU it also looks which of them views lead to, and takes each for a node: a gradient that is not defined is none.
    output.meta["user_visible_output_idxs"] = [
        index for index in user_visible_outputs if isinstance(output.args[0][index], torch.fx.Node)
    ]
    settled = contextlib.ExitStack()
    known = (_rules_of_dtypes_made_once(), _strides_without_algebra(), _memory_of_fusions_only_where_it_is_shared())
    for block in (*known, config.patch(settings), tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode)):
        settled.enter_context(block)
    with settled, refusing_to_compile(), kernels_in_few_files():
        return compile_fx_inner(
            graph, example_inputs, static_input_idxs=static_inputs, is_backward=is_backward, is_inference=is_inference
        )


def inductor_realize() -> Any:
    """An operator that gives its argument, which Inductor then keeps in memory; None where there is none (torch 2.13 has it)."""
    try:
        from torch._inductor import test_operators  # noqa: F401  (registers the operator)

        found = torch.ops._inductor_test.realize.default
    except (ImportError, AttributeError):
        return None
    return found


#: Where users find Inductor's settings.
SETTINGS = "torch._inductor.config"


def inductor_setting_names() -> set[str]:
    """Names of Inductor's own settings."""
    from torch._inductor import config

    return set(config.get_config_copy())


def inductor_runs_as_is(overloads: Iterable[OpOverload], *, instead: bool = False) -> None:
    """Let Inductor call these operators' own kernels where it would otherwise insist on having them decomposed.

    ``instead``: also where it has code of its own for them. Their arguments then lie as in the capture: oneDNN's layer of an LSTM
    ignores the strides of its input (torch 2.13).
    """
    from torch._inductor import lowering

    for overload in overloads:
        if instead or overload not in lowering.lowerings:
            constraint: Any = lowering.constrain_to_fx_strides if instead else None
            lowering.make_fallback(overload, layout_constraint=constraint, warn=False, override_decomp=True)


def inductor_writes_by_kernel(overload: OpOverload) -> None:
    """Let Inductor call an operator's own kernel where the data decides one of its arguments; its own code asks for the number."""
    from torch._inductor import lowering

    _by_kernel_where(
        overload, lambda *args, **more: any(map(lowering.free_unbacked_symbols, (*args[2:], *more.values())))
    )


def inductor_pools_by_kernel(overload: OpOverload) -> None:
    """Let Inductor call the kernel of a maximum over windows that it does not unroll."""
    _by_kernel_where(overload, lambda image, window, *more, **named: not _is_unrolled(str(overload), window))


def _is_unrolled(pool: str, window: Any) -> bool:
    """Whether Inductor writes out the comparisons of a pool's window (its ``unroll_reductions_threshold`` there)."""
    sizes = list(window) if isinstance(window, (list, tuple)) else [window]
    return math.prod(sizes if len(sizes) > 1 else sizes * (3 if "3d" in pool else 2)) < 25


#: The node that Inductor lowers, which its virtual machine has only while it lowers a graph.
_NODE_OF = attrgetter("graph.current_node")


def _by_kernel_where(overload: OpOverload, asks: Callable[..., bool]) -> None:
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    compute: Any = lowering.lowerings[overload]
    if getattr(compute, "has_kernel", False):
        return
    by_kernel: Any = lowering.fallback_handler(overload)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        if not asks(*args, **kwargs):
            return compute(*args, **kwargs)
        # Its first argument then lies as in the capture: a kernel may refuse another layout.
        first, _ = lowering.constrain_to_fx_strides(_NODE_OF(V), *args[:1])
        return by_kernel(*first, *args[1:], **kwargs)

    lowered.has_kernel = True  # type: ignore[attr-defined]
    lowering.lowerings[overload] = lowered


def inductor_keeps_strides(nodes: Iterable[torch.fx.Node]) -> None:
    """Let Inductor hand torch's operators that it has no code for what lies in memory as it did in the capture.

    It settles that for the process where a graph first needs one, and outside of a backward hands over anything.
    """
    from torch._inductor import lowering

    for node in nodes:
        overload: Any = node.target
        has_code = overload in lowering.lowerings and overload not in lowering.fallbacks
        if not has_code and lowering.maybe_layout_constraints(overload) is None:
            keeps: Any = lowering.constrain_to_fake_tensors
            lowering.make_fallback(overload, layout_constraint=keeps, warn=False, override_decomp=True)
        if lowering.maybe_layout_constraints(overload) is lowering.constrain_to_fake_tensors:
            node.meta["eager_input_vals"] = torch.fx.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])


def straight_call(compiled: Any) -> Callable[[list[Any]], Any]:
    """Inductor's graph without what it keeps records of at every call, which takes 2 us: the first call, and one under torch's
    profiler, go the whole way.
    """
    from torch._inductor import debug

    if not hasattr(compiled, "current_callable") or getattr(debug, "RECORD_GRAPH_EXECUTION", False):
        return compiled
    profiler = torch.autograd.profiler
    is_first = True

    def run(inputs: list[Any]) -> Any:
        nonlocal is_first
        if is_first or profiler._is_profiler_enabled:
            is_first = False
            return compiled(inputs)
        return compiled.current_callable(inputs)

    return run


def generated_file(compiled: Any) -> str:
    """The file of the code that Inductor has generated for a graph; empty where it says none."""
    call = getattr(compiled, "current_callable", None)
    code = getattr(getattr(call, "__func__", call), "__code__", None)
    return str(code.co_filename) if getattr(compiled, "source_code", "") and code is not None else ""


def cache_hits() -> int:
    """The number of graphs that Inductor's cache has had so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"])


def inductor_moves_channels(graph: torch.fx.GraphModule) -> bool:
    """Whether Inductor will compute the convolutions of this graph with the channels last.

    It does on a CPU with oneDNN, whatever else its rules say (torch 2.11 to 2.15): to ask them loads most of Inductor.
    """
    from torch._inductor import config

    is_asked = config.layout_optimization and torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()
    convolutions = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    read = [node.meta["val"] for each in convolutions for node in each.args[:2]]
    if is_asked and read and all(value.device.type == "cpu" for value in read):
        return True
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(graph, is_inference=False))


def inductor_pass(graph_pass: Callable[[torch.fx.Graph], None], files: tuple[str, ...], key: str = "") -> Any:
    """A pass over a graph in the form in which Inductor runs it after its own.

    Inductor's cache finds no code that was compiled with another content of ``files``, or another ``key``.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):  # type: ignore[misc, unused-ignore]
        def __call__(self, graph: torch.fx.Graph) -> None:
            graph_pass(graph)

        def uuid(self) -> Any:
            return get_hash_for_files(files, f"{graph_pass.__qualname__} {key}")

    return Pass()


@contextlib.contextmanager
def _instead(owner: Any, name: str, make: Callable[[Any], Any], optional: bool = False) -> Iterator[None]:
    """In the block, an attribute is what ``make`` makes of it; an ``optional`` one may be missing in some versions of torch."""
    if optional and not hasattr(owner, name):
        yield
        return
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _rules_of_dtypes_made_once() -> contextlib.AbstractContextManager[None]:
    """In the block, the table of the dtypes of operators is made anew only when rules were registered, not at each operator that is
    generated (3 % of Inductor's time; since torch 2.15 it does so itself).
    """
    from torch._inductor import utils
    from torch._inductor.codegen import common
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    if hasattr(DtypePropagationOpsHandler, "_rules_key"):
        return contextlib.nullcontext()
    made = (-1, -1)

    def once(make: Any) -> Any:
        def make_once(self: Any) -> None:
            nonlocal made
            rules = len(utils.op_dtype_propagation_rules), len(common.pointwise_overrides_data)
            if rules != made:
                make(self)
                made = rules

        return make_once

    return _instead(DtypePropagationOpsHandler, "__init__", once)


def _strides_without_algebra() -> contextlib.AbstractContextManager[None]:
    """In the block, a sum of multiples of indices is not simplified before its stride is taken, which is the factor of the index.

    SymPy takes 10 ms for each, which was a tenth of Inductor's time for a GPT.
    """
    from torch._inductor.codegen import cpp

    def simplified(simplify: Any) -> Any:
        return lambda index, var, length: index if is_linear(index) else simplify(index, var, length)

    return _instead(sys.modules[cpp.stride_at_vec_range.__module__], "simplify_index_in_vec_range", simplified, True)


def _memory_of_fusions_only_where_it_is_shared() -> contextlib.AbstractContextManager[None]:
    """In the block, Inductor weighs what two kernels save by being fused against memory only where each of them frees some.

    It compares the buffers that only one kernel reads, of either side. For two of three pairs one side has none, and the answer is
    known: it was 5 % of Inductor's time for a whole step of a GPT.
    """
    from torch._inductor.scheduler import Scheduler

    def frees(scheduler: Any, node: Any) -> bool:
        buffers = (scheduler.name_to_buf.get(item.name) for item in node.read_writes.reads)
        return any(buffer and len(buffer.users) == 1 for buffer in buffers)

    def weighed(weigh: Any) -> Any:
        return lambda self, one, other: frees(self, one) and frees(self, other) and bool(weigh(self, one, other))

    return _instead(Scheduler, "can_fusion_increase_peak_memory", weighed, True)


def is_linear(index: Any) -> bool:
    """Whether a SymPy expression is a sum of integers, symbols, and symbols times an integer."""
    return all(
        item.is_Integer
        or item.is_Symbol
        or (item.is_Mul and len(item.args) == 2 and item.args[0].is_Integer and item.args[1].is_Symbol)
        for item in (index.args if index.is_Add else (index,))
    )


def reads_stay_behind_writes() -> contextlib.AbstractContextManager[None]:
    """In the block, Inductor remembers which state of a buffer a kernel reads when it gives the kernel other loops.

    A buffer that is written in place has a new name after the write. Where Inductor fuses kernels for the CPU, it may find out
    anew what one of them reads, under the old name: that kernel may then run before the write. ``dropout`` of a normalised
    tensor was not a number, ``scatter_add`` beside a reduction was wrong (torch 2.13, ``torch.compile`` as well;
    ``tests/backends/inductor/test_order_of_writes.py``).
    """
    from torch._inductor.scheduler import SchedulerNode

    def renaming(recompute: Any) -> Any:
        def renamed(node: Any, *args: Any, **kwargs: Any) -> None:
            recompute(node, *args, **kwargs)
            names = getattr(node, "mutation_renames", None) or {}
            if any(item.name in names for item in node.read_writes.reads):
                node.set_read_writes(node.read_writes.rename(names))

        return renamed

    return _instead(SchedulerNode, "recompute_size_and_body", renaming, True)


def what_is_put_is_kept_apart() -> contextlib.AbstractContextManager[None]:
    """In the block, numbers that Inductor puts into a buffer in place, and their indices, are copied where they lie in that buffer.

    Inductor asks only for numbers that are computed of the buffer, not for parts of it, and before the buffer has a name.
    """
    from torch._inductor import ir, lowering

    def base(item: Any) -> Any:
        return item.data.unwrap_view() if isinstance(item.data, ir.BaseView) else item.data

    def lies_in(item: Any, buffer: Any) -> bool:
        if not isinstance(item, ir.TensorBox):
            return False
        return base(item) is base(buffer) or ir.try_get_name(base(buffer)) in item.get_read_names()

    def apart(put: Any) -> Any:
        def put_copies(buffer: Any, indices: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            def copied(item: Any) -> Any:
                if not lies_in(item, buffer):
                    return item
                buffer.realize()
                copy = lowering.clone(item)
                copy.realize()
                return copy

            if kwargs.get("may_realize"):
                indices, values = [copied(item) for item in indices], copied(values)
            return put(buffer, indices, values, *args, **kwargs)

        return put_copies

    return _instead(lowering, "index_put_impl_", apart)


def inputs_are_not_asserted() -> contextlib.AbstractContextManager[None]:
    """In the block, Inductor generates code that does not look at the sizes and strides of its inputs again.

    For the 410 tensors of an optimizer's step that took 145 of 713 us (torch 2.13, one thread, 2026-11). What operators return is
    still looked at: the fake kernel of a custom operator may be wrong.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    return _instead(PythonWrapperCodegen, "codegen_input_size_asserts", lambda original: lambda wrapper: None)


@contextlib.contextmanager
def inductor_calls(operators: Collection[OpOverload]) -> Iterator[None]:
    """In the block, Inductor generates no code for these operators, and calls them."""
    from torch._inductor import lowering

    made: dict[Any, Any] = {
        operator: lowering.fallback_handler(operator, add_to_fallback_set=False) for operator in operators
    }
    known: dict[Any, Any] = {
        operator: lowering.lowerings[operator] for operator in made if operator in lowering.lowerings
    }
    lowering.lowerings.update({operator: made[operator] for operator in known})
    free = [operator for operator in known if lowering.maybe_layout_constraints(operator) is None]
    for operator in free:
        lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
    try:
        yield
    finally:
        lowering.lowerings.update(known)
        for operator in free:
            lowering.add_layout_constraint(operator, None)  # type: ignore[arg-type]


def written_arguments_are_clones() -> contextlib.AbstractContextManager[None]:
    """In the block, Inductor gives each custom operator that writes to an argument a clone of it.

    Where it writes to the value itself, a kernel that read the value before may be computed after it (torch 2.13, ``torch.compile``
    as well).
    """
    from torch._inductor.fx_passes import post_grad

    return _instead(post_grad, "reinplace_inplaceable_ops", lambda original: lambda *args: None)


def free_from_order(nodes: list[Any]) -> list[Any]:
    """A pass over Inductor's schedule: who only waits for a value to be computed does not read it.

    The kernel that writes an input anew waits for all kernels that read the old content, and Inductor counts it as a user of
    their results. So it never computes in the memory of such a result while the writing is still to come: in a whole step, that
    is every result of a multiplication with a weight until the optimizer has come to the weight.
    """
    for node in nodes:
        for buffer in node.get_outputs():
            buffer.users = [user for user in buffer.users if not _only_waits(user, buffer.get_name())]
    return nodes


def _only_waits(user: Any, name: str) -> bool:
    from torch._inductor.dependencies import WeakDep

    if not user.is_weak:
        return False
    found = [item for item in user.node.read_writes.reads if item.name == name]
    return bool(found) and all(isinstance(item, WeakDep) and getattr(item, "is_fake", False) for item in found)


def inductor_schedule_pass() -> Any:
    """:func:`free_from_order` in the form in which Inductor runs it before it fuses; None where it runs none."""
    try:
        from torch._inductor.custom_graph_pass import CustomSchedulerPass, get_hash_for_files
    except ImportError:
        return None

    class Pass(CustomSchedulerPass):  # type: ignore[misc, unused-ignore]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return free_from_order(nodes)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,), free_from_order.__qualname__)

    return Pass()
