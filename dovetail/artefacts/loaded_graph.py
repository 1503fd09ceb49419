"""A joint graph from disk: something to call, to bind values to, and to compile again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.joint_graph import JointGraph
from dovetail.artefacts.specs import build_result, name_of_input
from dovetail.errors import InputError
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import shape_guards


@dataclass(frozen=True, eq=False)
class LoadedGraph:
    """A joint graph from disk, with the values that were exported with it.

    Call it with the inputs that are not in ``state``, in the order of ``open_inputs``; it returns what the captured function
    returned, differentiable ``derivative_order`` times, and writes to the tensors that the function wrote to. ``joint`` is the
    graph itself: it can be printed, edited and compiled again. ``result`` is the description of the result. ``kernels`` says where
    the kernels are from that ``load(..., kernels=True)`` was asked for.
    """

    joint: JointGraph
    state: dict[str, torch.Tensor]
    derivative_order: int
    result: Any
    exported_by: str = ""
    compiled: CompiledGraph | None = None
    kernels: str = ""
    _cache: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """All inputs of the graph, primals first, as sentences."""
        return tuple(str(descriptor) for descriptor in self.joint.input_descriptors)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the primals, as ``state`` has them."""
        return tuple(name_of_input(item) for item in self.joint.input_descriptors[: self.joint.num_primals])

    @property
    def open_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that a call must bring."""
        return tuple(name for name in self.names if name not in self.state)

    def bind(self, values: Mapping[str, torch.Tensor]) -> LoadedGraph:
        """The same graph with these values for inputs, by name. Raises :class:`InputError` for a name that is no input."""
        unknown = sorted(set(values) - set(self.names))
        if unknown:
            raise InputError(
                f"the graph has no input {unknown[0]!r}", advice=f"its inputs are: {', '.join(self.names)}"
            )
        return dataclasses.replace(self, state={**self.state, **values}, _cache={})

    def compile(self, backend: str | Callable[..., Any] | None = None, **options: Any) -> LoadedGraph:
        """The same graph, run by another backend than ``"aten"``; options are those of ``JointGraph.compile``."""
        return dataclasses.replace(self, compiled=self.joint.compile(backend, **options), kernels="", _cache={})

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the graph. Raises :class:`InputError` for inputs that it was not captured for."""
        missing = self.open_inputs
        if len(inputs) != len(missing):
            raise InputError(f"{len(missing)} inputs are needed, not {len(inputs)}: {', '.join(missing)}")
        given = iter(inputs)
        primals = [self.state[name] if name in self.state else next(given) for name in self.names]
        if self.compiled is None:
            object.__setattr__(self, "compiled", self.joint.compile("aten"))
        assert self.compiled is not None
        self._check(primals)
        self._check_autograd(primals)
        return build_result(self.result, self.compiled.run(primals))

    def _check(self, values: Sequence[torch.Tensor]) -> None:
        """Raise :class:`InputError` unless the tensors are such as the graph was captured for."""
        placeholders = self.joint.graph.find_nodes(op="placeholder")
        is_strided = any("as_strided" in str(node.target) for node in self.joint.graph.nodes)
        for value, node, name in zip(values, placeholders, self.inputs):
            _check_tensor(value, node.meta["val"], name)
            if is_strided and value.storage_offset() != 0:
                raise InputError(f"{name} is part of a larger tensor", advice="hand over a clone")
        guards = self._guards()
        failures = guards.failures(values) if guards is not None and not guards.holds(values) else []
        if failures:
            raise InputError("the graph was captured for other sizes: " + "; ".join(text for text, _ in failures))

    def _guards(self) -> Any:
        environment = self.joint.fake_mode.shape_env
        # A backend may have assumed more since the last call.
        count = len(environment.guards)
        if self._cache.get("guards", (-1, None))[0] != count:
            self._cache["guards"] = (count, shape_guards(environment, self.joint.capture.bindings))
        return self._cache["guards"][1]

    def _check_autograd(self, primals: Sequence[torch.Tensor]) -> None:
        """Raise :class:`InputError` for an input without the gradient that it wants, or written to under two names."""
        spec = self.joint.spec
        if torch.is_grad_enabled():
            for value, flag, name in zip(primals, spec.input_requires_grad, self.inputs):
                if value.requires_grad and not flag:
                    raise InputError(
                        f"{name} requires a gradient, and the graph has none for it",
                        advice="detach it, or capture the function with an input that requires a gradient",
                    )
        written = {mutation.input_index for mutation in spec.mutations}
        storages = [value.untyped_storage().data_ptr() for value in primals]
        for index in written:
            if primals[index].numel() and storages.count(storages[index]) > 1:
                raise InputError(f"{self.inputs[index]} is written to and shares memory with another input")

    def __str__(self) -> str:
        return (
            f"a graph of {len(self.joint.graph.nodes)} nodes exported with torch {self.exported_by}, derivative order "
            f"{self.derivative_order}; inputs: {', '.join(self.open_inputs)}; values from the file: {len(self.state)}"
            + (f"; kernels: {self.kernels}" if self.kernels else "")
        )


def _check_tensor(value: Any, promised: torch.Tensor, name: str) -> None:
    """Raise :class:`InputError` unless a tensor has the class, dtype, device and fixed sizes of the promised one."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise InputError(f"{name} must be a plain tensor, not a {type(value).__name__}")
    if value.dtype != promised.dtype or value.layout is not torch.strided or value.dim() != promised.dim():
        raise InputError(f"{name} must be {promised.dtype} of {promised.dim()} dimensions")
    if value.device.type != promised.device.type or value.is_conj() or value.is_neg():
        raise InputError(f"{name} must be a plain tensor on {promised.device.type}, not on {value.device}")
    for kind, found, wanted in (("shape", value.shape, promised.shape), ("strides", value.stride(), promised.stride())):
        for own, fixed, size in zip(found, wanted, value.shape):
            if not private_sizes.is_symbolic(fixed) and fixed != own and (kind == "shape" or size > 1):
                raise InputError(f"{name} has the {kind} {tuple(found)}, and the graph is for {tuple(wanted)}")
