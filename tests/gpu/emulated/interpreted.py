"""Inductor's Triton kernels on the emulated device: generated as for a GPU, and run by Triton's own interpreter on the CPU.

``python -m tests.gpu.emulated.programs inductor`` uses it where the package ``triton`` is installed. The interpreter computes with
NumPy in the memory of the CPU, where the emulated device's tensors are. It shows what the code computes, not that a GPU's compiler
takes it, nor how fast it is.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from tests.gpu.emulated import device as emulated
from tests.gpu.emulated.device import PROPERTIES

IS_INSTALLED = importlib.util.find_spec("triton") is not None


class _Driver:
    """What Inductor asks of a GPU's driver before it generates code for it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * PROPERTIES["major"] + PROPERTIES["minor"], PROPERTIES["warp_size"])

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class _Libdevice:
    """The functions that a GPU has in a library of its own, by torch: the interpreter has none of them, and gives None for each."""

    def __getattr__(self, name: str) -> Any:
        import torch
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        if hasattr(tl.math, name):
            return getattr(tl.math, name)
        function = getattr(torch, {"nearbyint": "round"}.get(name, name.removesuffix("_rn")))

        def run(*args: Any) -> Any:
            result = function(*[torch.from_numpy(arg.handle.data) for arg in args]).numpy()
            kind = tl.int1 if result.dtype == bool else args[0].type.scalar
            return tl.core.tensor(TensorHandle(result, kind), tl.block_type(kind, list(result.shape)))

        return run


def load() -> None:
    """Load the emulated device, and let Inductor take it for a GPU. torch must not be imported yet."""
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported, which torch does
    emulated.load()
    import torch
    import torch._inductor.runtime.triton_helpers as helpers
    from torch._dynamo import device_interface
    from triton.runtime import interpreter
    from triton.runtime.driver import driver

    run = interpreter.GridExecutor.__call__

    def with_numbers(self: Any, *args: Any, **kwargs: Any) -> None:
        # A launcher reads a number from the CPU's tensor of a step; the interpreter takes each tensor for a pointer.
        run(
            self,
            *[arg.item() if isinstance(arg, torch.Tensor) and not (arg.is_cuda or arg.dim()) else arg for arg in args],
            **kwargs,
        )

    interpreter.GridExecutor.__call__ = with_numbers
    driver.set_active(_Driver())
    helpers.set_driver_to_gpu = lambda: None
    helpers.libdevice = _Libdevice()
    device: Any = device_interface.CudaInterface
    for interface in (device, device.Worker):
        interface.get_device_properties = staticmethod(torch.cuda.get_device_properties)
    device.get_compute_capability = staticmethod(lambda index=None: 10 * PROPERTIES["major"] + PROPERTIES["minor"])
    device.get_raw_stream = staticmethod(lambda index: 0)
    torch._C._cuda_getCurrentRawStream = lambda index: 0

    def empty(sizes: Any, strides: Any, dtype: Any) -> Any:
        return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")

    torch._C._dynamo.guards._empty_strided_cuda = empty
