"""Gradients inside of the program: ``.grad``, ``backward()``, ``requires_grad``."""
