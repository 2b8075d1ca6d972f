"""NVRTC: every kernel compiles for every architecture, within limits, and what was compiled is kept."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ddtree.plugins import nvrtc
from ddtree.plugins.cache import cache_root
from ddtree.plugins.operations import DRAFT_TOPK, OPERATIONS, VERIFY_TREE

SOURCES = sorted(path.name for path in nvrtc.KERNELS.glob("*.cu"))
REGISTERS_OF_AN_SM = 65536
SHARED_BYTES = 48 << 10  # more wants an opt-in, which a TensorRT AOT plugin cannot make

# Blocks that an SM must hold at once. Its registers, 65,536 of them, are what limits the kernels here.
RESIDENT = {
    # A block a request: there are fewer blocks than SMs, so one an SM is enough, and it may take all registers.
    "build_tree": 1,
    "verify_tree": 1,
    # A block a row of draft logits, and 1,024 threads of it keep enough loads in flight.
    "draft_topk": 1,
    # Writes and copies: 1,024 threads an SM, each with 16 bytes on the way, keep the memory busy.
    "encode_tree": 4,
    "gather_features": 4,
    # 128 bytes a thread are on the way, so that 512 threads do.
    "commit_linear": 4,
    "commit_paged": 4,
}

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n'


@pytest.fixture(scope="module", autouse=True)
def _own_cache():
    """Kernels take a minute to compile: they are kept between runs, away from the user's own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DDTREE_CACHE", str(Path(tempfile.gettempdir()) / f"ddtree-nvrtc-{os.getuid()}"))
        yield


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "twice.cu"
    path.write_text(KERNEL)
    return path


@pytest.fixture
def compilations(monkeypatch):
    """The files that the compiler was started for."""
    started = []

    def compile_and_count(path, *arguments):
        started.append(path.name)
        return compile_really(path, *arguments)

    compile_really = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", compile_and_count)
    return started


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles_within_limits(source, arch):
    compiled = nvrtc.compile_source(source, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    header = compiled.ptx.decode().split("\n.address_size")[0].splitlines()
    assert ".version 9.0" in header  # what a driver of CUDA 13.0 takes
    assert f".target {arch}" in header

    operations = [operation for operation in OPERATIONS.values() if operation.source == source]
    usage = compiled.resource_usage()
    assert set(usage) == {op.entry(dtype) for op in operations for dtype in op.types or (None,)}
    for operation in operations:
        for dtype in operation.types or (None,):
            used = usage[operation.entry(dtype)]
            assert used.spill_bytes == 0
            assert used.static_shared_bytes <= SHARED_BYTES
            # Registers are given to warps in units of 256.
            registers = (32 * used.registers + 255) // 256 * 256 * (operation.block // 32)
            assert registers * RESIDENT[operation.name] <= REGISTERS_OF_AN_SM, used


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("operation", [DRAFT_TOPK, VERIFY_TREE], ids=lambda operation: operation.name)
def test_logits_are_read_in_words_of_16_bytes(operation, arch):
    """Wherever a row that is not aligned is read in words of 2 bytes, one that is takes an eighth as many of 16."""
    _, *kernels = nvrtc.compile_source(operation.source, arch).ptx.decode().split(".entry ")
    assert [text.partition("(")[0] for text in kernels] == [operation.entry(dtype) for dtype in operation.types]
    for text in kernels:
        wide, narrow = text.count("ld.global.nc.v4.u32"), text.count("ld.global.nc.u16")
        assert 0 < 8 * wide == narrow


def test_resources_are_read_from_the_log(tmp_path, cache):
    path = tmp_path / "greedy.cu"
    path.write_text(
        'extern "C" __global__ void __launch_bounds__(1024) spills(float* x) {\n'
        "    float v[96];\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
        "    __syncthreads();\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[(7 * i + 5) % 96];\n"
        "}\n"
        'extern "C" __global__ void shares(float* x) {\n'
        "    __shared__ float all[300];\n"
        "    all[threadIdx.x] = x[threadIdx.x];\n"
        "    __syncthreads();\n"
        "    x[threadIdx.x] = all[299 - threadIdx.x];\n"
        "}\n"
    )
    usage = nvrtc.compile_source(path, "sm_90").resource_usage()
    assert set(usage) == {"spills", "shares"}
    assert usage["spills"].spill_bytes > 0
    assert usage["spills"].registers == 64  # all that 1,024 threads may have
    assert (usage["spills"].static_shared_bytes, usage["shares"].static_shared_bytes) == (0, 1200)
    assert usage["shares"].spill_bytes == 0


def test_the_second_time_nothing_is_compiled(source, cache, compilations):
    first = nvrtc.compile_source(source, "sm_90")
    assert nvrtc.compile_source(source, "sm_90") == first
    assert compilations == ["twice.cu"]
    assert len(list(cache.iterdir())) == 1


def test_another_source_include_architecture_or_compiler_is_another_entry(source, cache, compilations, monkeypatch):
    nvrtc.compile_source(source, "sm_90")
    nvrtc.compile_source(source, "sm_120")
    assert len(compilations) == 2
    source.write_text(KERNEL + "// changed\n")
    nvrtc.compile_source(source, "sm_90")
    assert len(compilations) == 3
    for text in ("#pragma once\n", "#pragma once\n#define UNUSED\n"):
        (source.parent / "inner.cuh").write_text(text)
        (source.parent / "outer.cuh").write_text('#pragma once\n#  include "inner.cuh"\n')
        source.write_text('#include "outer.cuh"\n' + KERNEL)
        nvrtc.compile_source(source, "sm_90")
    assert len(compilations) == 5
    monkeypatch.setattr(nvrtc, "_compiler", lambda: "99.0")
    nvrtc.compile_source(source, "sm_90")
    assert len(compilations) == 6
    assert len(list(cache.iterdir())) == 6


@pytest.mark.parametrize("damage", ["cut off", "empty", "a bit changed", "another file"])
def test_a_damaged_entry_is_made_again(source, cache, compilations, damage):
    first = nvrtc.compile_source(source, "sm_90")
    (stored,) = cache.iterdir()
    content = bytearray(stored.read_bytes())
    if damage == "cut off":
        content = content[: len(content) // 2]
    elif damage == "empty":
        content = bytearray()
    elif damage == "a bit changed":
        content[-1000] ^= 1
    else:
        content = bytearray(b"something else" * 100)
    stored.write_bytes(content)
    again = nvrtc.compile_source(source, "sm_90")
    assert (again.ptx, again.cubin) == (first.ptx, first.cubin)
    assert nvrtc.compile_source(source, "sm_90") == again
    assert compilations == ["twice.cu"] * 2


def test_processes_share_the_cache(source, cache):
    """Several start at once on an empty cache. Each gets the whole, and nothing else is left behind."""
    program = (
        "import sys; from ddtree.plugins import nvrtc; compiled = nvrtc.compile_source(sys.argv[1], 'sm_90'); "
        "assert list(compiled.resource_usage()) == ['twice']; print(len(compiled.cubin))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, source], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    sizes = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len(set(sizes)) == 1
    assert [path.suffix for path in cache.iterdir()] == [".bin"]


def test_an_entry_is_never_seen_half_written(source, cache):
    compiled = nvrtc.compile_source(source, "sm_90")
    (stored,) = cache.iterdir()
    large = nvrtc.Compiled(os.urandom(1 << 20), compiled.cubin, compiled.log)
    seen, stop = [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.append(nvrtc._load(stored) in (compiled, large))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        nvrtc._store(large, stored)
        nvrtc._store(compiled, stored)
    stop.set()
    reader.join()
    assert len(seen) > 1
    assert all(seen)


def test_a_cache_that_cannot_be_written_costs_time_alone(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="DDTREE_CACHE names another place"):
        assert nvrtc.compile_source(source, "sm_90").cubin


def test_a_user_without_a_home_compiles_again(source, monkeypatch):
    """A container's user often has none."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("DDTREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(RuntimeWarning, match="in each process: no home directory to keep a cache in: set DDTREE_CACHE"):
        assert nvrtc.compile_source(source, "sm_90").cubin
    with pytest.raises(FileNotFoundError, match="no home directory to keep a cache in: set DDTREE_CACHE"):
        cache_root()


def test_the_cache_is_beside_that_of_engines(monkeypatch):
    monkeypatch.delenv("DDTREE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert nvrtc._cache_directory() == Path("/x/ddtree/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert nvrtc._cache_directory() == Path.home() / ".cache" / "ddtree" / "kernels"


def test_a_source_that_does_not_compile_says_where(tmp_path, cache):
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void broken() {\n    missing();\n}\n')
    with pytest.raises(
        RuntimeError, match=r"broken\.cu does not compile for sm_90(.|\n)*broken\.cu\(2\)(.|\n)*missing"
    ):
        nvrtc.compile_source(path, "sm_90")
    assert not cache.exists()


def test_an_unknown_architecture_is_refused(source, cache):
    with pytest.raises(ValueError, match=r"architecture sm_30 is unknown to this NVRTC \(one of .*sm_90, .*sm_100"):
        nvrtc.compile_source(source, "sm_30")


def test_without_headers_the_error_names_the_extra(source, cache, monkeypatch):
    monkeypatch.setitem(nvrtc._HEADERS, "no_such_header.h", "nvidia-cuda-runtime")
    message = r'no_such_header\.h of nvidia-cuda-runtime 13\.0 is not installed \(pip install "ddtree-trtllm\[cuda\]"\)'
    with pytest.raises(ImportError, match=message):
        nvrtc.compile_source(source, "sm_90")


def test_without_bindings_the_error_names_the_extra(source, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(nvrtc, "_nvrtc", nvrtc._nvrtc.__wrapped__)
    with pytest.raises(
        ImportError, match=r'cuda\.bindings\.nvrtc is not installed \(pip install "ddtree-trtllm\[cuda\]"\)'
    ):
        nvrtc.compile_source(source, "sm_90")
