"""``dovetail doctor``: versions, compiler, GPU, and which backends work here; and ``dovetail check-backend``.

Everything that may hang or crash is run in a process of its own, with a time limit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dovetail
from dovetail.backends import default_backend
from dovetail.testing import check_backend
from dovetail.testing.cases import GROUPS
from dovetail.testing.probe import PROBE_SECONDS, Probe, probe_backends
from dovetail.torch_private import compilers as private_compilers

_COMPILER_SECONDS = 30.0
_PACKAGES = ("torch", "triton", "numpy", "networkx", "safetensors", "onnxruntime", "openvino")
#: Torch's backends that find its own mistakes, or need to be told more than a name.
_NOT_PROBED = ("_TESTING_ONLY", "minifier", "crossref", "with_mode", "invoke_subgraph", "openxla_eval")
_PROGRAM = (
    "#include <cmath>\n#include <vector>\nint main() { std::vector<float> x(3, 1.0f); return std::cos(x[0]) > 2; }\n"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report: a subject, what was found, whether that is as it should be, and what to do if not."""

    subject: str
    found: str
    good: bool = True
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.subject:<14} {self.found}"
        return text + (f"\n{'':<14} what to do: {self.advice}" if self.advice else "")


def add_parsers(commands: Any) -> None:
    """Add ``doctor`` and ``check-backend`` to the command line."""
    doctor = commands.add_parser("doctor", help="versions, compiler, GPU, and which backends work on this machine")
    doctor.add_argument("--seconds", type=_positive, default=PROBE_SECONDS, help="time limit for each backend")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.add_argument(
        "--backends",
        type=_names,
        default=None,
        help="only these, separated by commas (all that can be had unless given)",
    )
    doctor.set_defaults(run=_doctor)
    check = commands.add_parser("check-backend", help="run a backend through the conformance suite")
    check.add_argument("names", nargs="+", metavar="NAME", help="a backend's name")
    check.add_argument("--groups", type=_names, default=None, help=f"some of: {', '.join(GROUPS)}")
    check.add_argument("--device", default="cpu", help="where the cases' tensors are, such as cuda")
    check.add_argument("--markdown", action="store_true", help="print tables for a page")
    check.set_defaults(run=_check)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _check(options: argparse.Namespace) -> int:
    passed = True
    for name in options.names:
        report = check_backend(name, groups=options.groups, device=options.device, show=False)
        print(report.markdown() if options.markdown else report, flush=True)
        passed = passed and report.passed
    return 0 if passed else 1


def _doctor(options: argparse.Namespace) -> int:
    findings: list[Finding] = []
    probes: list[Probe] = []

    def show(item: Any) -> None:
        if not options.json:
            print(item, flush=True)

    for finding in machine_findings():
        findings.append(finding)
        show(finding)
    names = options.backends if options.backends is not None else names_to_probe()
    show("\nbackends (each takes a few small training steps in a process of its own)")
    for probe in probe_backends(names, options.seconds):
        probes.append(probe)
        show(_backend_line(probe))
    chosen = findings_about_default(probes)
    findings.append(chosen)
    show(f"\n{chosen}")
    if options.json:
        print(json.dumps({"findings": [vars(item) for item in findings], "backends": [vars(item) for item in probes]}))
    return 0 if chosen.good else 1


def _backend_line(probe: Probe) -> str:
    mark = "works" if probe.works else "does not work"
    text = f"  {probe.name:<29} {mark:<14}"
    if probe.works:
        return f"{text} {probe.seconds:.1f} s{f', but {probe.reason}' if probe.reason else ''}"
    reason = probe.reason if len(probe.reason) <= 300 else probe.reason[:297] + "..."
    return f"{text} {reason}"


def names_to_probe() -> list[str]:
    """The backends worth trying, Dovetail's own and registered ones first."""
    own = dovetail.list_backends(torch_backends=False)
    others = [name for name in dovetail.list_backends() if name not in own]
    return [*own, *(name for name in others if not any(part in name for part in _NOT_PROBED))]


def machine_findings() -> Iterator[Finding]:
    """Versions, compiler, GPU and caches, as they are found."""
    yield Finding("Dovetail", f"{dovetail.__version__} at {Path(dovetail.__file__).parent}")
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding(
        "machine", f"{platform.platform()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads in torch"
    )
    yield Finding("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    yield compiler_finding()
    yield gpu_finding()
    yield _temporary_finding()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A package can be importable without having been installed.
        return "(no version)" if importlib.util.find_spec(name) else "-"


def compiler_finding() -> Finding:
    """Whether there is a C++ compiler, and whether it compiles a small program in time."""
    advice = 'install g++ or clang++, or set CXX to one; until then backend=None means "aten", which is slower'
    compiler = private_compilers.cpp_compiler()
    if compiler is None:
        return Finding("C++ compiler", "none was found", False, advice)
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        source = Path(folder, "try.cpp")
        source.write_text(_PROGRAM, encoding="utf-8")
        try:
            version = _output_of([compiler, "--version"])
            _output_of([compiler, "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(source.with_suffix(".so"))])
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            reason = (said if isinstance(said, str) else said.decode("utf-8", "replace")).strip().splitlines()
            return Finding(
                "C++ compiler", f"{compiler} does not work: {reason[-1] if reason else error}", False, advice
            )
    return Finding("C++ compiler", f"{compiler} ({version.splitlines()[0] if version else 'says nothing'})")


def _output_of(command: Sequence[str]) -> str:
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMPILER_SECONDS, check=True, stdin=subprocess.DEVNULL
    )
    return ran.stdout


def gpu_finding() -> Finding:
    """The GPUs that torch sees, and whether Triton can compile for them."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return Finding("GPU", "none: this torch was built for the CPU only")
        return Finding(
            "GPU",
            f"none that torch {torch.__version__} (CUDA {torch.version.cuda}) can use",
            advice="if the machine has one: check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES",
        )
    names = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        names.append(f"{torch.cuda.get_device_name(index)} ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)")
    text = f"{'; '.join(names)}; CUDA {torch.version.cuda}"
    if private_compilers.has_triton():
        return Finding("GPU", f"{text}; Triton works")
    return Finding(
        "GPU", f"{text}; no Triton", False, "install the triton that belongs to this torch: pip install triton"
    )


def _temporary_finding() -> Finding:
    folder = tempfile.gettempdir()
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free = _free_bytes(folder)
    except OSError as error:
        return Finding(
            "temporary", f"{folder} cannot be written: {error}", False, "set TMPDIR to a folder that can be written"
        )
    low = free < 2**29
    advice = "make room, or set TMPDIR: compiled code is kept there" if low else ""
    return Finding("temporary", f"{folder}, {free / 2**30:.1f} GiB free", not low, advice)


def _free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def findings_about_default(probes: Sequence[Probe]) -> Finding:
    """Which backend is used when none is named, and whether it works."""
    name = default_backend().name
    probe = next((item for item in probes if item.name == name), None)
    if probe is None:
        return Finding("by default", f"{name} (not tried)")
    if probe.works:
        return Finding("by default", f"{name}, which works")
    return Finding(
        "by default", f"{name}, which does not work here", False, 'say backend="aten" until the cause above is gone'
    )
