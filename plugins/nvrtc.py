"""CUDA C++ source to PTX and cubin, for a given architecture, through NVRTC: no nvcc and no GPU are needed.

What was compiled is kept in $DDTREE_CACHE/kernels (else ddtree/kernels in $XDG_CACHE_HOME or ~/.cache), under a name
that is a digest of the source with its includes, the options, the architecture and the compiler. Files are written
beside their place and renamed, so processes may share the cache.
"""

import hashlib
import importlib.util
import os
import re
import struct
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from ddtree.plugins.cache import cache_root

KERNELS = Path(__file__).parent / "kernels"
ARCHITECTURES = ("sm_90", "sm_100", "sm_103", "sm_120")  # those that the kernels are tested for
OPTIONS = ("--std=c++17", "--ptxas-options=-v")  # -v: resources of each kernel, in the log

_INSTALL = 'pip install "ddtree-trtllm[cuda]"'
_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt")
_HEADERS = {"cuda_fp16.h": "nvidia-cuda-runtime", "crt/host_defines.h": "nvidia-cuda-crt"}
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a streaming multiprocessor."""

    registers: int  # a thread
    spill_bytes: int  # stored and loaded, a thread
    static_shared_bytes: int  # a block


@dataclass(frozen=True)
class Compiled:
    """One source file, compiled for one architecture."""

    ptx: bytes  # text; later architectures can run it too, compiling it when it is loaded
    cubin: bytes  # code for this architecture alone
    log: str  # of the compiler

    def resource_usage(self) -> dict[str, Resources]:
        """What each kernel uses, by the kernel's name."""
        # "Compiling entry function 'name' for 'sm_90'", then lines on it and on what is not inlined into it.
        _, *parts = re.split(r"Compiling entry function '(\w+)'", self.log)
        return {
            name: Resources(
                registers=_sum(r"Used (\d+) registers", part),
                spill_bytes=_sum(r"(\d+) bytes spill", part),
                static_shared_bytes=_sum(r"(\d+) bytes smem", part),
            )
            for name, part in zip(parts[::2], parts[1::2], strict=True)
        }


def compile_source(source: str | Path, arch: str) -> Compiled:
    """Compiles a file of ``plugins/kernels`` (or of a full path), or takes what was compiled before.

    Args:
        source: name of the file.
        arch: "sm_90", "sm_100", "sm_103", "sm_120", or another that NVRTC knows.

    Raises:
        ImportError: NVRTC, its Python bindings or the CUDA headers are not installed.
        ValueError: NVRTC does not know the architecture.
        RuntimeError: the source does not compile; the message holds the compiler's log.
    """
    path = KERNELS / source
    options = (*OPTIONS, f"--gpu-architecture={arch}")
    try:
        directory = _cache_directory()
    except FileNotFoundError as error:
        _warn_of_no_cache(str(error.strerror))
        return _compile(path, arch, options)
    stored = directory / f"{path.stem}-{arch}-{_key(path, options)}.bin"
    if (compiled := _load(stored)) is None:
        compiled = _compile(path, arch, options)
        _store(compiled, stored)
    return compiled


def include_directories() -> list[Path]:
    """Where the headers of CUDA are, those that pip has installed.

    Raises:
        ImportError: they are not there; the message names the command that installs them.
    """
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    directories = [path for place in places or () if (path := Path(place) / "cu13" / "include").is_dir()]
    for header, package in _HEADERS.items():
        if not any((directory / header).exists() for directory in directories):
            raise ImportError(f"{header} of {package} 13.0 is not installed ({_INSTALL})")
    return directories


@cache
def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError(f"cuda.bindings.nvrtc is not installed ({_INSTALL})") from error
    return nvrtc


def _call(function: str, *arguments: Any) -> Any:
    nvrtc = _nvrtc()
    try:
        status, *results = getattr(nvrtc, function)(*arguments)
    except (RuntimeError, OSError) as error:  # the bindings look for the library at the first call
        raise ImportError(f"NVRTC cannot be loaded ({_INSTALL}): {error}") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{function}: {status.name}")
    return results[0] if len(results) == 1 else results  # nvrtcVersion has two


def _compiler() -> str:
    """Version of NVRTC and of the headers, as far as they are known."""
    versions = [".".join(map(str, _call("nvrtcVersion")))]
    for package in _PACKAGES:
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append("")
    return " ".join(versions)


def _key(path: Path, options: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in (_compiler(), *options, *_texts(path, set())):
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()[:32]


def _texts(path: Path, seen: set[Path]) -> list[str]:
    """The file, and the files beside it that it includes."""
    seen.add(path)
    text = path.read_text()
    texts = [text]
    for name in _INCLUDE.findall(text):
        if (included := path.parent / name) not in seen:
            texts += _texts(included, seen)
    return texts


def _compile(path: Path, arch: str, options: tuple[str, ...]) -> Compiled:
    known = [f"sm_{number}" for number in _call("nvrtcGetSupportedArchs")]
    if arch not in known:
        raise ValueError(f"architecture {arch} is unknown to this NVRTC (one of {', '.join(known)})")
    searched = [f"--include-path={directory}" for directory in (path.parent, *include_directories())]
    program = _call("nvrtcCreateProgram", path.read_bytes(), path.name.encode(), 0, [], [])
    try:
        arguments = [option.encode() for option in (*options, *searched)]
        status, *_ = _nvrtc().nvrtcCompileProgram(program, len(arguments), arguments)
        log = _text(program, "nvrtcGetProgramLog").decode()
        if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{path.name} does not compile for {arch}: {status.name}\n{log}")
        return Compiled(ptx=_text(program, "nvrtcGetPTX"), cubin=_buffer(program, "nvrtcGetCUBIN"), log=log)
    finally:
        _call("nvrtcDestroyProgram", program)


def _buffer(program: Any, function: str) -> bytes:
    buffer = bytearray(_call(f"{function}Size", program))
    _call(function, program, buffer)
    return bytes(buffer)


def _text(program: Any, function: str) -> bytes:
    return _buffer(program, function).rstrip(b"\0")  # a C string


def _sum(pattern: str, text: str) -> int:
    return sum(map(int, re.findall(pattern, text)))


# ---------------------------------------------------------------------------------------------------------------------
# The cache
# ---------------------------------------------------------------------------------------------------------------------


def _cache_directory() -> Path:
    return cache_root() / "kernels"


# A stored file: SHA-256 of the rest, three lengths, the three parts.
_LENGTHS = struct.Struct("<3Q")


def _load(stored: Path) -> Compiled | None:
    """None if there is no such file, or a damaged one."""
    try:
        content = stored.read_bytes()
    except OSError:
        return None
    rest = content[32:]
    if hashlib.sha256(rest).digest() != content[:32]:
        return None
    ptx, cubin, _ = _LENGTHS.unpack_from(rest)
    parts = rest[_LENGTHS.size :]
    return Compiled(parts[:ptx], parts[ptx : ptx + cubin], parts[ptx + cubin :].decode())


def _store(compiled: Compiled, stored: Path) -> None:
    parts = (compiled.ptx, compiled.cubin, compiled.log.encode())
    rest = _LENGTHS.pack(*map(len, parts)) + b"".join(parts)
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=stored.parent, prefix=f".{stored.stem}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(rest).digest() + rest)
            os.replace(written, stored)
        except BaseException:
            os.unlink(written)
            raise
    except OSError as error:
        _warn_of_no_cache(f"{stored.parent} cannot be written ({error.strerror}); DDTREE_CACHE names another place")


def _warn_of_no_cache(reason: str) -> None:
    warnings.warn(f"kernels are compiled again in each process: {reason}", RuntimeWarning, stacklevel=4)
