"""``python -m dovetail.testing.tables PAGE``: run all backends through the suite, and write their tables into a page.

The text between the two marks of the page is replaced.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dovetail.testing import check_backend
from dovetail.testing.probe import probe_backends
from dovetail.testing.report import Report, tables

BEGIN = "<!-- tables: written by `make backend-tables` -->"
END = "<!-- end of tables -->"
#: Each backend with the options that it is run with.
BACKENDS: dict[str, dict[str, str]] = {
    "aten": {},
    "eager": {},
    "inductor": {},
    "check_operators": {"inner": "aten"},
    "float64": {},
    "bisect": {"inner": "aten"},
    "onnxruntime": {},
    "openvino": {},
    "aot_eager": {},
    "aot_eager_default_partitioner": {},
    "aot_eager_decomp_partition": {},
    "aot_ts": {},
    "cudagraphs": {},
    "eager_noexcept": {},
    "eager_debug": {},
    "pre_dispatch_eager": {},
    "ts": {},
    "tvm": {},
    "openxla": {},
}


def replace_tables(page: str, text: str) -> str:
    """``page`` with ``text`` between its marks.

    >>> print(replace_tables(f"a {BEGIN} old {END} z", "new").replace(chr(10), "/"))
    a <!-- tables: written by `make backend-tables` -->/new/<!-- end of tables --> z
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{after}"


def written_tables(names: Sequence[str]) -> str:
    """The tables of these backends; one that cannot be had here is named, with the reason."""
    probes = {probe.name: probe for probe in probe_backends(names)}
    reports: list[Report] = []
    absent: list[str] = []
    for name in names:
        reason = probes[name].reason
        if not probes[name].works and any(
            sign in reason for sign in ("cannot be imported", "ImportError", "no backend")
        ):
            absent.append(f"- `{name}`: {reason[:200]}")
            continue
        reports.append(check_backend(name, options=BACKENDS.get(name, {}), show=False))
        print(reports[-1], flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {device}"
    text = f"With {versions}; passed of all, and how many were refused or wrong. What is refused names its reason.\n"
    text += (
        "\n" if torch.cuda.is_available() else "Without a GPU `cudagraphs` runs its kernels and records nothing.\n\n"
    )
    text += tables(reports)
    if absent:
        text += "\nNot to be had where this page was made:\n\n" + "\n".join(absent) + "\n"
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the page named first, with the backends named after it (all unless given)."""
    path = Path(arguments[0])
    text = written_tables(list(arguments[1:]) or list(BACKENDS))
    path.write_text(replace_tables(path.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
