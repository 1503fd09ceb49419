"""``torch.distributions``: its code is interpreted, so that its checks of arguments become assertions of the graph.

Where such a check fails, the call runs eagerly, and raises in the user's own line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributions import VonMises, Wishart, constraints, kl_divergence

from dovetail.frontend.interpreter.call_tables import interpret_modules
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, rule
from dovetail.guards import ComputedSource, Identity
from dovetail.rules.refusals import refuse
from dovetail.torch_private.distributions import all_true_or_assert, is_all_true, registered_divergence

interpret_modules("torch.distributions")


@rule(type(constraints.symmetric).check)
def _is_symmetric(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """Torch's own looks at a tensor of truths that its sizes decide."""
    _, value = args
    if not interpreter.truth(value.shape[-2] == value.shape[-1]):
        return interpreter.call(constraints.square.check, (value,), {})
    return interpreter.values.wrap(torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1))


@rule(type(constraints.positive_definite).check)
def _is_positive_definite(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """Torch's own tries to factorise only where all matrices are symmetric."""
    _, value = args
    symmetric = _is_symmetric(interpreter, args, kwargs)
    if not interpreter.truth(value.shape[-2] == value.shape[-1]):
        return symmetric
    factorised = torch.linalg.cholesky_ex(value).info.eq(0)
    return interpreter.values.wrap(torch.where(symmetric.all(), factorised, symmetric))


def _all_pass(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """The branch on a check, which becomes an assertion, is the caller's."""
    return interpreter.call_torch(is_all_true, args[:1], {})


if all_true_or_assert is not None:
    rule(all_true_or_assert)(_all_pass)


@rule(kl_divergence)
def _divergence(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    one, other = args or (kwargs.get("p"), kwargs.get("q"))
    kinds = interpreter.call(type, (one,), {}), interpreter.call(type, (other,), {})
    found = registered_divergence(*kinds)
    sources = tuple(interpreter.values.pin(kind, kind.__qualname__) for kind in kinds)
    source = ComputedSource(
        registered_divergence, sources, f"the divergence of {kinds[0].__name__} and {kinds[1].__name__}"
    )
    interpreter.values.guard(source, Identity(found), f"{source.name} was looked up")
    if found is NotImplemented:
        names = " and ".join(f"{name} type {kind.__name__}" for name, kind in zip("pq", kinds, strict=True))
        raise NotImplementedError(f"No KL(p || q) is implemented for {names}")
    return Instead(found, (one, other), {})


for _function in (VonMises.sample, Wishart.rsample):
    refuse((_function,), f"{_function.__qualname__} draws again until all samples are good")
