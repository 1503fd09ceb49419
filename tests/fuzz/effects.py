"""What the generator writes about effects: messages, custom functions and hooks that write, subclasses of tensors, compiled functions
inside, exceptions of every kind, threads. It plugs into the generator like :mod:`tests.fuzz.awkward`.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.generator import Scope, Writer

HELPERS = """\
messages, logged = [], []
amax = torch.zeros(())
class Halt(BaseException): pass
class Wrong(ValueError):
    def __str__(self): return f'wrong: {self.args}'
def make_logger():
    class Keep(logging.Handler):
        def emit(self, record):
            try:
                logged.append(f'{record.levelname} {record.getMessage()}')
            except (TypeError, ValueError):
                logged.append('unfit')
            del logged[:-12]
    logger = logging.Logger('fuzz', logging.DEBUG)
    logger.addHandler(Keep())
    return logger
__logger__ = make_logger()
def say(text, *rest, level=logging.INFO):
    __logger__.log(level, text, *rest)
def noted(t, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        warnings.warn(text, RuntimeWarning, stacklevel=1)
        y = t + 1
    messages.extend(f'{item.category.__name__} {item.message}' for item in caught)
    del messages[:-12]
    return y
class Tracked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, scale):
        ctx.save_for_backward(t)
        ctx.scale = scale
        with torch.no_grad(): amax.copy_(torch.maximum(amax, t.detach().abs().max().float()) if t.numel() else amax)
        return t * scale
    @staticmethod
    def backward(ctx, gradient):
        with torch.no_grad(): amax.add_(gradient.detach().abs().sum().float() * 0.25)
        return gradient * ctx.scale, None
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t): return t.round()
    @staticmethod
    def backward(ctx, gradient): return gradient.clone()
class Tagged(torch.Tensor):
    @property
    def tag(self): return 'tag'
def halve(gradient): return gradient * 0.5
def seen_gradient(gradient): messages.append(gradient.dim()); del messages[:-12]
def measured(gradient):
    with torch.no_grad(): amax.add_(gradient.sum().float())
def hooked(t, hook):
    y = t * 1.0
    if y.requires_grad: y.register_hook(hook)
    return y
def with_module_hook(t, change):
    handle = net.register_forward_hook(lambda module, args, result: result * change)
    try:
        return net(t)
    finally:
        handle.remove()
def make_inner():
    compiled = dovetail.compile(lambda t, n=1: t.sin() * n, backend='aten')
    def inner(t, n=1): return compiled(t, n)
    return inner
__inner__ = make_inner()
def in_thread(action, t):
    box = []
    def work():
        try:
            box.append(action(t))
        except Exception as error:
            box.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(box[0], Exception): raise box[0]
    return box[0]
def raising(kind, t, n):
    if n % 3 == 0: raise kind(n)
    return t + n
def caught(kind, t, n, among=(Exception,)):
    try:
        return raising(kind, t, n)
    except among as error:
        messages.append(f'{type(error).__name__} {error}')
        del messages[:-12]
        return t - 1
    finally:
        counts['caught'] = n
""".splitlines()

CHANGES = [
    "messages.clear()",
    "amax.zero_()",
    "globals().update(amax=torch.ones(()))",
    "__logger__.setLevel(logging.WARNING)",
    "__logger__.setLevel(logging.DEBUG)",
    "Straight.backward = staticmethod(lambda ctx, gradient: gradient * 2)",
    "Wrong.__str__ = lambda self: 'changed'",
    "Tagged.tag = 'other'",
    "globals().update(halve=lambda gradient: gradient * 0.25)",
]
_ERRORS = ("ValueError", "KeyError", "Wrong", "Problem", "StopIteration", "RuntimeError", "AssertionError", "OSError")
_OTHERS = ("Halt", "SystemExit", "GeneratorExit")


def expression(writer: Writer, kind: str, scope: Scope, depth: int) -> str | None:
    """An expression with an effect; None where there is none of this kind."""

    def sub(other: str) -> str:
        return writer.expression(other, scope, depth)

    pick = writer.pick
    error, other = pick(*_ERRORS), pick(*_OTHERS)
    options: dict[str, list[Callable[[], str]]] = {
        "T": [
            lambda: f"noted({sub('T')}, {pick(sub('S'), repr('a text'))})",
            lambda: f"Tracked.apply({sub('T')}, {sub('F')})",
            lambda: f"Straight.apply({sub('T')})",
            lambda: f"({sub('T')} * amax)",
            lambda: f"{sub('T')}.as_subclass(Tagged).as_subclass(torch.Tensor)",
            lambda: f"({sub('T')}.as_subclass(Tagged) * 2).as_subclass(torch.Tensor)",
            lambda: f"hooked({sub('T')}, {pick('halve', 'seen_gradient', 'measured', '(lambda g: g + 1)')})",
            lambda: f"with_module_hook({sub('T')}, {sub('F')})",
            lambda: f"__inner__({sub('T')}, {sub('I')})",
            lambda: f"in_thread({pick('torch.sin', '(lambda t: t * 2)', 'Straight.apply')}, {sub('T')})",
            lambda: f"caught({error}, {sub('T')}, {sub('I')})",
            lambda: f"caught({error}, {sub('T')}, {sub('I')}, ({pick(*_ERRORS)}, {pick(*_ERRORS)}))",
            lambda: f"caught({other}, {sub('T')}, {sub('I')}, {pick('(BaseException,)', '(Exception,)', other)})",
            lambda: f"{sub('T')}.mT.contiguous().mT if {sub('T')}.dim() > 1 else {sub('T')}",
        ],
        "S": [
            lambda: f"f'{{{pick('amax.item()', 'state.sum().item()')}:.3f}}'",
            lambda: "str(amax.dtype)",
            lambda: "'|'.join(map(str, messages[-2:]))",
            lambda: f"repr({error}({sub('I')}))",
        ],
        "I": [lambda: "len(messages)", lambda: f"len(str({error}({sub('I')})))"],
        "B": [lambda: "(messages[-1:] == ['a'])", lambda: "torch.compiler.is_compiling() and False"],
    }
    found = options.get(kind)
    if kind == "T" and not writer.chance(0.9) and not writer.breaks:
        return None
    return f"({writer.rng.choice(found)()})" if found else None


def statement(writer: Writer, scope: Scope) -> list[str]:
    """A statement with an effect."""

    def sub(kind: str) -> str:
        return writer.expression(kind, scope, 1)

    pick = writer.pick
    error, name = pick(*_ERRORS), writer.name("e")
    options: list[Callable[[], list[str]]] = [
        lambda: [f"say('%s and %d', {sub('S')}, {sub('I')})"],
        lambda: [f"say({sub('S')}, level=logging.{pick('DEBUG', 'WARNING')})"],
        lambda: [f"__logger__.{pick('info', 'warning', 'error')}('size %s', {sub('T')}.shape)"],
        lambda: [f"__logger__.{pick('info', 'debug')}('value %.3f', {pick(sub('F'), 'amax')})"],
        lambda: [f"messages.append({pick(sub('S'), sub('I'))}); del messages[:-12]"],
        lambda: [f"amax.{pick('mul_', 'add_')}({sub('F')})"],
        lambda: [f"amax.copy_({sub('T')}.detach().sum())"],
        lambda: [
            "try:",
            f"    raise {error}({sub('I')}){pick('', ' from KeyError(1)', ' from None')}",
            f"except {pick(error, 'Exception')} as {name}:",
            f"    messages.append(str({name})); del messages[:-12]",
        ],
        lambda: [
            "try:",
            f"    if {sub('B')}: raise {pick(*_OTHERS)}({sub('I')})",
            f"except {pick('BaseException', 'Halt', '(Halt, SystemExit, GeneratorExit)')} as {name}:",
            f"    messages.append(type({name}).__name__); del messages[:-12]",
            "finally:",
            "    counts['finally'] = len(messages)",
        ],
        lambda: [f"assert {sub('T')}.dim() < {pick('9', '9', '1')}, {sub('S')}"],
        lambda: [f"if {sub('I')} == {pick('3', '7')}: raise {pick(error, *_OTHERS)}({sub('S')})"],
    ]
    return writer.rng.choice(options)()


def head(writer: Writer, scope: Scope) -> list[str]:
    """The head of a ``with`` block about errors, and what its body begins with."""
    return writer.rng.choice(
        [
            ["with contextlib.suppress(Halt, Wrong):"],
            ["with contextlib.ExitStack() as stack:", "    stack.callback(say, 'left')"],
            ["with warnings.catch_warnings():", "    warnings.simplefilter('ignore')"],
        ]
    )
