"""A plugin of pytest: tests run with the emulated device as the default one."""

from tests.gpu.emulated.device import load

load()

import torch  # noqa: E402  (the device must be there before)

torch.set_default_device("cuda")
