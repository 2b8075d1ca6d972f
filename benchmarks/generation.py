"""Tokens per second of the demo pair on held-out prompts: the draft tree and the same drafter's chain, each as a ratio
to plain decoding in the same run.

Every prompt is run by every method in turn, so that a slow moment of the machine falls on all of them, and all prompts
are gone through before any is run again, so that slow minutes do not hold all runs of a prompt: its fastest counts. A
ratio is total time of plain decoding over total time of the method (the texts are the same, token for token, which is
checked); its spread is a 90 % bootstrap interval over prompts. An output loops if one of its 12-grams occurs twice.
"""

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import onnxruntime
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ddtree.demo.evaluate import loops
from ddtree.demo.prompts import KINDS, held_out_prompts
from ddtree.runtime import LLM, SamplingParams
from ddtree.runtime.round import Method

BOOTSTRAP = 2000


@dataclass(frozen=True)
class Run:
    prompt: int
    kind: str
    token_ids: tuple[int, ...]
    seconds: float
    rounds: int
    emitted: int  # by rounds; the prompt's pass gives the first token

    @property
    def loops(self) -> bool:
        return loops(self.token_ids)


@dataclass(frozen=True)
class Setting:
    name: str
    method: Method
    budget: int = 0
    adaptive: bool = False


@click.command(context_settings={"show_default": True})
@click.option("--prompts", default=12, help="Prompts of each kind.")
@click.option("--max-tokens", default=96, help="Tokens of each output.")
@click.option("--repeats", default=6, help="Runs of each prompt and method; the fastest counts.")
@click.option("--temperature", type=float, multiple=True, default=(0.0, 0.8), help="May be given several times.")
@click.option("--budget", type=int, multiple=True, default=(8, 16), help="Whole trees; may be given several times.")
@click.option("--most", type=int, multiple=True, default=(16,), help="Adaptive trees; may be given several times.")
@click.option("--threads", type=int, help="Threads of a pass.")
def main(
    prompts: int,
    max_tokens: int,
    repeats: int,
    temperature: tuple[float, ...],
    budget: tuple[int, ...],
    most: tuple[int, ...],
    threads: int | None,
) -> None:
    """Measure chain and tree against plain decoding."""
    console = Console(highlight=False, width=150)
    llm = LLM(threads=threads)
    texts = [(kind, text) for kind in KINDS for text in held_out_prompts(kind, prompts, seed=0)]
    settings = [
        Setting("ar", "ar"),
        Setting("chain", "chain"),
        *(Setting(f"ddtree {b}, whole", "ddtree", b) for b in budget),
        *(Setting(f"ddtree {b}, adaptive", "ddtree", b, adaptive=True) for b in most),
    ]
    console.print(_machine())
    console.print(
        f"{len(texts)} held-out prompts, {prompts} of each kind ({', '.join(KINDS)}), at most {max_tokens} tokens each"
    )
    for t in temperature:
        best: dict[tuple[Setting, int], Run] = {}
        schedule = [(index, *text) for _ in range(repeats) for index, text in enumerate(texts)]
        for index, kind, text in track(schedule, f"temperature {t}", console=Console(stderr=True)):
            params = SamplingParams(max_tokens=max_tokens, temperature=t, seed=index)
            for setting in settings:
                llm.method, llm.budget, llm.adaptive = setting.method, setting.budget, setting.adaptive
                run = _run(llm, index, kind, text, params)
                if (setting, index) not in best or run.seconds < best[setting, index].seconds:
                    best[setting, index] = run
        runs = {setting: [best[setting, index] for index in range(len(texts))] for setting in settings}
        console.print(_table(t, runs))


def _run(llm: LLM, index: int, kind: str, text: str, params: SamplingParams) -> Run:
    output = llm.generate(text, params)
    stats = output.statistics
    seconds = stats.prefill_seconds + stats.decode_seconds
    return Run(index, kind, tuple(output.outputs[0].token_ids), seconds, stats.rounds, stats.emitted_tokens)


def _table(temperature: float, runs: dict[Setting, list[Run]]) -> Table:
    plain = next(iter(runs.values()))
    looping = {run.prompt for run in plain if run.loops}
    table = Table(box=MARKDOWN, title=f"temperature {temperature}: {len(looping)} of {len(plain)} outputs loop")
    for heading in ("method", "tokens/s", "tokens a round", "speed-up", "without loops", *KINDS, "same text"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for setting, rows in runs.items():
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, rows, strict=True))
        table.add_row(
            setting.name,
            f"{sum(len(r.token_ids) for r in rows) / sum(r.seconds for r in rows):.0f}",
            f"{sum(r.emitted for r in rows) / sum(r.rounds for r in rows):.2f}",
            _speed_up(plain, rows),
            _speed_up((r for r in plain if r.prompt not in looping), (r for r in rows if r.prompt not in looping)),
            *(
                _ratio([r.seconds for r in plain if r.kind == k], [r.seconds for r in rows if r.kind == k])
                for k in KINDS
            ),
            f"{same}/{len(plain)}",
        )
    return table


def _speed_up(plain: Iterable[Run], runs: Iterable[Run]) -> str:
    slow, fast = np.array([r.seconds for r in plain]), np.array([r.seconds for r in runs])
    if not len(slow):
        return "-"
    picks = np.random.default_rng(0).integers(len(slow), size=(BOOTSTRAP, len(slow)))
    low, high = np.quantile(slow[picks].sum(1) / fast[picks].sum(1), [0.05, 0.95])
    return f"{slow.sum() / fast.sum():.2f} ({low:.2f}-{high:.2f})"


def _ratio(slow: list[float], fast: list[float]) -> str:
    return f"{sum(slow) / sum(fast):.2f}" if slow else "-"


def _machine() -> str:
    model = next((line.split(": ")[1] for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    return (
        f"{model}, {torch.get_num_threads()} threads, onnxruntime {onnxruntime.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
