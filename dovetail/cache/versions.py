"""What an entry that was made by programs depends on: Dovetail's own files, torch, Python and the system."""

from __future__ import annotations

import functools
import hashlib
import platform
import sysconfig
from pathlib import Path

import torch


@functools.cache
def software() -> tuple[str, ...] | None:
    """A digest of all of Dovetail's files, and the versions of what runs them; None where the files cannot be read.

    Dovetail's version alone would take what an edited file has made for what it makes now.

    >>> software() == software() != ()
    True
    """
    package = Path(__file__).parents[1]
    digest, count = hashlib.sha256(), 0
    try:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
            count += 1
    except OSError:
        return None
    if not count:
        return None
    about = (str(torch.version.git_version), str(sysconfig.get_config_var("SOABI")), platform.platform())
    return (digest.hexdigest(), torch.__version__, *about)
