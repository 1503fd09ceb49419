"""Code that Inductor has made, kept in the cache on disk: another process runs it without Inductor, which takes seconds to load.

The key is a digest of everything that decides about the code: the graph with the dtype, sizes, strides and device of each value,
as it is handed to Inductor; how it is compiled; all of Inductor's settings; torch's switches; the CPU; and the files and versions
of the programs that have made it (:mod:`dovetail.cache.versions`). With symbolic sizes, also the symbols, and what is assumed of
them; the entry says what Inductor has assumed besides, and who takes the code assumes that too. What cannot be written into a key
is not kept: sizes that the data decides, large constants, operators that are not torch's own, settings that are objects.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from dovetail import cache
from dovetail.aot.nodes import has_symbolic_sizes
from dovetail.backends.common.constants import constant_of, decode_constant, encode_constant
from dovetail.backends.common.sizes_elsewhere import SizesHere
from dovetail.backends.inductor.job import WORKAROUNDS, Job
from dovetail.backends.protocol import CompiledCallable, Kind
from dovetail.cache.unportable import UnportableError
from dovetail.torch_private import dynamo as private_dynamo
from dovetail.torch_private import inductor_code as private_code
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private.inductor_kernels import cpu_features

_NAMESPACES = ("aten", "prims", "_inductor_test")
_PLAIN = (bool, int, float, str, type(None))
#: Arguments of torch operators besides numbers and texts; each is written as torch writes it.
_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device)
#: Marks in the ``meta`` of nodes by which Inductor compiles differently.
_READ_BY_INDUCTOR = (
    "custom",
    "eager_input_vals",
    "mutation_region_id",
    "low_precision_pointwise_barrier",
    "unbacked_bindings",
)


class _UnknownError(Exception):
    """Something of the graph cannot be written into a key."""


def key_of_code(job: Job, kind: Kind, visible: Sequence[int], sizes: SizesHere | None) -> str | None:
    """The key of the code of a graph; None where it is not kept, or the program wants to see it made. ``sizes`` are those of its
    fake mode.
    """
    software = cache.software()
    settings = private_code.settings_as_text() if cache.is_on() and software is not None else None
    if settings is None or private_dynamo.shows_artifact("output_code"):
        job.not_kept = "the cache is off, a setting of Inductor's is an object, or the compilation is to be shown"
        return None
    try:
        is_symbolic = has_symbolic_sizes(job.graph.graph.nodes) or any(map(private_sizes.has_symbols, job.examples))
        for item in job.examples:
            _check(item, sizes)
        graph = "\n".join(_line(node, sizes) for node in job.graph.graph.nodes)
        decides = sizes.decides() if is_symbolic and sizes is not None else None
        given = [_written(sorted(item.items())) for item in (job.settings, job.write_backs)]
        given.append(_written([visible, job.is_guarded]))
        inputs = list(map(facts, job.examples))
    except (_UnknownError, UnportableError) as error:
        job.not_kept = str(error)
        return None
    names = [f"{work_around.__module__}.{work_around.__qualname__}" for work_around in WORKAROUNDS]
    return cache.key_of(
        "code", graph, inputs, decides, *given, kind, settings, names, *state_of_torch(), *(software or ())
    )


def state_of_torch() -> tuple[Any, ...]:
    """Switches of torch and facts of the machine that decide about code."""
    named = ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS")
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        private_state.kernel_flags(),
        _cpu(),
        torch.backends.cpu.get_cpu_capability(),
        *(os.environ.get(name, "") for name in named),
    )


_cpu = functools.cache(cpu_features)


def _line(node: torch.fx.Node, sizes: SizesHere | None) -> str:
    if node.op == "get_attr":
        constant = encode_constant(constant_of(node))
        if constant is None:
            raise _UnknownError("a constant is large, or no plain tensor of the CPU")
        return f"{node.op} {node.name} {node.target} {json.dumps(constant)}"
    if node.op not in ("placeholder", "call_function", "output"):
        raise _UnknownError(f"it has a node of kind {node.op}")
    if node.op == "call_function" and isinstance(node.target, private_operators.OpOverload):
        if node.target.namespace not in _NAMESPACES:
            raise _UnknownError(f"{node.target} is no operator of torch's")
        target = str(node.target)
    elif node.op == "call_function":
        module, target = getattr(node.target, "__module__", ""), getattr(node.target, "__qualname__", "")
        if module != "_operator":
            raise _UnknownError(f"{module}.{target} is no operator of torch's")
    else:
        target = str(node.target)
    if any(name in node.meta for name in _READ_BY_INDUCTOR):
        raise _UnknownError(f"{node.name} is marked for Inductor")
    value = node.meta.get("val")
    _check(value, sizes)
    return (
        f"{node.op} {node.name} {target} {_written(node.args)} {_written(sorted(node.kwargs.items()))} {facts(value)}"
    )


def _check(value: Any, sizes: SizesHere | None) -> None:
    """Raise for a value that is neither a plain tensor of the CPU nor a number that is known, or follows from ``sizes``."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _check(item, sizes)
    elif isinstance(value, torch.Tensor):
        is_plain = (
            value.layout == torch.strided and value.device.type == "cpu" and not value.is_conj() and not value.is_neg()
        )
        if not is_plain:
            raise _UnknownError("a value is no plain tensor of the CPU")
        for number in (*value.shape, *value.stride(), value.storage_offset()):
            _check(number, sizes)
    elif sizes is not None and isinstance(value, (torch.SymInt, torch.SymBool)):
        sizes.encode(value)
    elif type(value) not in _PLAIN:
        raise _UnknownError(f"a value is a {type(value).__name__}")


def _written(value: Any) -> str:
    """Arguments and settings as text: equal texts mean equal values."""
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"{'(' if isinstance(value, tuple) else '['}{', '.join(map(_written, value))}]"
    if type(value) in _PLAIN or isinstance(value, _NAMED) or type(value) is complex:
        return repr(value)
    raise _UnknownError(f"an argument or an option is a {type(value).__name__}")


def facts(value: Any) -> str:
    """The facts that kernels may assume of a value."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(facts, value))}]"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    if value.layout != torch.strided:
        return f"{value.dtype} {value.shape} {value.layout} {value.device}"
    return f"{value.dtype} {value.shape} {value.stride()} {value.storage_offset()} {value.device}"


def take_code(key: str | None, sizes: SizesHere | None = None) -> CompiledCallable | None:
    """The code under a key as a callable; None where it is not there, not whole, or its kernels are not, and where what it assumes
    of ``sizes`` does not hold for this call.
    """
    content = None if key is None else cache.read("code", key)
    if content is None:
        return None
    try:
        # One line of data, then the source as it is, for people who read the file.
        names, _, source = content.decode().partition("\n")
        data = json.loads(names)
        data["constants"] = {name: decode_constant(item) for name, item in data["constants"].items()}
        found: CompiledCallable | None = private_code.code_from_data({**data, "source": source})
        if found is not None and sizes is not None:
            sizes.assume(data["assumed"])
    except Exception:  # noqa: BLE001  (whatever is there under the key: the graph is compiled, and the entry written anew)
        return None
    return found


def keep_code(key: str | None, compiled: Any, sizes: SizesHere | None, before: int) -> None:
    """Write down the code of a graph that was compiled, where that is possible. ``before`` is the number of conditions on ``sizes``
    that were recorded before.
    """
    if key is None:
        return
    data = private_code.code_as_data(compiled)
    try:
        assumed = [] if sizes is None else sizes.recorded_since(before)
    except UnportableError:
        return
    if data is not None:
        data["assumed"] = assumed
        source, constants = data.pop("source"), data.pop("constants")
        data["constants"] = {name: encode_constant(value) for name, value in constants.items()}
        if None in data["constants"].values():
            return
        cache.write("code", key, f"{json.dumps(data)}\n{source}".encode())
