"""No text of a tracer reaches the program: texts of whatever holds a tensor are eager's at every call."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail


class Named:
    """Shows what it has."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Named({self.value!r})"


class Native(collections.UserList[Any]):
    """Its repr is that of its list."""


def _of_exception(x: Tensor) -> str:
    try:
        raise ValueError("one", x.sum())
    except ValueError as error:
        return f"{error} {error!r} {error.args}"


def _of_chained_exception(x: Tensor) -> str:
    try:
        try:
            raise KeyError(x)
        except KeyError as error:
            raise RuntimeError([error]) from error
    except RuntimeError as error:
        return str(error)


TEXTS: dict[str, Callable[[Tensor], str]] = {
    "str": lambda x: str(x),
    "repr": lambda x: repr(x),
    "x.__repr__": lambda x: x.__repr__(),
    "x.__str__": lambda x: x.__str__(),
    "format": lambda x: f"{x.sum():.2f}",
    "format of a sum": lambda x: f"{x.sum()}",
    "x.__format__": lambda x: x.sum().__format__(".1f"),
    "%s": lambda x: "%s and %r" % (x, [x]),  # noqa: UP031
    "str.format": lambda x: "{} {0.shape}".replace("{} ", "").format(x),
    "list": lambda x: str([x, (x, {x.shape[0]: x})]),
    "OrderedDict": lambda x: repr(collections.OrderedDict(a=x)),
    "deque": lambda x: str(collections.deque([x])),
    "defaultdict": lambda x: str(collections.defaultdict(list, a=x)),
    "SimpleNamespace": lambda x: str(types.SimpleNamespace(a=x, n=x.shape[0])),
    "dict view": lambda x: str({"a": x}.items()),
    "values": lambda x: repr({"a": x, "b": 2}.values()),
    "return type": lambda x: str(x.max(0)),
    "f-string of a return type": lambda x: f"{x.sort()}",
    "own class": lambda x: str(Named(x)),
    "own class in a list": lambda x: f"{[Named(x)]}",
    "UserList": lambda x: repr(Native([x])),
    "exception": _of_exception,
    "chained exception": _of_chained_exception,
    "ascii": lambda x: ascii([x]),
    "size in a namespace": lambda x: str(types.SimpleNamespace(n=x.shape[0])),
    "size in a view": lambda x: str({"n": x.shape[0]}.values()),
    "size in an exception": lambda x: str(ValueError("n", x.shape[0], x.sum().item())),
    "mappingproxy": lambda x: str(types.MappingProxyType({"a": x})),
    "dtype and device": lambda x: f"{x.dtype} {x.device} {x.shape} {x.size()!r}",
    "item": lambda x: f"{x.sum().item()} {x.tolist()}",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(4)
def test_texts_are_those_of_eager(name: str) -> None:
    text = TEXTS[name]
    compiled = dovetail.compile(lambda x: (x * 2, text(x)), backend="aten")
    for rows in (2, 3, 4, 2):
        for value in (1.0, 5.0):
            x = torch.arange(float(rows)) + value
            assert compiled(x)[1] == text(x)
