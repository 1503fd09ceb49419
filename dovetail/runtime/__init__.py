"""What runs on every call: entries, the autograd function, write-backs, results, the compiled module."""
