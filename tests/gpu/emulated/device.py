"""Compile and load the emulated device: ``device.cpp``, by the compiler that Inductor uses, against the headers of torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
#: What programs and torch's own Python ask of the device.
PROPERTIES = {
    "name": "emulated",
    "major": 8,
    "minor": 0,
    "total_memory": 2**34,
    "regs_per_multiprocessor": 2**16,
    "shared_memory_per_block_optin": 166_912,
    "L2_cache_size": 40 * 2**20,
    "gcnArchName": "",
    "multi_processor_count": 108,
    "warp_size": 32,
    "max_threads_per_multi_processor": 2048,
}


def build() -> Path:
    """The shared library, compiled where it has not been for this torch and this source (about 10 seconds)."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch_folder = Path(found.origin).parent
    version = (torch_folder / "version.py").read_bytes()
    name = hashlib.sha256(SOURCE.read_bytes() + version + str(torch_folder).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"dovetail-emulated-device-{os.getuid()}" / f"{name}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        headers = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
        command = [
            os.environ.get("CXX", "g++"),
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            str(SOURCE),
            "-o",
            str(partial),
        ]
        subprocess.run([*command, *headers, *libraries], check=True, capture_output=True, text=True)
        partial.replace(library)
    return library


def load() -> None:
    """Make ``cuda:0`` a device of this process. torch must not be imported yet: it looks for its devices once."""
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    import torch
    import torch._dynamo.device_interface  # before the names below exist: it takes all or none of them

    bindings: Any = torch._C
    for name, function in {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda index: None,
        "_cuda_synchronize": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }.items():
        setattr(bindings, name, function)
    device: Any = torch.cuda
    device._initialized = True
    device._exchange_device = device._maybe_exchange_device = lambda index: 0
    device.is_available = lambda: True
    device.device_count = device.random.device_count = lambda: 1
    device.default_generators = (torch.Generator("cuda"),)
    device.get_device_properties = lambda index=None: SimpleNamespace(**PROPERTIES)
    device.get_device_capability = lambda index=None: (PROPERTIES["major"], PROPERTIES["minor"])
    device.get_device_name = lambda index=None: PROPERTIES["name"]

    def clone(storage: Any) -> Any:
        """As the storage of a build that has the device."""
        values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return values.clone().untyped_storage()

    plain = torch.UntypedStorage.clone
    torch.UntypedStorage.clone = lambda self: clone(self) if self.is_cuda else plain(self)  # type: ignore[method-assign]
