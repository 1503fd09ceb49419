"""A plugin of pytest: tests run with the emulated device as the default one, and Inductor's kernels where Triton is installed."""

from tests.gpu.emulated import device, interpreted

(interpreted if interpreted.IS_INSTALLED else device).load()

import torch  # noqa: E402  (the device must be there before)

torch.set_default_device("cuda")
