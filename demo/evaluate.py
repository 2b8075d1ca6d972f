"""Measures a pair on held-out text only: `python -m ddtree.demo.evaluate`.

No tree pass is needed. With the coupled walk the text does not depend on the tree, so plain decoding writes it once,
one pass of the drafter gives its marginals at every position of it, and each budget's rounds are then walked along it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from ddtree.demo import DRAFT_DIR, TARGET_DIR
from ddtree.demo.corpus import KINDS, stdlib_texts
from ddtree.demo.drafter import Drafter
from ddtree.demo.export import load_drafter, load_target
from ddtree.demo.generator import FIRST_HELD_OUT_SEED, generate
from ddtree.demo.own_text import write_batch
from ddtree.demo.prompts import PROMPT_TOKENS, held_out_prompts
from ddtree.demo.recipe import END_ID, Recipe
from ddtree.demo.target import Target
from ddtree.demo.train_target import token_stream
from ddtree.plugins.ops import build_tree

NEW_TOKENS = 96
BUDGETS = (8, 16, 32, 64)
PROMPT_SEED = 7
_REPEAT = 12


@dataclass
class Written:
    """What the target wrote after one held-out prompt."""

    kind: str
    temperature: float
    ids: np.ndarray  # [length] int64, prompt and text
    first: int  # position of the first written token
    features: np.ndarray  # [length, taps * hidden] float16

    @property
    def loops(self) -> bool:
        return loops(self.ids[self.first :].tolist())


def loops(token_ids: Sequence[int]) -> bool:
    """Whether some 12-gram of a text occurs in it twice."""
    grams = [tuple(token_ids[i : i + _REPEAT]) for i in range(len(token_ids) - _REPEAT + 1)]
    return len(set(grams)) < len(grams)


@torch.no_grad()
def held_out_loss(target: Target, tokenizer: Tokenizer, kind: str, windows: int = 64) -> tuple[float, float]:
    """Nats per token, and the share of tokens that are the likeliest one, in windows of 256 tokens."""
    if kind == "stdlib":
        texts = stdlib_texts(held_out=True)
    else:
        texts = [generate(kind, FIRST_HELD_OUT_SEED + number) for number in range(200)]
    stream = token_stream(tokenizer, texts).astype(np.int64)
    starts = np.linspace(0, len(stream) - 257, windows).astype(int)
    ids = torch.from_numpy(np.stack([stream[start : start + 257] for start in starts]))
    logits = target.logits(target(ids[:, :-1])[0]).flatten(0, 1)
    labels = ids[:, 1:].flatten()
    return float(functional.cross_entropy(logits, labels)), float((logits.argmax(-1) == labels).float().mean())


def write(recipe: Recipe, target: Target, tokenizer: Tokenizer, prompts_of_kind: int) -> list[Written]:
    """Each kind's prompts continued twice, greedily and sampled, up to the end token or NEW_TOKENS tokens."""
    prompts = [
        (kind, tokenizer.encode(text).ids)
        for kind in KINDS
        for text in held_out_prompts(kind, prompts_of_kind, PROMPT_SEED, tokenizer=tokenizer)
    ]
    batch = write_batch(
        recipe,
        target,
        lambda row: prompts[row // 2][1],
        rows=2 * len(prompts),
        length=PROMPT_TOKENS + NEW_TOKENS,
        seed=PROMPT_SEED,
    )
    written = []
    for row, (ids, features) in enumerate(zip(batch.ids.astype(np.int64), batch.features, strict=True)):
        kind, prompt = prompts[row // 2]
        first = len(prompt)
        ends = np.flatnonzero(ids[first:] == END_ID)
        stop = first + (ends[0] + 1 if len(ends) else NEW_TOKENS)
        temperature = recipe.temperature if row % 2 else 0.0
        written.append(Written(kind, temperature, ids[:stop], first, features[:stop]))
    return written


@torch.no_grad()
def draft_logits(drafter: Drafter, embedding: Tensor, text: Written) -> Tensor:
    """The drafter's logits with each written token but the last as the anchor, float32 [anchors, depths, vocab]."""
    anchors = torch.arange(text.first, len(text.ids) - 1)[None]
    features = torch.from_numpy(text.features[None].astype(np.float32))
    hidden = drafter(features, torch.from_numpy(text.ids[None]), anchors, embedding)
    return functional.linear(hidden[0], embedding)


def right_guesses(logits: Tensor, text: Written) -> np.ndarray:
    """Whether the likeliest token of each depth is the text's: float [anchors, depths], NaN beyond the text."""
    guesses = logits.argmax(-1).numpy()
    right = np.full(guesses.shape, np.nan)
    for anchor in range(len(guesses)):
        truth = text.ids[text.first + anchor + 1 :][: guesses.shape[1]]
        right[anchor, : len(truth)] = guesses[anchor, : len(truth)] == truth
    return right


def rounds(logits: Tensor, text: Written, budget: int, mode: str) -> int:
    """How many rounds of draft and verify write the text after its first token, which the prompt's own pass gives."""
    roots = torch.from_numpy(text.ids[text.first : -1]).int()
    tree = build_tree(logits, roots, budget=budget, mode=mode)
    tokens, parents, depths = tree.token_ids.tolist(), tree.parents.tolist(), tree.depths.tolist()
    done, count, written = 0, 0, text.ids[text.first :].tolist()
    while done < len(written) - 1:
        node = 0
        for child in range(1, int(tree.node_count[done])):  # parents come before their children
            position = done + depths[done][child]
            if parents[done][child] == node and position < len(written) and tokens[done][child] == written[position]:
                node = child
        done += depths[done][node] + 1  # the accepted tokens and the bonus token
        count += 1
    return count


def evaluate(recipe: Recipe, pair: tuple[Path, Path], prompts_of_kind: int) -> dict:
    """Every figure of the model card, as plain lists and numbers."""
    torch.set_num_threads(recipe.threads)
    target, drafter = load_target(recipe.target, pair[0]), load_drafter(recipe.target, recipe.drafter, pair[1])
    tokenizer = Tokenizer.from_file(str(pair[0] / "tokenizer.json"))
    report: dict = {"prompts_of_kind": prompts_of_kind, "held_out": {}, "accuracy": {}, "acceptance": []}
    for kind in KINDS:
        report["held_out"][kind] = held_out_loss(target, tokenizer, kind)

    texts = write(recipe, target, tokenizer, prompts_of_kind)
    policies = [("chain", recipe.drafter.block_size - 1, "chain"), *((f"tree {b}", b, "tree") for b in BUDGETS)]
    right: dict = {}
    for text in texts:
        if len(text.ids) - text.first < 2:
            continue
        logits = draft_logits(drafter, target.embed_tokens.weight, text)
        right.setdefault((text.kind, text.temperature), []).append(right_guesses(logits, text))
        row = {"kind": text.kind, "temperature": text.temperature, "loops": text.loops}
        row["tokens"] = len(text.ids) - text.first - 1
        row["rounds"] = {name: rounds(logits, text, budget, mode) for name, budget, mode in policies}
        report["acceptance"].append(row)
    for (kind, temperature), parts in right.items():
        report["accuracy"][f"{kind} {temperature}"] = np.nanmean(np.concatenate(parts), 0).round(3).tolist()
    report["recipe"] = asdict(recipe)
    return report


def show(report: dict, console: Console) -> None:
    """The tables of the model card."""
    table = Table("held-out text", "nats/token", "top-1", box=MARKDOWN)
    for kind, (loss, top1) in report["held_out"].items():
        table.add_row(kind, f"{loss:.3f}", f"{top1:.1%}")
    console.print(table)

    table = Table("drafter's top-1", *(str(depth) for depth in range(1, 16)), box=MARKDOWN)
    for name, values in report["accuracy"].items():
        table.add_row(name, *(f"{value:.2f}"[1:] if value < 1 else "1" for value in values))
    console.print(table)

    rows = report["acceptance"]
    table = Table("acceptance length", *rows[0]["rounds"], "tree 16, 10-90 %", "loops", "texts", box=MARKDOWN)
    for temperature in sorted({row["temperature"] for row in rows}):
        for kind in (*KINDS, "mixed", "mixed, no loops"):
            chosen = [
                row
                for row in rows
                if row["temperature"] == temperature
                and (row["kind"] == kind or kind == "mixed" or (kind == "mixed, no loops" and not row["loops"]))
            ]
            if chosen:
                tokens = sum(row["tokens"] for row in chosen)
                lengths = [tokens / sum(row["rounds"][name] for row in chosen) for name in chosen[0]["rounds"]]
                low, high = np.quantile([row["tokens"] / row["rounds"]["tree 16"] for row in chosen], (0.1, 0.9))
                cells = [f"{kind}, T={temperature}", *(f"{length:.2f}" for length in lengths), f"{low:.1f}-{high:.1f}"]
                table.add_row(*cells, f"{np.mean([row['loops'] for row in chosen]):.0%}", str(len(chosen)))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo pair on held-out text.")
    parser.add_argument("--target", type=Path, default=TARGET_DIR)
    parser.add_argument("--draft", type=Path, default=DRAFT_DIR)
    parser.add_argument("--prompts", type=int, default=40, help="of each of the four kinds")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    arguments = parser.parse_args()
    report = evaluate(Recipe(), (arguments.target, arguments.draft), arguments.prompts)
    show(report, Console(width=160))
    if arguments.json:
        arguments.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
