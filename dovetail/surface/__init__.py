"""``dovetail.compile`` and ``dovetail.list_backends`` as people call them: typed, with the modes of torch.compile."""
