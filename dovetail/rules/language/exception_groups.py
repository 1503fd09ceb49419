"""``except*``."""

from __future__ import annotations

from dovetail.frontend.code.frame import Frame, Instruction
from dovetail.frontend.instructions.exceptions import check_classes
from dovetail.frontend.instructions.functions import TWO
from dovetail.frontend.instructions.shared import handles, pop_many
from dovetail.frontend.protocol import FrameRunner


@handles("CHECK_EG_MATCH")
def check_eg_match(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    error, kinds = pop_many(frame, 2)
    for kind in check_classes(kinds):
        if issubclass(kind, BaseExceptionGroup):
            raise TypeError("catching ExceptionGroup with except* is not allowed. Use except instead.")
    match: BaseException | None = None
    rest: BaseException | None = error
    if issubclass(type(error), kinds):
        match, rest = error, None
        if not isinstance(error, BaseExceptionGroup):
            match = BaseExceptionGroup("", [error])
    elif isinstance(error, BaseExceptionGroup):
        match, rest = interpreter.call(interpreter.load_attribute(error, "split"), (kinds,), {})
    if match is not None and frame.current_exceptions:
        frame.current_exceptions[-1] = match
    frame.stack += [rest, match]


def _is_part_of(error: BaseException, original: BaseException) -> bool:
    """Whether an exception is a part of the original one that was only raised again."""
    return (
        getattr(error, "__notes__", None) is getattr(original, "__notes__", None)
        and error.__traceback__ is original.__traceback__
        and error.__cause__ is original.__cause__
        and error.__context__ is original.__context__
    )


def _leaves(error: BaseException) -> set[int]:
    if isinstance(error, BaseExceptionGroup):
        return set().union(*map(_leaves, error.exceptions))
    return {id(error)}


def exception_to_raise(original: BaseException, errors: list[BaseException | None]) -> BaseException | None:
    """The exception that leaves a ``try`` with ``except*`` clauses: theirs, and the part of the original group that none took."""
    if not isinstance(original, BaseExceptionGroup):
        return errors[0] if errors else None
    raised: list[BaseException] = []
    kept: set[int] = set()
    for error in errors:
        if error is None:
            continue
        if _is_part_of(error, original):
            kept |= _leaves(error)
        else:
            raised.append(error)
    rest = original.subgroup(lambda error: id(error) in kept) if kept else None
    if rest is not None:
        raised.append(rest)
    if len(raised) > 1:
        return BaseExceptionGroup("", raised)
    return raised[0] if raised else None


@handles("PREP_RERAISE_STAR")
def prep_reraise_star(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    original, errors = pop_many(frame, 2)
    frame.stack.append(exception_to_raise(original, errors))


TWO[1] = exception_to_raise
