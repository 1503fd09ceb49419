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
