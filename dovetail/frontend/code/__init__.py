"""Code objects and frames: decoding, argument binding, liveness, and suspended frames."""
