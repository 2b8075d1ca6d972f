"""Times the operations on a GPU and prints the bandwidth that each reaches; needs no pytest.

    python tests/gpu/timing.py [--out timing.json] [--vocab 151936] [--repeats 50]

Each operation is captured in a CUDA graph, so that the host's part is left out, and replayed with a cold L2 cache. Its
bandwidth is the least number of bytes that it has to read and write over the median time; beside it stands the
bandwidth of a plain copy on the same device, taken in the same way. The result is one JSON file.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ddtree.plugins import ops

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
DEPTH = 15  # a block of 16 tokens
LAYERS, KV_HEADS, HEAD_DIM, CACHE = 36, 8, 128, 4096  # Qwen3-8B
FEATURES = 5 * 4096  # of 5 target layers
PAST = 2048
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.95, min_p 0.05": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
}


@dataclass(frozen=True)
class Timing:
    operation: str
    batch: int
    budget: int
    bytes: int
    microseconds: float  # median
    gigabytes_per_second: float


def median_microseconds(run: Callable[[], object], repeats: int) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # compiles and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flushed = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)  # larger than any L2
    spans = []
    for _ in range(repeats):
        flushed.zero_()
        span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        span[0].record()
        graph.replay()
        span[1].record()
        spans.append(span)
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in spans)


def copy_bandwidth(repeats: int) -> float:
    """Gigabytes a second that a copy of 1 GiB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_microseconds(lambda: target.copy_(source), repeats) / 1e3


def draft_logits(batch: int, vocab: int) -> torch.Tensor:
    """[batch, D, vocab]: the r-th likeliest token has logit -2.5 ln(1 + r), give or take 0.5."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    ranks = torch.rand(batch, DEPTH, vocab, device=DEVICE, generator=generator).argsort(-1)
    noise = torch.randn(ranks.shape, device=DEVICE, generator=generator)
    return (-2.5 * torch.log1p(ranks.float()) + 0.5 * noise).to(DTYPE)


def target_logits(drafts: torch.Tensor, tree: ops.DraftTree) -> torch.Tensor:
    """[batch, N, vocab]: after a node of depth d, the draft's row d + 1, so that drafts are often right."""
    slots = torch.arange(len(drafts), device=DEVICE)[:, None]
    return drafts[slots, tree.depths.clamp(max=DEPTH - 1).long()]


def sampling(batch: int, **settings: float) -> ops.SamplingTensors:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), settings.get(name, default), dtype=dtype, device=DEVICE)

    return ops.SamplingTensors(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=torch.arange(batch, device=DEVICE),
    )


def time_all(batch: int, budget: int, vocab: int, repeats: int) -> Iterator[Timing]:
    def timing(operation: str, run: Callable[[], object], moved: int) -> Timing:
        microseconds = median_microseconds(run, repeats)
        return Timing(operation, batch, budget, moved, microseconds, moved / microseconds / 1e3)

    yield from time_tree(timing, batch, budget, vocab)
    yield from time_commit(timing, batch, budget)


def time_tree(timing: Callable[..., Timing], batch: int, budget: int, vocab: int) -> Iterator[Timing]:
    drafts, roots = draft_logits(batch, vocab), torch.arange(batch, device=DEVICE)
    past = torch.full((batch,), PAST, device=DEVICE)
    yield timing("build_tree", lambda: ops.build_tree(drafts, roots, budget=budget), drafts.nbytes)
    tree = ops.build_tree(drafts, roots, budget=budget)

    mask_bytes = batch * (budget + 1) * CACHE * DTYPE.itemsize
    yield timing("encode_tree", lambda: ops.encode_tree(tree, past, past, CACHE, DTYPE), mask_bytes)

    logits = target_logits(drafts, tree)
    row_bytes = vocab * DTYPE.itemsize
    for name, settings in SETTINGS.items():
        slots = sampling(batch, **settings)
        rows = batch + int(ops.verify_tree(logits, tree, past, slots).accepted_count.sum())
        run = partial(ops.verify_tree, logits, tree, past, slots)
        yield timing(f"verify_tree, {name}", run, rows * row_bytes)


def time_commit(timing: Callable[..., Timing], batch: int, budget: int) -> Iterator[Timing]:
    # Every second node of the tree is accepted, so that each row but the root's moves.
    steps = min(DEPTH, budget // 2)
    nodes = torch.full((batch, DEPTH + 1), -1, dtype=torch.int32, device=DEVICE)
    nodes[:, : steps + 1] = 2 * torch.arange(steps + 1, device=DEVICE)
    count = torch.full((batch,), steps, dtype=torch.int32, device=DEVICE)
    verified = ops.Verified(nodes, count, nodes, nodes.float(), torch.zeros_like(count))
    past = torch.full((batch,), PAST, device=DEVICE)
    shape = (batch, KV_HEADS, CACHE, HEAD_DIM)
    flat = [torch.zeros(shape, dtype=DTYPE, device=DEVICE) for _ in range(2 * LAYERS)]
    caches = list(zip(flat[::2], flat[1::2], strict=True))
    rows_moved = 2 * LAYERS * batch * KV_HEADS * steps
    yield timing("commit", lambda: ops.commit(caches, past, verified), 2 * rows_moved * HEAD_DIM * DTYPE.itemsize)

    features = torch.zeros(batch, budget + 1, FEATURES, dtype=DTYPE, device=DEVICE)
    rows_copied = batch * (steps + 1 + DEPTH + 1)  # read, and written with the padding
    moved = rows_copied * FEATURES * DTYPE.itemsize
    yield timing("gather_features", lambda: ops.gather_features(features, verified), moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="timing.json")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing was timed")
    copied = copy_bandwidth(arguments.repeats)
    print(f"{torch.cuda.get_device_name()}, {DTYPE}, vocabulary {arguments.vocab}; a copy reaches {copied:.0f} GB/s")
    print(f"{'operation':42} {'batch':>5} {'budget':>6} {'us':>9} {'GB/s':>7} {'of a copy':>9}")
    timings = []
    for batch, budget in ((1, 64), (1, 255), (1, 1023), (8, 64), (8, 255)):
        for timing in time_all(batch, budget, arguments.vocab, arguments.repeats):
            timings.append(timing)
            print(
                f"{timing.operation:42} {batch:5} {budget:6} {timing.microseconds:9.1f} "
                f"{timing.gigabytes_per_second:7.0f} {timing.gigabytes_per_second / copied:9.0%}"
            )
    major, minor = torch.cuda.get_device_capability()
    result = {
        "device": torch.cuda.get_device_name(),
        "arch": f"sm_{major}{minor}",
        "torch": torch.__version__,
        "vocab": arguments.vocab,
        "dtype": str(DTYPE).removeprefix("torch."),
        "copy_gigabytes_per_second": copied,
        "timings": [asdict(timing) for timing in timings],
    }
    with open(arguments.out, "w") as file:
        json.dump(result, file, indent=2)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
