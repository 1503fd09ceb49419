"""The records of operators, remembered in this process and kept in the cache on disk for the first captures of later ones.

One entry holds all that was learned in one state of the switches that choose kernels, as data. It says nothing about a program: its
key has what decides about fake kernels, the files and versions of the programs, the CPU, and the kernels that were registered from
Python. It is written where a backend compiles that takes longer than that.
"""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.passes.shape_prop import TensorMetadata

from dovetail import cache
from dovetail.aot.steps import Lowering, instead_of_steps
from dovetail.torch_private import fast_capture as private

_MOST, _MOST_KEPT = 20_000, 4_000


@dataclass(frozen=True)
class Output:
    """One result: a fake tensor to be made again, and further facts on the node."""

    pattern: private.Pattern
    tensor_meta: Any


@dataclass(frozen=True)
class Known:
    """The node of an operator: this many of its arguments and these named ones (the others have their defaults), and
    the results; ``several``: list or tuple, where it returns one.
    """

    count: int
    names: tuple[str, ...]
    outputs: tuple[Output | None, ...]
    several: type | None

    @functools.cached_property
    def is_apart(self) -> bool:
        """Whether no result is in the memory of an argument."""
        return all(output is None or output.pattern.alias < 0 for output in self.outputs)


class Memory:
    """The results learned in one state of the switches, by the facts of an operator's call; None: torch's way every time."""

    def __init__(self, switches: Any) -> None:
        self.known: dict[Any, Known | None] = {}
        self._is_new = False
        self._entry = _entry_for(switches)
        #: As it lies on disk: a graph needs few of all operators.
        self._kept: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            self._kept = dict(json.loads(cache.read("operators", self._entry) or b"{}"))

    def find(self, key: Any) -> Any:
        """The known result, NotImplemented where nothing was learned; raises TypeError for arguments that cannot be a key."""
        found = self.known.get(key, NotImplemented)
        if found is NotImplemented and self._kept:
            kept = _decoded(self._kept.get(_text_of(key)))
            if kept is not None:
                found = self.known[key] = kept
        return found

    def learn(self, key: Any, known: Known | None) -> None:
        """Remember it."""
        if len(self.known) >= _MOST:
            self.known.clear()
        self.known[key] = known
        self._is_new = self._is_new or known is not None

    def keep(self) -> None:
        """Write down new results, where reading them gives the same."""
        if not self._is_new or not self._entry:
            return
        self._is_new = False
        for key, known in list(self.known.items()):
            text = "" if known is None else _text_of(key)
            if known is not None and text and text not in self._kept:
                outputs = [item and (vars(item.pattern), item.tensor_meta) for item in known.outputs]
                written = [known.count, known.names, outputs, known.several and known.several.__name__]
                data = json.loads(json.dumps(written, default=str))
                if _decoded(data) == known:
                    self._kept[text] = data
        self._kept = dict(list(self._kept.items())[-_MOST_KEPT:])
        cache.write("operators", self._entry, json.dumps(self._kept).encode())


MEMORIES: dict[Any, Memory] = {}


@instead_of_steps
def keep_what_was_learned(lowering: Lowering) -> None:
    """In front of a compilation that takes long."""
    if lowering.backend.slow_to_compile:
        for memory in list(MEMORIES.values()):
            memory.keep()


def _entry_for(switches: Any) -> str:
    """The key of the entry; empty where there is none."""
    software = cache.software() if cache.is_on() else None
    about = (switches, private.registered_kernels(), torch.backends.cpu.get_cpu_capability())
    return "" if software is None else cache.key_of("operators", *about, *software)


def _text_of(key: Any) -> str:
    """The key of a call as text; empty where it has a function of the program's."""
    operator, rule, *others = key
    name = "" if rule is None else f"{rule.__module__}.{rule.__qualname__}"
    return repr((str(operator.operator), name, *others)) if rule is None or name.startswith("dovetail.") else ""


def _decoded(data: Any) -> Known | None:
    """The result in data; None for data that means nothing."""
    try:
        count, names, outputs, several = data
        kind = {None: None, "list": list, "tuple": tuple}[several]
        return Known(count, tuple(names), tuple([item and _output(*item) for item in outputs]), kind)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        return None


def _output(pattern: dict[str, Any], tensor_meta: list[Any]) -> Output:
    device = torch.device(pattern["device"])
    facts = {"shape": tuple(pattern["shape"]), "stride": tuple(pattern["stride"]), "dtype": _named(pattern["dtype"])}
    # Whatever else than the device a fake tensor might have comes back as another thing, and was not kept.
    attributes = {name: None if item is None else device for name, item in pattern["attributes"].items()}
    shape, dtype, requires_grad, stride, layout, *more = tensor_meta
    about = TensorMetadata(
        torch.Size(shape), _named(dtype), requires_grad, tuple(stride), layout and _named(layout), *more
    )
    return Output(private.Pattern(**{**pattern, **facts, "device": device, "attributes": attributes}), about)


def _named(name: str) -> Any:
    """The dtype or memory format of torch with a name."""
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, (torch.dtype, torch.memory_format)):
        raise ValueError(name)
    return found
