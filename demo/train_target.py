"""Trains the target on equal parts of standard library and generated text."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from ddtree.demo.corpus import generated_texts, stdlib_texts
from ddtree.demo.recipe import END_ID, Phase, Recipe, TargetShape
from ddtree.demo.target import Target
from ddtree.demo.training import Report, learning_rates, train


def train_target(recipe: Recipe, tokenizer: Tokenizer, checkpoints: Path, report: Report) -> Target:
    """The trained target in float32. Goes on from the files in `checkpoints`, one a stage, where there are any."""
    library = token_stream(tokenizer, stdlib_texts(held_out=False))
    generated = token_stream(tokenizer, generated_texts(recipe.documents, held_out=False))
    rng = np.random.default_rng(recipe.seed)
    torch.manual_seed(recipe.seed)
    target = Target(replace(recipe.target, layers=0))
    for stage in recipe.target_stages:
        target = grow(target, replace(recipe.target, layers=stage.layers))
        if recipe.compile:  # the layers one by one: they share one compilation
            for layer in target.layers:
                layer.compile(dynamic=False)
        batches = [batch for phase in stage.phases for batch in _batches(library, generated, phase, rng)]

        def loss_of_step(step: int, target: Target = target, batches: list = batches) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
                return next_token_loss(target, torch.from_numpy(batches[step]()))

        train(
            target,
            loss_of_step,
            rates=learning_rates(stage.steps, recipe.target_rate, recipe, falls=stage is recipe.target_stages[-1]),
            recipe=recipe,
            checkpoint=checkpoints / f"{stage.layers}-layers.pt",
            report=lambda done, steps, note, layers=stage.layers: report(done, steps, f"{layers} layers  {note}"),
        )
    return target


def next_token_loss(target: Target, ids: Tensor) -> Tensor:
    """Cross entropy of each token of `ids` [rows, length + 1] after the first."""
    hidden, _ = target(ids[:, :-1])
    return functional.cross_entropy(target.logits(hidden).float().flatten(0, 1), ids[:, 1:].flatten())


def grow(target: Target, shape: TargetShape) -> Target:
    """A target of `shape` whose layers repeat those of `target`, in order; new ones where `target` has none."""
    grown = Target(shape)
    if target.layers:
        for index, layer in enumerate(grown.layers):
            layer.load_state_dict(target.layers[index % len(target.layers)].state_dict())
        grown.embed_tokens.load_state_dict(target.embed_tokens.state_dict())
        grown.norm.load_state_dict(target.norm.state_dict())
    return grown


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
