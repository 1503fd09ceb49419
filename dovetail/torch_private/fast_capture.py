"""Traced tensors of known shape, made without the dispatch modes that usually make them. Checked on torch 2.13 and 2.15."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConfig, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer, _ProxyTensor, fetch_sym_proxy
from torch.fx.traceback import has_preserved_node_meta
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from dovetail.torch_private.kernels import functional_form

__all__ = ["FakeTensor", "FunctionalTensor"]

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize
_INCLUDED = torch._C.DispatchKeySet(_FUNCTIONALIZE)
_IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd
#: Whether torch's modes and fake tensors are as this module knows them: those of torch 2.11 and 2.12 are not.
IS_KNOWN = "fake_device" in vars(FakeTensor) and hasattr(ProxyTorchDispatchMode, "enable_decompositions")
#: Asks for the device of a tensor.
DEVICE = torch.ops.prim.device.default
#: Tags of operators whose results do not follow from what is known of the arguments before they run.
_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})


def is_plain_operator(operator: Any) -> bool:
    """Whether an operator of ATen only computes or views its first argument, and is recorded as it is.

    >>> is_plain_operator(torch.ops.aten.mul.Tensor), is_plain_operator(torch.ops.aten.mul_.Tensor)
    (True, False)
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten" or operator._schema.is_mutable:
        return False
    aliased = [item for item in operator._schema.arguments if item.alias_info is not None]
    return (
        (_TAGS.isdisjoint(operator.tags) or operator is torch.ops.aten.index.Tensor)
        and operator not in FunctionalTensor.metadata_fns
        and operator not in FakeTensorMode.lift_fns
        and not operator.has_kernel_for_dispatch_key(_IMPLICIT)
        and all(str(item.type) in ("Tensor", "List[Tensor]") for item in operator._schema.returns)
        and (not aliased or (operator.is_view and aliased == operator._schema.arguments[:1]))
    )


def written_form(operator: Any) -> Any:
    """The operator that functionalisation records of one that writes its result into its first argument; None for others.

    >>> written_form(torch.ops.aten.mul_.Tensor)
    <OpOverload(op='aten.mul', overload='Tensor')>
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return None
    written = [item for item in operator._schema.arguments if item.alias_info is not None]
    is_write = operator._schema.is_mutable and written == operator._schema.arguments[:1]
    if not is_write or len(operator._schema.returns) != 1 or operator.has_kernel_for_dispatch_key(_IMPLICIT):
        return None
    return functional_form(operator)


def makes_memory(operator: Any) -> bool:
    """Whether functionalisation has nothing of its own for an operator: it wraps the results.

    >>> makes_memory(torch.ops.aten.mul.Tensor), makes_memory(torch.ops.aten.t.default)
    (True, False)
    """
    return not operator.is_view and not operator.has_kernel_for_dispatch_key(_FUNCTIONALIZE)


def name_of_nodes(operator: Any) -> str:
    """The name of an operator's nodes, without their numbers."""
    return torch.fx.Graph()._target_to_str(operator.overloadpacket.__name__)


def records_plainly(tracer: PythonKeyTracer, fake_mode: FakeTensorMode) -> bool:
    """Whether what functionalisation calls now goes to this tracer and this fake mode, and nobody else has a word in it."""
    mode = torch._C._get_dispatch_mode(_PROXY)
    return (
        type(mode) is ProxyTorchDispatchMode
        and mode.tracer is tracer
        and not mode.decomposition_table
        and not mode.emulate_precision_casts
        and torch._C._get_dispatch_mode(_FAKE) is fake_mode
        and _len_torch_dispatch_stack() == 2
        and not fake_mode.propagate_real_tensors
        and not has_preserved_node_meta()
        and not FakeTensorConfig.debug
    )


def fake_of(value: FunctionalTensor, *, is_argument: bool) -> Any:
    """The fake tensor that a functional one stands for; as an argument it is first brought up to date with writes to its base."""
    if is_argument:
        torch._functionalize_sync(value.elem)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(value.elem)


def is_plain(fake: Any, fake_mode: FakeTensorMode) -> bool:
    """Whether this is a strided fake tensor of the mode's."""
    return type(fake) is FakeTensor and fake.fake_mode is fake_mode and fake.layout is torch.strided


def device_of(value: Any, fake_mode: FakeTensorMode) -> Any:
    """The device of a fake tensor; NotImplemented for others, and in the middle of its fake kernel."""
    is_own = type(value) is FakeTensor and value.fake_mode is fake_mode
    return value.fake_device if is_own and not fake_mode.in_kernel_invocation else NotImplemented


def node_of_fake(tracer: PythonKeyTracer, fake: torch.Tensor) -> torch.fx.Node | None:
    """The node that computes a fake tensor; None where it is unknown, or its data are known."""
    slot: Any = tracer.tensor_tracker.get(fake)
    return None if slot is None or slot.constant is not None else slot.proxy.node


def node_of_number(tracer: PythonKeyTracer, number: Any) -> torch.fx.Node | None:
    """The node that computes a symbolic number; None for one that is a constant by now."""
    found: Any = fetch_sym_proxy(tracer)(number)
    return found.node if isinstance(found, torch.fx.Proxy) else None


def facts_of(fake: Any) -> tuple[Any, ...]:
    """The facts about a fake tensor that an operator can depend on; not hashable if its sizes are symbolic."""
    return (
        fake.dtype,
        fake.shape,
        fake.stride(),
        fake.storage_offset(),
        fake.fake_device,
        torch._C._dispatch_keys(fake).raw_repr(),
        fake.untyped_storage().nbytes(),
    )


@dataclass(frozen=True)
class Pattern:
    """A fake tensor to be made again; ``alias``: in the storage of this one of the arguments, or in one of its own (-1)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]
    alias: int

    def make(self, fake_mode: FakeTensorMode, arguments: Sequence[torch.Tensor], count: int) -> list[Any]:
        """Make that many fake tensors in one storage."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if self.alias >= 0:
                storage: Any = arguments[self.alias].untyped_storage()
                meta.set_(storage, self.offset, self.shape, self.stride)
            made = []
            for _ in range(count):
                fake: Any = torch.Tensor._make_subclass(  # type: ignore[call-arg]
                    FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=self.device
                )
                torch._C._set_throw_on_mutable_data_ptr(fake)
                fake.__dict__.update(self.attributes)
                fake.fake_mode = fake_mode
                made.append(fake)
        return made


def pattern_of(fake: Any, arguments: Sequence[torch.Tensor]) -> Pattern | None:
    """A function that makes a fake tensor again from other arguments of the same facts; None where that gives another one."""
    facts = facts_of(fake)
    if any(type(number) is not int for number in (*fake.shape, *fake.stride(), fake.storage_offset(), facts[-1])):
        return None
    storages = [item.untyped_storage()._cdata for item in arguments]
    own = fake.untyped_storage()._cdata
    pattern = Pattern(
        tuple(fake.shape),
        tuple(fake.stride()),
        fake.storage_offset(),
        fake.dtype,
        fake.fake_device,
        {**fake.__dict__, "fake_mode": None},
        storages.index(own) if own in storages else -1,
    )
    (again,) = pattern.make(fake.fake_mode, arguments, 1)
    memos = {*fake.__dict__} - {"fake_mode", "_fake_device", "fake_device"}
    alike = (
        facts_of(again) == facts
        and all(fake.__dict__[name] is None for name in memos)
        and again.__dict__ == fake.__dict__
        and again.is_inference() is fake.is_inference()
    )
    return pattern if alike and not fake.requires_grad else None


def add_node(
    graph: torch.fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    op: str = "call_function",
) -> torch.fx.Node:
    """Do the work of ``graph.create_node``; its search of all arguments for raw symbols, and other checks, take as long again."""
    name = graph._graph_namespace.create_name(name, None)
    node = torch.fx.Node(graph, name, op, target, args, kwargs)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def is_ordinary(real: torch.Tensor, fake_mode: FakeTensorMode) -> bool:
    """Whether nothing but its facts says which fake tensor torch makes of a plain tensor: no other input shares its memory."""
    return (
        type(real) in (torch.Tensor, torch.nn.Parameter)
        and real.layout is torch.strided
        and not real.is_inference()
        and not fake_mode.propagate_real_tensors
        and not FakeTensorConfig.debug
        and real.untyped_storage() not in _converter(fake_mode).describer.lookup_storage
    )


def facts_of_real(real: torch.Tensor) -> tuple[Any, ...]:
    """The same as :func:`facts_of`, of a real tensor."""
    keys = torch._C._dispatch_keys(real).raw_repr()
    place = real.shape, real.stride(), real.storage_offset(), real.untyped_storage().nbytes()
    return (real.dtype, real.device, keys, *place, torch.is_inference_mode_enabled())


def note_memory(fake_mode: FakeTensorMode, real: torch.Tensor, fake: torch.Tensor) -> None:
    """Have the fake tensors of other inputs in the memory of ``real`` share that of ``fake``."""
    converter = _converter(fake_mode)
    converter.storage_memo[converter.describer.get_storage_id(real.untyped_storage())] = fake.untyped_storage()


def _converter(fake_mode: FakeTensorMode) -> Any:
    return fake_mode.fake_tensor_converter.meta_converter


def registered_kernels() -> list[str]:
    """The kernels of ATen's operators that were registered from Python, torch's own among them."""
    return sorted(name for name in torch.library._impls if name.startswith("aten/"))


def track(tracer: PythonKeyTracer, fake: torch.Tensor, node: torch.fx.Node) -> None:
    """Say which node computes a fake tensor."""
    tracer.tensor_tracker[fake] = _ProxyTensor(tracer.proxy(node), None)


class _Answer(TorchDispatchMode):
    """Gives the known result of the one operator that functionalisation calls; a write to a view calls others for its base."""

    def __init__(self, operator: Any, result: Any, is_write: bool = False) -> None:
        # The base class's version is for modes that are entered; this one is pushed and popped.
        self.operator = operator
        self.result = result
        self.is_write = is_write

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # No wrapper: functionalisation, which is left to be called, has switched Dynamo off.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the base class."""
        if func is DEVICE:
            return args[0].fake_device
        if func is not self.operator and self.is_write:
            return func(*args, **(kwargs or {}))
        assert func is self.operator, f"{func} is called in place of {self.operator}"
        return self.result


def functionalise(
    mode: Any, operator: Any, recorded: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """Functionalise an operator; ``recorded`` is what functionalisation calls for it, whose fake result is known."""
    inner = [_unwrapped(item) for item in args]
    named = {name: _unwrapped(item) for name, item in kwargs.items()}
    include = torch._C._dispatch_tls_local_include_set() | _INCLUDED
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(_FUNCTIONALIZE) - FunctionalTensor._extra_dispatch_keys
    torch._C._push_on_torch_dispatch_stack(_Answer(recorded, result, recorded is not operator))
    try:
        with torch._C._ForceDispatchKeyGuard(include, exclude):
            before = torch._functionalize_enable_reapply_views(True)  # type: ignore[attr-defined]
            try:
                made = operator._op_dk(_FUNCTIONALIZE, *inner, **named)
                traced = _wrapped(made, mode) if recorded is operator else args[0]
            finally:
                torch._disable_functionalization()  # type: ignore[attr-defined]
                torch._functionalize_enable_reapply_views(before)  # type: ignore[attr-defined]
    finally:
        torch._C._pop_torch_dispatch_stack(None)
    if operator.is_view:
        for view in traced if type(traced) is list else (traced,):
            torch._functionalize_unsafe_set(view, args[0])  # type: ignore[attr-defined]
    return traced


def functional(mode: Any, result: Any) -> Any:
    """The same for an operator that :func:`makes_memory`."""
    torch._C._push_on_torch_dispatch_stack(_Answer(None, None))
    try:
        return _wrapped(result, mode)
    finally:
        torch._C._pop_torch_dispatch_stack(None)


def _unwrapped(value: Any) -> Any:
    kind = type(value)
    if kind is FunctionalTensor:
        return value.elem
    return kind([_unwrapped(item) for item in value]) if kind is list or kind is tuple else value


def _wrapped(value: Any, mode: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        value = torch._to_functional_tensor(value)
    if isinstance(value, torch.Tensor):
        return FunctionalTensor(value, mode)
    return kind([_wrapped(item, mode) for item in value]) if kind is list or kind is tuple else value
