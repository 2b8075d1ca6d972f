"""Makes the demo pair from nothing: `python -m ddtree.demo.make`.

Four steps, each skipped when its result is already in demo/work: tokenizer, target, the target's own text, drafter.
Interrupted at any point and started again, it goes on from the last checkpoint and ends with the same pair.
"""

import ctypes
import json
import os
import shutil
import time
from pathlib import Path

# Read when torch is imported. The compiler runs inside this process, so that its CPU time is counted; a thread that
# waits sleeps instead of spinning, which on a busy machine would take the processor from the one it waits for.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from ddtree.demo import DRAFT_DIR, TARGET_DIR
from ddtree.demo.corpus import generated_texts, stdlib_texts
from ddtree.demo.export import (
    assert_equals_transformers,
    export_drafter,
    export_target,
    load_target,
)
from ddtree.demo.own_text import write_own_text
from ddtree.demo.recipe import Recipe
from ddtree.demo.tokenizer import save_tokenizer, train_tokenizer
from ddtree.demo.train_drafter import train_drafter
from ddtree.demo.train_target import train_target
from ddtree.demo.training import Report

WORK = Path(__file__).parent / "work"

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # parameters of mallopt(3)


def make(recipe: Recipe, work: Path, console: Console) -> Path:
    """Run every step that `work` does not have yet; returns the directory of the pair."""
    torch.set_num_threads(recipe.threads)
    work.mkdir(parents=True, exist_ok=True)
    pair, own_text = work / "pair", work / "own_text"
    layer_ids = recipe.drafter.target_layer_ids

    if not (work / "tokenizer.json").exists():
        with _Step("tokenizer", work, console):
            texts = stdlib_texts(held_out=False) + generated_texts(recipe.documents, held_out=False)
            train_tokenizer(texts, recipe.target.vocab_size).save(str(work / "tokenizer.partial"))
            os.replace(work / "tokenizer.partial", work / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))

    if not (pair / "target").exists():
        with _Step("target", work, console) as report:
            target = train_target(recipe, tokenizer, work / "target", report)
            export_target(target, pair / "target.partial")
            save_tokenizer(tokenizer, pair / "target.partial", recipe.target.max_positions)
            assert_equals_transformers(recipe.target, layer_ids, pair / "target.partial")
            os.replace(pair / "target.partial", pair / "target")
    target = load_target(recipe.target, pair / "target")

    if not (pair / "draft").exists():
        with _Step("own text", work, console) as report:
            write_own_text(recipe, target, tokenizer, own_text, report)
        with _Step("drafter", work, console) as report:
            drafter = train_drafter(recipe, target, own_text, work / "drafter.pt", report)
            export_drafter(drafter, pair / "draft.partial")
            os.replace(pair / "draft.partial", pair / "draft")
    return pair


def _keep_freed_memory() -> None:
    """Have the C library (glibc) keep what is freed: the large tensors of a step otherwise come as fresh pages from the
    system every time, which is an eighth to a third of the step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**28)):
            mallopt(parameter, value)


class _Step:
    """A progress bar for one step, and its CPU time (of compilers too) added up in work/cpu_seconds.json."""

    def __init__(self, name: str, work: Path, console: Console):
        self.name, self.console, self.ledger = name, console, work / "cpu_seconds.json"
        self.bar = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            transient=not console.is_terminal,
        )
        self.task = self.bar.add_task(name, total=None, note="")
        self.counted, self.written = sum(os.times()[:4]), time.monotonic()

    def __enter__(self) -> Report:
        self.bar.start()
        return self._report

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self._count()
        self.console.print(f"{self.name}: {cpu_seconds(self.ledger.parent)[self.name] / 60:.1f} CPU minutes")

    def _report(self, done: int, steps: int, note: str) -> None:
        self.bar.update(self.task, completed=done, total=steps, note=f"{done}/{steps}  {note}")
        if time.monotonic() - self.written > 30:
            self.written = time.monotonic()
            self._count()
            if not self.console.is_terminal:
                self.console.print(f"{self.name} {done}/{steps}  {note}")

    def _count(self) -> None:
        now = sum(os.times()[:4])
        seconds = cpu_seconds(self.ledger.parent)
        seconds[self.name] = seconds.get(self.name, 0.0) + now - self.counted
        self.counted = now
        self.ledger.write_text(json.dumps(seconds, indent=2) + "\n")


def cpu_seconds(work: Path) -> dict[str, float]:
    """CPU seconds of each step so far, all interrupted runs together."""
    ledger = work / "cpu_seconds.json"
    return json.loads(ledger.read_text()) if ledger.exists() else {}


def main() -> None:
    _keep_freed_memory()
    console = Console()
    pair = make(Recipe(), WORK, console)
    shutil.copytree(pair / "target", TARGET_DIR, dirs_exist_ok=True)
    shutil.copytree(pair / "draft", DRAFT_DIR, dirs_exist_ok=True)
    console.print(f"{sum(cpu_seconds(WORK).values()) / 60:.1f} CPU minutes in all")


if __name__ == "__main__":
    main()
