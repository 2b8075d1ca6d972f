"""The point of it all: the text of DDTree rounds is the text that autoregressive decoding writes, token for token, at
any temperature, whatever the draft, the tree, the budget, the slot and the other requests of the batch."""

import pytest

from .toy_model import LENGTH, Request, autoregressive, ddtree

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
