"""The versions of Python and torch that Dovetail runs on, checked once at import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import linecache
import sys

from dovetail.errors import UnsupportedVersionError

__version__ = "0.2.0"
PYTHON_RANGE = ((3, 11), (3, 16))
TORCH_RANGE = ((2, 11), (2, 16))


def parse(version: str) -> tuple[int, int]:
    """Major and minor number of a version text.

    >>> parse("2.13.0+cpu")
    (2, 13)
    """
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()))


def check_versions(python: tuple[int, int] | None = None, torch_version: str | None = None) -> None:
    """Raise :class:`UnsupportedVersionError` unless both versions are in range; the defaults are those that run."""
    running = python if python is not None else sys.version_info[:2]
    flags = getattr(sys, "abiflags", "")
    if not PYTHON_RANGE[0] <= running < PYTHON_RANGE[1] or "t" in flags:
        raise UnsupportedVersionError(
            f"Dovetail {__version__} does not run on Python {running[0]}.{running[1]}{flags}",
            advice="use Python 3.11 to 3.15, and a build with the global interpreter lock",
        )
    if torch_version is None:
        try:
            torch_version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError as error:
            raise UnsupportedVersionError("torch is not installed", advice="pip install 'torch>=2.11,<2.16'") from error
        found = importlib.util.find_spec("torch")
        lines = linecache.getlines(f"{(found.submodule_search_locations or [''])[0]}/version.py") if found else []
        imported = next((line.split("'")[1] for line in lines if line.startswith("__version__ = '")), torch_version)
        if parse(imported) != parse(torch_version):
            message = f"two installations of torch are mixed: {imported} is imported, {torch_version} is what pip knows"
            raise UnsupportedVersionError(
                message, advice="leave one of them on the path, or uninstall both and install one"
            )
        needed = ("typing_extensions", "sympy", "mpmath", "networkx")
        if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
            raise UnsupportedVersionError(
                f"torch is installed without {', '.join(lacking)}", advice="pip install torch"
            )
    if not TORCH_RANGE[0] <= parse(torch_version) < TORCH_RANGE[1]:
        raise UnsupportedVersionError(
            f"Dovetail {__version__} does not run on torch {torch_version}", advice="pip install 'torch>=2.11,<2.16'"
        )
