"""Settings of torch that a program changes or reads: every setter in C++ that has a reader, found by name, and some in Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail

quiet = pytest.mark.usefixtures("quiet")
READERS = ("get_", "is_", "")


def found() -> Iterator[tuple[str, Callable[[Any], Any], Callable[[], Any], Any, Any]]:
    """Each setter with its reader, the value now and another one that it takes."""
    for name in dir(torch._C):
        if not re.search("(^|_)set_", name) or re.search(
            "only_lift|meta_in_tls|threads|autocast_(cpu|gpu|xla|ipu)", name
        ):
            continue
        readers = [getattr(torch._C, name.replace("set_", part, 1), None) for part in READERS]
        write, read = getattr(torch._C, name), next(filter(callable, readers), None)
        try:
            old = read() if read is not None and read is not write else None
        except (TypeError, RuntimeError):
            continue
        others = {bool: lambda value: not value, int: lambda value: value + 1, list: lambda value: value[::-1]}
        if type(old) not in others:
            continue
        new = others[type(old)](old)
        try:
            write(old)  # a build for GPUs refuses some without one
            write(new)
            takes = read() == new
            write(old)
        except (TypeError, RuntimeError):
            continue
        if takes:
            yield name, write, read, old, new


def in_python() -> Iterator[tuple[str, Callable[[Any], Any], Callable[[], Any], Any, Any]]:
    invariants = torch.sparse.check_sparse_tensor_invariants
    matmul = torch.backends.cuda.matmul
    yield (
        "invariants",
        lambda on: (invariants.enable if on else invariants.disable)(),
        invariants.is_enabled,
        False,
        True,
    )
    yield "nnpack", torch.backends.nnpack.set_flags, torch._C._get_nnpack_enabled, torch._C._get_nnpack_enabled(), False
    yield "fast path", torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled, True, False
    yield "tf32", lambda on: setattr(matmul, "allow_tf32", on), lambda: matmul.allow_tf32, matmul.allow_tf32, True
    yield "warnings", torch.set_warn_always, torch.is_warn_always_enabled, False, True


SETTINGS = [*found(), *in_python()]


def test_the_search_finds_settings() -> None:
    assert len(SETTINGS) > 30


@quiet
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[0])
def test_a_setting_that_is_changed_inside_is_changed_at_each_call(setting: Any) -> None:
    _, write, read, old, new = setting

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        write(new)
        return x + 1

    compiled = dovetail.compile(function, backend="aten")
    for _ in range(3):
        try:
            assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
            assert read() == new
        finally:
            write(old)


@quiet
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[0])
def test_a_setting_that_is_read_is_that_of_the_call(setting: Any) -> None:
    _, write, read, old, new = setting
    compiled = dovetail.compile(lambda x: (x + 1, read()), backend="aten")
    for value in (old, new, old, new):
        write(value)
        try:
            assert compiled(torch.ones(2))[1] == value
        finally:
            write(old)


@quiet
def test_a_check_that_is_on_for_a_part_of_the_program() -> None:
    check = torch.sparse.check_sparse_tensor_invariants()

    def function(rows: torch.Tensor, columns: torch.Tensor, x: torch.Tensor) -> Any:
        x = x * 2
        try:
            with check:
                return torch.sparse_csr_tensor(rows, columns, x, dtype=x.dtype).to_dense()
        except RuntimeError as error:
            return str(error)

    compiled = dovetail.compile(function, backend="aten")
    columns, x = torch.tensor([0, 1, 2, 0, 1]), torch.ones(5)
    for rows in (torch.tensor([0, 3, 5]), torch.tensor([0, 3, 4])) * 2:
        ours, theirs = compiled(rows, columns, x), function(rows, columns, x)
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("fullgraph", [True, False])
def test_kernels_of_attention_in_the_order_of_the_call(fullgraph: bool) -> None:
    kinds = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    x = torch.randn(2, 2, 8, 16)

    def attention(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    compiled = dovetail.compile(attention, backend="aten", fullgraph=fullgraph)
    for _ in range(2):
        assert torch.equal(compiled(x), attention(x))
        with torch.nn.attention.sdpa_kernel(kinds, set_priority=True):
            assert torch.equal(compiled(x), attention(x))


def test_the_order_of_kernels_is_changed_inside_of_one_graph() -> None:
    before = torch._C._get_sdp_priority_order()

    def function(x: torch.Tensor) -> torch.Tensor:
        torch._C._set_sdp_priority_order(before[::-1])
        return x + 1

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for _ in range(3):
        try:
            compiled(torch.ones(2))
            assert torch._C._get_sdp_priority_order() == before[::-1]
        finally:
            torch._C._set_sdp_priority_order(before)


@quiet
@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors_that_are_checked_and_masked() -> None:
    def function(rows: torch.Tensor, columns: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse_csr_tensor(rows, columns, x * 2, dtype=x.dtype).to_dense()

    def masked(x: torch.Tensor) -> torch.Tensor:
        sparse = x.to_sparse_csr()
        return torch.masked.masked_tensor(sparse, (x != 0).to_sparse_csr()).to_dense().get_data()

    good = torch.tensor([0, 3, 5]), torch.tensor([0, 1, 2, 0, 1]), torch.ones(5)
    x = torch.tensor([[1.0, 0, 2], [0, 3, 0]])
    compiled = dovetail.compile(function, backend="aten")
    with torch.sparse.check_sparse_tensor_invariants(True):
        assert torch.equal(compiled(*good), function(*good))
        with pytest.raises(RuntimeError, match="nnz"):
            compiled(torch.tensor([0, 3, 4]), *good[1:])
    assert torch.equal(dovetail.compile(masked, backend="aten")(x), masked(x))
