"""Compiles the unmodified ``.cu`` files for the CPU and launches their kernels on torch tensors (see cuda_cpu.h).

``build`` compiles a source once into a cache directory; ``Kernels.launch`` runs one of its kernels. A sanitized build
runs under AddressSanitizer and UndefinedBehaviorSanitizer (array bounds, misaligned vector loads, shifts, signed
overflow), in a child process without Python, on copies of the tensors. A traced build detects data races, and counts
the reads of a tensor.
Arithmetic stays IEEE: no -ffast-math, no contraction.
"""

import ctypes
import hashlib
import importlib.util
import os
import re
import struct
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "plugins" / "kernels"
COMPILER = os.environ.get("CXX", "g++")

_FLAGS = ("-std=c++20", "-fPIC", "-g1", "-ffp-contract=off", "-ffunction-sections", "-fdata-sections")
_FLAGS += ("-fno-extern-tls-init", "-fno-strict-aliasing", "-w")
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_TRACE = ("-fsanitize=thread", "-O0", "--param", "tsan-instrument-func-entry-exit=0")
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s[^;\[]*?(\w+)\s*\[\s*\]\s*;")
_HEADER = re.compile(r'#include "(\w+\.cuh)"')
_MESSAGE_BYTES = 1024


class SimtError(RuntimeError):
    """A launch that a device would not have survived, or whose result it would not have promised."""


@dataclass(frozen=True)
class Pointers:
    """An argument that is a table of device addresses, int64 [n]: those of these tensors."""

    tensors: Sequence[Tensor]


Argument = Tensor | Pointers | int


def build(
    name: str,
    *,
    sanitize: bool = False,
    trace: bool = False,
    defines: Sequence[str] = (),
    replace: Mapping[str, str] | None = None,
) -> "Kernels":
    """The kernels of ``plugins/kernels/<name>``.

    Args:
        sanitize: under AddressSanitizer, in a child process.
        trace: to detect data races, and for ``Kernels.launch(watch=...)``. Slow.
        defines: macros, "NAME" or "NAME=VALUE".
        replace: faults to plant: text that occurs exactly once in the file, or else in the headers of ours that it
            includes, and what takes its place.
    """
    text = (KERNELS / name).read_text()
    for old, new in (replace or {}).items():
        if old not in text:
            text = _with_headers(text, set())
        if text.count(old) != 1:
            raise ValueError(f"{name} holds the text to replace {text.count(old)} times, expected once: {old!r}")
        text = text.replace(old, new)
    return build_text(text, sanitize=sanitize, trace=trace, defines=defines, name=name)


def _with_headers(text: str, seen: set[str]) -> str:
    """``text`` with the headers of ours in place of their includes, each once."""

    def included(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return _with_headers((KERNELS / match[1]).read_text(), seen)

    return _HEADER.sub(included, text)


def build_text(
    text: str, *, sanitize: bool = False, trace: bool = False, defines: Sequence[str] = (), name: str = "text.cu"
) -> "Kernels":
    """The kernels of a CUDA C++ source, which may include what is in ``plugins/kernels``."""
    if sanitize and trace:
        raise ValueError("sanitize and trace cannot be one build")
    flags = [*_FLAGS, *(f"-D{define}" for define in defines)]
    flags += ["-O1", *_SANITIZE] if sanitize else [*_TRACE] if trace else ["-O2"]
    headers = sorted(KERNELS.glob("*.cuh"))
    folder = _folder(Path(name).stem, flags, name, text, *headers)

    unit = folder / name
    names = {match for part in (text, *(h.read_text() for h in headers)) for match in _DYNAMIC_SHARED.findall(part)}
    if len(names) > 1:
        raise ValueError(f"{name} has dynamic shared memory under several names: {', '.join(sorted(names))}")
    _once(unit, lambda to: to.write_text(f'#include "cuda_cpu.h"\n#line 1 "{name}"\n{text}'))
    _once(folder / "dynamic.cpp", lambda to: to.write_text(_dynamic_shared(names)))
    compiled = [_compiled(unit, folder, flags), _compiled(folder / "dynamic.cpp", folder, flags)]
    return Kernels(folder, [*compiled, *_runtime(sanitize, trace)], sanitize, trace)


def _runtime(sanitize: bool, trace: bool) -> list[Path]:
    """What runs the kernels, compiled."""
    flags = [*_FLAGS, "-O2", *(_SANITIZE if sanitize else ())]
    parts = [
        HERE / "cuda_cpu.cpp",
        *([HERE / "child.cpp"] if sanitize else []),
        *([HERE / "trace.cpp"] if trace else []),
    ]
    folder = _folder("runtime", flags, *parts)
    return [_compiled(part, folder, flags) for part in parts]


def _compiled(source: Path, folder: Path, flags: Sequence[str]) -> Path:
    include = [f"-I{HERE}", f"-I{KERNELS}", f"-I{_cuda_include()}"]
    command = [*flags, *include, "-x", "c++", "-c", str(source)]
    return _once(folder / f"{source.stem}.o", lambda to: _compile([*command, "-o", str(to)]))


_launching = threading.Lock()  # a library runs one launch at a time
_with_stacks: list[ctypes.CDLL] = []  # the one library that keeps its threads' stacks: the last that ran


class Kernels:
    """The kernels of one source, each linked by itself when first launched, so that its shared memory is counted."""

    def __init__(self, folder: Path, objects: list[Path], sanitize: bool, trace: bool) -> None:
        self.folder, self.objects, self.sanitize, self.trace = folder, objects, sanitize, trace
        symbols = subprocess.run(
            ["nm", "--defined-only", "--extern-only", str(objects[0])], check=True, capture_output=True, text=True
        ).stdout
        functions = re.findall(r"^\w+ T (\w+)$", symbols, re.MULTILINE)
        self.names = sorted(name for name in functions if not name.startswith(("_Z", "cuda_cpu_")))
        self._libraries: dict[str, ctypes.CDLL] = {}

    def launch(
        self,
        name: str,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
        schedule: int = 0,
        watch: Tensor | None = None,
    ) -> Tensor | None:
        """Runs a kernel; its outputs are written in place.

        Args:
            args: in the kernel's order. Contiguous CPU tensors become pointers, ints become int32.
            shared_bytes: of dynamic shared memory.
            schedule: 0 runs the threads in order, another value shuffles them.
            watch: a tensor, of a traced build.

        Returns:
            of a traced build, how often each byte of ``watch`` was read, uint8 [bytes], at most 255.

        Raises:
            SimtError: deadlock, a divergent barrier, a mask of exited lanes, too much shared memory, an invalid access,
                of a traced build a data race.
        """
        if name not in self.names:
            raise ValueError(f"no kernel {name} (there are {', '.join(self.names)})")
        for at, argument in enumerate(args):
            for tensor in argument.tensors if isinstance(argument, Pointers) else (argument,):
                if isinstance(tensor, Tensor) and not (tensor.is_contiguous() and tensor.device.type == "cpu"):
                    raise ValueError(f"argument {at} is no contiguous CPU tensor: {list(tensor.shape)}")
                if isinstance(tensor, int) and not -(2**31) <= tensor < 2**31:
                    raise ValueError(f"argument {at}, {tensor}, is no int32")
        if self.sanitize:
            self._launch_in_child(name, grid, block, args, shared_bytes, schedule)
            return None
        if name not in self._libraries:
            self._libraries[name] = ctypes.CDLL(str(self._linked(name)))
        counts = None
        if self.trace:
            counts = torch.zeros(0 if watch is None else watch.nbytes, dtype=torch.uint8)
            self._trace(name, args, watch, counts)
        self._launch_here(name, grid, block, args, shared_bytes, schedule)
        return counts

    def _launch_here(self, name, grid, block, args, shared_bytes, schedule) -> None:
        tables, values = [], []
        for argument in args:
            if isinstance(argument, Pointers):
                argument = torch.tensor([tensor.data_ptr() for tensor in argument.tensors], dtype=torch.int64)
                tables.append(argument)  # alive until the kernel has run
            values.append(argument.data_ptr() if isinstance(argument, Tensor) else argument & 0xFFFFFFFF)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        library = self._libraries[name]
        with _launching:
            if _with_stacks and _with_stacks[0]._handle != library._handle:
                _with_stacks.pop().cuda_cpu_release()
            _with_stacks[:] = [library]
            failed = library.cuda_cpu_launch(
                (ctypes.c_uint * 3)(*grid),
                (ctypes.c_uint * 3)(*block),
                ctypes.c_size_t(shared_bytes),
                (ctypes.c_uint64 * len(values))(*values),
                ctypes.c_size_t(len(values)),
                ctypes.c_uint64(schedule),
                message,
                ctypes.c_size_t(_MESSAGE_BYTES),
            )
        if failed:
            raise SimtError(f"{name}: {message.value.decode()}")

    def _trace(self, name, args, watch, counts) -> None:
        known = {}  # address: bytes, argument
        for at, argument in enumerate(args):
            for tensor in argument.tensors if isinstance(argument, Pointers) else (argument,):
                if isinstance(tensor, Tensor):
                    known[tensor.data_ptr()] = (tensor.nbytes, at)
        watched = (None, 0) if watch is None else (watch.data_ptr(), watch.nbytes)
        self._libraries[name].cuda_cpu_trace(
            (ctypes.c_uint64 * len(known))(*known),
            (ctypes.c_uint64 * len(known))(*(size for size, _ in known.values())),
            (ctypes.c_int * len(known))(*(at for _, at in known.values())),
            ctypes.c_size_t(len(known)),
            ctypes.c_void_p(watched[0]),
            ctypes.c_size_t(watched[1]),
            ctypes.c_void_p(counts.data_ptr()),
        )

    def _launch_in_child(self, name, grid, block, args, shared_bytes, schedule) -> None:
        buffers: list[Tensor] = []
        index: dict[tuple[int, int], int] = {}  # a tensor given twice is one buffer

        def buffer_of(tensor: Tensor) -> int:
            key = (tensor.data_ptr(), tensor.nbytes)
            if key not in index:
                index[key] = len(buffers)
                buffers.append(tensor)
            return index[key]

        relocations, values = [], []
        for argument in args:
            if isinstance(argument, Pointers):
                targets = [buffer_of(tensor) for tensor in argument.tensors]
                table = len(buffers)
                buffers.append(torch.zeros(len(targets), dtype=torch.int64))
                relocations += [(table, 8 * at, target) for at, target in enumerate(targets)]
                values.append((1, table))
            elif isinstance(argument, Tensor):
                values.append((1, buffer_of(argument)))
            else:
                values.append((0, argument & 0xFFFFFFFF))

        def numbers(*values: int) -> bytes:
            return struct.pack(f"<{len(values)}Q", *values)

        request = [numbers(*grid, *block, shared_bytes, schedule, len(buffers))]
        for tensor in buffers:
            request += [numbers(tensor.nbytes, tensor.data_ptr() % 16), _bytes(tensor).numpy().tobytes()]
        request += [numbers(len(relocations)), *(numbers(*relocation) for relocation in relocations)]
        request += [numbers(len(values)), *(numbers(*value) for value in values)]
        options = {
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        child = subprocess.run(
            [str(self._linked(name))], input=b"".join(request), capture_output=True, env={**os.environ, **options}
        )
        if child.returncode:
            raise SimtError(f"{name}: {_first_lines(child.stderr.decode(errors='replace'), child.returncode)}")
        failed, message_bytes = struct.unpack_from("<2Q", child.stdout)
        at = 16 + message_bytes
        if failed:
            raise SimtError(f"{name}: {child.stdout[16:at].decode()}")
        for tensor in buffers:
            if tensor.nbytes:
                _bytes(tensor).copy_(
                    torch.frombuffer(bytearray(child.stdout[at : at + tensor.nbytes]), dtype=torch.uint8)
                )
            at += tensor.nbytes

    def _linked(self, name: str) -> Path:
        """A library, or the child's program, with this kernel alone: what it does not use is left out."""
        objects = [str(path) for path in self.objects]
        common = [f"-Wl,--defsym=cuda_cpu_kernel={name}", "-Wl,--gc-sections"]
        if self.sanitize:
            command = [*_SANITIZE, *objects, *common]
            return _once(self.folder / name, lambda to: _compile([*command, "-o", str(to)]))
        exports = self.folder / "exports.map"
        _once(
            exports,
            lambda to: to.write_text("{ global: cuda_cpu_launch; cuda_cpu_release; cuda_cpu_trace; local: *; };"),
        )
        command = ["-shared", *objects, *common, f"-Wl,--version-script={exports}"]
        return _once(self.folder / f"{name}.so", lambda to: _compile([*command, "-o", str(to)]))


def _dynamic_shared(names: set[str]) -> str:
    entry = 'extern "C" unsigned char* cuda_cpu_dynamic_shared()'
    if not names:
        return f"{entry} {{ return nullptr; }}\n"
    (name,) = names
    return f"alignas(256) thread_local unsigned char {name}[64 * 1024];\n{entry} {{ return {name}; }}\n"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)


def _first_lines(report: str, code: int) -> str:
    lines = [line for line in report.splitlines() if line.strip() and not line.startswith("=====")]
    start = next((at for at, line in enumerate(lines) if "ERROR" in line or "runtime error" in line), 0)
    return "\n".join(lines[start : start + 12]) or f"the child ended with code {code}"


def _once(path: Path, make) -> Path:
    """Makes a file unless it is there, whole or not at all: another process may be making it too."""
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
        os.close(handle)
        make(Path(temporary))
        os.replace(temporary, path)
    return path


def _folder(name: str, *parts: object) -> Path:
    """The cache's folder for what these parts, flags, text and files, make with this compiler and this runner."""
    digest = hashlib.sha256(repr((COMPILER, _compiler_version())).encode())
    for part in (
        *parts,
        *sorted(HERE.glob("*.h")),
        *sorted(HERE.glob("*.cpp")),
        HERE / "nv" / "target",
        Path(__file__),
    ):
        digest.update(part.read_bytes() if isinstance(part, Path) else repr(part).encode())
    folder = _cache() / f"{name}-{digest.hexdigest()[:24]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(arguments: list[str]) -> None:
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{COMPILER} failed:\n{done.stderr[:4000]}")


@cache
def _compiler_version() -> str:
    return subprocess.run([COMPILER, "-dumpfullversion"], check=True, capture_output=True, text=True).stdout


def _cuda_include() -> Path:
    """Where the pip packages nvidia-cuda-runtime and nvidia-cuda-crt put their headers."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found and found.submodule_search_locations) or ():
        include = Path(folder) / "cu13" / "include"
        if (include / "cuda_fp16.h").exists():
            return include
    raise RuntimeError('no CUDA headers: pip install "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*"')


def _cache() -> Path:
    return Path(tempfile.gettempdir()) / f"ddtree-simt-{os.getuid()}"
