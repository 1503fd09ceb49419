"""What the generator writes besides plain code: generators that are talked to, objects with ways of their own, the containers of
``collections``, subclasses of builtin classes, blocks that change torch's state.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.generator import Scope, Writer

HELPERS = """\
queue = collections.deque([1, 2], maxlen=5)
tally = collections.Counter()
groups = collections.defaultdict(list)
ordered = collections.OrderedDict(b=1, a=2)
looked = {(1, 'a'): state, 'a': state}
class Loud(list):
    def append(self, value): super().append(value); counts['loud'] = counts.get('loud', 0) + 1
    def __getitem__(self, index): return super().__getitem__(index)
class Fancy(dict):
    def __missing__(self, key): return len(self)
    def __setitem__(self, key, value): super().__setitem__(key, value + 1)
class Step(int):
    def __add__(self, other): return Step(int(self) + other * 2)
class Word(str):
    def upper(self): return self.lower()
class Slotted:
    __slots__ = ('a', 'b')
    def __init__(self): self.a = 1
@dataclasses.dataclass(frozen=True)
class Frozen:
    t: torch.Tensor
    n: int = 1
class Logged:
    def __set_name__(self, owner, name): self.name = '_' + name
    def __get__(self, instance, owner=None): return self if instance is None else getattr(instance, self.name, 0)
    def __set__(self, instance, value): setattr(instance, self.name, value); counts['set'] = counts.get('set', 0) + 1
class Dial:
    level = Logged()
    def __init__(self): self._knob, self.turns = 1, []
    @property
    def knob(self): return self._knob
    @knob.setter
    def knob(self, value): self.turns.append(self._knob); del self.turns[3:]; self._knob = value % 5
    @knob.deleter
    def knob(self): self._knob = 0
loud, fancy, step, word, slotted, dial = Loud([1]), Fancy(a=1), Step(2), Word('Ab'), Slotted(), Dial()
frozen = Frozen(state)
def talker(total):
    try:
        while True:
            try:
                got = yield total
                if got is not None:
                    total = total + got
            except ValueError:
                total = total * 2
                counts['thrown'] = counts.get('thrown', 0) + 1
    finally:
        numbers[:] = [*numbers, 1][:4]
def remember(t, seen=[], *, table={}):
    seen.append(t.dim())
    del seen[5:]
    table[len(seen)] = t.dim()
    return t * len(seen)
def careful(t, n):
    for i in range(3):
        try:
            if n == i: return t * 2
            if n == i + 3: raise KeyError(n)
            if n == 7: continue
            if n == 8: break
        except KeyError as error:
            return t + len(error.args)
        finally:
            counts['careful'] = i
            if n == 9: return t - 1
    else:
        return t * 3
    return t
@contextlib.contextmanager
def absorbing(*kinds):
    try:
        yield numbers
    except kinds as error:
        counts['absorbed'] = len(str(error))
def kept(t): return t
""".splitlines()

CHANGES = [
    "queue.append(3)",
    "queue.clear()",
    "queue.rotate(1)",
    "tally.update(['a', 'b'])",
    "tally.clear()",
    "groups['a'].append(state)",
    "groups.clear()",
    "ordered.move_to_end('b') if 'b' in ordered else None",
    "looked.pop('a', None)",
    "looked.update({(1, 'a'): base_0})",
    "loud.append(5)",
    "list.clear(loud)",
    "dict.__setitem__(fancy, 'b', 3)",
    "globals().update(step=Step(3))",
    "globals().update(word=Word('Cd'))",
    "setattr(slotted, 'b', 2)",
    "dial.knob = 4",
    "dial.turns.clear()",
    "dial.level = 3",
    "globals().update(frozen=Frozen(base_0, 2))",
    "remember.__defaults__[0].clear()",
    "remember.__kwdefaults__['table'].clear()",
    "globals().update(dial=Dial())",
    "Dial.knob = property(lambda self: 2)",
    "Fancy.__missing__ = lambda self, key: 7",
    "Step.__add__ = int.__add__",
]


def expression(writer: Writer, kind: str, scope: Scope, depth: int) -> str | None:
    """An awkward expression of a kind; None where there is none."""

    def sub(other: str) -> str:
        return writer.expression(other, scope, depth)

    pick = writer.pick
    options: dict[str, list[Callable[[], str]]] = {
        "T": [
            lambda: f"remember({sub('T')})",
            lambda: f"careful({sub('T')}, {sub('I')})",
            lambda: f"helper(*({sub('T')},), **{{'count': {sub('I')}, 'extra': {sub('F')}}})",
            lambda: (
                f"(lambda first, *rest, k=1, **named: first * k + len(rest) + len(named))(*[{sub('T')}, *{sub('LT')}], **{sub('DI')})"
            ),
            lambda: f"looked.get(({sub('I')}, {sub('S')}), {sub('T')})",
            lambda: f"looked.get({pick(sub('S'), 'tuple(state.shape)')}, {sub('T')})",
            lambda: f"looked.setdefault(({sub('I')}, 'b'), {sub('T')})",
            lambda: f"(groups[{sub('S')}] or [{sub('T')}])[-1]",
            lambda: f"dataclasses.replace(frozen, t={sub('T')}).t",
            lambda: f"(frozen.t * frozen.n + {sub('T')})",
            lambda: f"({sub('T')} * step)",
            lambda: f"({sub('T')} + dial.knob)",
            lambda: f"torch.arange({sub('I')} % 4 + 1).sum() * {sub('T')}",
            lambda: f"torch.stack([{sub('T')}.sum(), *[t.sum() for t in {sub('LT')}]]).max()",
        ],
        "I": [
            lambda: "len(queue)",
            lambda: f"(queue[{pick('0', '-1')}] if queue else {sub('I')})",
            lambda: "sum(queue)",
            lambda: f"tally[{sub('S')}]",
            lambda: "sum(tally.values())",
            lambda: "len(groups)",
            lambda: f"ordered.get({sub('S')}, {sub('I')})",
            lambda: "next(iter(ordered.values()), 0)",
            lambda: f"(loud[{pick('0', '-1')}] if loud else {sub('I')})",
            lambda: f"fancy[{sub('S')}]",
            lambda: pick(
                "int(step + 1)", "len('ab' * step)", "[5, 6, 7, 8, 9][step]", "len(range(step))", "max(step, 1) * 1"
            ),
            lambda: f"getattr(slotted, {pick(repr('a'), repr('b'))}, {sub('I')})",
            lambda: "dial.knob",
            lambda: "len(dial.turns)",
            lambda: "dial.level",
            lambda: "frozen.n",
            lambda: f"len(str({sub('T')}.shape))",
            lambda: f"len(str({pick(sub('LI'), sub('F'))}))",
            lambda: f"state.shape[{pick('0', '-1')}]",
            lambda: f"math.prod({sub('T')}.shape)",
            lambda: f"sorted({sub('LI')}, key=lambda i: -i)[:1] == [{sub('I')}]",
        ],
        "B": [
            lambda: pick("bool(queue)", "bool(tally)", "bool(groups)", "bool(loud)", "bool(fancy)", "bool(step)"),
            lambda: f"({sub('I')} in queue)",
            lambda: f"({sub('S')} in fancy)",
            lambda: f"(({sub('I')}, {sub('S')}) in looked)",
            lambda: "hasattr(slotted, 'b')",
            lambda: f"(word == {sub('S')})",
            lambda: f"isinstance({sub('I')}, Step)",
            lambda: "(list(ordered) == sorted(ordered))",
        ],
        "S": [
            lambda: f"format({sub('T')}.shape)[-4:]",
            lambda: f"'%s|%d' % (word, {sub('I')})",
            lambda: f"'{{0[0]}}-{{n:>3}}'.format(state.shape, n={sub('I')})",
            lambda: pick("word.upper()", "word", "'-'.join([word, 'x'])", "word[:1]", "str(step)"),
            lambda: f"(tally.most_common(1) or [({sub('S')}, 1)])[0][0]",
        ],
        "LI": [
            lambda: "list(queue)",
            lambda: "list(loud)",
            lambda: "list(fancy.values())",
            lambda: "[*ordered.values()]",
            lambda: f"sorted({sub('LI')}, reverse=True)",
            lambda: f"list(itertools.accumulate({sub('LI')}))",
            lambda: f"[i for i, t in enumerate({sub('LT')}) if t.dim() == {sub('I')}]",
            lambda: f"[sum(pair) for pair in itertools.pairwise({sub('LI')})]",
        ],
        "LT": [
            lambda: f"[*groups[{sub('S')}]][-3:]",
            lambda: f"[looked[key] for key in looked][:{pick('1', '2')}]",
            lambda: f"[remember(t) for t in {sub('LT')}[:2]]",
            lambda: f"[y * i for i, y in zip({sub('LI')}, {sub('LT')})]",
        ],
        "DI": [
            lambda: "dict(tally)",
            lambda: "dict(fancy)",
            lambda: "{**ordered}",
            lambda: "({'a': len(dial.turns)} if vars(dial)['turns'] else {})",
        ],
        "DT": [lambda: "{str(key)[:3]: value for key, value in looked.items()}"],
    }
    found = options.get(kind)
    return writer.rng.choice(found)() if found else None


def statement(writer: Writer, scope: Scope) -> list[str]:
    """An awkward statement without a block of its own."""

    def sub(kind: str) -> str:
        return writer.expression(kind, scope, 1)

    pick = writer.pick
    name, first, second = writer.name("g"), writer.name("v"), writer.name("v")
    options: list[Callable[[], list[str]]] = [
        lambda: [
            f"{name} = talker({sub('T')})",
            f"{first} = next({name})",
            pick(
                f"{second} = {name}.send({sub('T')})",
                f"{second} = {name}.throw(ValueError({sub('S')}))",
                f"{second} = next({name})",
            ),
            pick(f"{name}.close()", f"{name}.send({sub('F')}); {name}.close()", f"del {name}"),
        ],
        lambda: [pick("queue.append({})", "queue.appendleft({})").format(sub("I"))],
        lambda: [f"if queue: queue.{pick('pop', 'popleft')}()"],
        lambda: [f"tally[{sub('S')}] += {sub('I')}"],
        lambda: [f"groups[{sub('S')}].append({sub('T')})", "if len(groups) > 3: groups.clear()"],
        lambda: [f"ordered[{sub('S')}] = ordered.pop({sub('S')}, {sub('I')})"],
        lambda: [f"looked[({sub('I')}, {sub('S')})] = {sub('T')}", "if len(looked) > 4: looked.popitem()"],
        lambda: [f"loud.append({sub('I')})", "del loud[4:]"],
        lambda: [f"loud += [{sub('I')}]", "del loud[4:]"],
        lambda: [f"fancy[{sub('S')}] = {sub('I')}", "if len(fancy) > 4: fancy.clear()"],
        lambda: [f"slotted.{pick('a', 'b')} = {sub('I')}"],
        lambda: ["if hasattr(slotted, 'b'): del slotted.b"],
        lambda: [f"dial.knob {pick('=', '+=', '*=')} {sub('I')}"],
        lambda: ["del dial.knob"],
        lambda: [f"dial.level = {sub('I')}"],
        lambda: [f"nested['a'][0] = nested['a'][0] {pick('+', '*')} {sub('F')}"],
        lambda: [
            f"history[{pick(':1', '1:', '::2', '-1:')}] = {sub('LT')}[:1]" if not writer.chance(0.3) else "history *= 1"
        ],
        lambda: [f"thing.table[{sub('S')}], thing.count = {sub('T')}, {sub('I')}"],
        lambda: [f"vars(thing).update(label={sub('S')})"],
        lambda: [f"thing.__dict__['level'] = {sub('I')}"],
    ]
    lines = writer.rng.choice(options)()
    if any(line.startswith(f"{first} =") for line in lines):
        scope.add("T", first)
        scope.add("T", second)
    if any(line.startswith("loud +=") for line in lines):
        scope.globals_written.add("loud")
    if any(line.startswith("history *=") for line in lines):
        scope.globals_written.add("history")
    return lines


def head(writer: Writer, scope: Scope) -> list[str]:
    """The head of an awkward ``with`` block, and what its body begins with."""
    number = writer.expression("I", scope, 1)
    return writer.rng.choice(
        [
            ["with absorbing(ValueError, KeyError) as absorbed:"],
            ["with absorbing(Exception):"],
            ["with contextlib.ExitStack() as stack, counting():", f"    stack.callback(queue.append, {number})"],
            ["with contextlib.ExitStack() as stack:", "    stack.enter_context(thing)"],
            ["with torch.autograd.graph.saved_tensors_hooks(kept, kept):"],
            ["with torch.autocast('cpu', dtype=torch.bfloat16):"],
            ["with torch.device('cpu'):"],
            ["with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):"],
        ]
    )
