"""``dovetail doctor``: versions, compiler, GPU, and which backends work here.

Everything that may hang or crash runs in a process of its own, with a time limit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import dovetail
from dovetail.backends import default_backend
from dovetail.backends.cudagraphs.cuda import why_no_gpu
from dovetail.cli.check_backend import names
from dovetail.testing.suite import PROBE_SECONDS, Probe, probe_backends
from dovetail.torch_private import compilers as private_compilers

_COMPILER_SECONDS = 30.0
_PACKAGES = ("torch", "triton", "numpy", "safetensors", "onnxruntime", "openvino")
#: Parts of the names of torch's backends that look for its own faults, or need more than a name.
_NOT_PROBED = ("_TESTING_ONLY", "minifier", "crossref", "with_mode", "invoke_subgraph", "openxla_eval")
_PROGRAM = (
    "#include <cmath>\n#include <vector>\nint main() { std::vector<float> x(3, 1.0f); return std::cos(x[0]) > 2; }\n"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report: a subject, its state, whether that is ``good``, and what to do if not."""

    subject: str
    found: str
    good: bool = True
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.subject:<14} {self.found}"
        return text + (f"\n{'':<14} what to do: {self.advice}" if self.advice else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--seconds", type=_positive, default=PROBE_SECONDS, help="time limit for each backend")
    parser.add_argument("--backends", type=names, default=None, help="only these, separated by commas")
    parser.add_argument("--all", action="store_true", help="try all backends, which takes minutes")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value


def run(options: argparse.Namespace) -> int:
    """Print all findings as they come; 0 if the default backend works."""
    for finding in machine_findings():
        print(finding, flush=True)
    print("\nbackends (each takes a few small training steps in a process of its own)", flush=True)
    chosen = options.backends or (names_to_probe() if options.all else sorted({default_backend().name, "aten"}))
    probes: list[Probe] = []
    for probe in probe_backends(chosen, options.seconds):
        probes.append(probe)
        print(probe, flush=True)
    default = default_finding(probes)
    print(f"\n{default}")
    if options.backends is None and not options.all:
        print("               `dovetail doctor --all` tries every backend")
    return 0 if default.good else 1


def names_to_probe() -> list[str]:
    """Return the backends worth trying, Dovetail's own and registered ones first."""
    own = dovetail.list_backends(torch_backends=False)
    others = [name for name in dovetail.list_backends() if name not in own]
    return [*own, *(name for name in others if not any(part in name for part in _NOT_PROBED))]


def machine_findings() -> Iterator[Finding]:
    """Yield versions, compiler, GPU and temporary folder."""
    yield Finding("Dovetail", f"{dovetail.__version__} at {Path(dovetail.__file__).parent}")
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    threads = f"{os.cpu_count()} processors, {torch.get_num_threads()} threads in torch"
    yield Finding("machine", f"{platform.platform()}, {threads}")
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
    """Find the C++ compiler, and have it compile a small program."""
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
            text = said if isinstance(said, str) else said.decode("utf-8", "replace")
            reason = (text.strip().splitlines() or [str(error)])[-1]
            return Finding("C++ compiler", f"{compiler} does not work: {reason}", False, advice)
    return Finding("C++ compiler", f"{compiler} ({version.splitlines()[0] if version else 'says nothing'})")


def _output_of(command: Sequence[str]) -> str:
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMPILER_SECONDS, check=True, stdin=subprocess.DEVNULL
    )
    return ran.stdout


def gpu_finding() -> Finding:
    """Find the GPUs that torch sees, and whether Triton can compile for them."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return Finding("GPU", "none: this torch was built for the CPU only")
        return Finding(
            "GPU",
            f"none that torch {torch.__version__} (CUDA {torch.version.cuda}) can use: {why_no_gpu()}",
            advice="if the machine has one: check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES",
        )
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        devices.append(f"{torch.cuda.get_device_name(index)} ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)")
    text = f"{'; '.join(devices)}; CUDA {torch.version.cuda}"
    if private_compilers.has_triton():
        return Finding("GPU", f"{text}; Triton works")
    advice = "install the triton that belongs to this torch: pip install triton"
    return Finding("GPU", f"{text}; no Triton", False, advice)


def _temporary_finding() -> Finding:
    folder = tempfile.gettempdir()
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = "set TMPDIR to a folder that can be written"
        return Finding("temporary", f"{folder} cannot be written: {error}", False, advice)
    low = free < 2**29
    advice = "make room, or set TMPDIR: compiled code is kept there" if low else ""
    return Finding("temporary", f"{folder}, {free / 2**30:.1f} GiB free", not low, advice)


def default_finding(probes: Sequence[Probe]) -> Finding:
    """Find the backend that runs when none is named, and whether it works."""
    name = default_backend().name
    probe = next((item for item in probes if item.name == name), None)
    if probe is None:
        return Finding("by default", f"{name} (not tried)")
    if probe.works:
        return Finding("by default", f"{name}, which works")
    advice = 'say backend="aten" until the cause above is gone'
    if probe.reason.startswith("timed out"):
        advice += "; on a slow or busy machine, dovetail doctor --seconds=600 waits longer"
    return Finding("by default", f"{name}, which does not work here", False, advice)
