"""What the drafter learns from: text that the target wrote itself, and some that it read, with its hidden states.

A row of its own text is a series of prompt and continuation: some tokens of training text, then up to 144 of the
target's own (or up to its end token), then the next prompt. Every other row is greedy, the rest is sampled. Rows
advance in step, so one batch needs no padding and no mask.
"""

import os
from collections import Counter
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
    own: np.ndarray  # [rows, length] bool: to be learnt; all but what is part of a prompt
    features: np.ndarray  # [rows, length, taps * hidden] float16


def write_own_text(recipe: Recipe, target: Target, tokenizer: Tokenizer, directory: Path, report: Report) -> None:
    """Write every batch of the recipe that `directory` does not have yet."""
    todo = [(rows, number) for rows, numbers in _numbered(recipe) for number in numbers]
    if all(batch_path(directory, rows, number).exists() for rows, number in todo):
        return
    library, generated = library_prompts(recipe, tokenizer), generated_prompts(recipe, tokenizer)
    pools = {
        "own": [library] * len(GENERATED_KINDS) + [generated] * len(GENERATED_KINDS),
        "own library": [library],
    }
    read = token_stream(tokenizer, stdlib_texts(held_out=False))
    directory.mkdir(parents=True, exist_ok=True)
    for done, (rows, number) in enumerate(todo):
        path = batch_path(directory, rows, number)
        if not path.exists():
            rng = np.random.default_rng([recipe.seed, rows.length, number])
            if rows.source == "read library":
                _save(path, read_batch(recipe, target, read, rows.rows, rows.length, rng))
            else:
                prompts = pools[rows.source]

                def next_prompt(row: int, prompts: list = prompts, rng: np.random.Generator = rng) -> list[int]:
                    pool = prompts[row // 2 % len(prompts)]  # so that each pool has greedy and sampled rows
                    return pool[rng.integers(len(pool)), : rng.integers(*recipe.prompt_tokens, endpoint=True)].tolist()

                seed = int(rng.integers(2**62))
                _save(path, write_batch(recipe, target, next_prompt, rows.rows, rows.length, seed))
        tokens = sum(r.rows * r.length for r, _ in todo[: done + 1])
        report(done + 1, len(todo), f"{tokens / 1000:.0f} k tokens")


def read_own_text(recipe: Recipe, directory: Path) -> dict[Rows, list[Batch]]:
    """The batches of each part of the recipe."""
    return {rows: [_load(batch_path(directory, rows, n)) for n in numbers] for rows, numbers in _numbered(recipe)}


def _numbered(recipe: Recipe) -> list[tuple[Rows, range]]:
    """Each part of the recipe and its batches' numbers, counted apart for each length of rows."""
    parts, taken = [], Counter[int]()
    for rows in (*recipe.drafter_text, recipe.long_drafter_text):
        first = taken[rows.length]
        taken[rows.length] += rows.batches
        parts.append((rows, range(first, taken[rows.length])))
    return parts


def library_prompts(recipe: Recipe, tokenizer: Tokenizer) -> np.ndarray:
    """Pieces of the standard library's training files that begin with a line, uint16 [count, prompt_tokens[1]]."""
    count = recipe.prompt_tokens[1]
    library = token_stream(tokenizer, stdlib_texts(held_out=False))
    breaks = np.array([token.startswith("Ċ") for token in _vocabulary(tokenizer)])  # tokens that begin a new line
    starts = np.flatnonzero(breaks[library[:-count]])
    pieces = [library[start + 1 : start + 1 + count] for start in starts]
    return np.stack([piece for piece in pieces if len(piece) == count and END_ID not in piece])


def generated_prompts(recipe: Recipe, tokenizer: Tokenizer) -> np.ndarray:
    """The beginnings of generated documents, uint16 [count, prompt_tokens[1]]."""
    count = recipe.prompt_tokens[1]
    generated = token_stream(tokenizer, generated_texts(recipe.documents, held_out=False))
    starts = np.flatnonzero(generated[:-count] == END_ID) + 1
    prompts = np.stack([generated[start : start + count] for start in starts])
    return prompts[~(prompts == END_ID).any(1)]


@torch.no_grad()
def read_batch(
    recipe: Recipe, target: Target, text: np.ndarray, rows: int, length: int, rng: np.random.Generator
) -> Batch:
    """One batch of pieces of `text`, with the target's hidden states as it reads them."""
    starts = rng.choice(len(text) - length, rows, replace=False)
    ids = np.stack([text[start : start + length] for start in starts])
    features = []
    for some in np.array_split(ids.astype(np.int64), max(rows // 32, 1)):
        tapped = target(torch.from_numpy(some), target_layer_ids=recipe.drafter.target_layer_ids)[1]
        assert tapped is not None
        features.append(tapped.numpy().astype(np.float16))
    return Batch(ids, np.ones((rows, length), bool), np.concatenate(features))


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


def batch_path(directory: Path, rows: Rows, number: int) -> Path:
    return directory / f"{rows.length}-{number:03d}"


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
