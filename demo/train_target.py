"""Trains the target on equal parts of standard library and generated text."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from ddtree.demo.corpus import generated_texts, stdlib_texts
from ddtree.demo.recipe import END_ID, Phase, Recipe
from ddtree.demo.target import Target
from ddtree.demo.training import Report, train


def train_target(recipe: Recipe, tokenizer: Tokenizer, checkpoint: Path, report: Report) -> Target:
    """The trained target in float32. Goes on from `checkpoint` where there is one."""
    library = token_stream(tokenizer, stdlib_texts(held_out=False))
    generated = token_stream(tokenizer, generated_texts(recipe.documents, held_out=False))
    rng = np.random.default_rng(recipe.seed)
    batches = [
        batch for cycle in recipe.target_cycles for phase in cycle for batch in _batches(library, generated, phase, rng)
    ]
    torch.manual_seed(recipe.seed)
    target = Target(recipe.target)

    def loss(ids: Tensor) -> Tensor:  # ids [rows, length + 1]
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
            hidden, _ = target(ids[:, :-1])
            logits = target.logits(hidden)
        return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    compiled = torch.compile(loss, dynamic=False, disable=not recipe.compile)
    train(
        target,
        lambda step: compiled(torch.from_numpy(batches[step]())),
        cycles=[sum(phase.steps for phase in cycle) for cycle in recipe.target_cycles],
        rate=recipe.target_rate,
        recipe=recipe,
        checkpoint=checkpoint,
        report=report,
    )
    return target


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one row of token ids, uint16, each text closed by the end token."""
    pieces = [np.array([*encoding.ids, END_ID], np.uint16) for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate(pieces)


def _batches(library: np.ndarray, generated: np.ndarray, phase: Phase, rng: np.random.Generator) -> list:
    """One function per step that cuts the step's batch, int64 [rows, length + 1]: half of each kind of text."""
    half, width = phase.rows // 2, phase.length + 1
    grid = np.arange(rng.integers(phase.length), len(library) - width, phase.length)
    library_starts = _in_turn(grid, phase.steps * half, rng)
    documents = np.flatnonzero(generated[:-width] == END_ID) + 1  # a generated row starts where a document does
    generated_starts = _in_turn(documents, phase.steps * (phase.rows - half), rng)

    def cut(step: int) -> np.ndarray:
        rows = [library[s : s + width] for s in library_starts[step * half :][:half]]
        rows += [generated[s : s + width] for s in generated_starts[step * (phase.rows - half) :][: phase.rows - half]]
        return np.stack(rows).astype(np.int64)

    return [lambda step=step: cut(step) for step in range(phase.steps)]


def _in_turn(items: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` items in random order, none a second time before all were taken."""
    rounds = -(-count // len(items))
    return np.concatenate([rng.permutation(items) for _ in range(rounds)])[:count]
