"""The runner catches the faults that it is there for: a small kernel with each, and its correct twin, which passes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from . import runner
from .runner import Kernels, Pointers, SimtError, build_text

THREADS = 64
SCHEDULES = range(1, 6)


def kernels(body: str, parameters: str = "const float* in, int n, float* out", **options) -> Kernels:
    text = (
        f'#include <cuda_fp16.h>\nextern "C" __global__ void k({parameters}) {{\nconst int t = threadIdx.x;\n{body}\n}}'
    )
    return build_text(text, **options)


def launch(kernels: Kernels, *args, threads: int = THREADS, **options):
    return kernels.launch("k", grid=(1, 1, 1), block=(threads, 1, 1), args=args, **options)


def run(body: str, *, sanitize: bool = False, n: int = THREADS, **options) -> list[float]:
    """``out`` after a run on in = 0, 1, 2, ..."""
    out = torch.zeros(THREADS)
    launch(kernels(body, sanitize=sanitize), torch.arange(float(THREADS)), n, out, **options)
    return out.tolist()


REVERSED = [float(THREADS - 1 - t) for t in range(THREADS)]
SHIFTED = [float(max(t - 1, 0)) for t in range(THREADS)]
REVERSE = "__shared__ float s[64]; s[t] = in[t]; BARRIER out[t] = s[n - 1 - t];"
SHIFT = "__shared__ float s[64]; s[t] = in[t]; BARRIER out[t] = s[t ? t - 1 : 0];"


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("schedule", [0, 1])
def test_a_missing_barrier_gives_a_wrong_result_in_order(schedule, sanitize):
    options = {"schedule": schedule, "sanitize": sanitize}
    assert run(REVERSE.replace("BARRIER", "__syncthreads();"), **options) == REVERSED
    assert run(REVERSE.replace("BARRIER", ""), **options) != REVERSED


def test_a_missing_barrier_that_the_order_of_threads_hides_shows_in_shuffled_schedules():
    faulty, right = SHIFT.replace("BARRIER", ""), SHIFT.replace("BARRIER", "__syncthreads();")
    assert run(faulty) == SHIFTED
    assert all(run(faulty, schedule=schedule) != SHIFTED for schedule in SCHEDULES)
    assert all(run(right, schedule=schedule) == SHIFTED for schedule in SCHEDULES)


def test_a_missing_warp_barrier_shows_too():
    body = "__shared__ float s[64]; s[t] = in[t]; BARRIER out[t] = s[t ^ 1];"
    expected = [float(t ^ 1) for t in range(THREADS)]
    assert all(
        run(body.replace("BARRIER", "__syncwarp();"), schedule=schedule) == expected for schedule in (0, *SCHEDULES)
    )
    assert run(body.replace("BARRIER", "")) != expected


RACES = {
    "a read of what another thread writes": (SHIFT, "__syncthreads();"),
    "a write to what another thread reads": (
        "out[t] = in[t ^ 32]; BARRIER const_cast<float*>(in)[t] = 1;",
        "__syncthreads();",
    ),
    "two writes": (
        "__shared__ float s[64]; s[t] = in[t]; BARRIER s[t ^ 1] = in[t]; __syncthreads(); out[t] = s[t];",
        "__syncwarp();",
    ),
}


@pytest.mark.parametrize(("body", "barrier"), RACES.values(), ids=RACES)
def test_a_race_is_found_whatever_the_order_of_threads(body, barrier):
    out, source = torch.zeros(THREADS), torch.zeros(THREADS)
    for schedule in (0, 1):
        launch(kernels(body.replace("BARRIER", barrier), trace=True), source, THREADS, out, schedule=schedule)
        with pytest.raises(SimtError, match=r"race: (reads|writes) byte .* with no barrier between"):
            launch(kernels(body.replace("BARRIER", ""), trace=True), source, THREADS, out, schedule=schedule)


def test_blocks_that_write_to_one_place_race():
    add = kernels("if (t == 0) atomicAdd(out, in[0]);", trace=True)
    store = kernels("if (t == 0) out[0] = in[0];", trace=True)
    source, out = torch.ones(1), torch.zeros(1)
    add.launch("k", grid=(3, 1, 1), block=(64, 1, 1), args=[source, 0, out])
    assert out.tolist() == [3.0]
    with pytest.raises(
        SimtError, match=r"block \(1, 0, 0\).*: race: writes byte 0 of argument 2, which thread 0 of block 0 wrote"
    ):
        store.launch("k", grid=(3, 1, 1), block=(64, 1, 1), args=[source, 0, out])


def test_a_schedule_is_reproducible():
    body = "int mine = atomicAdd(reinterpret_cast<int*>(out + 63), 1); if (t < 63) out[t] = mine;"
    orders = [run(body, schedule=schedule)[:63] for schedule in (1, 1, 2, 0)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == list(range(63))


@pytest.mark.parametrize("where", ["in[t + 1]", "in[t - 1]"])
def test_an_access_outside_a_tensor_is_found_by_the_address_sanitizer(where):
    with pytest.raises(SimtError, match=r"AddressSanitizer: heap-buffer-overflow(.|\n)*text\.cu:4"):
        run(f"out[t] = {where};", sanitize=True)
    assert run("out[t] = in[t];", sanitize=True) == list(range(THREADS))


def test_a_write_outside_a_tensor_of_a_pointer_table_is_found():
    body = "reinterpret_cast<float*>(in[1])[t] = reinterpret_cast<const float*>(in[0])[t];"
    copy = kernels(body, "const long long* in", sanitize=True)
    source, target = torch.arange(float(THREADS)), torch.zeros(THREADS)
    launch(copy, Pointers([source, target]))
    assert torch.equal(source, target)
    with pytest.raises(SimtError, match="heap-buffer-overflow"):
        launch(copy, Pointers([source, torch.zeros(THREADS - 1)]))
    target.zero_()
    launch(kernels(body, "const long long* in"), Pointers([source, target]))
    assert torch.equal(source, target)


def test_an_index_outside_a_shared_array_is_found():
    body = "__shared__ float s[64]; s[t + n] = in[t]; __syncthreads(); out[t] = s[t];"
    with pytest.raises(SimtError, match=r"index 64 out of bounds for type 'float \[64\]'"):
        run(body, n=1, sanitize=True)
    assert run(body, n=0, sanitize=True) == list(range(THREADS))


def test_a_misaligned_vector_load_is_found():
    body = "out[t] = reinterpret_cast<const float2*>(in + n)[t / 4].x;"
    with pytest.raises(SimtError, match="misaligned address"):
        run(body, n=1, sanitize=True)
    assert run(body, n=2, sanitize=True) == [float(2 + t // 4 * 2) for t in range(THREADS)]


def test_a_fault_of_memory_ends_the_launch_and_not_the_process():
    with pytest.raises(SimtError, match="Segmentation fault"):
        run("out[t] = *reinterpret_cast<const float*>(8ll * n);", n=1)
    with pytest.raises(SimtError, match="a stack over"):
        run("volatile char large[100000]; for (int i = 0; i < 100000; ++i) large[i] = n; out[t] = large[t];")
    assert run("out[t] = in[t];") == list(range(THREADS))


@pytest.mark.parametrize("sanitize", [False, True])
def test_a_divergent_barrier_is_an_error(sanitize):
    with pytest.raises(SimtError, match=r"thread \(32, 0, 0\): divergent barrier: __syncthreads at text.cu:7"):
        run("if (t < 32) {\n__syncthreads(); out[t] = 1;\n} else {\n__syncthreads(); out[t] = 2; }", sanitize=sanitize)


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("schedule", [0, 1])
def test_a_deadlock_is_reported(schedule, sanitize):
    body = "if (t == 5) __syncthreads(); else __syncwarp(); out[t] = 1;"
    with pytest.raises(SimtError, match="deadlock: 1 threads wait at __syncthreads, 31 in a warp collective"):
        run(body, schedule=schedule, sanitize=sanitize)
    assert run("__syncwarp(); __syncthreads(); out[t] = 1;", schedule=schedule, sanitize=sanitize) == [1.0] * THREADS


def test_a_barrier_waits_for_the_threads_that_have_not_exited():
    assert run("if (t >= 32) return; __syncthreads(); out[t] = __syncthreads_count(t < 7);")[:33] == [7.0] * 32 + [0.0]


def test_a_mask_that_names_an_exited_lane_is_an_error():
    body = "if (t == 3) return; out[t] = __shfl_sync(MASK, in[t], 0);"
    with pytest.raises(SimtError, match=r"mask ffffffff at text.cu:4 names exited or absent lanes 00000008"):
        run(body.replace("MASK", "0xFFFFFFFFu"))
    right = run(body.replace("MASK", "t < 32 ? 0xFFFFFFF7u : 0xFFFFFFFFu"))
    assert right == [0.0] * 32 + [32.0] * 32


def test_a_mask_that_does_not_name_its_caller_is_an_error():
    with pytest.raises(SimtError, match=r"mask 0000ffff at text\.cu:4 does not name the lane that uses it, 16"):
        run("out[t] = __any_sync(0x0000FFFFu, t == 3);")


def test_lanes_at_different_collectives_are_an_error():
    with pytest.raises(SimtError, match="divergent collective"):
        run("if (t % 2)\nout[t] = __shfl_sync(~0u, in[t], 0);\nelse\nout[t] = __shfl_sync(~0u, in[t], 1);")


def test_collectives_of_several_masks_go_on_side_by_side():
    body = """const unsigned mask = t % 32 < 8 ? 0xFFu : 0xFFFFFF00u;
    float sum = in[t];
    for (int step = 0; step < (t % 32 < 8 ? 3 : 1); ++step) sum += __shfl_xor_sync(mask, sum, 1 << step);
    out[t] = sum + 100 * __popc(__ballot_sync(mask, t % 2)) + 1000 * __reduce_max_sync(mask, t);"""
    expected = [
        sum(range(t & ~7, (t & ~7) + 8)) + 400 + 1000 * (t | 7) if t % 32 < 8 else t + (t ^ 1) + 1200 + 1000 * (t | 31)
        for t in range(THREADS)
    ]
    for schedule in (0, *SCHEDULES):
        assert run(body, schedule=schedule) == expected


def test_shared_memory_over_48_kib_is_an_error():
    body = "__shared__ float s[1024]; extern __shared__ float d[]; s[t] = in[t]; d[t] = in[t]; __syncthreads();"
    body += "out[t] = s[n - 1 - t] + d[t ^ 1] - (t ^ 1);"
    assert run(body, shared_bytes=44 << 10) == REVERSED
    with pytest.raises(SimtError, match="4096 bytes of static and 45312 of dynamic shared memory exceed 49152"):
        run(body, shared_bytes=(44 << 10) + 256)
    with pytest.raises(SimtError, match="49156 bytes of static"):
        run("__shared__ float s[12289]; s[t] = in[t]; __syncthreads(); out[t] = s[n - 1 - t];")


def test_shared_memory_is_counted_for_each_kernel_alone():
    kernel = (
        'extern "C" __global__ void NAME(float* out) { __shared__ float s[SIZE]; s[(int)out[0]] = 1; out[0] = s[0]; }'
    )
    small, large = (kernel.replace("NAME", n).replace("SIZE", s) for n, s in (("small", "8000"), ("large", "12289")))
    both = build_text(f"{small}\n{large}")
    assert both.names == ["large", "small"]
    both.launch("small", grid=(1, 1, 1), block=(1, 1, 1), args=[torch.zeros(1)])
    with pytest.raises(SimtError, match="49156 bytes of static"):
        both.launch("large", grid=(1, 1, 1), block=(1, 1, 1), args=[torch.zeros(1)])


@pytest.mark.parametrize("sanitize", [False, True])
def test_a_write_past_the_dynamic_shared_memory_is_an_error(sanitize):
    body = "extern __shared__ float d[]; d[t] = in[t]; out[t] = d[t];"
    assert run(body, shared_bytes=256, sanitize=sanitize) == list(range(THREADS))
    with pytest.raises(SimtError, match="use-after-poison" if sanitize else "byte 252 of 252 bytes of dynamic"):
        run(body, shared_bytes=252, sanitize=sanitize)


def test_shared_memory_holds_garbage_in_every_block():
    body = "__shared__ unsigned s[64]; extern __shared__ unsigned d[];"
    body += "out[t] = s[t] == 0xFEFEFEFEu && d[t] == 0xFEFEFEFEu; s[t] = d[t] = t;"
    out = torch.zeros(THREADS)
    kernels(body).launch("k", grid=(3, 2, 1), block=(64, 1, 1), args=[out, 0, out], shared_bytes=256)
    assert out.tolist() == [1.0] * THREADS


def test_arithmetic_is_ieee():
    """A product and a sum are rounded each; fmaf once. Halves are the toolkit's."""
    out = run(
        "float x = 1.0f + 0x1p-12f; out[0] = x * x - 1.0f; out[1] = fmaf(x, x, -1.0f); out[2] = __half2float(0.1);"
    )
    assert out[:3] == [2.0**-11, 2.0**-11 + 2.0**-24, float(torch.tensor(0.1).half())]


def test_reads_are_counted_by_byte():
    body = "if (t < n) out[t] = in[2 * t] + (t == 3 ? __ldg(reinterpret_cast<const float4*>(in)).w : 0);"
    source, out = torch.arange(8.0), torch.zeros(4)
    counts = launch(kernels(body, trace=True), source, 4, out, watch=source)
    assert counts.view(8, 4).max(1).values.tolist() == counts.view(8, 4).min(1).values.tolist()
    assert counts.view(8, 4)[:, 0].tolist() == [2, 1, 2, 1, 1, 0, 1, 0]
    assert out.tolist() == [0.0, 2.0, 4.0, 9.0]


def test_wrong_arguments_are_refused_before_the_launch():
    copy = kernels("out[t] = in[t];")
    values = torch.zeros(THREADS, 2)
    with pytest.raises(ValueError, match="no kernel other"):
        copy.launch("other", grid=(1, 1, 1), block=(1, 1, 1), args=[])
    with pytest.raises(ValueError, match="argument 0 is no contiguous CPU tensor"):
        launch(copy, values[:, 0], THREADS, values)
    with pytest.raises(ValueError, match="argument 1, 2147483648, is no int32"):
        launch(copy, values, 2**31, values)
    with pytest.raises(SimtError, match="1025 threads in a block"):
        launch(copy, values, THREADS, values, threads=1025)


def test_a_fault_to_plant_has_to_be_in_the_source_once():
    with pytest.raises(ValueError, match="0 times, expected once"):
        runner.build("verify_tree.cu", replace={"no such text": ""})


def test_one_source_may_be_built_by_several_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_cache", lambda: tmp_path)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: run("out[t] = in[t];"), range(2)))
    assert results == [list(range(THREADS))] * 2
    assert len(list(tmp_path.glob("*/k.so"))) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of this process's mappings")
def test_stacks_of_many_kernels_do_not_add_up():
    """A process has 65,530 mappings, and a test session runs some hundred kernels of up to 1,024 threads."""

    def mappings_after(which: int) -> int:
        out = torch.zeros(1024)
        for _ in range(2):
            launch(kernels(f"out[t] = in[t] + {which};"), torch.arange(1024.0), 1024, out, threads=1024)
        assert out.tolist() == [t + which for t in range(1024)]
        return len(Path("/proc/self/maps").read_text().splitlines())

    first = mappings_after(0)
    assert all(mappings_after(which) < first + 500 for which in (1, 2, 3))
