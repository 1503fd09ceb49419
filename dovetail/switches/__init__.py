"""What people switch from outside of their program: stances, ``disable``, ``reset`` and settings, torch.compile's and our own."""
