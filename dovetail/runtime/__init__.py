"""The code that runs on every call: entries, the autograd function, write-backs, results."""
