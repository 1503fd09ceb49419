"""The ``inductor`` backend: generated kernels of PyTorch's own compiler."""
