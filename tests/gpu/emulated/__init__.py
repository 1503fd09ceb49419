"""A CUDA device without a GPU: tensors that say ``cuda:0``, in the CPU's memory, computed by the CPU's kernels.

It shows what is the same on every device that is not the CPU: devices of values and of constants, backwards that run in the
engine's thread of the device, random state of a device of its own, streams that are asked for, capturable optimizers, rules of
autocast. Where the package ``triton`` is installed, Inductor generates its kernels for it, and Triton's interpreter runs them
(:mod:`tests.gpu.emulated.interpreted`). It does not show what a GPU's own kernels compute, how fast they are, and CUDA graphs.

``python -m pytest -p tests.gpu.emulated.everywhere tests/aot`` runs tests with it as the default device. It must be loaded
before torch: :func:`load` in a process of its own.
"""
