"""Switches outside of the program: stances, ``disable``, ``reset`` and settings, torch.compile's and our own."""
