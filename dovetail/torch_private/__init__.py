"""The only package that uses private names of torch: one module a subject, one small function or re-export a name."""
