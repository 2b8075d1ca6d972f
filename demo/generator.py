"""The generated half of the demo text: `generate(kind, seed)` writes one document."""

import random

from ddtree.demo.functions import function
from ddtree.demo.problems import problem
from ddtree.demo.stories import story

GENERATED_KINDS = {"problem": problem, "story": story, "function": function}

# Training uses the seeds below, held-out text the seeds from here on.
FIRST_HELD_OUT_SEED = 1_000_000_000


def generate(kind: str, seed: int) -> str:
    """One document of the kind "problem", "story" or "function": the same text for the same seed, on every machine."""
    if kind not in GENERATED_KINDS:
        raise ValueError(f"no generator for kind {kind!r} (known: {', '.join(GENERATED_KINDS)})")
    return GENERATED_KINDS[kind](random.Random(f"{kind} {seed}"))
