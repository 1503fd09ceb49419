"""Backends of other libraries, and Dovetail as a backend of torch.compile."""
