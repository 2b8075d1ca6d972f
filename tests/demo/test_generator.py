"""The generator: deterministic, varied, right where it can be checked, and split by seed."""

import hashlib
import re

import pytest

from ddtree.demo.generator import FIRST_HELD_OUT_SEED, GENERATED_KINDS, generate


def test_a_seed_always_gives_the_same_text():
    """On any machine and Python version: the committed pair was trained on exactly these texts."""
    texts = "".join(generate(kind, seed) for kind in ("problem", "story", "function") for seed in range(300))
    assert hashlib.sha1(texts.encode()).hexdigest() == "38519b089cfeb77182105f567e89797fc7a5f2ad"


@pytest.mark.parametrize("kind", GENERATED_KINDS)
def test_documents_differ_and_held_out_ones_are_not_among_the_training_ones(kind):
    training = {generate(kind, seed) for seed in range(5000)}
    held_out = {generate(kind, FIRST_HELD_OUT_SEED + seed) for seed in range(500)}
    assert len(training) > 4990
    assert not training & held_out


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"'poem' \(known: problem, story, function\)"):
        generate("poem", 0)


@pytest.mark.parametrize("seed", range(200))
def test_the_sums_in_solutions_are_right(seed):
    text = generate("problem", seed)
    for left, operator, right, result in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text):
        a, b = int(left), int(right)
        assert int(result) == {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operator], text
    assert re.search(r"\d+ [-+*/] \d+ = \d+", text)


@pytest.mark.parametrize("seed", range(100))
def test_functions_pass_the_tests_written_below_them(seed):
    namespace: dict = {}
    exec(generate("function", seed), namespace)
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


@pytest.mark.parametrize("seed", range(100))
def test_stories_leave_no_slot_open(seed):
    text = generate("story", seed)
    assert "{" not in text
    assert text.count("\n\n") == 3
