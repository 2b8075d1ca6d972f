"""Times build_tree and verify_tree on the CPU beside the published algorithm of DDTree (arXiv 2604.12989).

The published algorithm is written here from its description: a Python heap over torch.topk and log-sum-exp, then what
each node sees; softmax and multinomial of all N rows, and a walk through one dictionary of children a node. Both sides
run in turn, on the same logits, in float32. Medians are shown and, after a slash, the fastest run: on a machine with
other work to do, waiting for a core adds about as much to either side, and hides the ratio. Trees may differ where two
float32 sums nearly tie, because the published heap reaches a sibling by a subtraction and an addition.
"""

import heapq
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from ddtree.plugins import ops

ROOT = 11


def published_build(draft_logits: Tensor, budget: int) -> tuple[list[int], list[int], list[dict[int, int]], np.ndarray]:
    """Tokens and parents of the nodes, each node's children by token, and which nodes it sees; [D, vocab] logits."""
    top = torch.topk(draft_logits, min(budget, draft_logits.shape[1]))
    log_probs = (top.values - torch.logsumexp(draft_logits, -1, keepdim=True)).tolist()
    token_ids = top.indices.tolist()
    depths, ranks = len(log_probs), len(log_probs[0])
    tokens, parents, children = [ROOT], [-1], [{}]  # type: tuple[list[int], list[int], list[dict[int, int]]]
    heap = [(-log_probs[0][0], (0,), 0, 1, 0, log_probs[0][0])]
    while heap and len(tokens) <= budget:
        _, path, parent, depth, rank, logw = heapq.heappop(heap)
        node, token = len(tokens), token_ids[depth - 1][rank]
        tokens.append(token)
        parents.append(parent)
        children.append({})
        children[parent][token] = node
        if rank + 1 < ranks:
            sibling = logw - log_probs[depth - 1][rank] + log_probs[depth - 1][rank + 1]
            heapq.heappush(heap, (-sibling, (*path[:-1], rank + 1), parent, depth, rank + 1, sibling))
        if depth < depths:
            child = logw + log_probs[depth][0]
            heapq.heappush(heap, (-child, (*path, 0), node, depth + 1, 0, child))
    visible = np.eye(len(tokens), dtype=bool)
    for node in range(1, len(tokens)):
        visible[node, :node] = visible[parents[node], :node]
    return tokens, parents, children, visible


def published_verify(logits: Tensor, children: list[dict[int, int]]) -> list[int]:
    """A token drawn at every node (``logits`` [N, vocab], temperature 1), then the walk: accepted nodes."""
    drawn = torch.multinomial(torch.softmax(logits, -1), 1).squeeze(1).tolist()
    path = [0]
    while drawn[path[-1]] in children[path[-1]]:
        path.append(children[path[-1]][drawn[path[-1]]])
    return path


def peaked(depth: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Draft logits [D, vocab] as language models have them: the r-th likeliest token has logit -s ln(1 + r), give or
    take 0.5, s from 3.5 at the first depth (its best token has probability 0.9) to 1.5 at the last (0.4)."""
    ranks = torch.arange(vocab, dtype=torch.float32)
    slopes = torch.linspace(3.5, 1.5, depth)[:, None]
    logits = -slopes * torch.log1p(ranks) + 0.5 * torch.randn(depth, vocab, generator=generator)
    return torch.stack([row[torch.randperm(vocab, generator=generator)] for row in logits])


def flat(depth: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Draft logits [D, vocab] from a normal distribution: nothing is likely, and the tree is shallow and wide."""
    return torch.randn(depth, vocab, generator=generator)


def target_logits(draft_logits: Tensor, tree: ops.DraftTree, generator: torch.Generator) -> Tensor:
    """[1, N, vocab]: after a node of depth d the draft's row d + 1, give or take 1, so that drafts are often right."""
    rows = tree.depths[0].clamp(max=draft_logits.shape[0] - 1).long()
    logits = torch.empty(1, len(rows), draft_logits.shape[1])
    torch.randn(logits.shape, generator=generator, out=logits)
    for node, row in enumerate(rows.tolist()):
        logits[0, node] += draft_logits[row]
    return logits


@dataclass(frozen=True)
class Timing:
    milliseconds: list[float]
    results: list

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    def __str__(self) -> str:
        return f"{self.median:.2f} / {min(self.milliseconds):.2f}"


def in_turn(sides: list[Callable[[int], object]], repeats: int) -> list[Timing]:
    """Timings of each side, after one run that is not counted."""
    timings = [Timing([], []) for _ in sides]
    for repeat in range(-1, repeats):
        for timing, run in zip(timings, sides, strict=True):
            start = time.perf_counter()
            result = run(repeat)
            elapsed = time.perf_counter() - start
            if repeat >= 0:
                timing.milliseconds.append(elapsed * 1e3)
                timing.results.append(result)
    return timings


def ratios(ours: Timing, published: Timing) -> str:
    fastest = min(published.milliseconds) / min(ours.milliseconds)
    return f"[bold]{published.median / ours.median:.1f}x / {fastest:.1f}x"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@click.command(context_settings={"show_default": True})
@click.option(
    "--budget", "budgets", type=int, multiple=True, default=(64, 256, 1024), help="May be given several times."
)
@click.option("--vocab", default=151936, help="Size of the vocabulary.")
@click.option("--depth", default=15, help="D, the rows of draft logits.")
@click.option("--repeats", default=21, help="Timed runs of each side; a third as many of verification.")
@click.option("--threads", type=int, help="Threads of torch. Absent: its own choice.")
def main(budgets: tuple[int, ...], vocab: int, depth: int, repeats: int, threads: int | None) -> None:
    """Time build_tree and verify_tree beside the published algorithm."""
    if threads:
        torch.set_num_threads(threads)
    console = Console(width=150)
    console.print(
        f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        f"Batch 1, D {depth}, vocabulary {vocab:,}, float32, verification at temperature 1. "
        f"Median / fastest run. Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    )
    table = Table("logits", "budget", "depth", *("build_tree ms", "published", "ratio"), box=MARKDOWN)
    for column in ("accepted", "published", "verify_tree ms", "published", "ratio"):
        table.add_column(column)
    roots, root_position = torch.tensor([ROOT]), torch.tensor([100])
    with Progress(console=console, transient=True) as progress:
        kinds = [peaked, flat]
        task = progress.add_task("measuring", total=len(kinds) * len(budgets))
        for kind in kinds:
            for budget in budgets:
                generator = torch.Generator().manual_seed(budget)
                draft_logits = kind(depth, vocab, generator)
                built, published_built = in_turn(
                    [
                        lambda _, d=draft_logits, b=budget: ops.build_tree(d[None], roots, budget=b),
                        lambda _, d=draft_logits, b=budget: published_build(d, b),
                    ],
                    repeats,
                )
                tree, (tokens, parents, children, _) = built.results[0], published_built.results[0]
                same = tree.token_ids[0].tolist() == tokens and tree.parents[0].tolist() == parents
                logits = target_logits(draft_logits, tree, generator)

                def verify(seed: int, logits: Tensor = logits, tree: ops.DraftTree = tree) -> int:
                    sampling = ops.SamplingTensors(
                        temperature=torch.ones(1),
                        top_k=torch.zeros(1, dtype=torch.int32),
                        top_p=torch.ones(1),
                        min_p=torch.zeros(1),
                        seed=torch.tensor([seed]),
                    )
                    return int(ops.verify_tree(logits, tree, root_position, sampling).accepted_count)

                verified, published_verified = in_turn(
                    [verify, lambda _, x=logits[0], c=children: len(published_verify(x, c)) - 1],
                    max(3, repeats // 3),
                )
                table.add_row(
                    kind.__name__,
                    str(budget) + ("" if same else " (trees differ)"),
                    str(int(tree.depths.max())),
                    str(built),
                    str(published_built),
                    ratios(built, published_built),
                    *(f"{statistics.mean(side.results):.1f}" for side in (verified, published_verified)),
                    str(verified),
                    str(published_verified),
                    ratios(verified, published_verified),
                )
                progress.advance(task)
    console.print(table)


if __name__ == "__main__":
    main()
