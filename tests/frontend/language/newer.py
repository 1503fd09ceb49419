"""The syntax of newer versions of Python."""

from __future__ import annotations

from tests.frontend.language.cases import source_case

source_case(
    (3, 12),
    """
def type_parameters(x):
    class Box[T]:
        def __init__(self, item: T):
            self.item = item
        def map[U](self, function) -> "Box[U]":
            return Box(function(self.item))
    def first[T: (int, str), *Ts, **P](item: T) -> T:
        return item
    def bounded[T: int](item: T) -> T:
        return item
    return (Box(x).map(lambda v: v * 2).item, first(x), [p.__name__ for p in first.__type_params__],
            bounded.__type_params__[0].__bound__, first.__type_params__[0].__constraints__, Box.__type_params__[0].__name__,
            Box[int].__args__, Box.__orig_bases__[0].__args__[0].__name__)
""",
    breaks="is not interpreted",
)
source_case(
    (3, 12),
    """
def type_statement(x):
    type Number = int | float
    type Pair[T] = tuple[T, T]
    return x * 2, Number.__name__, str(Number.__value__), Pair.__type_params__[0].__name__, isinstance(3, Number.__value__)
""",
    breaks="is not interpreted",
)
source_case(
    (3, 12),
    """
def nested_f_strings(x):
    name = "a"
    return x, f"{f"{name + "b"}"} {name!r:>{len("four")}}"
""",
)
source_case(
    (3, 12),
    """
def class_scope_with_type_parameters(x):
    outer = 3
    class Box[T]:
        outer = 4
        seen = outer
        def method[U](self, value: U = outer) -> U:
            return value
        values = [outer for outer in range(2)]
    return x, Box.seen, Box().method(), Box.values
""",
    breaks="is not interpreted",
)
source_case(
    (3, 13),
    """
def type_parameter_defaults(x):
    class Box[T: int = int, **P = [int]]:
        pass
    type Rest[*Ts = *tuple[int, str]] = tuple[*Ts]
    return x * 2, [str(p.__default__) for p in (*Box.__type_params__, *Rest.__type_params__)], Box.__firstlineno__
""",
    breaks="is not interpreted",
)
source_case(
    (3, 14),
    """
def template_of_numbers(x):
    width, name = 6, "n"
    t = t"a {name!r:>{width}} {width} {3 + 4=}"
    parts = [(p.value, p.expression, p.conversion, p.format_spec) if not isinstance(p, str) else p for p in t]
    return x * len(t.interpolations), t.strings, t.values, parts, t"".strings
""",
    breaks="a template string",
)
source_case(
    (3, 14),
    """
def deferred_annotations(x):
    scale = 3
    def later(a: NotThere, b: int = scale) -> "text":
        return a * b
    try:
        later.__annotations__
    except NameError as error:
        seen = error.name
    NotThere = int
    return later(x), seen
""",
)
source_case(
    (3, 14),
    """
def inlined_all_any_tuple(x):
    numbers = [1, 2, 3]
    kept = tuple(n * 2 for n in numbers if n > 1)
    return x * sum(kept), all(n > 0 for n in numbers), any(n > 2 for n in numbers), all(n < 3 for n in numbers), kept
""",
)
source_case(
    (3, 14),
    """
def small_and_common_constants(x):
    try:
        assert not x.shape if hasattr(x, "shape") else False, "text"
    except AssertionError as error:
        text = str(error)
    return x * 255 + 256 - 1, text, -1, None, True
""",
)
source_case(
    (3, 14),
    """
def with_statements(x):
    log = []
    class Manager:
        def __init__(self, swallow):
            self.swallow = swallow
        def __enter__(self):
            log.append("in")
            return 2
        def __exit__(self, kind, error, traceback):
            log.append((kind and kind.__name__, str(error)))
            return self.swallow
    class OnlyEnter:
        def __enter__(self): return 1
    class OnlyExit:
        def __exit__(self, *args): return 1
    with Manager(True) as a, Manager(False) as b:
        x = x * a * b
        raise ValueError("v")
    for kind in (OnlyEnter, OnlyExit):
        try:
            with kind():
                x = x * 0
        except TypeError as error:
            log.append(str(error))
    return x, log
""",
    breaks="a class is defined",
)
source_case(
    (3, 14),
    """
def except_without_brackets(x):
    found = []
    for kind in (ValueError, KeyError):
        try:
            raise kind("k")
        except ValueError, KeyError:
            found.append(kind.__name__)
    return x, found
""",
)
source_case(
    (3, 15),
    """
def generators_that_begin_with_their_iterator(x):
    def inner(v):
        try:
            yield v
        except ValueError:
            return v * 5
    def outer(v):
        yield [10, v, (yield from inner(v))]
    made = (n * 2 for n in [1, 2, 3])
    first = next(made)
    generator = outer(x)
    next(generator)
    return generator.throw(ValueError), first, list(made), [a * b for a in range(2) for b in (c for c in (3, 4))]
""",
)
