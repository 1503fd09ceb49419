"""Names of torch's own packages. This module does not import torch."""

#: Packages whose frames a traced call has, and eager does not have, or has in another shape.
TRACING_PACKAGES = (
    *("torch._ops", "torch._subclasses", "torch._library", "torch._prims_common", "torch._refs", "torch._decomp"),
    *("torch._meta_registrations", "torch._functorch", "torch.fx.experimental", "torch.overrides"),
    "torch.utils._python_dispatch",
)
