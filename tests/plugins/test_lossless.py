"""The point of it all: the text of DDTree rounds is the text that autoregressive decoding writes, token for token, at
any temperature, whatever the draft, the tree, the budget, the slot and the other requests of the batch."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
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

    @property
    def settings(self) -> dict:
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: getattr(self, name) for name in names}


def autoregressive(request: Request) -> list[int]:
    text = request.prompt
    while len(text) < len(request.prompt) + LENGTH:
        token = oracles.coupled_draw(list(target_logits(text)), request.seed, len(text), **request.settings)
        text = (*text, token)
    return list(text[len(request.prompt) :])


def ddtree(requests: list[Request], budget: int, **options) -> tuple[list[list[int]], list[int]]:
    """Texts of ``LENGTH`` tokens and the number of rounds each took, all requests in one batch."""
    texts = [request.prompt for request in requests]
    rounds = [0] * len(requests)
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
        verified = ops.verify_tree(logits, tree, positions, sampling)
        assert not verified.status.any()
        for slot, request in enumerate(requests):
            if len(texts[slot]) < len(request.prompt) + LENGTH:
                rounds[slot] += 1
            emitted = verified.output_ids[slot, : int(verified.accepted_count[slot]) + 1].tolist()
            texts[slot] = (*texts[slot], *emitted)
    return [list(t[len(r.prompt) :][:LENGTH]) for t, r in zip(texts, requests, strict=True)], rounds


REQUESTS = [
    Request((1, 2, 3), temperature=0.0),
    Request((1, 2, 3), temperature=0.7, seed=1),
    Request((4,), temperature=1.0, seed=2, quality=0.0),
    Request((5, 6), temperature=1.0, top_k=3, seed=3),
    Request((7, 8, 9, 10), temperature=1.3, top_p=0.8, seed=2**63 - 5),
    Request((3, 3), temperature=0.9, min_p=0.2, seed=-17),
    Request((0, 0), temperature=0.8, top_k=6, top_p=0.9, min_p=0.05, seed=6, quality=3.0),
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [autoregressive(request) for request in REQUESTS]


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 16, 64, 255])
def test_the_text_does_not_depend_on_the_budget(budget, expected):
    texts, rounds = ddtree(REQUESTS, budget)
    assert texts == expected
    if budget == 0:
        assert rounds == [LENGTH] * len(REQUESTS)
    if budget >= 16:
        assert max(rounds[:2]) < LENGTH  # drafts were accepted, so the equality says something


@pytest.mark.parametrize("options", [{"mode": "chain"}, {"keep_chain": True}])
def test_the_text_does_not_depend_on_the_shape_of_the_tree(options, expected):
    assert ddtree(REQUESTS, 7, **options)[0] == expected


def test_the_text_does_not_depend_on_slot_or_batch_mates(expected):
    assert ddtree(REQUESTS[::-1], 12)[0] == expected[::-1]
    for request, text in zip(REQUESTS, expected, strict=True):
        assert ddtree([request], 12)[0] == [text]


def test_seeds_and_positions_decide():
    request = Request((1, 2, 3), temperature=1.0, seed=1)
    other = Request((1, 2, 3), temperature=1.0, seed=2)
    texts, _ = ddtree([request, other, request], 16)
    assert texts[0] == texts[2] != texts[1]
