"""Faults of Inductor, and functions that work around them, each with the program that shows the fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dovetail.backends.inductor.job import WORKAROUNDS, Job, resolved
from dovetail.backends.protocol import CompiledCallable, output_arguments
from dovetail.errors import BackendError
from dovetail.passes.recompute import asked_for_equality
from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import inductor as private_inductor
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.repeats import draws_random_numbers

#: Where a size is read: an input, "size" or "stride", and a dimension.
Place = tuple[int, str, int]


def example(
    function: Callable[..., Any], *sizes: tuple[int, ...], order: int = 0, **more: Any
) -> Callable[[], Example]:
    """Return an example with ascending numbers as arguments; the second of two equal calls surely runs compiled code."""

    def make() -> Example:
        arguments = tuple(torch.ones(size).cumsum(-1) for size in sizes)
        return Example(function, [arguments] * 2, order=order, exact=False, options={"backend": "inductor"}, **more)

    return make


def _draws(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = F.dropout(x, 0.5, True), torch.rand_like(y)
    third = torch.bernoulli(torch.full_like(x, 0.3))
    return (first * third).sum(0), second + F.dropout(y.sin(), 0.2, True), torch.randn_like(x), first


@quirk(WORKAROUNDS, example=example(_draws, (33, 9), (700,), stays=True))
def keep_order_of_draws(job: Job) -> None:
    """Random operators draw in the order of the graph, by eager's kernels.

    The order decides which operator draws which numbers, and Inductor moves operators past each other for locality and for
    peak memory. It also insists on decomposing random operators, and a decomposed one draws other numbers than eager's kernel;
    torch 2.15 keeps the order, and compiles no such graph where it would have to decompose one.
    """
    targets = {node.target for node in job.graph.graph.nodes if draws_random_numbers(node.target)}
    if targets:
        job.before.append(lambda: private_inductor.inductor_runs_as_is(targets))
        job.settings.setdefault("reorder_for_peak_memory", False)
        job.settings.setdefault("reorder_for_locality", False)


def _padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.conv2d(x, weight)
    return torch.ops.aten.replication_pad2d_backward(y, y[..., :2, :2], [1, 1, 1, 1]) * 2  # type: ignore[no-any-return]


@quirk(WORKAROUNDS, example=example(_padded, (1, 3, 4, 4), (8, 3, 1, 1), stays=True))
def keep_strides_for_kernels(job: Job) -> None:
    """Hand kernels what lies as it did in the capture, as results of some lie alike: Inductor cares for that in a backward only."""
    called = [node for node in job.graph.graph.nodes if getattr(node.target, "namespace", "") == "aten"]
    job.before.append(lambda: private_inductor.inductor_keeps_strides(called))


def _written_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    place = int(x[0])
    x[place : place + 2] = y[2:]
    return x + 1


@quirk(WORKAROUNDS, example=example(_written_at, (4,), (4,), graphs=1, stays=True))
def write_parts_at_places_of_data(job: Job) -> None:
    """Write to a part that begins where the data says by eager's kernel: Inductor asks whether the place is negative."""
    if job.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.slice_scatter.default):
        job.before.append(lambda: private_inductor.inductor_writes_by_kernel(torch.ops.aten.slice_scatter.default))


@quirk(WORKAROUNDS, example=example(lambda x: torch.var_mean(x, correction=0), (0, 5), stays=True))
def moments_of_nothing_by_kernel(job: Job) -> None:
    """Give the mean of no numbers by eager's kernel, NaN: with the variance, Inductor computes it as 0."""
    moments = torch.ops.aten.var_mean.correction
    nodes = job.graph.graph.find_nodes(op="call_function", target=moments)
    if any(type(size) is int and size == 0 for node in nodes for size in node.args[0].meta["val"].shape):
        job.before.append(lambda: private_inductor.inductor_runs_as_is({moments}, instead=True))


@quirk(WORKAROUNDS, example=example(lambda x: (F.dropout(x, 0.5), x * 2)[1], (5,)))
def keep_unused_draws(job: Job) -> None:
    """Random operators draw even if nobody uses their results: later draws must be eager's.

    Inductor removes operators that no output depends on, and does not count the generator's state as an output. The results of
    unused draws become outputs here, and a wrapper drops them.
    """
    graph = job.graph
    output = graph.graph.output_node()
    used: set[torch.fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node not in used:
            used.add(node)
            waiting += node.all_input_nodes
    draws = [node for node in graph.graph.nodes if node.op == "call_function" and draws_random_numbers(node.target)]
    unused = [node for node in draws if node not in used and isinstance(node.meta.get("val"), torch.Tensor)]
    if unused:
        output.args = ([*output_arguments(graph), *unused],)
        count = len(unused)
        job.wrappers.append(lambda call: lambda inputs: list(call(inputs))[:-count])


@quirk(WORKAROUNDS, example=example(lambda x, y: x.sin().add(x @ y, alpha=0.1), (3, 3), (3, 3)), until="2.15")
def scale_before_adding(job: Job) -> None:
    """Write a sum with a factor as a product and a sum: Inductor makes ``addmm`` of a sum with ``mm``, and drops the factor."""
    for node in job.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        factor, (first, second) = node.kwargs.get("alpha", 1), node.args
        is_plain = isinstance(factor, (int, float)) and factor == 1
        if is_plain or not isinstance(second, torch.fx.Node) or not isinstance(second.meta["val"], torch.Tensor):
            continue
        dtype, value = node.meta["val"].dtype, second.meta["val"]
        if dtype == torch.bool:
            # A product with a number would be a number.
            factor = bool(factor)
        steps = [(torch.ops.prims.convert_element_type.default, dtype)] if value.dtype != dtype else []
        with job.graph.graph.inserting_before(node):
            for target, argument in [*steps, (torch.ops.aten.mul.Tensor, factor)]:
                second = job.graph.graph.call_function(target, (second, argument))
                second.meta = {**node.meta, "val": value.to(dtype)}
        node.args, node.kwargs = (first, second), {}


_CONVERT = torch.ops.prims.convert_element_type.default
_HALF = (torch.bfloat16, torch.float16)


def _bits(node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    """The bits of a value as another type, right behind it."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(torch.ops.aten.view.dtype, (node, dtype))
    made.meta = {**node.meta, "val": node.meta["val"].view(dtype)}
    return made


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return (x / 7).bfloat16().float() + 1


def _is_statistic(node: torch.fx.Node) -> bool:
    """Whether this rounds the mean or deviation of each channel, as torch's formula of batch norm does.

    Eager's kernel keeps them in single precision, as Inductor does, unless the weights are of half precision too (torch 2.13). The
    formula squeezes them from (1, C, 1, 1). To round them costs all that reads them its vector instructions: a step of six
    residual blocks under autocast took 36 ms with it and 23 ms without (``benchmarks/step.py --autocast``, torch 2.13).
    """
    squeezed = node.args[0]
    if not isinstance(squeezed, torch.fx.Node) or squeezed.target is not torch.ops.aten.squeeze.dims:
        return False
    return squeezed.meta["val"].dim() == 1 and squeezed.all_input_nodes[0].meta["val"].dim() > 2


@quirk(WORKAROUNDS, example=example(_rounded, (50,)))
def keep_explicit_rounding(job: Job) -> None:
    """Round where the program converts to half precision and back: Inductor computes half precision in single, and rounded nothing.

    ``x + (x.bfloat16().float() - x).detach()``, which trains for half precision, was ``x``. The bits of a rounded number, taken
    as whole numbers, are rounded.
    """
    graph = job.graph.graph
    for node in graph.find_nodes(op="call_function", target=_CONVERT):
        dtype = node.args[1]
        readers = [user for user in node.users if user.target is _CONVERT and user.args[1] != dtype]
        if dtype not in _HALF or not any(user.args[1].is_floating_point for user in readers) or _is_statistic(node):
            continue
        rounded = _bits(_bits(node, torch.int16), dtype)
        for user in readers:
            user.replace_input_with(node, rounded)


_ORDERS = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPARISONS = {getattr(torch.ops.aten, name).Tensor for name in _ORDERS} | {
    getattr(torch.ops.aten, name).Scalar for name in _ORDERS[:2]
}


def _fifty(x: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() + 0.3 == 50.25).float()


@quirk(
    WORKAROUNDS,
    example=example(_fifty, (50,)),
    issue="https://github.com/pytorch/pytorch/issues/195214",
)
def round_before_comparing(job: Job) -> None:
    """Round computed numbers of half precision before they are compared with each other.

    Inductor compares them in single precision: the largest of them, rounded, was equal to none, and its gradient not a number.
    """
    for node in job.graph.graph.nodes:
        if node.target not in _COMPARISONS:
            continue
        for value in node.all_input_nodes:
            if value.op == "call_function" and value.meta["val"].dtype in _HALF:
                node.replace_input_with(value, _bits(_bits(value, torch.int16), value.meta["val"].dtype))


def _first_largest(x: torch.Tensor) -> torch.Tensor:
    y = F.gelu(x / 7 - 0.3)
    return y == y.amax(1, keepdim=True)


@quirk(
    WORKAROUNDS,
    example=example(_first_largest, (5, 3)),
    issue="https://github.com/pytorch/pytorch/issues/186799",
    since="2.13",
)
def compute_once_what_is_compared(job: Job) -> None:
    """Keep in memory what is asked for being equal to something that is computed of it.

    Inductor computes it twice, in loops of vectors and of single numbers, which round in two ways: no element was equal to the
    largest, and the gradient of ``amax`` was lost.
    """
    realize = private_inductor.inductor_realize()
    graph = job.graph.graph
    for value in asked_for_equality(graph.nodes) if realize is not None else ():
        if len(value.users) < 2:
            continue
        with graph.inserting_after(value):
            kept = graph.call_function(realize, (value,))
        kept.meta = {**value.meta}
        for user in [user for user in value.users if user is not kept]:
            user.replace_input_with(value, kept)


def give_sizes_as_inputs(job: Job) -> None:
    """Symbolic sizes become inputs of their own, where Inductor's cache looks for them.

    The cache keeps, beside a compiled graph, the conditions on its whole-number inputs. A size that comes in only as part of a
    tensor has no conditions there: code compiled for sizes up to 4096 was found again for 5000, with wrong results. Raises
    :class:`BackendError` for a symbol that is no size or stride of an input. No single program shows this fault:
    ``tests/backends/inductor/test_workarounds.py`` does, over two compilations.
    """
    known = {private_sizes.first_expression(item) for item in job.examples if isinstance(item, torch.SymInt)}
    places: dict[Any, tuple[Place, Any]] = {}
    needed: dict[Any, Any] = {}
    for place, number in _symbolic_sizes(job.examples):
        expression = private_sizes.first_expression(number)
        needed.update(dict.fromkeys(private_sizes.symbols_of(expression), number))
        if private_sizes.is_symbol(expression):
            places.setdefault(expression, (place, number))
    there = known | set(places)
    # A symbol that turned out to be another one (torch.compile's symbols for strides) is that one.
    missing = [
        symbol
        for symbol, number in needed.items()
        if symbol not in there and not there.issuperset(private_sizes.symbols_of(private_sizes.expression_of(number)))
    ]
    if missing:
        raise BackendError(
            f"the size {missing[0]} is no size of an input",
            advice='use backend="aten", or dynamic=False for this function',
        )
    # One for those that turned out to be the same: another process, which compiles the graph for this one, knows the one alone.
    distinct: dict[Any, tuple[Place, Any]] = {}
    for symbol, found in places.items():
        expression = private_sizes.expression_of(found[1])
        if known.isdisjoint((symbol, expression)) and private_sizes.symbols_of(expression):
            distinct.setdefault(expression, found)
    chosen = list(distinct.values())
    if not chosen:
        return
    last = job.graph.graph.find_nodes(op="placeholder")[-1]
    for number, (_, value) in enumerate(chosen):
        with job.graph.graph.inserting_after(last):
            last = job.graph.graph.placeholder(f"dovetail_size_{number}")
        last.meta["val"] = value
        job.examples.append(value)
    job.wrappers.append(lambda call: _with_sizes(call, [place for place, _ in chosen]))


def _symbolic_sizes(examples: Sequence[Any]) -> list[tuple[Place, Any]]:
    return [
        ((index, kind, dim), number)
        for index, value in enumerate(examples)
        if isinstance(value, torch.Tensor) and private_sizes.has_symbols(value)
        for kind, numbers in (("size", value.shape), ("stride", value.stride()))
        for dim, number in enumerate(numbers)
        if private_sizes.is_symbolic(number)
    ]


def _with_sizes(call: CompiledCallable, places: Sequence[Place]) -> CompiledCallable:
    def run(inputs: list[Any]) -> list[Any]:
        sizes = [inputs[i].size(dim) if kind == "size" else inputs[i].stride(dim) for i, kind, dim in places]
        inputs.extend(sizes)
        return call(inputs)

    return run


WORKAROUNDS.append(give_sizes_as_inputs)


@quirk(
    WORKAROUNDS, example=example(lambda x: F.dropout(F.layer_norm(x, (16,)), 0.3), (3, 4, 16), order=1), until="2.14"
)
def keep_reads_behind_writes(job: Job) -> None:
    """Kernels that read a written buffer run after the write (see :func:`private_inductor.reads_stay_behind_writes`)."""
    job.during.append(private_inductor.reads_stay_behind_writes)


def _added_to_itself(x: torch.Tensor) -> torch.Tensor:
    y = x.sqrt()
    return y.index_add(0, torch.tensor([1, 1]), y[:2])


_PUTS = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


@quirk(WORKAROUNDS, example=example(_added_to_itself, (4, 5)))
def put_copies_of_parts(job: Job) -> None:
    """Put copies of what lies in the tensor that it is put into (``index_add``, ``index_put``).

    Inductor writes in place to a tensor that nobody reads later, and read there what it had written: a row that was added twice
    was added to itself.
    """
    if any(node.target in _PUTS for node in job.graph.graph.nodes):
        job.during.append(private_inductor.what_is_put_is_kept_apart)


def _writing_operator() -> Any:
    """A custom operator that writes to an argument, or to none."""
    try:
        return torch.ops.dovetail_example.doubled_into.default
    except AttributeError:
        torch.library.define("dovetail_example::doubled_into", "(Tensor x, Tensor(a!)? out) -> Tensor")

    def doubled(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return x * 3 if out is None else out.copy_(x * 2).clone()

    torch.library.impl("dovetail_example::doubled_into", "default", doubled)
    torch.library.register_fake("dovetail_example::doubled_into", lambda x, out: torch.empty_like(x))
    return torch.ops.dovetail_example.doubled_into.default


def _written_again(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for number in range(4):
        torch.ops.dovetail_example.doubled_into(x * number, y)
        x = x + y
    return x


def _written_example() -> Example:
    _writing_operator()
    return example(_written_again, (5,))()


@quirk(WORKAROUNDS, example=_written_example, since="2.13")
def write_to_clones(job: Job) -> None:
    """Custom operators write to clones of values that the graph still reads (see ``written_arguments_are_clones``)."""
    if job.graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
        job.during.append(private_inductor.written_arguments_are_clones)


def _nothing_written_example() -> Example:
    operator = _writing_operator()
    calls = [(torch.arange(5.0),)] * 2
    # With fullgraph: an error of Inductor's would otherwise be left to eager, which is right.
    options = {"backend": "inductor", "fullgraph": True}
    return Example(lambda x: operator(x, None) + x, calls, order=0, exact=False, options=options)


@quirk(WORKAROUNDS, example=_nothing_written_example, since="2.12")
def call_what_writes_nothing(job: Job) -> None:
    """A custom operator that was given none of the optional arguments that it writes to is called as it is."""
    graph = job.graph.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
        if node.kwargs["_all_bases"]:
            continue
        operator: Any = node.args[0]
        given = [(item.kwarg_only, item.name, node.kwargs.get(item.name)) for item in operator._schema.arguments]
        arguments = tuple(value for is_keyword, _, value in given if not is_keyword)
        with graph.inserting_before(node):
            call = graph.call_function(operator, arguments, {name: value for flag, name, value in given if flag})
        # Without "eager_input_vals", which are those of the node that goes.
        call.meta["val"] = node.meta["val"]
        if len(operator._schema.returns) == 1:
            call.meta["val"] = node.meta["val"][0]
            for user in list(node.users):
                user.replace_all_uses_with(call)
                graph.erase_node(user)
        node.replace_all_uses_with(call)
        graph.erase_node(node)


def _conjugated(x: torch.Tensor) -> torch.Tensor:
    y = torch.complex(x, x.t() * 2)
    return (y.conj().t() @ y).abs()


_LAZY = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


@quirk(WORKAROUNDS, example=example(_conjugated, (4, 4), order=2))
def compute_conjugates(job: Job) -> None:
    """Conjugates are values. A lazy one is a view with a mark, which Inductor's views of it lose."""
    moved: set[torch.fx.Node] = set()
    for node in job.graph.graph.nodes:
        is_lazy = node.target in _LAZY
        value: Any = node.meta.get("val")
        if is_lazy and not isinstance(node.args[0], torch.fx.Node):
            # Of a number, as in the gradient of a product with one: only the lazy operators take it for a tensor.
            number = node.target(node.args[0]).item()
            node.target, node.args = torch.ops.aten.scalar_tensor.default, (number,)
            node.kwargs = {"dtype": value.dtype, "device": value.device}
        node.target = _LAZY.get(node.target, node.target)
        if private_tensors.is_fake(value) and (is_lazy or not moved.isdisjoint(node.all_input_nodes)):
            # The value lies in memory otherwise than the view did, and so do views of it.
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
            with value.fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            if node.meta["val"].stride() != value.stride():
                moved.add(node)


def resolve_inputs(job: Job) -> None:
    """Inputs with a mark (conjugated, negated) are resolved, and so are tangents: kernels read the memory as it is.

    ``tests/backends/inductor/test_workarounds.py`` shows this fault.
    """
    for index, node in enumerate(job.graph.graph.find_nodes(op="placeholder")):
        value: Any = node.meta.get("val")
        if private_tensors.is_fake(value) and (value.is_conj() or value.is_neg()):
            if index in job.write_backs.values() or 0 in value.stride():
                raise BackendError("a conjugated or negated input is written or expanded", advice='use backend="aten"')
            with value.fake_mode:
                node.meta["val"] = job.examples[index] = resolved(value)
            job.resolved.append(index)
        elif node.name.startswith("tangents"):
            job.resolved.append(index)


WORKAROUNDS.append(resolve_inputs)
