"""Inductor's C++ kernels: compiled many at a time, and for instructions of the CPU that are looked for one by one."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib.util
import os
import platform
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail import cache

#: So many kernels share one file: reading the headers takes as long as compiling ten kernels, and the files of a graph are
#: compiled on all cores.
KERNELS_A_FILE = 16
#: The compiler needs as long for what calls a kernel from Python as for so many characters of a kernel.
_COST_OF_BINDING = 20_000
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"][^>\"\n]+[>\"][ \t]*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?!pragma\b)", re.MULTILINE)
_ENTRY = re.compile(r'extern "C"(\s+void\s+kernel\()')
_are_joined: contextvars.ContextVar[bool] = contextvars.ContextVar("dovetail_kernels_are_joined", default=False)
#: Inductor's binding of one kernel: what reads arguments, the function for Python, the table of functions, and the module.
_BINDING = re.compile(
    r"(?P<head>.*?)(?P<call>static PyObject\* \w+_py\(.*?)static PyMethodDef py_methods\[\] = \{(?P<method>.*?)"
    r"(?P<end>\{NULL, NULL, 0, NULL\}\};.*)",
    re.DOTALL,
)


#: Torch reduces a vector of doubles to one number by writing it to memory and reading it back once for each of its numbers, which
#: takes 35 ns; of floats it does it in registers, like this. A product of a matrix with 20000 rows of 20 doubles and a vector took
#: 0.8 ms, and takes 0.1.
_REDUCED_DOUBLES = """
namespace at::vec {
#if defined(CPU_CAPABILITY_AVX512)
template <typename Op> struct VecReduceAllSIMD<double, Op> {
  static inline double apply(const Op& combine, const Vectorized<double>& all) {
    Vectorized<double> v = all, w = _mm512_shuffle_f64x2(v, v, 0x4E);
    v = combine(v, w);
    w = _mm512_shuffle_f64x2(v, v, 0xB1);
    v = combine(v, w);
    w = _mm512_shuffle_pd(v, v, 0x55);
    v = combine(v, w);
    return _mm512_cvtsd_f64(v);
  }
};
#elif defined(CPU_CAPABILITY_AVX2)
template <typename Op> struct VecReduceAllSIMD<double, Op> {
  static inline double apply(const Op& combine, const Vectorized<double>& all) {
    Vectorized<double> v = all, w = _mm256_permute2f128_pd(v, v, 0x1);
    v = combine(v, w);
    w = _mm256_shuffle_pd(v, v, 0x5);
    v = combine(v, w);
    return _mm256_cvtsd_f64(v);
  }
};
#endif
}
"""


@contextlib.contextmanager
def kernels_in_few_files() -> Iterator[None]:
    """In the block, the C++ kernels of a graph are compiled in few files, and CPU features are tried out one at a time.

    Inductor compiles each kernel in a file of its own, which takes 0.8 seconds of which 0.7 are the headers (precompiled), the
    Python binding and the linker. The code of the kernels and the flags stay the same, but for how a vector of doubles is reduced.
    """
    _install()
    token = _are_joined.set(True)
    try:
        yield
    finally:
        _are_joined.reset(token)


@functools.cache
def _install() -> None:
    """Stand in for two methods of ``AsyncCompile``, which do as before outside of :func:`kernels_in_few_files`."""
    from torch._inductor import codecache, cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile

    compile_one, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        if not _are_joined.get() or _without_directives(source_code) is None:
            return compile_one(self, argtypes, source_code)
        waiting = self.__dict__.setdefault("dovetail_waiting", [])
        waiting.append((argtypes, source_code))
        return _Waiting(len(waiting) - 1)

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        waiting = self.__dict__.pop("dovetail_waiting", None)
        if waiting:
            kernels = _compile_together(waiting, lambda item: compile_one(self, *item))
            scope.update({name: kernels[item.index] for name, item in scope.items() if type(item) is _Waiting})
        wait(self, scope)

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign, assignment, unused-ignore]
    AsyncCompile.wait = wait_for_all  # type: ignore[method-assign, assignment, unused-ignore]
    codecache._precompile_header = _header_taken(codecache._precompile_header)  # type: ignore[assignment, unused-ignore]
    find_all = cpu_vec_isa.valid_vec_isa_list
    find_lazily = functools.cache(lambda: _LazyInstructions(cpu_vec_isa))
    # Only this list is made of the table of x86: other processors have one entry, which is tried out once.
    _remember_checks(cpu_vec_isa.VecISA)
    is_tried = cpu_vec_isa.platform.machine() in ("x86_64", "AMD64") and hasattr(cpu_vec_isa, "x86_isa_checker")
    cpu_vec_isa.valid_vec_isa_list = lambda: find_lazily() if _are_joined.get() and is_tried else find_all()  # type: ignore[assignment, unused-ignore]


def _remember_checks(instructions: Any) -> None:
    """Keep which instructions were tried out with success: each try takes a process, also where nothing has to be compiled."""
    check = instructions.check_build

    def check_build(self: Any, code: str) -> bool:
        if not _are_joined.get():
            return bool(check(self, code))
        places = (os.path.dirname(torch.__file__), os.environ.get("LD_LIBRARY_PATH"), sys.executable)
        key = cache.key_of("check", code, self.build_arch_flags(), *places, *_machine())
        if cache.read("instructions", key) == b"yes" or _trust.get() == "compiler":
            return True
        # A failure may have been one of memory or time.
        return bool(check(self, code)) and (cache.write("instructions", key, b"yes") or True)

    instructions.check_build = check_build


class _Waiting:
    """Stands for a kernel in the generated module until the whole module is read."""

    def __init__(self, index: int) -> None:
        self.index = index


class _LazyInstructions:
    """The vector instructions that this CPU and the compiler know, the best first, each tried out when it is looked at.

    Inductor tries all of them (six compilations and ten processes), and takes the first one.
    """

    def __init__(self, cpu_vec_isa: Any) -> None:
        flags = cpu_vec_isa.x86_isa_checker()
        known = cpu_vec_isa.supported_vec_isa_list
        self._candidates = [isa for isa in known if all(flag in flags for flag in str(isa).split())]

    def __iter__(self) -> Iterator[Any]:
        return (isa for isa in self._candidates if isa)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __getitem__(self, index: int) -> Any:
        return list(self)[index] if index else next(iter(self))


def _without_directives(source: str) -> str | None:
    """A kernel's source without its ``#include``s; None where it cannot be put beside another one."""
    body, count = _ENTRY.subn(r"\1", _INCLUDE.sub("", source))
    return body if count == 1 and 'extern "C"' not in body and _DIRECTIVE.search(body) is None else None


def _reduces_doubles(source: str) -> bool:
    """Whether a source reduces vectors of doubles, and torch has no code of its own for it."""
    return "vec_reduce_all<double" in source and _lacks_reduced_doubles()


@functools.cache
def _lacks_reduced_doubles() -> bool:
    path = Path(torch.__file__).parent / "include/ATen/cpu/vec/functional_base.h"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return "struct VecReduceAllSIMD<float, Op>" in text and "VecReduceAllSIMD<double" not in text


def _files_of(kernels: Sequence[tuple[list[str], str]]) -> list[list[tuple[list[str], str]]]:
    """The kernels in files of about :data:`KERNELS_A_FILE`, in their order, such that the compiler needs as long for each file."""
    count = -(-len(kernels) // KERNELS_A_FILE)
    costs = [_COST_OF_BINDING + len(source) for _, source in kernels]
    groups: list[list[tuple[list[str], str]]] = [[] for _ in range(count)]
    before = 0
    for kernel, cost in zip(kernels, costs, strict=True):
        groups[(2 * before + cost) * count // (2 * sum(costs))].append(kernel)
        before += cost
    return [group for group in groups if group]


def _compile_together(kernels: Sequence[tuple[list[str], str]], alone: Callable[[Any], Any]) -> list[Any]:
    """The kernels as callables, in files of about :data:`KERNELS_A_FILE`; those that do not compile together, one by one."""
    groups = _files_of(kernels)
    modules: list[Any] = []
    # Kernel by kernel, what is missing here is Inductor's own error, or no error.
    with contextlib.suppress(RuntimeError, OSError):
        modules = _modules([joined(group) for group in groups if _is_joined(group)])
    waiting = iter(modules)
    found: list[Any] = []
    for group in groups:
        module = next(waiting, None) if _is_joined(group) else None
        if module is None:
            found += [alone(kernel) for kernel in group]
        else:
            found += [getattr(module, f"kernel_{number}") for number in range(len(group))]
    return found


@contextlib.contextmanager
def trusting_compiler(trust: str = "compiler") -> Iterator[None]:
    """In the block, kernels are compiled for the best instructions that this CPU has, without trying out whether the compiler knows
    them, and with headers that were precompiled before, or none: to try takes 2 CPU seconds, to precompile 6. What does not compile
    so is compiled again where ``trust`` is "nobody": instructions are tried out, and no precompiled headers are taken.
    """
    token = _trust.set(trust)
    try:
        yield
    finally:
        _trust.reset(token)


_trust: contextvars.ContextVar[str] = contextvars.ContextVar("dovetail_trust_in_the_compiler", default="")


def _header_taken(precompile: Callable[..., str]) -> Callable[..., str]:
    """Inductor's function that precompiles a header, and gives its path, with a note of what is there beside the header.

    Inductor runs the preprocessor over the header in each process, for half a second, to see whether it is the same. The compiler,
    the CPU, and the version and the place of torch say so too.
    """

    @functools.wraps(precompile)
    def precompiled(header: str, command: str, **options: Any) -> str:
        if not _are_joined.get():
            return precompile(header, command, **options)
        from torch._inductor import codecache

        key = cache.key_of("header", header, command, os.path.dirname(torch.__file__), *_machine())
        note = Path(codecache._HEADER_DIR) / f"dovetail-{key}"
        with contextlib.suppress(OSError, ValueError):
            path = str(note.parent / Path(note.read_text("utf-8")).name)
            found = [file for kind in ("gch", "pch") if (file := Path(f"{path}.{kind}")).exists()]
            if _trust.get() == "nobody":
                # It may be why the graph comes a second time.
                for file in (note, *found):
                    file.unlink()
            elif Path(path).exists() and found:
                return path
        if _trust.get():
            return ""
        path = precompile(header, command, **options)
        with contextlib.suppress(OSError):
            beside = note.with_name(f"{note.name}.{os.getpid()}")
            beside.write_text(Path(path).name, encoding="utf-8")
            beside.replace(note)
        return path

    return precompiled


def compile_headers() -> None:
    """Precompile the headers of kernels, unless that was done before, for graphs to come. Half a header is never taken."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    compile_one = cpp_builder.run_compile_cmd
    kernel = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C"  void kernel(float* out)\n{\n}\n'

    def compile_beside(command: str, cwd: str) -> None:
        found = re.search(r" -o (\S+[.][gp]ch)(?= |$)", command)
        if found is None:
            return compile_one(command, cwd)
        whole = Path(found[1])
        # One name: Inductor's lock lets one process at a time come here, and the next one writes over what a killed one has left.
        beside = whole.with_name(f"part-{whole.name}")
        try:
            compile_one(f"{command[: found.start(1)]}{beside}{command[found.end(1) :]}", cwd)
            beside.replace(whole)
        finally:
            beside.unlink(missing_ok=True)

    with kernels_in_few_files():
        with trusting_compiler():
            cpu_vec_isa.pick_vec_isa()
        cpp_builder.run_compile_cmd = compile_beside  # type: ignore[assignment, unused-ignore]
        try:
            # Loading would compile the kernel.
            _joined_kernels().load_async(joined([(["float*"], kernel)]), "cpu")
        finally:
            cpp_builder.run_compile_cmd = compile_one


def _is_joined(group: Sequence[tuple[list[str], str]]) -> bool:
    return len(group) > 1 or _reduces_doubles(group[0][1])


def _modules(sources: Sequence[str]) -> list[Any]:
    """The modules of some files, from the cache on disk where it has them; None for a file that does not compile."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    # With one thread Inductor's ``submit`` compiles at once, while ``load_async`` holds the lock that compiling takes.
    submit = AsyncCompile.submit if get_compile_threads() > 1 else None
    keys = [_key_of_file(source) for source in sources]
    modules = {key: module for key in keys if (module := loaded_kernels(key)) is not None}
    with contextlib.ExitStack() as locks:
        # In one order for all processes: none waits for a file while another one waits for its file.
        for key in sorted(set(keys) - modules.keys()):
            if not locks.enter_context(cache.making("kernels", key)) and (module := loaded_kernels(key)) is not None:
                modules[key] = module
        to_load = {
            key: _joined_kernels().load_async(source, "cpu", submit_fn=submit)
            for key, source in zip(keys, sources, strict=True)
            if key not in modules
        }
        for key, load in to_load.items():
            # Kernel by kernel, an error of the compiler is Inductor's again.
            with contextlib.suppress(RuntimeError, OSError, ImportError):
                modules[key] = load()
                path = modules[key].__file__
                if cache.write("kernels", key, Path(path).read_bytes()):
                    _keys_of_loaded[path] = key
    return [modules.get(key) for key in keys]


def loaded_kernels(key: str) -> Any:
    """A compiled file from the cache on disk, as a module; loads nothing of Inductor."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    name = f"{key}.kernel"
    if name in sys.modules and (cache.held() is None or key_of_loaded(sys.modules[name]) is not None):
        return sys.modules[name]
    content = cache.read("kernels", key)
    if content is None:
        return None
    # Inductor's directory: the cache's own may be on a disk that no code can be run from, and is smaller than it.
    path = Path(cache_dir()) / "dovetail" / f"{hashlib.sha256(content).hexdigest()}.so"
    with contextlib.suppress(OSError, ImportError):
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            beside.write_bytes(content)
            beside.replace(path)
        # Where the kernels find the data of a tensor.
        address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        _keys_of_loaded[str(path)] = key
        return sys.modules.setdefault(name, module)
    return None


#: By the file of a module of kernels: the key under which the cache has it.
_keys_of_loaded: dict[str, str] = {}


def key_of_loaded(module: types.ModuleType) -> str | None:
    """The key of a loaded file of kernels in the cache on disk, where it is put unless it is there; None: it cannot be."""
    path = getattr(module, "__file__", None)
    key = _keys_of_loaded.get(str(path))
    if path is None or (key is not None and (cache.held() is None or cache.read("kernels", key) is not None)):
        return key
    # Compiled by itself, in Inductor's cache; or loaded before it was asked for to be held.
    with contextlib.suppress(OSError):
        content = Path(path).read_bytes()
        key = key or cache.key_of("alone", hashlib.sha256(content).hexdigest())
        if cache.read("kernels", key) == content or cache.write("kernels", key, content):
            _keys_of_loaded[path] = key
            return key
    return None


def _key_of_file(source: str) -> str:
    """The key of a compiled file: its source, the compiler's command without the places of torch and Python, and the machine."""
    from torch._inductor.codecache import pick_vec_isa
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    flags = _joined_kernels().cpp_compile_command_flags
    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", extra_flags=(), **flags)
    command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    for place, name in ((os.path.dirname(torch.__file__), "torch"), (sys.prefix, "venv"), (sys.base_prefix, "python")):
        command = command.replace(place, f"<{name}>")
    return cache.key_of("file", source, command, *_machine())


@functools.cache
def _machine() -> tuple[str, ...]:
    """The facts behind compiled code beside source and command: versions, the compiler, and this CPU (``-march=native``)."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    return (*cache.runtime(), get_compiler_version_info(get_cpp_compiler()), cpu_features())


def cpu_features() -> str:
    """The name of this CPU and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "cpu family", "model", "stepping", "flags", "features", "cpu implementer", "cpu part")
    found: dict[str, str] = {}
    for line in lines:
        name, _, text = line.partition(":")
        if name.strip().lower() in names:
            found.setdefault(name.strip().lower(), " ".join(sorted(text.split())))
    return f"{platform.machine()} {sorted(found.items())}"


def joined(kernels: Sequence[tuple[list[str], str]]) -> str:
    """One C++ file of several kernels, each in a namespace of its own, with the Python module ``kernel`` that calls them."""
    includes = dict.fromkeys(line.strip() for _, source in kernels for line in _INCLUDE.findall(source))
    bodies = [
        f"\nnamespace dovetail_kernel_{number} {{\n{_without_directives(source)}\n}}\n"
        for number, (_, source) in enumerate(kernels)
    ]
    module = _binding("kernel", "", [])
    calls = [
        _binding(f"kernel_{number}", f"dovetail_kernel_{number}::", types) for number, (types, _) in enumerate(kernels)
    ]
    functions, table = "".join(call["call"] for call in calls), "".join(call["method"] for call in calls)
    if any(_reduces_doubles(body) for body in bodies):
        bodies.insert(0, _REDUCED_DOUBLES)
    head = "".join(f"{line}\n" for line in includes) + "".join(bodies) + module["head"]
    return f"{head}{functions}static PyMethodDef py_methods[] = {{{table}{module['end']}"


def _binding(name: str, namespace: str, types: Sequence[str]) -> dict[str, str]:
    """The parts of Inductor's binding for a kernel in a namespace, under a name in Python."""
    cache_class = _joined_kernels()
    arguments = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {place})" for place, kind in enumerate(types))
    text = cache_class.suffix_template.format(
        arg_len=len(types),
        call_entry_func=namespace + cache_class.call_entry_function.format(arguments),
        entry_func=name,
        extra_parse_arg="",
    )
    found = _BINDING.fullmatch(text)
    if found is None:
        raise RuntimeError("Inductor binds kernels to Python in another form")
    return found.groupdict()


@functools.cache
def _joined_kernels() -> Any:
    """Inductor's cache of compiled kernels with Python bindings, for files of several kernels."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.utils import clear_on_fresh_cache

    loaded: dict[str, Any] = {}
    made = type("JoinedKernels", (CppPythonBindingsCodeCache,), {"cache": loaded, "cache_clear": loaded.clear})
    return clear_on_fresh_cache(made)
