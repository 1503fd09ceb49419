"""Places where torch itself is wrong or lacks something, one function each."""
