"""The only package that uses private names of torch, divided by subject; nothing else in Dovetail names one.

Import a module under its subject: ``from dovetail.torch_private import sizes as private_sizes``. Each module says what it covers
and with which versions of torch it was checked; where versions differ, the difference is handled here and nowhere else.

- for the core: ``tensors``, ``tracing``, ``operators``, ``sizes``, ``autograd``, ``calls``, ``state``, ``guards``, ``compilers``,
  ``packages`` and ``trees``;
- for rules, quirks and wings: ``autograd_nodes``, ``numbers``, ``kernels`` and ``checkpoints``;
- for single wings: ``engine`` (compiled autograd), ``guard_managers`` (fast guards), ``dynamo``, ``inductor``, ``recordings`` and
  ``distributed``.
"""
