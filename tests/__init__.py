import os

# A test of kernels runs them from its first call on; tests of tiers ask for them.
os.environ.setdefault("DOVETAIL_TIERS", "wait")
