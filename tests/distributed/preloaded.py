"""What each process of a test of several processes needs: loaded once, in the process that they are forked from."""

import importlib

from dovetail.face.loading import load_rules

for name in ("fsdp", "tensor.parallel", "checkpoint", "pipelining"):
    importlib.import_module(f"torch.distributed.{name}")
importlib.import_module("dovetail.distributed")
load_rules()
