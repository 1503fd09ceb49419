"""The public callables of torch, arguments for them, and the forms in which each can be called.

Arguments come from torch's operator database where it knows the callable, else from a few guesses that eager accepts.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.conformance.verdicts import seed_everything

FACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.sparse": torch.sparse,
    "torch.Tensor": torch.Tensor,
}
# They read memory that nobody has written, leave the process, or need a second process or another device.
_SKIPPED = frozenset(
    (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"),
        *("resize_as_", "share_memory_", "pin_memory", "cuda", "xpu"),
        *("ipu", "hpu", "mtia", "to_mkldnn", "save", "load"),
        *(
            "backward",
            "set_",
            "from_file",
            "seed",
            "initial_seed",
            "manual_seed",
            "set_printoptions",
            "compile",
            "Tensor",
        ),
        *("record_stream", "module_load", "empty_quantized", "resize", "resize_as", "resize_as_sparse_", "is_shared"),
        *(
            "untyped_storage",
            "storage",
            "storage_type",
            "data_ptr",
            "const_data_ptr",
            "register_hook",
            "to_dlpack",
            "__dlpack__",
        ),
        *("register_post_accumulate_grad_hook", "retain_grad", "map_", "map2_", "apply_", "index_put_impl_"),
        *("fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix"),
    )
)


@dataclass(frozen=True)
class Arguments:
    """What one call is given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """One way to call: a function of (args, kwargs), and whether gradients are asked for."""

    name: str
    function: Callable[[Any, Any], Any]
    given: Arguments
    backward: bool = False


@functools.cache
def callables() -> dict[str, Callable[..., Any]]:
    """Every public callable for which there may be arguments, by its full name."""
    known = torch.overrides.get_testing_overrides()
    sampled = set(_database())
    found: dict[str, Callable[..., Any]] = {}
    for face, module in FACES.items():
        for name in sorted(dir(module)):
            target = getattr(module, name, None)
            plain = name.startswith("_") or name in _SKIPPED or isinstance(target, type) or not callable(target)
            if plain:
                continue
            if target in known or _database_name(face, name) in sampled:
                found[f"{face}.{name}"] = target
    return found


@functools.cache
def _database() -> dict[str, Any]:
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db

    # The database seeds the generator inside some operators; the runner seeds before every call.
    common_methods_invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
    named: dict[str, Any] = {}
    for op in op_db:
        if op.supports_dtype(torch.float32, "cpu"):
            for name in (op.name, *(alias.name for alias in op.aliases)):
                named.setdefault(name, op)
    return named


def _database_name(face: str, name: str) -> str:
    if face == "torch.Tensor":
        return name.rstrip("_")
    return f"{face}.{name}".removeprefix("torch.")


def _guesses(requires_grad: bool) -> Iterator[Arguments]:
    def x(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, requires_grad=requires_grad)

    positions = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 0, 1]])
    for args in (
        (x(3, 3),),
        (x(3, 3), x(3, 3)),
        (x(3, 3), 1),
        (x(3, 3), 0, 1),
        (x(3, 3), (0, 1)),
        ([x(3, 3), x(3, 3)],),
        (x(3, 3), positions),
        (x(3, 3), 0, positions, x(3, 3)),
        (x(3, 3), x(3, 3), x(3, 3)),
        (x(3, 3), 0.5),
        (x(2, 3, 4),),
        (x(2, 3, 4), x(2, 4, 3)),
        (x(2, 3, 8, 8),),
        (x(2, 3, 8, 8), 2),
        (x(2, 3, 8, 8), x(4, 3, 3, 3)),
        (positions,),
        (positions, positions),
        (x(3, 3), torch.float64),
    ):
        yield Arguments(args)


def arguments(name: str, requires_grad: bool, count: int) -> list[Arguments]:
    """The first ``count`` argument lists for a callable that are known, or that eager accepts."""
    face, _, short = name.rpartition(".")
    seed_everything()
    op = _database().get(_database_name(face, short))
    if op is not None:
        if requires_grad and not (op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")):
            return []
        samples = itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=requires_grad), count)
        return [Arguments((sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]
    found = []
    for guess in _guesses(requires_grad):
        try:
            callables()[name](*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in guess.args))
        except Exception:
            # Not what it takes.
            continue
        found.append(guess)
    return found[:count]


def forms(name: str, requires_grad: bool, count: int = 2) -> Iterator[Form]:
    """Every form of a call, for ``count`` argument lists."""
    face, _, short = name.rpartition(".")
    target = callables()[name]
    for number, given in enumerate(arguments(name, requires_grad, count)):
        made = _method_forms if face == "torch.Tensor" else _function_forms
        for form in made(short, target, given, requires_grad):
            yield Form(f"{form.name} #{number}", form.function, form.given, requires_grad)


def _method_forms(name: str, target: Callable[..., Any], given: Arguments, requires_grad: bool) -> Iterator[Form]:
    if not given.args or not isinstance(given.args[0], torch.Tensor):
        return

    def method(args: Any, kwargs: Any) -> Any:
        return getattr(args[0], name)(*args[1:], **kwargs)

    def of_class(args: Any, kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def on_clone(args: Any, kwargs: Any) -> Any:
        made = args[0].clone()
        result = getattr(made, name)(*args[1:], **kwargs)
        return made, result

    def through_view(args: Any, kwargs: Any) -> Any:
        getattr(args[0].view_as(args[0]), name)(*args[1:], **kwargs)
        return args[0] * 1

    def on_slice(args: Any, kwargs: Any) -> Any:
        made = torch.stack([args[0], args[0]])
        getattr(made[0], name)(*args[1:], **kwargs)
        return made

    writes = name.endswith("_")
    yield Form("method", method, given)
    if not requires_grad:
        yield Form("method of the class", of_class, given)
        yield Form("method, transposed", method, _transposed(given))
    if writes:
        yield Form("in place on a clone", on_clone, given)
        yield Form("in place on a slice", on_slice, given)
        yield Form("in place on a clone, transposed", on_clone, _transposed(given))
        if not requires_grad:
            yield Form("in place through a view", through_view, given)


def _function_forms(name: str, target: Callable[..., Any], given: Arguments, requires_grad: bool) -> Iterator[Form]:
    def positional(args: Any, kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def written(args: Any, kwargs: Any) -> Any:
        result = target(*args, **kwargs)
        first = result if isinstance(result, torch.Tensor) else result[0]
        first.mul_(2)
        # Without its history: sums of gradients in another order would differ in the last bit.
        return result, args[0].detach() if isinstance(args[0], torch.Tensor) else None

    yield Form("positional", positional, given)
    yield Form("positional, transposed", positional, _transposed(given))
    by_name = _by_keyword(target, given)
    if by_name is not None:
        yield Form("keyword", positional, by_name)
    yield Form("result written", written, given)
    if not requires_grad:
        yield from _out_forms(target, given)


def _out_forms(target: Callable[..., Any], given: Arguments) -> Iterator[Form]:
    try:
        seed_everything()
        results = target(*given.args, **given.kwargs)
    except Exception:
        # The plain form shows it.
        return
    several = not isinstance(results, torch.Tensor)
    if several and not (isinstance(results, tuple) and all(isinstance(result, torch.Tensor) for result in results)):
        return
    shapes = [(result.shape, result.dtype) for result in (results if several else [results])]

    def into(make: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], Any]:
        def call(args: Any, kwargs: Any) -> Any:
            outs = tuple(make(shape, dtype) for shape, dtype in shapes)
            result = target(*args, **kwargs, out=outs if several else outs[0])
            same = (result[0] is outs[0]) if several else (result is outs[0])
            return outs, result, same

        return call

    yield Form("out=", into(lambda shape, dtype: torch.zeros(shape, dtype=dtype)), given)
    yield Form("out= resized", into(lambda shape, dtype: torch.zeros(0, dtype=dtype)), given)
    yield Form("out= slice", into(lambda shape, dtype: torch.zeros(2, *shape, dtype=dtype)[1]), given)
    yield Form("out= strided", into(lambda shape, dtype: torch.zeros(*shape, 2, dtype=dtype)[..., 0]), given)
    yield Form("out= of integers", into(lambda shape, dtype: torch.zeros(shape, dtype=torch.int64)), given)


def _by_keyword(target: Callable[..., Any], given: Arguments) -> Arguments | None:
    known = torch.overrides.get_testing_overrides().get(target)
    if known is None:
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    names = [entry.name for entry in inspect.signature(known).parameters.values() if entry.kind in kinds]
    if len(names) < len(given.args):
        return None
    return Arguments((), {**dict(zip(names, given.args, strict=False)), **given.kwargs})


def _transposed(given: Arguments) -> Arguments:
    def turn(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.dim() < 2:
            return tensor
        turned = tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
        return turned.requires_grad_(tensor.requires_grad)

    return Arguments(*tree_map_only(torch.Tensor, turn, (given.args, given.kwargs)))
