"""Tensor subclasses that wrap other tensors."""
