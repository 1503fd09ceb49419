"""What a random program defines before its function: helpers, classes, a module. Their bodies are random too."""

from __future__ import annotations

from tests.fuzz import awkward, effects, memory
from tests.fuzz.generator import Scope
from tests.fuzz.statements import StatementWriter


def indented(lines: list[str]) -> list[str]:
    """The lines, one level deeper."""
    return ["    " + line for line in lines]


def global_line(scope: Scope) -> list[str]:
    """The ``global`` statement of a function's body, where it writes to globals."""
    return [f"global {', '.join(sorted(scope.globals_written))}"] if scope.globals_written else []


def _body(writer: StatementWriter, scope: Scope) -> list[str]:
    """A few statements and a returned tensor. They may not call the program's own code, so that nothing recurses."""
    writer.plain = True
    lines = writer.body(scope, writer.rng.randint(0, 3), depth=1, returned="T")
    writer.plain = False
    return [*global_line(scope), *lines]


def helpers(writer: StatementWriter, outer: Scope) -> list[str]:
    """Functions, generators and context managers."""
    scope = outer.child()
    scope.returns = False
    # Kinds that are defined further below may be used in bodies, but helpers must not call each other in a circle.
    scope.add("T", "t")
    scope.add("I", "count")
    scope.add("F", "extra")
    helper = [
        f"def helper(t, count={writer.pick('1', 'limit')}, *rest, extra=0.5, **options):",
        *indented(_body(writer, scope)),
    ]
    make = [
        "def make_scaler(amount):",
        "    calls = 0",
        "    def scale(t):",
        "        nonlocal calls",
        "        calls += 1",
        "        return t * amount + calls",
        "    return scale",
        "def make_counted():",
        "    total, seen = 0, []",
        "    def counted(t):",
        "        nonlocal total",
        "        total += 1",
        f"        {writer.pick('seen.append(total)', 'seen.append(t)', 'pass')}",
        "        return t + total * len(seen)",
        "    return counted",
        "counted = make_counted()",
        "def late_or(instead):",
        "    try:",
        "        return late_global",
        "    except NameError:",
        "        return instead",
        "def apply(action, t, *rest, **options):",
        "    return action(t, *rest, **options)",
        "def pairs(values):",
        "    previous = None",
        "    for value in values:",
        "        if previous is not None:",
        "            yield previous * value",
        "        previous = value",
        "def stream(values, last):",
        "    seen = 0",
        "    try:",
        "        for value in values:",
        "            seen += 1",
        "            yield value * seen",
        "        yield last",
        "    finally:",
        f"        {writer.pick('counts.update(seen=seen)', 'pass')}",
        "@contextlib.contextmanager",
        "def counting():",
        "    global limit",
        "    limit += 1",
        "    try:",
        "        yield limit",
        "    finally:",
        "        limit -= 1",
    ]
    return helper + make + awkward.HELPERS + effects.HELPERS + (memory.HELPERS if writer.about_memory else [])


def classes(writer: StatementWriter, outer: Scope) -> list[str]:
    """A base class and the class of ``thing``."""

    def method_scope() -> Scope:
        scope = outer.child()
        scope.returns = False
        for kind, names in {
            "T": ["self.weight"],
            "F": ["self.scale"],
            "I": ["self.count"],
            "LT": ["self.items"],
            "DT": ["self.table"],
        }.items():
            for name in names:
                scope.add(kind, name)
        return scope

    scope = method_scope()
    scope.add("T", "t")
    base = [
        "class Base:",
        f"    LIMIT = {writer.pick('1', '3')}",
        "    level = 0",
        "    def method(self, t):",
        f"        return t * {writer.pick('self.scale', 'self.LIMIT', 'self.level', '2')}",
        "    def bump(self, by=1):",
        "        self.count += by",
        f"        return {writer.pick('self.count', 'self.count % 3')}",
        "    @property",
        "    def total(self):",
        f"        {writer.pick('self.level += 1', 'pass')}",
        "        return sum(self.items, self.weight * self.scale)",
    ]
    thing = [writer.pick("@dataclasses.dataclass(eq=False)", "") or "", "class Thing(Base):"]
    if thing[0]:
        thing += [
            "    weight: torch.Tensor",
            "    count: int = 0",
            "    scale: float = 1.5",
            "    items: list = dataclasses.field(default_factory=list)",
            "    table: dict = dataclasses.field(default_factory=dict)",
            "    label: str = 'thing'",
        ]
    else:
        thing = thing[1:]
        thing += [
            "    def __init__(self, weight, count=0):",
            "        super().__init__()",
            "        self.weight = weight",
            "        self.count = count",
            f"        self.scale = {writer.pick('1.5', 'factor')}",
            f"        self.items = {writer.pick('[]', '[weight]', 'history')}",
            f"        self.table = {writer.pick('{}', '{repr_a: weight}'.replace('repr_a', repr('a')), 'table')}",
            "        self.label = 'thing'",
        ]
    thing += ["    def action(self, t):", *indented(indented(_body(writer, scope)))]
    if writer.chance(0.6):
        scope = method_scope()
        scope.add("T", "t")
        scope.add("T", "super().method(t)", assignable=False)
        thing += ["    def method(self, t):", *indented(indented(_body(writer, scope)))]
    thing += [
        "    def __call__(self, t, **options):",
        f"        return {writer.pick('self.method(t)', 'self.action(t) + self.weight', 't + self.count')}",
        "    def __len__(self):",
        f"        return {writer.pick('len(self.items)', 'self.count % 5', '2')}",
        "    def __iter__(self):",
        f"        {writer.pick('return iter(self.items[:3])', 'yield from self.items[:3]')}",
        "    def __enter__(self):",
        "        self.level += 1",
        "        return self",
        "    def __exit__(self, kind, error, trace):",
        "        self.level -= 1",
        f"        return {writer.pick('False', 'kind is Problem', 'None')}",
    ]
    if writer.chance(0.4):
        thing += [
            "    def __getattr__(self, name):",
            "        if name in ('hidden', 'late', 'last'):",
            f"            return {writer.pick('3', 'self.weight', 'self.count')}",
            "        raise AttributeError(name)",
        ]
    if writer.chance(0.15):
        thing += ["    def __setattr__(self, name, value):", "        object.__setattr__(self, name, value)"]
    if writer.chance(0.3):
        thing += [
            "    @classmethod",
            "    def build(cls, t):",
            "        return cls(t, cls.LIMIT)",
            "    @staticmethod",
            "    def double(t):",
            "        return t * 2",
        ]
        outer.add("C", "Thing.double", assignable=False)
        outer.add("O", "Thing.build(state)", assignable=False)
    return base + thing


def module(writer: StatementWriter, outer: Scope) -> list[str]:
    """A module and an instance of it."""
    scope = outer.child()
    scope.returns = False
    scope.add("T", "t")
    scope.add("T", "self.weight", assignable=False)
    scope.add("T", "self.buffer", assignable=False)
    scope.add("T", "self.last")
    scope.add("I", "self.seen")
    scope.add("B", "self.training", assignable=False)
    body = _body(writer, scope)
    more = writer.rng.sample(
        [
            "self.seen += 1",
            "self.last = t.detach()",
            "self.buffer.add_(t.detach().mean())",
            "self.running = self.running * 0.5 + t.detach().mean()",
            "self.records.append(t.detach().sum())",
            "t = self.layer(t.expand(2, 3))",
            "t = self.drop(t)",
            "t = self.layers[self.seen % 2](t)",
            "if self.training: t = t * 2",
            "for layer in self.layers: t = layer(t)",
            "self.table[self.seen % 3] = t",
        ],
        writer.rng.randint(0, 4),
    )
    lines = [
        "class Net(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.weight = torch.nn.Parameter(torch.randn(3))",
        "        self.layer = torch.nn.Linear(3, 3)",
        "        self.layers = torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.Sigmoid()])",
        "        self.drop = torch.nn.Dropout(0.5)",
        "        self.register_buffer('buffer', torch.ones(3))",
        "        self.register_buffer('running', torch.zeros(()))",
        "        self.seen, self.last, self.records, self.table = 0, torch.zeros(3), [], {}",
        "    def forward(self, t):",
        *("        " + line for line in more),
        *indented(indented(body)),
    ]
    if writer.chance(0.1):
        lines += ["net = Net()", "net.layers.append(net.layers[0])"]
    else:
        lines.append("net = Net()")
    return lines
