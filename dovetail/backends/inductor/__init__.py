"""The ``inductor`` backend: PyTorch's own kernel compiler."""
