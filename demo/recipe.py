"""Sizes, budgets and seeds of the demo pair. Budgets are counts of steps, so a run can be repeated on any machine."""

from dataclasses import dataclass, field, replace
from typing import Literal

END_TOKEN, MASK_TOKEN = "<|endoftext|>", "<|mask|>"  # neither is ever part of a text
END_ID, MASK_ID = 0, 1


@dataclass(frozen=True)
class TargetShape:
    """A dense Qwen3 model with tied embeddings."""

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048


@dataclass(frozen=True)
class DrafterShape:
    """A DFlash drafter. Width, head size, vocabulary, embedding and head are the target's."""

    layers: int = 5  # after 1,350 steps five thin layers draft 14 % longer than three with a feed-forward of 512
    intermediate_size: int = 352
    heads: int = 4
    kv_heads: int = 2
    block_size: int = 16  # the anchor and 15 masks: 15 draft depths
    target_layer_ids: tuple[int, ...] = (1, 6, 11, 16, 21)  # outputs of these target layers are the context features

    def layer(self, target: TargetShape) -> TargetShape:
        """The shape of one of its layers."""
        return replace(
            target,
            intermediate_size=self.intermediate_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            layers=self.layers,
        )


@dataclass(frozen=True)
class Phase:
    """`steps` optimiser steps on `rows` sequences of `length` tokens."""

    steps: int
    rows: int
    length: int


@dataclass(frozen=True)
class Stage:
    """The target at `layers` layers. A stage begins with the layers of the one before, repeated in order."""

    layers: int
    phases: tuple[Phase, ...]

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


Source = Literal["own", "own library", "read library"]


@dataclass(frozen=True)
class Rows:
    """`batches` batches of `rows` sequences of `length` tokens for the drafter to learn from.

    "own" and "own library" are written by the target itself, after prompts of every kind or of the library alone;
    "read library" is training text of the library as it stands, which the target only reads.
    """

    source: Source
    batches: int
    rows: int  # even: every other one is greedy
    length: int
    share: int  # rows of one training step


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome."""

    seed: int = 0
    threads: int = 2
    target: TargetShape = field(default_factory=TargetShape)
    drafter: DrafterShape = field(default_factory=DrafterShape)

    documents: int = 15_000  # generated documents of each of the three kinds
    # Most of the training is done while the target is shallow and a step is cheap (stacking, arXiv 2405.15319).
    target_stages: tuple[Stage, ...] = (
        Stage(6, (Phase(1200, 16, 256),)),
        Stage(12, (Phase(850, 16, 256),)),
        Stage(24, (Phase(640, 16, 256), Phase(80, 4, 1024))),
    )
    target_rate: float = 4e-3

    # Library text is the harder kind, and a drafter soon knows by heart what there is of it: so there is more of it.
    drafter_text: tuple[Rows, ...] = (
        Rows("own", 5, 512, 256, share=5),
        Rows("own library", 3, 512, 256, share=2),
        Rows("read library", 4, 512, 256, share=1),
    )
    long_drafter_text: Rows = Rows("own", 1, 256, 1024, share=2)  # for every eighth step
    prompt_tokens: tuple[int, int] = (12, 64)  # the fewest and the most
    continuation_tokens: int = 144
    temperature: float = 0.8  # of every other row; the rest is greedy
    # Of a training step's rows of own text. Against 0.5: 3 % more tokens a round at temperature 0, 4 % fewer at 0.8.
    greedy_share: float = 0.75

    # Many small steps: 1,350 of 128 blocks drafted 9 % longer than 600 of 384, for 15 % more processor time.
    drafter_steps: int = 7_850
    drafter_anchors: int = 128  # blocks of one step
    drafter_rate: float = 5e-3
    loss_decay: float = 7.0  # depth k weighs exp(-(k - 1) / loss_decay), apart from
    loss_reach: float = 0.9  # this part, which is by how likely a round gets there (the square root of it)

    warmup_steps: int = 50
    decay_fraction: float = 0.7  # the rate falls to zero over this last part of the steps (of the last stage)
    compile: bool = True
    bfloat16: bool = True  # matrix products of the training steps; weights and sums stay float32
