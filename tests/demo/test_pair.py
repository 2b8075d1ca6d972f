"""The committed pair: its size, its files as other software reads them, and what the model card claims of it."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from ddtree.demo import DRAFT_DIR, TARGET_DIR
from ddtree.demo.corpus import KINDS
from ddtree.demo.evaluate import evaluate
from ddtree.demo.export import assert_equals_transformers
from ddtree.demo.prompts import DEFAULT_PROMPT, held_out_prompts
from ddtree.demo.recipe import MASK_ID, Recipe

MEGABYTE = 1_000_000


def test_the_weights_are_float16_and_under_24_megabytes():
    files = [TARGET_DIR / "model.safetensors", DRAFT_DIR / "model.safetensors"]
    assert sum(file.stat().st_size for file in files) < 24 * MEGABYTE
    for file in files:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                tensor = weights.get_tensor(name)
                assert tensor.dtype == torch.float16, name
                assert torch.isfinite(tensor).all(), name


def test_the_target_computes_what_transformers_computes():
    recipe = Recipe()
    assert assert_equals_transformers(recipe.target, recipe.drafter.target_layer_ids, TARGET_DIR) < 1e-4


def test_transformers_reads_the_tokenizer():
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(TARGET_DIR), Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    for kind in KINDS:
        for prompt in held_out_prompts(kind, 5):
            assert theirs(prompt).input_ids == ours.encode(prompt).ids
            assert theirs.decode(theirs(prompt).input_ids) == prompt
    assert theirs.eos_token_id == json.loads((TARGET_DIR / "generation_config.json").read_text())["eos_token_id"]
    assert theirs.mask_token_id == MASK_ID


def test_the_drafter_fits_the_target():
    target, draft = (json.loads((part / "config.json").read_text()) for part in (TARGET_DIR, DRAFT_DIR))
    assert draft["architectures"] == ["DFlashDraftModel"]
    assert draft["block_size"] == 16
    assert draft["num_target_layers"] == target["num_hidden_layers"]
    assert draft["dflash_config"]["mask_token_id"] == MASK_ID
    layer_ids = draft["dflash_config"]["target_layer_ids"]
    assert max(layer_ids) < target["num_hidden_layers"] - 1  # hidden_states[-1] is after the final norm
    for key in ("hidden_size", "vocab_size", "head_dim", "rope_theta", "max_position_embeddings", "model_type"):
        assert draft[key] == target[key]
    with safe_open(DRAFT_DIR / "model.safetensors", "pt") as weights:
        assert weights.get_tensor("fc.weight").shape == (target["hidden_size"], len(layer_ids) * target["hidden_size"])
        layer = {
            "input_layernorm",
            "post_attention_layernorm",
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        }
        layer |= {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
        expected = {f"layers.{i}.{name}.weight" for i in range(draft["num_hidden_layers"]) for name in layer}
        assert set(weights.keys()) == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


@pytest.fixture(scope="module")
def report():
    return evaluate(replace(Recipe(), threads=1), (TARGET_DIR, DRAFT_DIR), prompts_of_kind=4)


def _acceptance(report, temperature, policy):
    rows = [row for row in report["acceptance"] if row["temperature"] == temperature]
    return sum(row["tokens"] for row in rows) / sum(row["rounds"][policy] for row in rows)


@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 5.5), (0.8, 3.8)])
def test_more_budget_accepts_more_on_held_out_prompts(report, temperature, floor):
    """The floors: the model card's 7.2 and 4.5, less about three standard errors of 16 prompts (0.55 and 0.2)."""
    lengths = [
        _acceptance(report, temperature, policy) for policy in ("chain", "tree 8", "tree 16", "tree 32", "tree 64")
    ]
    assert lengths[0] < lengths[2] < lengths[3] < lengths[4]
    assert lengths[2] > floor


def test_the_default_prompt_encodes_within_a_block_of_text():
    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    assert 10 < len(tokenizer.encode(DEFAULT_PROMPT).ids) < 64
