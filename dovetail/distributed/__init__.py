"""Training on several processes: passes over joint graphs that exchange gradients and parameters.

>>> from dovetail.distributed import data_parallel
>>> data_parallel(abs)(-1)
Traceback (most recent call last):
dovetail.errors.DistributedError: there is no process group
  what to do: start the program with torchrun, and call torch.distributed.init_process_group("gloo") first
"""

from dovetail.distributed.data_parallel import data_parallel
from dovetail.distributed.exchange import Team
from dovetail.distributed.replicate import replicate

__all__ = ["Team", "data_parallel", "replicate"]
