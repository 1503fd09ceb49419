"""The ``inductor`` backend: PyTorch's own kernel compiler, C++ on the CPU and Triton on a GPU.

:func:`compile_inductor` copies the graph, transforms the copy and has Inductor compile it:

* inputs that the graph gives new values are written by the graph itself (:mod:`dovetail.passes.write_backs`);
* symbolic floats become tensors (:mod:`.float_inputs`);
* scalars are computed once, not in every kernel that reads them (:mod:`.scalar_values`);
* convolutions and their gradients read one memory layout, also where they are in two graphs (:mod:`.convolution_layouts`);
* faults of Inductor are worked around (:mod:`.workarounds`, :mod:`.pools`, :mod:`.arithmetic`);
* code that an earlier process has made of the same graph is taken from the cache (:mod:`.kept_code`).

The graph has been decomposed before (:mod:`.decompositions`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail import cache
from dovetail.backends.common.outputs import guard_outputs, own_copy, promised_strides
from dovetail.backends.common.sizes_elsewhere import sizes_of_mode
from dovetail.backends.inductor import (
    arithmetic,
    complex_scatters,
    convolution_layouts,
    pools,
    recurrent_layers,
    sizes_that_change,
    workarounds,
)
from dovetail.backends.inductor.decompositions import Decompositions
from dovetail.backends.inductor.float_inputs import floats_as_tensors
from dovetail.backends.inductor.generated import Generated, note
from dovetail.backends.inductor.job import WORKAROUNDS, Job, resolving
from dovetail.backends.inductor.kept_code import facts, keep_code, key_of_code, take_code
from dovetail.backends.inductor.scalar_values import compute_scalars_once
from dovetail.backends.protocol import PIPELINE_OPTIONS, Backend, CompiledCallable, Kind, output_arguments
from dovetail.errors import BackendError, OptionError, did_you_mean
from dovetail.passes.write_backs import write_back
from dovetail.torch_private import inductor as private_inductor
from dovetail.torch_private import inductor_arithmetic as private_arithmetic
from dovetail.torch_private import inductor_cache as private_inductor_cache
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing


def find_fake_mode(graph: torch.fx.GraphModule, example_inputs: Sequence[Any] = ()) -> Any:
    """Return the fake mode of the graph's values; raises :class:`BackendError` if there is none."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    for value in [*example_inputs, *values]:
        if private_tensors.is_fake(value):
            return value.fake_mode
    raise BackendError(
        "no node of the graph carries a fake value", advice='propagate fake tensors through it (node.meta["val"])'
    )


def _refuse_writes(graph: torch.fx.GraphModule) -> None:
    """Raise for a graph that is not functional: Inductor's result was silently wrong for a mask filled in place."""
    for node in graph.graph.nodes:
        if not isinstance(node.target, private_operators.OpOverload) or not node.target._schema.is_mutable:
            continue
        written = node.args[0] if node.args else None
        into_input = isinstance(written, torch.fx.Node) and written.op == "placeholder"
        if node.target is torch.ops.aten.copy_.default and into_input and not _read_after(node):
            continue
        raise BackendError(
            f"the graph writes in place with {node.target}, and Inductor needs a functional graph",
            where=node.meta.get("user_line"),
            advice='functionalise the graph, or use backend="aten"',
        )


def _read_after(write: torch.fx.Node) -> bool:
    """Return whether anything but the output reads the written input, or the write's result, after the write."""
    target = write.args[0]
    node = write.next
    while node.op not in ("output", "root"):
        if target in node.all_input_nodes or write in node.all_input_nodes:
            return True
        node = node.next
    return False


def _passes(key: str) -> dict[str, Any]:
    """Return the settings of Inductor that make it run Dovetail's passes.

    The files and the key also keep Inductor's cache from finding code that was compiled with other workarounds, or of other values.
    """
    own = (arithmetic, complex_scatters, convolution_layouts, pools, recurrent_layers, sizes_that_change, workarounds)
    modules = (*own, private_inductor, private_arithmetic)
    files = tuple(str(item.__file__) for item in modules)
    layouts = private_inductor.inductor_pass(convolution_layouts.lay_out_convolutions, files, key)
    order = private_inductor.inductor_schedule_pass()
    settings = {"post_grad_custom_post_pass": layouts, "_pre_fusion_custom_pass": order}
    return {name: item for name, item in settings.items() if item is not None}


def _make_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name not in PIPELINE_OPTIONS}
    known = private_inductor.inductor_setting_names()
    unknown = sorted(given.keys() - known)
    if unknown:
        advice = did_you_mean(unknown[0], known, f"use names from {private_inductor.SETTINGS}")
        raise OptionError(f"backend 'inductor' has no option {unknown[0]!r}", advice=advice)
    return {"fallback_random": True, **given}


def _key(job: Job) -> str:
    """The facts that decide about the code and are not in Inductor's own key: the workarounds, and the values of all nodes.

    Inductor's key has the text of the graph and the values of its inputs. Results of custom operators' fake kernels are in neither.
    """
    digest = hashlib.sha256()
    for node in job.graph.graph.nodes:
        digest.update(f"{node.name} {facts(node.meta.get('val'))}\n".encode())
    return ", ".join([*(work_around.__name__ for work_around in WORKAROUNDS), digest.hexdigest()])


def compile_inductor(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    """Compile one flat ATen graph with Inductor.

    ``options`` are Dovetail's (``user_visible_outputs``, ``write_backs``), and any of Inductor's own settings by name, such as
    ``max_autotune=True``. Random numbers are eager's unless ``fallback_random=False``.
    """
    settings = _make_settings(options)
    outputs = output_arguments(graph)
    _refuse_writes(graph)
    fake_mode = find_fake_mode(graph, example_inputs)
    # Values that the forward saves must have the promised strides too: the backward graph is compiled for them.
    every = range(len(outputs))
    user_visible = list(options.get("user_visible_outputs", every))
    visible = list(every) if kind == "forward" else user_visible
    # Inductor changes the graph, which the caller keeps to show and to export.
    own = own_copy(graph, private_tracing.lazy_graph_module)
    examples = list(example_inputs) or [node.meta["val"] for node in own.graph.find_nodes(op="placeholder")]
    job = Job(own, examples, settings, options.get("write_backs", {}))
    job.is_guarded = bool(options.get("guarded_inputs")) and not any(map(private_sizes.has_symbols, examples))
    if job.is_guarded:
        job.during.append(private_inductor.inputs_are_not_asserted)
    write_back(own, job.write_backs)
    floats_as_tensors(own)
    compute_scalars_once(own)
    for work_around in WORKAROUNDS:
        work_around(job)
    # Inductor holds a pinned value to the strides of the capture; a saved one with channels last lies so anyway.
    pinned = [
        index
        for index in visible
        if index in user_visible or not convolution_layouts.lies_with_channels_last(outputs[index])
    ]
    sizes = sizes_of_mode(fake_mode)
    key, before = key_of_code(job, kind, pinned, sizes), 0 if sizes is None else sizes.count
    call, alone = take_code(key, sizes), None if job.wrappers or key is None else (key, job.resolved)
    if call is not None:
        note(fake_mode, Generated(kind, str(cache.directory() / "code" / str(key)), True, alone))
    else:
        compiled, was_cached = _compile(job, fake_mode, kind, pinned)
        keep_code(key, compiled, sizes, before)
        if file := private_inductor.generated_file(compiled):
            note(fake_mode, Generated(kind, file, was_cached, alone))
        call = private_inductor.straight_call(compiled)
    for wrap in job.wrappers:
        call = wrap(call)
    call = resolving(call, job.resolved)
    return guard_outputs(call, promised_strides(outputs, visible))


def _compile(job: Job, fake_mode: Any, kind: Kind, pinned: list[int]) -> tuple[Any, bool]:
    """Have Inductor compile the graph, or take it from Inductor's own cache; whether that had it."""
    missing = f"not kept, as {job.not_kept}" if job.not_kept else "not there, or a kernel of it is not"
    private_inductor_cache.look_no_further(f"the code of the {kind} graph is {missing}")
    hits = private_inductor.cache_hits()
    for prepare in job.before:
        prepare()
    with contextlib.ExitStack() as during:
        for block in job.during:
            during.enter_context(block())
        compiled = private_inductor.inductor_compile(
            job.graph,
            job.examples,
            fake_mode,
            # Inductor would no longer look whether static inputs are aligned, and a parameter may become a view.
            static_inputs=[],
            user_visible_outputs=pinned,
            is_backward=kind == "backward",
            is_inference=kind == "inference",
            settings={**_passes(f"{_key(job)} {pinned} {job.is_guarded}"), **job.settings},
        )
    return compiled, private_inductor.cache_hits() > hits


def _for_options(options: Mapping[str, Any]) -> Backend:
    _make_settings(options)
    return INDUCTOR


INDUCTOR = Backend(
    "inductor",
    compile_inductor,
    for_options=_for_options,
    decompositions=Decompositions,
    data_sizes=True,
    writes_back=True,
    slow_to_compile=True,
    leaves_fused_updates=True,
    numerics="tolerance",
    description="PyTorch's kernel compiler: fused C++ on the CPU, Triton on a GPU",
)
