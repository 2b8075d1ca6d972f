"""What the drafter learns from: text that the target wrote itself, with the target's hidden states.

A row is a series of prompt and continuation: some tokens of training text, then up to 144 of the target's own (or up to
its end token), then the next prompt. Every other row is greedy, the rest is sampled. Rows advance in step, so
one batch needs no padding and no mask.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from ddtree.demo.corpus import generated_texts, stdlib_texts
from ddtree.demo.generator import GENERATED_KINDS
from ddtree.demo.recipe import END_ID, Recipe, Rows
from ddtree.demo.target import Target
from ddtree.demo.train_target import token_stream
from ddtree.demo.training import Report


@dataclass
class Batch:
    """Rows of own text, memory-mapped."""

    ids: np.ndarray  # [rows, length] uint16
    own: np.ndarray  # [rows, length] bool: written by the target, not part of a prompt
    features: np.ndarray  # [rows, length, taps * hidden] float16


def write_own_text(recipe: Recipe, target: Target, tokenizer: Tokenizer, directory: Path, report: Report) -> None:
    """Write every batch of the recipe that `directory` does not have yet."""
    prompts = training_prompts(recipe, tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    todo = [(size, number) for size in recipe.own_text for number in range(size.batches)]
    for done, (size, number) in enumerate(todo):
        path = batch_path(directory, size, number)
        if not path.exists():
            rng = np.random.default_rng([recipe.seed, size.length, number])

            def next_prompt(row: int, rng: np.random.Generator = rng) -> list[int]:
                pool = prompts[row // 2 % len(prompts)]  # so that each pool has greedy and sampled rows
                return pool[rng.integers(len(pool)), : rng.integers(*recipe.prompt_tokens, endpoint=True)].tolist()

            _save(path, write_batch(recipe, target, next_prompt, size.rows, size.length, int(rng.integers(2**62))))
        tokens = sum(s.rows * s.length for s, _ in todo[: done + 1])
        report(done + 1, len(todo), f"{tokens / 1000:.0f} k tokens")


def read_own_text(recipe: Recipe, directory: Path) -> list[list[Batch]]:
    """The batches of each part of the recipe."""
    return [[_load(batch_path(directory, size, n)) for n in range(size.batches)] for size in recipe.own_text]


def training_prompts(recipe: Recipe, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Prompts of each kind from training text, uint16 [count, prompt_tokens[1]]: pieces of the standard library that
    begin with a line, and the beginnings of generated documents. The library is half: it is the harder kind."""
    count = recipe.prompt_tokens[1]
    library = token_stream(tokenizer, stdlib_texts(held_out=False))
    breaks = np.array([token.startswith("Ċ") for token in _vocabulary(tokenizer)])  # tokens that begin a new line
    starts = np.flatnonzero(breaks[library[:-count]])
    pieces = [library[start + 1 : start + 1 + count] for start in starts]
    library_prompts = np.stack([piece for piece in pieces if len(piece) == count and END_ID not in piece])

    generated = token_stream(tokenizer, generated_texts(recipe.documents, held_out=False))
    starts = np.flatnonzero(generated[:-count] == END_ID) + 1
    generated_prompts = np.stack([generated[start : start + count] for start in starts])
    generated_prompts = generated_prompts[~(generated_prompts == END_ID).any(1)]
    return [library_prompts] * len(GENERATED_KINDS) + [generated_prompts] * len(GENERATED_KINDS)


@torch.no_grad()
def write_batch(
    recipe: Recipe, target: Target, next_prompt: Callable[[int], list[int]], rows: int, length: int, seed: int
) -> Batch:
    """One batch. Even rows are greedy, odd ones sampled; `next_prompt(row)` is called whenever a row needs a prompt."""
    generator = torch.Generator().manual_seed(seed)
    greedy = torch.arange(rows) % 2 == 0
    ids = np.zeros((rows, length), np.uint16)
    own = np.zeros((rows, length), bool)
    features = np.zeros((rows, length, len(recipe.drafter.target_layer_ids) * recipe.target.hidden_size), np.float16)
    caches = target.new_caches(rows, length)
    left = np.zeros(rows, int)  # tokens left of the row's continuation
    forced: list[list[int]] = [[] for _ in range(rows)]  # what is left of its prompt
    following = np.zeros(rows, int)  # what the target wrote last
    for position in range(length):
        for row in range(rows):
            ended = position > 0 and own[row, position - 1] and ids[row, position - 1] == END_ID
            if ended or (left[row] == 0 and not forced[row]):
                forced[row] = list(next_prompt(row))
                left[row] = recipe.continuation_tokens
            if forced[row]:
                ids[row, position] = forced[row].pop(0)
            else:
                ids[row, position], own[row, position] = following[row], True
                left[row] -= 1
        now = torch.from_numpy(ids[:, position : position + 1].astype(np.int64))
        hidden, tapped = target(now, target_layer_ids=recipe.drafter.target_layer_ids, caches=caches, past=position)
        assert tapped is not None
        features[:, position] = tapped[:, 0].numpy()
        logits = target.logits(hidden[:, 0])  # [rows, vocab]
        sampled = torch.multinomial((logits / recipe.temperature).softmax(-1), 1, generator=generator)[:, 0]
        following = torch.where(greedy, logits.argmax(-1), sampled).numpy()
    return Batch(ids, own, features)


def batch_path(directory: Path, size: Rows, number: int) -> Path:
    return directory / f"{size.length}-{number:03d}"


def _save(path: Path, batch: Batch) -> None:
    partial = path.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    for name, array in vars(batch).items():
        np.save(partial / f"{name}.npy", array)
    os.replace(partial, path)


def _load(path: Path) -> Batch:
    return Batch(**{name: np.load(path / f"{name}.npy", mmap_mode="r") for name in ("ids", "own", "features")})


def _vocabulary(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_token(index) or "" for index in range(tokenizer.get_vocab_size())]
