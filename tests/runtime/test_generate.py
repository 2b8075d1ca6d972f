"""Where a text ends, what is reported, and how it streams."""

import itertools
import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ddtree.builder import build_engine
from ddtree.runtime import LLM, RequestError, SamplingParams

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


def test_statistics_count_what_the_rounds_did_and_the_text_kept(tiny_llm: LLM) -> None:
    rounds: list[tuple[int, int]] = []
    tiny_llm.budget = 64
    tiny_llm.on_round = lambda tree, verified: rounds.append((int(tree.node_count[0]), int(verified.accepted_count[0])))
    output = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=50, **FREE))
    stats = output.statistics
    assert stats.rounds == len(rounds)
    assert stats.emitted_tokens == 49  # the first token is the prompt pass's
    assert stats.acceptance_length == 49 / len(rounds)
    *whole, last = [accepted for _, accepted in rounds]
    kept = 49 - sum(accepted + 1 for accepted in whole)  # of the last round
    assert 0 < kept <= last + 1
    accepted = [*whole, min(kept, last)]
    assert stats.accepted_tokens == sum(accepted)
    deepest = max(accepted)
    assert stats.accepted_by_depth[:deepest] == [sum(a >= depth for a in accepted) for depth in range(1, deepest + 1)]
    assert not any(stats.accepted_by_depth[deepest:])
    assert all(nodes == 65 for nodes, _ in rounds)  # the root is not in the budget
    assert stats.draft_tokens == 64 * len(rounds)


def test_tokens_that_a_stop_cuts_off_do_not_count(tiny_llm: LLM) -> None:
    """A stop string may take back tokens of earlier rounds, and those of its own round behind it."""
    tiny_llm.budget = 64
    free = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=60, **FREE)).outputs[0]
    for start in range(5, 40, 3):
        stop = " ".join(free.text.split()[start : start + 4])
        output = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=60, stop=stop, **FREE))
        (completion,) = output.outputs
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        stats, kept = output.statistics, len(completion.token_ids)
        assert stats.emitted_tokens == kept - 1
        assert kept - 1 - stats.rounds <= stats.accepted_tokens <= kept - 1
        assert stats.acceptance_length == (kept - 1) / stats.rounds


def test_statistics_say_when_and_how_long(tiny_llm: LLM) -> None:
    before = time.monotonic()
    outputs = tiny_llm.generate([PROMPT, list(range(20)) * 30], SamplingParams(max_tokens=30, **FREE))
    after = time.monotonic()
    for output in outputs:
        stats, stages = output.statistics, output.statistics.stage_seconds
        times = [stats.arrival_time, stats.first_scheduled_time, stats.first_token_time, stats.last_token_time]
        assert [before, *times, after] == sorted([before, *times, after])
        assert 0 < stats.prefill_seconds <= stats.first_token_time - stats.first_scheduled_time
        assert 0 < stats.decode_seconds <= after - stats.first_token_time
        parts = [stages.draft, stages.encode, stages.verify, stages.commit]
        assert min(parts) > 0
        assert 0.5 * stats.decode_seconds < sum(parts) < stats.decode_seconds
    tiny_llm.method = "ar"
    assert tiny_llm.generate(PROMPT).statistics.stage_seconds.draft < 1e-3


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

    monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", 512)
    whole = trees()
    for chunk in (1, 7, 150, 299):
        monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", chunk)
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
    lengths: list[int] = []

    def lengthen(*_: object) -> None:  # between two rounds
        lengths.append(tiny_llm.engine.target_cache_length)
        tiny_llm.engine.reserve_target(2048)
        tiny_llm.engine.reserve_draft(2048)

    tiny_llm.on_round = lengthen
    assert tiny_llm.generate(PROMPT, params).outputs[0].token_ids == grown
    assert lengths[0] == 128  # a new request does not pay for the last one's length
    assert set(lengths[1:]) == {2048}


def test_caches_are_updated_in_place(tiny_llm: LLM) -> None:
    addresses: set[tuple[int, ...]] = set()
    rows: list[torch.Tensor] = []

    def look(*_: object) -> None:
        caches = [cache for pair in tiny_llm.engine.target_caches(1) for cache in pair]
        addresses.add(tuple(cache.data_ptr() for cache in caches))
        rows.append(torch.cat([cache[:, 0, :, 3] for cache in caches]))  # of each layer's keys, then values

    tiny_llm.on_round = look
    tiny_llm.generate(PROMPT, SamplingParams(max_tokens=40, **FREE))
    assert len(addresses) == 1
    assert rows[0].abs().amin(dim=(1, 2)).min() > 0  # the root's row, of every layer, was zero before the first round


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
        ([1.5, 2], "prompt [1.5, 2] is neither a text nor a list of token ids (give one)"),
        (None, "prompt None is neither a text nor a list of token ids (give one)"),
        ({"prompt": "w1"}, "prompt {'prompt': 'w1'} is neither a text nor a list of token ids (give one)"),
        ([10**5000], "prompt list too long to show is neither a text nor a list of token ids (give one)"),
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


def test_calls_may_overlap(tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, **FREE)
    expected = full_text(tiny_llm)[:30]
    other = tiny_llm.generate([4, 5], params).outputs[0].token_ids
    stream = tiny_llm.stream(PROMPT, params)
    next(stream)
    assert tiny_llm.generate([4, 5], params).outputs[0].token_ids == other
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


@pytest.mark.parametrize(
    ("given", "name"), [({"max_tokens": 5}, "dict"), ([SamplingParams(), 3], "int"), ("greedy", "str")]
)
def test_sampling_params_of_another_type_are_refused(tiny_llm: LLM, given: object, name: str) -> None:
    with pytest.raises(RequestError) as refusal:
        tiny_llm.generate([PROMPT, PROMPT], given)
    message = f"sampling_params is a {name} (give a SamplingParams, or a list of one for each prompt)"
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": True}, "threads True is not a whole number (use 1 or more)"),
        ({"threads": 1.0}, "threads 1.0 is not a whole number (use 1 or more)"),
        ({"max_batch_size": 0}, "max_batch_size 0 is out of range (use 1 or more)"),
        ({"max_batch_size": 5}, "max_batch_size 5 exceeds the engine's 4 (rebuild with --max-batch-size 5)"),
        ({"max_queue_size": 10**5000}, "max_queue_size int too long to show is not a whole number (use 0 or more)"),
        ({"adaptive": "no"}, "adaptive 'no' is neither True nor False"),
        ({"adaptive": None}, "adaptive None is neither True nor False"),
        ({"max_queue_size": -1}, "max_queue_size -1 is out of range (use 0 or more)"),
        ({"max_queue_size": None}, "max_queue_size None is not a whole number (use 0 or more)"),
    ],
)
def test_a_setting_of_the_llm_out_of_range_is_refused(tiny_engine: Path, settings: dict, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        LLM(tiny_engine, **settings)
    assert str(refusal.value) == message


@pytest.fixture(scope="module")
def chat_engine(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine, of a checkpoint that was taught to chat: user messages begin with w9, answers with w10."""
    root = tmp_path_factory.mktemp("chat")
    target = shutil.copytree(tiny_pair[0], root / "target")
    template = (
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{{ 'w9 ' if message.role == 'user' else 'w10 ' }}{{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}w10{% endif %}"
    )
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    build_engine(target, tiny_pair[1], root / "engine")
    return root / "engine"


def test_chat_goes_through_the_tokenizers_own_template(chat_engine: Path) -> None:
    messages = [
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": "w3"},
        {"role": "user", "content": "w4"},
    ]
    with LLM(chat_engine, threads=1) as llm:
        output = llm.chat(messages, SamplingParams(max_tokens=20, **FREE))
        assert output.prompt == "w9 w1 w2 w10 w3 w9 w4 w10"
        assert output.prompt_token_ids == [9, 1, 2, 10, 3, 9, 4, 10]
        expected = llm.generate(output.prompt, SamplingParams(max_tokens=20, **FREE))
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is not a list of messages (give one or more, each with role and content)"),
        ("w1", "messages is not a list of messages (give one or more, each with role and content)"),
        (["w1"], "message 'w1' is not a dict with a role (give role and content)"),
        ([{"content": "w1"}], "message \"{'content': 'w1'}\" is not a dict with a role (give role and content)"),
        (
            [{"role": "system", "content": "w1"}],
            "the chat template does not take these messages: no system here (change them)",
        ),
    ],
)
def test_messages_that_the_template_does_not_take_are_refused(
    chat_engine: Path, messages: object, message: str
) -> None:
    with LLM(chat_engine, threads=1) as llm, pytest.raises(RequestError) as refusal:
        llm.chat(messages)
    assert str(refusal.value) == message


def test_chat_without_a_template_is_refused(tiny_llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"has no chat template \(use generate, or a checkpoint taught to chat\)$"):
        tiny_llm.chat([{"role": "user", "content": "w1"}])


@pytest.mark.parametrize("path", [5, b"x", "", []])
def test_a_model_that_is_no_path_is_refused(tiny_engine: Path, path: object) -> None:
    with pytest.raises(RequestError) as refusal:
        LLM(path)
    assert str(refusal.value) == f"model {path!r} is no path (give a directory's)"
    with pytest.raises(RequestError) as refusal:
        LLM(tiny_engine, speculative_model=path)
    assert str(refusal.value) == f"speculative_model {path!r} is no path (give a directory's)"


def test_a_request_keeps_the_lists_that_it_was_given(tiny_llm: LLM) -> None:
    """Whatever the caller does with them, and with those that it got back."""
    stop, bias = [0], {1: 2.0}
    prompt = list(PROMPT)
    params = SamplingParams(max_tokens=30, stop_token_ids=stop, logit_bias=bias, repetition_penalty=1.2, **FREE)
    expected = tiny_llm.generate(PROMPT, params).outputs[0].token_ids
    changed = threading.Event()
    tiny_llm.on_round = lambda *_: changed.wait(60)
    stream = tiny_llm.stream(prompt, params)
    first = next(stream)
    stop.extend(range(24))
    bias[5] = 100.0
    prompt.clear()
    first.prompt_token_ids.clear()
    first.outputs[0].token_ids.clear()
    changed.set()
    *_, last = stream
    assert last.outputs[0].token_ids == expected
