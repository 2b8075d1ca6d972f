"""Where a text ends, what is reported, and how it streams."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ddtree.builder import build_engine
from ddtree.runtime import LLM, RequestError, SamplingParams
from ddtree.runtime.errors import EngineError

PROMPT = [1, 2, 3]
FREE = {"temperature": 1.0, "seed": 5, "ignore_eos": True}


def full_text(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, SamplingParams(max_tokens=60, **FREE)).outputs[0].token_ids


@pytest.mark.parametrize("method", ["ar", "chain", "ddtree"])
def test_max_tokens_is_met_exactly_wherever_a_round_ends(tiny_llm: LLM, method: str) -> None:
    expected = full_text(tiny_llm)
    tiny_llm.method, tiny_llm.budget = method, 64
    for count in range(1, 30):
        output = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=count, **FREE))
        assert output.outputs[0].token_ids == expected[:count]
        assert output.outputs[0].finish_reason == "length"
        assert output.finished


@pytest.mark.parametrize("method", ["ar", "chain", "ddtree"])
def test_a_stop_token_ends_the_text_inside_an_accepted_path(tiny_llm: LLM, method: str) -> None:
    expected = full_text(tiny_llm)
    tiny_llm.method, tiny_llm.budget = method, 255
    for stop in set(expected):
        end = expected.index(stop) + 1
        completion = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=60, stop_token_ids=[stop], **FREE)).outputs[0]
        assert completion.token_ids == expected[:end]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_token_wins_over_max_tokens_at_the_same_place(tiny_llm: LLM) -> None:
    expected = full_text(tiny_llm)
    stop = expected[9]
    end = expected.index(stop) + 1
    completion = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=end, stop_token_ids=[stop], **FREE)).outputs[0]
    assert completion.finish_reason == "stop"


def test_end_id_replaces_the_checkpoints_and_ignore_eos_ignores_it(tiny_llm: LLM) -> None:
    expected = full_text(tiny_llm)
    end_id = expected[3]
    until = expected[: expected.index(end_id) + 1]
    settings = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "end_id": end_id}
    ended = tiny_llm.generate(PROMPT, SamplingParams(**settings)).outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (until, "stop", None)
    assert tiny_llm.generate(PROMPT, SamplingParams(**settings, ignore_eos=True)).outputs[0].token_ids == expected


def test_statistics_count_what_the_rounds_did(tiny_llm: LLM) -> None:
    rounds: list[tuple[int, int]] = []
    tiny_llm.budget = 64
    tiny_llm.on_round = lambda tree, verified: rounds.append((int(tree.node_count[0]), int(verified.accepted_count[0])))
    output = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=50, **FREE))
    assert output.statistics.rounds == len(rounds)
    assert output.statistics.accepted_tokens == sum(accepted for _, accepted in rounds)
    assert 1 + sum(accepted + 1 for _, accepted in rounds) >= 50 > 1 + sum(accepted + 1 for _, accepted in rounds[:-1])
    assert all(nodes == 65 for nodes, _ in rounds)  # the root is not in the budget


def test_an_absent_seed_is_random_and_reported(tiny_llm: LLM) -> None:
    outputs = [tiny_llm.generate(PROMPT, SamplingParams(max_tokens=30, temperature=1.0)).outputs[0] for _ in range(3)]
    assert len({output.seed for output in outputs}) == 3
    again = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=30, temperature=1.0, seed=outputs[0].seed)).outputs[0]
    assert again.token_ids == outputs[0].token_ids


def test_the_stream_grows_to_the_text_that_generate_gives(tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, **FREE)
    expected = tiny_llm.generate(PROMPT, params)
    outputs = list(tiny_llm.stream(PROMPT, params))
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(outputs) == expected.statistics.rounds + 1
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
    assert texts[-1] == expected.outputs[0].text


def test_a_prompt_longer_than_a_chunk_gives_the_same_drafts(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context features of every chunk reach the drafter: the trees, not just the text, are the same."""
    prompt = [(i * i + 3 * i) % 22 for i in range(300)]

    def trees() -> tuple[list[list[int]], list[int]]:
        seen: list[list[int]] = []
        tiny_llm.on_round = lambda tree, verified: seen.append(tree.token_ids[0].tolist())
        return seen, tiny_llm.generate(prompt, SamplingParams(max_tokens=30, **FREE)).outputs[0].token_ids

    monkeypatch.setattr("ddtree.runtime.round.PREFILL_CHUNK", 512)
    whole = trees()
    for chunk in (1, 7, 150, 299):
        monkeypatch.setattr("ddtree.runtime.round.PREFILL_CHUNK", chunk)
        assert trees() == whole


def test_a_cache_is_at_most_a_quarter_too_long_and_takes_four_steps_to_double(tiny_llm: LLM) -> None:
    engine, lengths = tiny_llm.engine, set()
    for length in range(1, 2050):
        engine.reset(1)
        engine.reserve_target(length)
        lengths.add(engine.target_cache_length)
        assert length <= engine.target_cache_length <= max(128, 1.25 * length)
    assert sorted(lengths)[:6] == [128, 160, 192, 224, 256, 320]
    assert len(lengths) == 1 + 4 * 4 + 1  # 128, four for each octave to 2048, and one beyond


def test_caches_grow_while_a_text_is_written(tiny_llm: LLM) -> None:
    """A text that crosses several cache sizes is the text of an engine whose caches were long from the start."""
    params = SamplingParams(max_tokens=600, **FREE)
    grown = tiny_llm.generate(PROMPT, params).outputs[0].token_ids
    assert 600 <= tiny_llm.engine.target_cache_length <= 1.25 * 620
    stream = tiny_llm.stream(PROMPT, params)
    first = next(stream)
    assert tiny_llm.engine.target_cache_length == 128  # a new request does not pay for the last one's length
    tiny_llm.engine.reserve_target(2048)
    tiny_llm.engine.reserve_draft(2048)
    *_, last = stream
    assert first.outputs[0].token_ids == grown[:1]
    assert last.outputs[0].token_ids == grown


def test_caches_are_updated_in_place(tiny_llm: LLM) -> None:
    stream = tiny_llm.stream(PROMPT, SamplingParams(max_tokens=40, **FREE))
    next(stream)
    before = [cache.data_ptr() for pair in tiny_llm.engine.target_caches(1) for cache in pair]
    rows = [key[0, :, 3].clone() for key, _ in tiny_llm.engine.target_caches(1)]
    *_, _ = stream
    assert [cache.data_ptr() for pair in tiny_llm.engine.target_caches(1) for cache in pair] == before
    assert all(
        (key[0, :, 3] != row).any() for (key, _), row in zip(tiny_llm.engine.target_caches(1), rows, strict=True)
    )


@pytest.mark.parametrize("method", ["ar", "chain", "ddtree"])
def test_nan_logits_fail_their_request_alone_and_leave_no_trace(poisoned_engine, method: str) -> None:
    llm = LLM(poisoned_engine, method=method, adaptive=False, threads=1)  # the count of rounds must not depend on time
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
    healthy = [[1, 2, 3], [4, 4, 6, 7]]
    in_the_prompt, while_writing = [3] * 61, [3] * 55
    expected = [llm.generate(prompt, params).outputs[0].token_ids for prompt in healthy]
    mixed = llm.generate([healthy[0], in_the_prompt, healthy[1], while_writing, *healthy], params)
    assert [output.error is not None for output in mixed] == [False, True, False, True, False, False]
    assert all(mixed[i].outputs[0].finish_reason == "error" for i in (1, 3))
    assert mixed[1].error == (
        "the target's logits hold NaN or no finite value in the round from position 61 on "
        "(check the checkpoint's weights)"
    )
    written = [output.outputs[0].token_ids for output in mixed if output.error is None]
    assert written == expected + expected
    # Not in the drafts either, which the text would not show: the slot of a failed request drafts as a new one does.
    shorter = [[5], [6], [1]]
    fresh = [llm.generate(prompt, params).statistics.rounds for prompt in shorter]
    after = llm.generate([healthy[1], in_the_prompt, *shorter], params)[2:]
    assert [output.statistics.rounds for output in after] == fresh


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1 is out of range (use 0 or more)"),
        ({"temperature": float("nan")}, "temperature nan is not a finite number"),
        ({"top_p": 0.0}, "top_p 0 keeps no token (use a value above 0, 1 turns the filter off)"),
        ({"top_p": 1.5}, "top_p 1.5 is out of range (use 0 to 1)"),
        ({"min_p": 2}, "min_p 2.0 is out of range (use 0 to 1)"),
        ({"top_k": -1}, "top_k -1 is out of range (use 0 or more)"),
        ({"top_k": 2.5}, "top_k 2.5 is not a whole number"),
        ({"max_tokens": 0}, "max_tokens 0 is out of range (use 1 or more)"),
        ({"seed": 2**64}, f"seed {2**64} is out of range (use 0 to {2**64 - 1})"),
        ({"temperature": 1e39}, "temperature 1e+39 is more than a float32 holds (use 0 or more)"),
        ({"stop_token_ids": 5}, "stop_token_ids 5 is not a list (give a list of token ids)"),
        ({"stop_token_ids": [24]}, "stop_token_ids 24 is out of range (use 0 to 23)"),
        ({"max_tokens": 2046}, "prompt of 3 tokens and max_tokens 2046 exceed the engine's max_seq_len 2048 "
         "(lower max_tokens to 2045, or rebuild with a larger --max-seq-len)"),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_before_anything_runs(tiny_llm: LLM, settings: dict, message: str) -> None:
    ran: list[object] = []
    tiny_llm.on_round = lambda *_: ran.append(_)
    with pytest.raises(RequestError) as refusal:
        tiny_llm.generate([PROMPT, PROMPT], [SamplingParams(), SamplingParams(**settings)])
    assert str(refusal.value) == message
    assert not ran


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty (give at least one token)"),
        ("", "the prompt is empty (give at least one token)"),
        ("w1 \udcff", "the prompt is not Unicode at character 3 (use UTF-8 text)"),
        ([1.5, 2], "prompt '[1.5, 2]' is neither a text nor a list of token ids (give one)"),
        (None, "prompt 'None' is neither a text nor a list of token ids (give one)"),
        ({"prompt": "w1"}, "prompt \"{'prompt': 'w1'}\" is neither a text nor a list of token ids (give one)"),
        ([1, 24], "prompt token 24 is out of range (use 0 to 23)"),
        ([1] * 2048, "prompt of 2048 tokens and max_tokens 32 exceed the engine's max_seq_len 2048 "
         "(shorten the prompt to at most 2047 tokens, or rebuild with a larger --max-seq-len)"),
    ],
)  # fmt: skip
def test_a_prompt_that_cannot_be_served_is_refused(tiny_llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        tiny_llm.generate([prompt])
    assert str(refusal.value) == message


def test_the_context_can_be_filled_to_its_last_token(tiny_llm: LLM) -> None:
    prompt = [i % 22 for i in range(2000)]
    params = SamplingParams(max_tokens=48, **FREE)
    texts = []
    for tiny_llm.method, tiny_llm.budget in [("ar", 0), ("chain", 0), ("ddtree", 255)]:
        texts.append(tiny_llm.generate(prompt, params).outputs[0].token_ids)
    assert len(texts[0]) == 48
    assert texts[1] == texts[2] == texts[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 256}, "budget 256 exceeds the engine's max_tree_nodes 255 (rebuild with --budget 256)"),
        ({"budget": 1024}, "budget 1024 exceeds the engine's max_tree_nodes 255 (lower it to 255)"),
        ({"budget": -1}, "budget -1 is negative (use 0 to 255)"),
        ({"budget": 2.5}, "budget 2.5 is not a whole number (use 0 to 255)"),
        ({"method": "eagle"}, "method 'eagle' is not known (use one of ddtree, chain, ar)"),
    ],
)
def test_a_method_or_budget_that_does_not_fit_is_refused_whenever_it_is_set(
    tiny_engine: Path, settings: dict, message: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        LLM(tiny_engine, **settings)
    assert str(refusal.value) == message
    llm = LLM(tiny_engine, threads=1)
    for name, value in settings.items():
        setattr(llm, name, value)
    with pytest.raises(RequestError) as refusal:
        llm.generate(PROMPT)
    assert str(refusal.value) == message


def test_small_limits_of_an_engine_hold(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    build_engine(*tiny_pair, tmp_path / "engine", max_tree_nodes=4, max_seq_len=64)
    llm = LLM(tmp_path / "engine", threads=1)
    assert llm.budget == 4  # the default gives way to the limit
    assert len(llm.generate(PROMPT, SamplingParams(max_tokens=61, ignore_eos=True)).outputs[0].token_ids) == 61
    llm.method = "chain"
    with pytest.raises(RequestError, match=r"^the chain's length 7 exceeds the engine's max_tree_nodes 4 "):
        llm.generate(PROMPT)


def test_a_tree_may_have_more_nodes_than_the_context_has_positions(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    build_engine(*tiny_pair, tmp_path / "engine", max_tree_nodes=255, max_seq_len=64)
    llm = LLM(tmp_path / "engine", threads=1, budget=255)
    params = SamplingParams(max_tokens=61, **FREE)
    tree = llm.generate(PROMPT, params).outputs[0].token_ids
    llm.method = "ar"
    assert llm.generate(PROMPT, params).outputs[0].token_ids == tree


def test_an_engine_without_a_drafter_decodes_plainly_and_refuses_to_draft(
    tiny_pair: tuple[Path, Path], tiny_llm: LLM, tmp_path: Path
) -> None:
    build_engine(tiny_pair[0], None, tmp_path / "engine")
    llm = LLM(tmp_path / "engine", threads=1)
    assert llm.method == "ar"
    assert llm.generate(PROMPT, SamplingParams(max_tokens=60, **FREE)).outputs[0].token_ids == full_text(tiny_llm)
    llm.method = "ddtree"
    with pytest.raises(RequestError, match=r"the engine has none"):
        llm.generate(PROMPT)


def test_one_call_at_a_time(tiny_llm: LLM) -> None:
    """A second call would write into the first one's caches, so it is refused; the first goes on unharmed."""
    params = SamplingParams(max_tokens=30, **FREE)
    expected = full_text(tiny_llm)[:30]
    stream = tiny_llm.stream(PROMPT, params)
    next(stream)
    with pytest.raises(RequestError, match=r"^this LLM is serving another call"):
        tiny_llm.generate([4, 5], params)
    with pytest.raises(RequestError, match=r"^this LLM is serving another call"):
        next(tiny_llm.stream([4, 5], params))
    *_, last = stream
    assert last.outputs[0].token_ids == expected
    abandoned = tiny_llm.stream(PROMPT, params)
    next(abandoned)
    abandoned.close()
    assert tiny_llm.generate(PROMPT, params).outputs[0].token_ids == expected


def test_a_call_keeps_the_settings_it_began_with(tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, **FREE)
    expected = full_text(tiny_llm)[:30]
    stream = tiny_llm.stream(PROMPT, params)
    outputs = [next(stream)]
    tiny_llm.method, tiny_llm.budget, params.max_tokens, params.temperature = "ar", 0, 1, 0.0
    outputs += stream
    assert outputs[-1].outputs[0].token_ids == expected
    rounds = [output.statistics.rounds for output in outputs]
    assert rounds == list(range(len(rounds)))  # each output has its own statistics


def test_prompts_may_be_arrays_and_many(tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=5)
    expected = tiny_llm.generate(PROMPT, params).outputs[0].token_ids
    array = np.array(PROMPT)
    for prompt in (tuple(PROMPT), array, list(array), torch.tensor(PROMPT), "w1 w2 w3"):
        assert tiny_llm.generate(prompt, params).outputs[0].token_ids == expected
    for prompts in ([PROMPT, "w1 w2 w3"], np.array([PROMPT, PROMPT]), (array, PROMPT)):
        assert [o.outputs[0].token_ids for o in tiny_llm.generate(prompts, params)] == [expected, expected]
    assert tiny_llm.generate([], params) == []


def test_truncation_and_padding_saved_with_a_tokenizer_are_not_applied(tiny_engine: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_engine, tmp_path / "engine")
    file = tmp_path / "engine" / "tokenizer.json"
    size = file.stat().st_size
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(file))
    manifest = tmp_path / "engine" / "config.json"
    manifest.write_text(manifest.read_text().replace(f'"size": {size}', f'"size": {file.stat().st_size}'))
    output = LLM(tmp_path / "engine", threads=1).generate("w1 w2 w3", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == PROMPT


def test_an_engine_of_another_kind_is_refused(tiny_engine: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_engine, tmp_path / "engine")
    manifest = tmp_path / "engine" / "config.json"
    manifest.write_text(manifest.read_text().replace('"engine": "onnxruntime"', '"engine": "tensorrt_rtx"'))
    with pytest.raises(EngineError, match="is a tensorrt_rtx engine, which this version builds but does not run"):
        LLM(tmp_path / "engine")
