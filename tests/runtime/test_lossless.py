"""ddtree == chain == ar, token by token: the promise of the project."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddtree.builder import build_engine
from ddtree.runtime import LLM, SamplingParams

PROMPTS = [[1, 2, 3], [4], [7, 7, 1, 0, 9, 12, 3, 3, 8], list(range(20)) * 2]
FILTERS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05},
}
BUDGETS = [0, 1, 7, 16, 64, 255]


def assert_same_text(params: SamplingParams, expected: list[int], actual: list[int]) -> None:
    if expected != actual:
        first = next(i for i, (a, b) in enumerate(itertools.zip_longest(expected, actual)) if a != b)
        pytest.fail(
            f"{params}: token {first} is {actual[first : first + 1]}, plain decoding has {expected[first : first + 1]} "
            "(benchmarks/losslessness.py tells a near tie from a fault)"
        )


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_every_method_and_budget_writes_the_same_text(tiny_llm: LLM, temperature: float, filters: str) -> None:
    assert compare_methods(tiny_llm, temperature, FILTERS[filters], batch=1, seeds=[2**63 + 11]) > 50
    assert compare_methods(tiny_llm, temperature, FILTERS[filters], batch=4, seeds=[0, 1]) > 100


def compare_methods(llm: LLM, temperature: float, filters: dict, *, batch: int, seeds: list[int]) -> int:
    """Compare chain and every budget, in batches, with plain decoding alone; returns the draft tokens accepted."""
    accepted = 0
    for seed in seeds:
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True, **filters)
        llm.method = "ar"
        expected = [llm.generate(prompt, params).outputs[0].token_ids for prompt in PROMPTS]
        for llm.method, llm.budget in [("ar", 0), ("chain", 0), *(("ddtree", budget) for budget in BUDGETS)]:
            for start in range(0, len(PROMPTS), batch):
                for i, output in enumerate(llm.generate(PROMPTS[start : start + batch], params), start):
                    assert_same_text(params, expected[i], output.outputs[0].token_ids)
                    accepted += output.statistics.accepted_tokens
    return accepted  # the trees were not idle


VARIANTS = {
    "every layer has a window": ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, {}),
    "two layers have a window": ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, {}),
    "the drafter has a window": ({}, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "the anchor's row is a candidate": ({}, {"sample_from_anchor": True}),
    "a KV head for each query head": ({"num_key_value_heads": 4}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models_keep_their_text_too(write_target, write_draft, variant: str, tmp_path: Path) -> None:
    target, draft = VARIANTS[variant]
    build_engine(write_target(tmp_path / "t", **target), write_draft(tmp_path / "d", **draft), tmp_path / "engine")
    llm = LLM(tmp_path / "engine", adaptive=False, threads=1)
    assert compare_methods(llm, 0.8, {"top_p": 0.95}, batch=4, seeds=[0]) > 50


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("method", ["ar", "chain", "ddtree"])
def test_a_batch_writes_what_each_request_writes_alone(tiny_llm: LLM, method: str, temperature: float) -> None:
    llm = tiny_llm
    llm.method, llm.budget = method, 16
    params = [
        SamplingParams(max_tokens=length, temperature=t, seed=seed, top_k=k, top_p=p, min_p=m)
        for length, t, seed, k, p, m in [
            (40, temperature, 3, 0, 1.0, 0.0),
            (7, 0.0, 4, 0, 1.0, 0.0),
            (23, temperature, 5, 6, 0.9, 0.0),
            (31, 1.3, 6, 0, 1.0, 0.05),
            (12, temperature, 7, 0, 0.7, 0.0),
            (1, temperature, 8, 3, 1.0, 0.0),
        ]
    ]
    prompts = [*PROMPTS, [5, 6], [2] * 17]  # six requests, four slots: two join when others leave
    alone = [llm.generate(prompt, p).outputs[0] for prompt, p in zip(prompts, params, strict=True)]
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    for p, a, b in zip(params, alone, together, strict=True):
        assert_same_text(p, a.token_ids, b.token_ids)
        assert (a.finish_reason, a.stop_reason, a.text) == (b.finish_reason, b.stop_reason, b.text)


def philox_word(seed: int, position: int, token: int) -> int:
    """One 32-bit word of Philox4x32-10 in plain integers, from the paper's description."""
    a, b, c, d = token // 4, position, 0, 0
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ low, second & 0xFFFFFFFF, (first >> 32) ^ d ^ high, first & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return (a, b, c, d)[token % 4]


def drawn_token(logits: list[float], params: SamplingParams, position: int) -> int:
    """The coupled draw of the design, in float64, one token at a time."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return order[0]
    weight = {token: math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order}
    kept = order[: params.top_k or None]
    if params.top_p < 1:
        mass, total = 0.0, sum(weight[token] for token in kept)
        for count, token in enumerate(kept, 1):
            mass += weight[token]
            if mass >= params.top_p * total:
                kept = kept[:count]
                break
    kept = [token for token in kept if weight[token] >= params.min_p]

    def key(token: int) -> float:
        uniform = min((philox_word(params.seed or 0, position, token) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return logits[token] / params.temperature - math.log(-math.log1p(-uniform))

    return max(kept, key=key)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_text_is_the_one_that_transformers_logits_and_the_definition_give(
    tiny_llm: LLM, tiny_pair: tuple[Path, Path], temperature: float, filters: str
) -> None:
    """Not relative to another run of ours: the peer's logits, and the draw as the design defines it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32)
    tiny_llm.budget = 64
    for seed, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=25, temperature=temperature, seed=seed * 2**40 + 3, ignore_eos=True, **FILTERS[filters]
        )
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(params.max_tokens):
                ids.append(drawn_token(model(torch.tensor([ids])).logits[0, -1].tolist(), params, len(ids)))
        assert tiny_llm.generate(prompt, params).outputs[0].token_ids == ids[len(prompt) :]
