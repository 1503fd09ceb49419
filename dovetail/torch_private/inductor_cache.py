"""Inductor's caches on disk: where they are, what their keys depend on, and how to take from them without compiling."""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterator
from typing import Any

from dovetail import cache
from dovetail.errors import BackendError


class NotCachedError(BackendError):
    """A graph, or the code of one, is not in the cache; the text says why, as far as that is known.

    One of a backend's own errors, so that it comes out of a compilation as it is.
    """


def cache_folder() -> str:
    """The folder of Inductor's caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def settings_as_data() -> dict[str, Any]:
    """Inductor's settings that are plain values, by name, as they are after a way through JSON."""
    from torch._inductor import config

    found = {}
    for name, value in config.save_config_portable().items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = json.loads(json.dumps(value))
    return found


@contextlib.contextmanager
def settings_from_data(data: dict[str, Any]) -> Iterator[None]:
    """In the block, Inductor's settings are those of another process, as :func:`settings_as_data` gave them."""
    from torch._inductor import config

    own = settings_as_data()
    with config.patch({name: value for name, value in data.items() if name in own and own[name] != value}):
        yield


_where: contextvars.ContextVar[str] = contextvars.ContextVar("dovetail_where_code_is_looked_for", default="")


@contextlib.contextmanager
def only_from_cache(*, ours: bool = False) -> Iterator[None]:
    """In the block code comes from a cache, and :class:`NotCachedError` is raised for a graph that is not there.

    ``ours``: from Dovetail's cache, where it is on. To look into Inductor's takes seconds where Inductor was not used before.
    """
    token = _where.set("ours" if ours and cache.is_on() else "any")
    try:
        yield
    finally:
        _where.reset(token)


def look_no_further(reason: str) -> None:
    """Raise :class:`NotCachedError` where Dovetail's cache was the only place to look; ``reason``: why nothing was found there."""
    if _where.get() == "ours":
        raise NotCachedError(reason)


@contextlib.contextmanager
def refusing_to_compile() -> Iterator[None]:
    """In the block, Inductor compiles nothing where :func:`only_from_cache` says so."""
    if not _where.get():
        yield
        return
    from torch._inductor import compile_fx

    original = compile_fx.fx_codegen_and_compile

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotCachedError("the compiled graph is not in Inductor's cache")

    compile_fx.fx_codegen_and_compile = refuse  # type: ignore[assignment, unused-ignore]
    try:
        yield
    finally:
        compile_fx.fx_codegen_and_compile = original


def load_compiler() -> None:
    """Import what compiling needs, before the first graph comes."""
    from torch._inductor import compile_fx, lowering  # noqa: F401
