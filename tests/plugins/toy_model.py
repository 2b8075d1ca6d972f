"""A target and a drafter of eleven tokens, and requests decoded with them: by DDTree rounds of the operations, and one
token at a time by the oracles."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from ddtree.plugins import ops

from . import oracles

VOCAB, DEPTH, LENGTH = 11, 5, 24


@cache
def target_logits(text: tuple[int, ...]) -> tuple[float, ...]:
    """A target: some logits for every text. float32 values, so that the oracle sees what the operation sees."""
    generator = np.random.default_rng([7, *text[-4:], len(text)])
    return tuple((generator.normal(size=VOCAB) * 2).astype(np.float32).tolist())


def draft_logits(text: tuple[int, ...], quality: float) -> np.ndarray:
    """A drafter [DEPTH, VOCAB] that has seen the target's greedy continuation, through noise."""
    generator = np.random.default_rng([9, *text[-3:], len(text)])
    rows = []
    for _ in range(DEPTH):
        row = np.array(target_logits(text))
        rows.append(quality * row + generator.normal(size=VOCAB))
        text = (*text, int(row.argmax()))
    return np.stack(rows).astype(np.float32)


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    quality: float = 1.0
    rules: dict = field(default_factory=dict)  # of RowRules

    @property
    def settings(self) -> dict:
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: getattr(self, name) for name in names}


def autoregressive(request: Request) -> list[int]:
    text = request.prompt
    while len(text) < len(request.prompt) + LENGTH:
        prompt = len(request.prompt)
        logits = oracles.ruled_logits(list(target_logits(text)), text[:prompt], text[prompt:], **request.rules)
        text = (*text, oracles.coupled_draw(logits, request.seed, len(text), **request.settings))
    return list(text[len(request.prompt) :])


def ddtree(requests: list[Request], budget: int, **options) -> tuple[list[list[int]], list[int]]:
    """Texts of ``LENGTH`` tokens and the number of rounds each took, all requests in one batch."""
    texts = [request.prompt for request in requests]
    rounds = [0] * len(requests)
    rules = [
        ops.RowRules(vocab_size=VOCAB, prompt_token_ids=r.prompt, **r.rules) if r.rules else None for r in requests
    ]
    sampling = oracles.sampling([{**r.settings, "seed": r.seed} for r in requests])
    while any(len(text) < len(r.prompt) + LENGTH for text, r in zip(texts, requests, strict=True)):
        roots = torch.tensor([text[-1] for text in texts])
        drafts = [draft_logits(text, r.quality) for text, r in zip(texts, requests, strict=True)]
        tree = ops.build_tree(torch.from_numpy(np.stack(drafts)), roots, budget=budget, **options)
        logits = torch.full((len(texts), budget + 1, VOCAB), torch.nan)
        for slot, text in enumerate(texts):
            paths: list[tuple[int, ...]] = [()]
            for node in range(int(tree.node_count[slot])):
                if node > 0:
                    paths.append((*paths[int(tree.parents[slot, node])], int(tree.token_ids[slot, node])))
                logits[slot, node] = torch.tensor(target_logits(text + paths[node]))
        positions = torch.tensor([len(text) - 1 for text in texts])
        verified = ops.verify_tree(logits, tree, positions, sampling, row_rules=rules)
        assert not verified.status.any()
        for slot, request in enumerate(requests):
            if len(texts[slot]) < len(request.prompt) + LENGTH:
                rounds[slot] += 1
            emitted = verified.output_ids[slot, : int(verified.accepted_count[slot]) + 1].tolist()
            texts[slot] = (*texts[slot], *emitted)
            if (of_slot := rules[slot]) is not None:
                of_slot.advance(emitted)
    return [list(t[len(r.prompt) :][:LENGTH]) for t, r in zip(texts, requests, strict=True)], rounds
