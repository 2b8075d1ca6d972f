"""The whole pipeline at toy size: it runs, it resumes to the same bytes, and what it writes loads elsewhere."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ddtree.demo import corpus, own_text, training
from ddtree.demo import make as make_module
from ddtree.demo.make import cpu_seconds, make
from ddtree.demo.recipe import DrafterShape, Phase, Recipe, Rows, Stage, TargetShape
from ddtree.demo.target import Target
from ddtree.demo.train_target import grow

TOY = replace(
    Recipe(),
    target=TargetShape(vocab_size=400, hidden_size=32, intermediate_size=64, layers=4, heads=4, kv_heads=2, head_dim=8),
    drafter=DrafterShape(layers=1, intermediate_size=48, heads=2, kv_heads=1, block_size=4, target_layer_ids=(0, 1)),
    documents=20,
    target_stages=(Stage(2, (Phase(4, 4, 32),)), Stage(4, (Phase(2, 4, 32), Phase(2, 2, 64)))),
    drafter_text=(
        Rows("own", 2, 64, 32, share=3),
        Rows("own library", 1, 32, 32, share=2),
        Rows("read library", 1, 40, 32, share=1),
    ),
    long_drafter_text=Rows("own", 2, 32, 64, share=2),
    prompt_tokens=(4, 8),
    continuation_tokens=12,
    drafter_steps=6,
    drafter_anchors=48,
    warmup_steps=2,
    threads=1,
    compile=False,
)


@pytest.fixture
def small_library(monkeypatch):
    files = [entry for entry in corpus.training_files() if entry[0] in ("bisect.py", "abc.py", "keyword.py")]
    assert len(files) == 3
    monkeypatch.setattr(corpus, "training_files", lambda: files)


def _bytes(pair: Path) -> dict[str, bytes]:
    return {path.relative_to(pair).as_posix(): path.read_bytes() for path in pair.rglob("*") if path.is_file()}


class InterruptedHereError(Exception):
    pass


def test_interrupted_at_every_stage_and_resumed_gives_the_same_pair(small_library, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    console = Console(quiet=True)
    whole = _bytes(make(TOY, tmp_path / "whole", console))

    # Each stage fails once: after the checkpoint of its third step, or before its second batch is saved.
    save_checkpoint, save_batch = training._save, own_text._save
    pending = {"2-layers.pt", "4-layers.pt", "drafter.pt", "32-001"}

    def fails_after(path, model, optimisers, step):
        save_checkpoint(path, model, optimisers, step)
        if step == 3 and path.name in pending:
            pending.remove(path.name)
            raise InterruptedHereError

    def fails_before(path, batch):
        if path.name in pending:
            pending.remove(path.name)
            raise InterruptedHereError
        save_batch(path, batch)

    monkeypatch.setattr(training, "_save", fails_after)
    monkeypatch.setattr(own_text, "_save", fails_before)
    interruptions = 0
    while True:
        try:
            resumed = _bytes(make(TOY, tmp_path / "parts", console))
            break
        except InterruptedHereError:
            interruptions += 1
    assert interruptions == 4
    assert resumed == whole
    assert set(cpu_seconds(tmp_path / "parts")) == {"tokenizer", "target", "own text", "drafter"}


def test_finished_steps_are_skipped(small_library, monkeypatch, tmp_path):
    make(TOY, tmp_path, Console(quiet=True))
    for stage in ("train_tokenizer", "train_target", "write_own_text", "train_drafter"):
        monkeypatch.setattr(make_module, stage, None)
    before = _bytes(tmp_path)
    make(TOY, tmp_path, Console(quiet=True))
    assert _bytes(tmp_path) == before


def test_the_step_decides_the_batch_not_what_ran_before(monkeypatch, tmp_path):
    """Two runs of the loop, one of them in three pieces, end with equal weights and equal optimiser state."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)

    def run(checkpoint, *stops):
        for stop in stops:
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))

            def loss(step, model=model, stop=stop):
                if step == stop:
                    raise InterruptedHereError
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                return (model(x) - x.roll(1, 1)).pow(2).mean()

            with suppress(InterruptedHereError):
                training.train(model, loss, rates=[0.01] * 9, recipe=TOY, checkpoint=checkpoint, report=lambda *_: None)
        return torch.load(checkpoint, weights_only=True)

    whole = run(tmp_path / "whole.pt", 9)
    pieces = run(tmp_path / "pieces.pt", 2, 5, 9)
    assert whole["step"] == pieces["step"] == 9
    torch.testing.assert_close(whole["model"], pieces["model"], rtol=0, atol=0)
    torch.testing.assert_close(whole["optimisers"], pieces["optimisers"], rtol=0, atol=0)


def test_the_exported_names_and_types(small_library, tmp_path):
    pair = make(TOY, tmp_path, Console(quiet=True))
    target, draft = (load_file(pair / part / "model.safetensors") for part in ("target", "draft"))
    assert {weight.dtype for weight in (*target.values(), *draft.values())} == {torch.float16}
    assert "model.layers.3.self_attn.q_norm.weight" in target
    assert draft["fc.weight"].shape == (32, 2 * 32)
    assert "lm_head.weight" not in target
    assert not any("embed" in name for name in draft)


def test_a_stage_begins_with_the_layers_of_the_one_before():
    small, large = (Target(replace(TOY.target, layers=layers)) for layers in (2, 4))
    for parameter in small.parameters():
        torch.nn.init.normal_(parameter)
    grown = grow(small, large.shape)
    assert set(grown.state_dict()) == set(large.state_dict())
    weights = dict(small.named_parameters())
    for name, weight in grown.named_parameters():
        old = re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) % 2}", name)
        torch.testing.assert_close(weight, weights[old], rtol=0, atol=0)


def test_rates_rise_stay_and_fall():
    rates = training.learning_rates(20, 3.0, TOY)  # 2 steps of warm-up, the last 14 fall
    assert rates[:2] == [1.5, 3.0]
    assert rates[2:7] == [3.0] * 5
    assert rates[-1] == pytest.approx(3.0 / 14)
    assert training.learning_rates(20, 3.0, TOY, falls=False) == [1.5, *[3.0] * 19]
