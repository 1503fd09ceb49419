"""Texts that tell an object by its address are the program's own: of this call's object, and of nothing that stands for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail

pytestmark = pytest.mark.usefixtures("quiet")


class Plain:
    def method(self) -> None: ...


class Named(Plain):
    def __str__(self) -> str:
        return "named"


class Shown(Plain):
    def __repr__(self) -> str:
        return "shown"


def helper() -> None: ...


OLD = Plain()
SHOWN_BY_ADDRESS: dict[str, Any] = {
    "old": lambda: (OLD, str(OLD)),
    "new": lambda: (made := Plain(), f"{made}"),
    "in a list": lambda: (made := Plain(), str([1, {"a": made}])),
    "repr of a named one": lambda: (made := Named(), f"{made!r}"),
    "by format": lambda: (made := Plain(), "{:>60}".format(str(made))),  # noqa: UP032
    "by %": lambda: (made := Plain(), "%s" % made),  # noqa: UP031
    "a function": lambda: (helper, f"{helper!r:>60}"),
    "a function by %": lambda: (helper, "%r" % (helper,)),  # noqa: UP031
    "a key": lambda: (helper, str({helper: 1})),
    "a lambda": lambda: (made := lambda: 1, repr(made)),
    "an error": lambda: (helper, str(ValueError(helper))),
}
SHOWN_OTHERWISE: dict[str, Any] = {
    "a name": lambda: f"{helper.__name__} {Plain.method.__qualname__}",
    "a named one": lambda: f"{Named()} {str(Named()):>8}",
    "a shown one": lambda: f"{Shown()} {[Shown()]}",
    "classes": lambda: f"{Plain} {int} {type(OLD)}",
    "an error": lambda: f"{ValueError('a', 1)} {KeyError(2)!r}",
    "others": lambda: f"{torch.float32} {torch.device('cpu')} {None} {1.5:.3f} {slice(1)}",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("name", SHOWN_BY_ADDRESS)
def test_an_address_is_that_of_the_object(name: str, backend: str) -> None:
    compiled = dovetail.compile(lambda x: (x + 1, *SHOWN_BY_ADDRESS[name]()), backend=backend)
    for _ in range(2):
        _, thing, text = compiled(torch.ones(2))
        assert object.__repr__(thing).split()[-1] in text or repr(thing).split()[-1] in text


@pytest.mark.parametrize("name", SHOWN_OTHERWISE)
def test_a_text_without_an_address_is_in_the_graph(name: str) -> None:
    def program(x: torch.Tensor) -> Any:
        return x + 1, SHOWN_OTHERWISE[name]()

    assert dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2))[1] == program(torch.ones(2))[1]
