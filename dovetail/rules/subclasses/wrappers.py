"""Takes tensor subclasses apart at the edge of a graph (``__tensor_flatten__``), and builds them again.

Inside a graph there are plain tensors only. Two autograd functions are the edge: :class:`InnerTensor` takes one inner tensor
out of a wrapper, :class:`Wrapped` makes a wrapper of inner tensors. The form of a gradient is read from the gradient itself when it
comes, not guessed at capture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from dovetail.errors import CaptureError, HigherOrderGradientError, InputError
from dovetail.guards import Predicate, Step
from dovetail.runtime.function import TANGENTS
from dovetail.runtime.origins import check_unchanged, note_origin
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.settings import Retry
from dovetail.trace.trace import open_trace

#: The strategy to capture operators whose gradient may have other parts than what it is the gradient of: no graph can return it.
OTHER_FORMS: Final = "gradients in other parts than the parameter's"
TANGENTS.update(dict.fromkeys(private_distributed.pending_kinds(), private_distributed.awaited))


def parts_of(wrapper: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any], Any]:
    """The inner tensors of a wrapper, its other inner objects, and the context that ``__tensor_unflatten__`` needs.

    A pending exchange is awaited, as any operator that reads its result in eager does.
    """
    names, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    if private_distributed.is_pending(wrapper):
        return dict.fromkeys(names, private_distributed.awaited(wrapper)), {}, context
    values = {name: private_distributed.awaited(getattr(wrapper, name)) for name in names}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in values.items() if name not in tensors}, context


def _form_of(context: Any) -> Any:
    """The part of a context (``__tensor_flatten__``) that a tensor and its gradient share: no record of sizes, as a DTensor has."""
    if type(context) is tuple and len(context) == 4:
        return context[0], context[2]
    spec: Any = context[0] if type(context) is tuple and len(context) == 2 else None
    return (spec.mesh, spec.placements) if hasattr(spec, "placements") else context  # torch 2.11


@dataclass(frozen=True, eq=False)
class WrapperMaker:
    """Builds wrappers like the one it was made for: same class, size and stride, other inner tensors."""

    kind: Any
    names: tuple[str, ...]
    others: dict[str, Any]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, wrapper: torch.Tensor) -> WrapperMaker:
        """The maker of wrappers like this one."""
        tensors, others, context = parts_of(wrapper)
        return cls(type(wrapper), tuple(tensors), others, context, tuple(wrapper.shape), wrapper.stride())

    def is_like(self, wrapper: torch.Tensor) -> bool:
        """Whether a wrapper could have been built by this maker."""
        if type(wrapper) is not self.kind:
            return False
        tensors, others, context = parts_of(wrapper)
        return (
            tuple(tensors) == self.names
            and (tuple(wrapper.shape), wrapper.stride()) == (self.size, self.stride)
            and bool(context == self.context)
            and others.keys() == self.others.keys()
            and all(others[name] is item or bool(others[name] == item) for name, item in self.others.items())
        )

    def build(self, inner: dict[str, torch.Tensor]) -> torch.Tensor:
        """A wrapper that requires no gradient."""
        made: torch.Tensor = self.kind.__tensor_unflatten__(
            {**inner, **self.others}, self.context, self.size, self.stride
        )
        return made

    def __call__(self, *inner: torch.Tensor, form: GradientForm | None = None) -> torch.Tensor:
        """A wrapper; it requires a gradient if an inner tensor does, and ``form`` then learns the form of the gradient."""
        if any(item.requires_grad for item in inner):
            made: torch.Tensor = Wrapped.apply(self, form, *inner)  # type: ignore[no-untyped-call]
            if form is None:
                node: Any = made.grad_fn
                node.result = made.detach(), made._version, ()
            return made
        return self.build(dict(zip(self.names, inner, strict=True)))

    def take_apart(self, gradient: Any) -> list[torch.Tensor]:
        """The inner tensors of a gradient of such a wrapper, brought into its form; raises :class:`InputError`."""
        if not self._has_same_form(gradient) and hasattr(gradient, "__coerce_same_metadata_as_tangent__"):
            other = () if type(gradient) is self.kind else (self.kind,)
            gradient = gradient.__coerce_same_metadata_as_tangent__(self.context, *other)
        if not self._has_same_form(gradient):
            raise InputError(
                f"the gradient of a {self.kind.__name__} is a {type(gradient).__name__} of another form",
                advice=f"give a {self.kind.__name__} like the tensor itself to backward()",
            )
        return list(parts_of(gradient)[0].values())

    def _has_same_form(self, gradient: Any) -> bool:
        if type(gradient) is not self.kind:
            return False
        tensors, _, context = parts_of(gradient)
        if tuple(tensors) != self.names:
            return False
        return bool(_form_of(context) == _form_of(self.context))

    def refuse_higher_order(self) -> None:
        """Raise if the running backward is to be differentiated."""
        if torch.is_grad_enabled():
            raise HigherOrderGradientError(
                "a second derivative through a compiled function is asked for (create_graph=True), "
                f"with a {self.kind.__name__}",
                advice="take both derivatives inside the compiled function, or run this one eagerly",
            )


@dataclass
class GradientForm:
    """The form of a wrapper's gradient, found while capturing: DTensor's may be partial sums where the wrapper is whole.

    While a ``backward()`` inside of the program runs, the gradients themselves come into ``caught``, and go no further.
    """

    maker: WrapperMaker | None = None
    caught: list[torch.Tensor] | None = None


class InnerTensor(torch.autograd.Function):
    """One inner tensor of a wrapper."""

    @staticmethod
    def forward(ctx: Any, wrapper: torch.Tensor, name: str, form: GradientForm) -> torch.Tensor:
        """The inner tensor, in the same memory."""
        ctx.set_materialize_grads(False)
        ctx.maker, ctx.part, ctx.form = WrapperMaker.of(wrapper), name, form
        ctx.is_pending = private_distributed.is_pending(wrapper)
        tensors = parts_of(wrapper)[0]
        ctx.zeros = {other: (item.shape, item.dtype, item.device) for other, item in tensors.items() if other != name}
        ctx.is_dense = tensors[name].is_contiguous()
        return detached(tensors[name])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """A wrapper that holds the gradient, and zeros elsewhere."""
        if gradient is None:
            return None, None, None
        ctx.maker.refuse_higher_order()
        if ctx.is_pending:
            return gradient, None, None
        inner = {
            name: torch.zeros(size, dtype=dtype, device=device) for name, (size, dtype, device) in ctx.zeros.items()
        }
        # One number expanded, say: classes may ask that all inner tensors lie alike.
        inner[ctx.part] = gradient.contiguous() if ctx.is_dense else gradient
        maker = ctx.form.maker or ctx.maker
        return maker.build({name: inner[name] for name in maker.names}), None, None


class Wrapped(torch.autograd.Function):
    """A wrapper made of inner tensors."""

    @staticmethod
    def forward(ctx: Any, maker: WrapperMaker, form: GradientForm | None, *inner: torch.Tensor) -> torch.Tensor:
        """The wrapper."""
        ctx.set_materialize_grads(False)
        ctx.maker, ctx.form, ctx.sizes = maker, form, [item.shape for item in inner]
        return maker.build({name: detached(item) for name, item in zip(maker.names, inner, strict=True)})

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        """The inner gradients."""
        if gradient is None:
            return None, None, *[None] * len(ctx.maker.names)
        ctx.maker.refuse_higher_order()
        if ctx.form is not None and ctx.form.caught is not None:
            ctx.form.caught.append(gradient)
            return None, None, *[None] * len(ctx.maker.names)
        if ctx.form is None:
            check_unchanged([ctx.result])
            return None, None, *ctx.maker.take_apart(gradient)
        return None, None, *_parts_while_capturing(ctx, gradient)


def _parts_while_capturing(ctx: Any, gradient: torch.Tensor) -> list[torch.Tensor]:
    """The inner tensors of the gradient of an input; raises :class:`CaptureError` where no graph can return them."""
    advice = "leave what computes with it to eager, and compile the modules around it"
    if type(gradient) is not ctx.maker.kind:
        try:
            return ctx.maker.take_apart(gradient)  # type: ignore[no-any-return]
        except InputError as error:
            raise CaptureError(error.what, advice=advice) from None
    ctx.form.maker, parts = WrapperMaker.of(gradient), list(parts_of(gradient)[0].values())
    if [part.shape for part in parts] != ctx.sizes:
        trace = open_trace()
        reason = f"the gradient of a {ctx.maker.kind.__name__} is one whose parts have other sizes than its own"
        if trace is not None and trace.settings.allows(OTHER_FORMS):
            raise Retry(reason, without=OTHER_FORMS)
        raise CaptureError(f"{reason}: {ctx.form.maker.context}", advice=advice)
    return parts


def inner_tensor(wrapper: torch.Tensor, name: str, form: GradientForm | None = None) -> torch.Tensor:
    """One inner tensor, through which a gradient finds its way back into the wrapper."""
    if wrapper.requires_grad:
        with torch.enable_grad():
            found: torch.Tensor = InnerTensor.apply(wrapper, name, form or GradientForm())  # type: ignore[no-untyped-call]
    else:
        found = detached(parts_of(wrapper)[0][name])
    note_origin(found, wrapper)
    return found


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its autograd graph. ``detach()`` of a wrapper is the class's own, which may forget attributes of it."""
    if not private_tensors.is_wrapper(tensor):
        return tensor.detach()
    return WrapperMaker.of(tensor).build({name: detached(item) for name, item in parts_of(tensor)[0].items()})


def requires_inner_gradient(wrapper: torch.Tensor, name: str) -> bool:
    """Whether an inner tensor requires a gradient by itself, so that it is another leaf than the wrapper."""
    inner = getattr(wrapper, name, None)
    return isinstance(inner, torch.Tensor) and inner.requires_grad


@dataclass(frozen=True)
class InnerSource(Step):
    """An inner tensor of a tensor subclass."""

    makes_new: ClassVar[bool] = True
    attribute: str
    form: GradientForm = field(compare=False)

    @property
    def name(self) -> str:
        """The attribute of the wrapper, as a user writes it."""
        return f"{self.base.name}.{self.attribute}"

    def read(self, value: Any) -> Any:
        """The inner tensor of a wrapper."""
        return inner_tensor(value, self.attribute, self.form)


@dataclass(frozen=True, eq=False)
class WrapperMatch(Predicate):
    """A tensor subclass has the same class and form, and requires a gradient or not as before."""

    maker: WrapperMaker
    requires_grad: bool

    def holds(self, value: Any) -> bool:
        """Whether the form of a tensor is the same."""
        return self.maker.is_like(value) and value.requires_grad is self.requires_grad

    def describe(self, name: str) -> str:
        """The question as a statement."""
        return f"{name} is a {self.maker.kind.__name__} of the same form"

    def failure(self, name: str, value: Any) -> str:
        """A sentence on a tensor of another form."""
        return f"the form of the {self.maker.kind.__name__} `{name}` changed"
