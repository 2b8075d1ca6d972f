"""TensorRT engines, run through the stand-ins for NVIDIA's runtime: the texts are those of plain decoding, and the work
is done as a GPU wants it."""

import itertools
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tensorrt_rtx
import torch
from onnx import numpy_helper

from ddtree.builder import Manifest, build_engine, draft, plans, target
from ddtree.builder.trtllm_graph import lower
from ddtree.plugins import launch
from ddtree.runtime import LLM, RequestError, SamplingParams, scheduler
from ddtree.runtime.cuda_graphs import CudaGraphs
from ddtree.runtime.errors import EngineError
from ddtree.runtime.passes import draft_inputs
from ddtree.runtime.tensorrt_plan import PROMPT, ROUND, Plan

from . import cuda_stand_in, tensorrt_runtime_stand_in

KINDS = {
    "plugin": ("tensorrt", "plugin"),
    "kernel": ("tensorrt", "kernel"),
    "rtx": ("tensorrt_rtx", "kernel"),
    "trtllm": ("tensorrt", "plugin"),
}
TRTLLM = {"tensorrt": "10.14.1"}
LIMITS = {"max_batch_size": 3, "max_seq_len": 120, "max_tree_nodes": 31}
PROMPTS = [[1, 2, 3], [4], [7, 7, 1, 0, 9, 12, 3, 3, 8], list(range(20)) * 2]
SAMPLED = SamplingParams(max_tokens=20, temperature=0.7, seed=1, ignore_eos=True)
FILTERS = {"none": {}, "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05}}


@pytest.fixture(scope="module")
def engines(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an engine of each kind, float32, and "half", in float16."""
    root = tmp_path_factory.mktemp("tensorrt")
    for name in KINDS:
        build(tiny_pair, root / name, name)
    build(tiny_pair, root / "half", "plugin", dtype="float16")
    return root


def build(pair: tuple[Path, Path], output: Path, kind: str, **settings: Any) -> None:
    engine, verify = KINDS[kind]
    settings = {"engine": engine, "verify": verify, "dtype": "float32"} | LIMITS | settings
    with pytest.MonkeyPatch.context() as patch:
        tensorrt_runtime_stand_in.install(patch)
        if kind == "trtllm":  # the graphs and the manifest of trtllm-build's engines
            for module, place in ((target, "place_target"), (draft, "place_draft")):
                placed = getattr(module, place)
                patch.setattr(module, place, lambda *args, placed=placed: lower(placed(*args)))
        manifest = build_engine(*pair, output, **settings)
    if kind == "trtllm":
        versions = manifest.versions | {"tensorrt": TRTLLM["tensorrt"]}
        replace(manifest, engine="tensorrt_llm", versions=versions).save(output)


@pytest.fixture
def open_llm(engines: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Opens one of ``engines``, or a directory, with the stand-ins in place."""
    opened: list[LLM] = []

    def open_llm(engine: str | Path, **settings: Any) -> LLM:
        directory = engines / engine
        versions = TRTLLM if Manifest.load(directory).engine == "tensorrt_llm" else {}
        tensorrt_runtime_stand_in.install(monkeypatch, **versions)
        opened.append(LLM(directory, **settings))
        return opened[-1]

    yield open_llm
    for llm in opened:
        llm.shutdown()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)


def plain_texts(llm: LLM, prompts: Any, params: list[SamplingParams]) -> list[list[int]]:
    """Plain decoding of each prompt alone."""
    llm.method = "ar"
    return [llm.generate(prompt, each).outputs[0].token_ids for prompt, each in zip(prompts, params, strict=True)]


def token_ids(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


# The text


@pytest.mark.parametrize(
    ("kind", "temperature", "filters"),
    [
        ("plugin", 0.0, {}),
        ("plugin", 0.7, {"top_k": 12, "top_p": 0.9, "min_p": 0.05}),
        ("plugin", 1.0, {}),
        ("kernel", 0.0, {}),
        ("kernel", 0.7, {"top_k": 12, "top_p": 0.9, "min_p": 0.05}),
        ("kernel", 1.0, {}),
        ("rtx", 0.8, {}),
        ("trtllm", 0.0, {}),
        ("trtllm", 0.8, {}),
    ],
)
def test_every_method_budget_and_batch_writes_what_onnx_runtime_writes(
    tiny_llm: LLM,
    open_llm: Callable[..., LLM],
    kind: str,
    temperature: float,
    filters: dict,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other engine, its other graphs and its plain decoding of each prompt alone are the oracle."""
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True, **filters)
        for seed in (2**63 + 11, 0, 1, 2)
    ]
    expected = plain_texts(tiny_llm, PROMPTS, params)
    llm = open_llm(kind)
    accepted = 0
    for llm.method, llm.budget in [("ar", 0), ("chain", 0), *(("ddtree", budget) for budget in (0, 7, 31))]:
        if llm.method in llm.engine.methods:
            for output, ids in zip(llm.generate(PROMPTS, params), expected, strict=True):  # four prompts, three slots
                assert output.outputs[0].token_ids == ids
                accepted += output.statistics.accepted_tokens
    assert accepted > 30  # the trees were not idle
    assert caplog.records == []  # all could be recorded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_float16_engines_are_lossless(open_llm: Callable[..., LLM], temperature: float) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
    llm = open_llm("half")
    expected = plain_texts(llm, PROMPTS, [params] * len(PROMPTS))
    llm.method = "ddtree"
    for llm.budget in (4, 31):
        assert token_ids(llm, PROMPTS, params) == expected


@every_kind
def test_requests_with_rules_write_what_onnx_runtime_writes(
    tiny_llm: LLM, open_llm: Callable[..., LLM], kind: str
) -> None:
    """Their rows are verified on the host, and those of their batch mates on the device."""
    rules: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {3: 2.0, 5: -100.0}},
        {"bad_token_ids": [9], "min_tokens": 12},
    ]
    params = [SamplingParams(max_tokens=25, temperature=0.9, seed=i, **each) for i, each in enumerate(rules)]
    expected = plain_texts(tiny_llm, PROMPTS, params)
    assert token_ids(open_llm(kind, budget=16), PROMPTS, params) == expected


@every_kind
def test_prompts_of_several_chunks_are_read_between_rounds(
    tiny_pair: tuple[Path, Path],
    tiny_llm: LLM,
    open_llm: Callable[..., LLM],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "PREFILL_CHUNK", 16)
    build(tiny_pair, tmp_path / "e", kind)
    prompts = [[3] * 5, list(range(20)) * 3 + [7], [1, 9] * 20]
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
    expected = plain_texts(tiny_llm, prompts, [params] * len(prompts))
    assert token_ids(open_llm(tmp_path / "e", budget=16), prompts, params) == expected


@every_kind
def test_sequences_that_fill_the_engine_leave_their_batch_mates_alone(
    tiny_llm: LLM, open_llm: Callable[..., LLM], kind: str
) -> None:
    """The draft that is made ahead of their end reaches behind max_seq_len."""
    prompts = [[i] * 90 for i in range(5)]
    params = SamplingParams(max_tokens=LIMITS["max_seq_len"] - 90, temperature=0.3, seed=1, ignore_eos=True)
    expected = plain_texts(tiny_llm, prompts, [params] * len(prompts))
    assert token_ids(open_llm(kind, budget=31), prompts, params) == expected


def test_a_draft_made_ahead_of_the_longest_text_stays_within_the_tables(open_llm: Callable[..., LLM]) -> None:
    """The whole draft was accepted in the last round that max_seq_len allows, which only good drafters do."""
    engine = open_llm("kernel").engine
    draft = engine.manifest.draft
    assert draft is not None
    rows = draft.max_depth + 1
    context, counts = torch.tensor([LIMITS["max_seq_len"] - 2]), torch.tensor([rows])
    roots = torch.tensor([-1], dtype=torch.int32)  # and of a sequence that failed, which has no root
    with torch.inference_mode(), engine.stream():
        inputs = draft_inputs(engine, torch.zeros(1, rows, engine.manifest.feature_width), context, counts, roots)
        assert int(inputs.block_position_ids.max()) > LIMITS["max_seq_len"] + draft.block_size
        tree = engine.draft(inputs, roots, 16, "tree")
    assert tree.node_count.tolist() == [17]


# The host and the device


@every_kind
def test_a_round_waits_once_and_reads_nothing_else(
    open_llm: Callable[..., LLM], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(kind, budget=16)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=1, ignore_eos=True)
    reads: list[str] = []
    inside = False
    for name in ("item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__", "cpu"):
        real = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, real: Any = real, name: str = name) -> Any:
            if inside and not cuda_stand_in.working():
                reads.append(name)
            return real(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, read)
    waits: list[int] = []
    whole = scheduler.decode_round

    def watched(*args: Any, **settings: Any) -> Any:
        nonlocal inside
        before, inside = cuda_stand_in.Event.waits, True
        try:
            return whole(*args, **settings)
        finally:
            inside = False
            waits.append(cuda_stand_in.Event.waits - before)

    monkeypatch.setattr(scheduler, "decode_round", watched)
    llm.generate(PROMPTS[:3], params)
    assert set(waits) == {1}
    assert len(waits) > 10
    assert reads == []


def test_a_round_of_a_known_shape_is_replayed_whole(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm("kernel", budget=16)
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True)
    llm.generate([1, 2, 3], params)
    launches, replays = tensorrt_runtime_stand_in.IExecutionContext.launches, cuda_stand_in.CUDAGraph.replays
    launches.clear()
    output = llm.generate([4, 5, 6], params)
    assert set(launches) == {PROMPT}
    drafts_and_rounds = cuda_stand_in.CUDAGraph.replays - replays
    assert 2 * output.statistics.rounds - 1 <= drafts_and_rounds <= 2 * output.statistics.rounds + 1


def test_another_object_at_the_same_address_is_not_taken_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_stand_in.install(monkeypatch)
    stream = torch.cuda.Stream()
    graphs = CudaGraphs(stream)
    with torch.cuda.stream(stream):
        for _ in range(20):
            graphs.run(make_zero, object())  # gone when the next one is made
        assert len(graphs) == 0
        kept = object()
        for _ in range(3):
            graphs.run(make_zero, kept)
        assert len(graphs) == 1


def make_zero(argument: object) -> torch.Tensor:
    return torch.zeros(1)


def test_the_next_draft_is_queued_before_the_host_waits(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a sequence that ends with the next token, whatever that is."""
    llm = open_llm("kernel", budget=0)  # a token a round
    queued: list[int] = []
    wait = cuda_stand_in.Event.synchronize

    def watched(event: Any) -> None:
        queued.append(len(llm.engine.ahead))
        wait(event)

    monkeypatch.setattr(cuda_stand_in.Event, "synchronize", watched)
    llm.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    assert queued == [0, *[1] * 6, 0]  # the prompt, six rounds, and the last


def test_addresses_stay_from_the_first_request_on(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm("plugin", budget=16)
    context = tensorrt_runtime_stand_in.IExecutionContext
    seen: dict[tuple[Any, str], set[int]] = {}  # by engine and name
    with pytest.MonkeyPatch.context() as patch:
        execute = context.execute_async_v3

        def watched(self: Any, stream_handle: int) -> bool:
            if self.active_optimization_profile == ROUND:
                for name, address in self._addresses.items():
                    seen.setdefault((self.engine, name), set()).add(address)
            return execute(self, stream_handle)

        patch.setattr(context, "execute_async_v3", watched)
        for prompts in (PROMPTS[:1], PROMPTS[:3], PROMPTS):
            llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    prefixes = ("past_key_values.", "present.", "query.", "logits", "context_features", "accepted_nodes", "parents")
    fixed = {name: where for name, where in seen.items() if name[1].startswith(prefixes)}
    caches = [where for (_, name), where in fixed.items() if name.startswith(("past", "present"))]
    assert len(caches) == 2 * 2 * (4 + 2)  # key and value, in and out, of the target's layers and the drafter's
    assert len(set().union(*caches)) == 2 * (4 + 2)
    moved = {name for name, where in fixed.items() if len(where) > 1}
    assert {name for _, name in moved} <= {"context_features"}  # an input of the drafter, an output of the target
    queries = [where for (_, name), where in fixed.items() if name.startswith("query.")]
    assert len(set().union(*queries)) == len(queries) == 4 + 2


@pytest.mark.parametrize("method", ["ddtree", "ar"])
@pytest.mark.parametrize("kind", ["plugin", "kernel"])
def test_who_watches_rounds_sees_the_tree_of_each(
    tiny_llm: LLM, open_llm: Callable[..., LLM], kind: str, method: str
) -> None:
    """Not that of the draft ahead, which is written over it."""
    params = SamplingParams(max_tokens=25, temperature=0.7, seed=1, ignore_eos=True)
    seen: dict[LLM, list[tuple]] = {}
    for llm in (tiny_llm, open_llm(kind)):
        llm.method, llm.budget, trees = method, 16, seen.setdefault(llm, [])
        llm.on_round = lambda tree, verified, trees=trees: trees.append(
            (tree.token_ids.tolist(), tree.parents.tolist(), [n for n in verified.accepted_nodes[0].tolist() if n >= 0])
        )
        ids = llm.generate([1, 2, 3], params).outputs[0].token_ids
        roots = [tokens[0][0] for tokens, _, _ in trees]
        assert roots == [ids[at] for at in itertools.accumulate((len(a) for _, _, a in trees[:-1]), initial=0)]
    assert seen.popitem()[1] == seen.popitem()[1]


# What goes wrong


POISONED = 60  # position


def poison(path: Path) -> None:
    """NaN in the rotary table of an engine file: a sequence that reaches POISONED has NaN logits."""
    magic, content = tensorrt_runtime_stand_in.MAGIC, path.read_bytes()
    start = len(magic) + 8 + int.from_bytes(content[len(magic) : len(magic) + 8], "little")
    model = onnx.load_from_string(content[start:])
    (table,) = (tensor for tensor in model.graph.initializer if tensor.name.endswith("rotary.cos"))
    values = numpy_helper.to_array(table).copy()
    values[POISONED] = np.nan
    table.raw_data = values.tobytes()
    path.write_bytes(content[:start] + model.SerializeToString())


@every_kind
def test_a_sequence_of_nan_fails_alone_and_leaves_no_trace(
    tiny_pair: tuple[Path, Path], tiny_llm: LLM, open_llm: Callable[..., LLM], kind: str, tmp_path: Path
) -> None:
    build(tiny_pair, tmp_path / "e", kind)
    poison(tmp_path / "e" / "target.engine")
    llm = open_llm(tmp_path / "e", budget=16)
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(20)) * 2 + [5] * 15, [7, 7]]
    expected = plain_texts(tiny_llm, prompts, [params] * 3)
    for order in ([0, 1, 2], [0, 2, 1], [2, 0, 1]):  # in the midst of the batch, and behind the others
        for i, output in zip(order, llm.generate([prompts[i] for i in order], params), strict=True):
            ids = output.outputs[0].token_ids
            if i == 1:
                assert output.error is not None
                assert "NaN" in output.error
            else:
                assert output.error is None
                assert len(ids) == 30
            assert ids == expected[i][: len(ids)]
    for plan in (llm.engine._target, llm.engine._draft):
        assert not any(cache.isnan().any() for cache in plan.caches)


def test_a_pass_that_the_library_refuses_ends_its_requests_and_no_later_ones(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm("kernel", budget=16)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = llm.generate([1, 2, 3], params).outputs[0].token_ids
    context = tensorrt_runtime_stand_in.IExecutionContext
    with monkeypatch.context() as patch:
        patch.setattr(context, "execute_async_v3", lambda self, stream_handle: self._refuse("out of order"))
        error = llm.generate([4], params).error
    assert error is not None
    assert error.endswith("stand-in: out of order (build it again if GPU and driver are in order)")
    assert llm.generate([1, 2, 3], params).outputs[0].token_ids == expected


def test_what_cannot_be_recorded_runs_without(
    open_llm: Callable[..., LLM], tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain_texts(tiny_llm, [[1, 2, 3]], [SAMPLED])
    llm = open_llm("kernel", budget=16)

    def refuse(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_stand_in.CUDAGraph, "keep", refuse)
    replays = cuda_stand_in.CUDAGraph.replays
    with caplog.at_level(logging.WARNING):
        assert token_ids(llm, [[1, 2, 3]], SAMPLED) == expected
    assert cuda_stand_in.CUDAGraph.replays == replays
    messages = [record.getMessage() for record in caplog.records]
    assert messages[-1] == "rounds run without CUDA graphs from here on"
    assert len(messages) == 4
    assert all(each.startswith("draft is not recorded as a CUDA graph: CUDA error") for each in messages[:3])


def test_one_failure_to_record_is_forgiven(
    open_llm: Callable[..., LLM], tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain_texts(tiny_llm, [[1, 2, 3]], [SAMPLED])
    llm = open_llm("kernel", budget=16)
    keep, failures = cuda_stand_in.CUDAGraph.keep, iter([RuntimeError("out of memory")])

    def once(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if failure := next(failures, None):
            raise failure
        return keep(self, func, args, kwargs)

    monkeypatch.setattr(cuda_stand_in.CUDAGraph, "keep", once)
    replays = cuda_stand_in.CUDAGraph.replays
    assert token_ids(llm, [[1, 2, 3]], SAMPLED) == expected
    assert cuda_stand_in.CUDAGraph.replays > replays + 5
    assert len(caplog.records) == 1


def test_an_engine_that_no_graph_can_hold_runs_without(
    open_llm: Callable[..., LLM], tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain_texts(tiny_llm, [[1, 2, 3]], [SAMPLED])
    llm = open_llm("rtx", budget=16)
    context = tensorrt_runtime_stand_in.RtxExecutionContext
    monkeypatch.setattr(context, "is_stream_capturable", lambda self, stream: False)
    replays = cuda_stand_in.CUDAGraph.replays
    assert token_ids(llm, [[1, 2, 3]], SAMPLED) == expected
    assert cuda_stand_in.CUDAGraph.replays == replays
    assert caplog.records == []


def test_a_recorded_context_is_used_for_nothing_else(
    open_llm: Callable[..., LLM], tiny_llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """The chain and trees of as many nodes have one shape, and so have rounds with rules: the stand-in refuses other
    addresses for a context that a graph holds."""
    llm = open_llm("kernel")
    assert llm.manifest.draft is not None
    depth = llm.manifest.draft.max_depth
    ruled = replace(SAMPLED, repetition_penalty=1.2)
    expected = {each.repetition_penalty: plain_texts(tiny_llm, [[1, 2, 3]], [each]) for each in (SAMPLED, ruled)}
    for llm.method, llm.budget in [("ddtree", depth), ("chain", 0), ("ddtree", depth), ("chain", 0)]:
        for params in (SAMPLED, ruled):
            assert token_ids(llm, [[1, 2, 3]], params) == expected[params.repetition_penalty]
    assert caplog.records == []


def test_two_threads_record_one_after_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_stand_in.install(monkeypatch)

    def slow(argument: object) -> torch.Tensor:
        time.sleep(0.05)
        return torch.zeros(1)

    def serve() -> int:
        stream = torch.cuda.Stream()
        graphs = CudaGraphs(stream)
        with torch.cuda.stream(stream):
            for _ in range(3):
                graphs.run(slow, graphs)
        return len(graphs)

    with ThreadPoolExecutor(2) as pool:
        assert [served.result() for served in [pool.submit(serve) for _ in range(2)]] == [1, 1]
    assert caplog.records == []


def test_tensorrt_for_rtx_keeps_what_it_compiled(
    open_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of rounds are compiled before they are recorded, those of prompts when there is time."""
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    open_llm("rtx", budget=16).generate([1, 2, 3], params)
    files = sorted((tmp_path / "tensorrt_rtx").iterdir())
    assert len(files) == 2  # target and draft
    before = [file.read_bytes() for file in files]
    assert all(content.split(b";")[0] == b"LAZY" and b"EAGER" in content for content in before)
    open_llm("rtx", budget=16).generate([1, 2, 3], params)
    assert all(file.read_bytes().startswith(content) for file, content in zip(files, before, strict=True))
    assert len(sorted((tmp_path / "tensorrt_rtx").iterdir())) == 2


def test_a_full_disk_costs_no_request(
    open_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorrt_rtx").touch()  # a file where the directory should be
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    output = open_llm("rtx", budget=16).generate([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 20
    assert {record.getMessage().split(": ")[0].split(" is ")[1] for record in caplog.records} == {"not written"}


def test_an_error_is_not_told_twice(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm("kernel", budget=16)
    llm.engine._target._logger.fault = "of long ago"
    context = tensorrt_runtime_stand_in.IExecutionContext
    monkeypatch.setattr(context, "execute_async_v3", lambda self, stream_handle: False)
    assert "no reason given" in str(llm.generate([4], SamplingParams(max_tokens=3)).error)


DAMAGE: dict[str, tuple[Callable[..., Any], str]] = {
    "damaged": (
        lambda manifest, directory, patch: (directory / "target.engine").write_bytes(
            b"0" * (directory / "target.engine").stat().st_size
        ),
        r"target.engine: tensorrt 10.15.1 cannot open it: stand-in: the engine's header is not there \(build it again",
    ),
    "version": (
        lambda manifest, directory, patch: replace(manifest, versions=manifest.versions | {"tensorrt": "10.16.0"}).save(
            directory
        ),
        r"built with tensorrt 10.16.0, and 10.15.1 is installed \(build the engine again, or install that version\)",
    ),
    "architecture": (
        lambda manifest, directory, patch: replace(manifest, compiled=replace(manifest.compiled, arch="sm_100")).save(
            directory
        ),
        r"was built for sm_100, and the GPU is sm_120 \(build it on this GPU\)",
    ),
    "no GPU": (
        lambda manifest, directory, patch: patch.setattr(torch.cuda, "is_available", lambda: False),
        r"finds no GPU here \(install a CUDA build",
    ),
    "no library": (
        lambda manifest, directory, patch: patch.setitem(sys.modules, "tensorrt", None),
        r"needs tensorrt 10.15.1: .* \(install that version\)",
    ),
    "no kernels": (
        lambda manifest, directory, patch: patch.setattr(launch, "device_arch", no_driver),
        r"cannot run its tree operations here: cuda.bindings.driver is not installed \(pip install",
    ),
    "memory": (
        lambda manifest, directory, patch: patch.setattr(Plan, "allocate", out_of_memory),
        r"does not fit into the GPU's memory of 80.0 GB, 5.0 GB of which are left \(build it with a smaller",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_engine_that_cannot_run_here_is_refused(
    engines: Path,
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    do, message = DAMAGE[damage]
    directory = tmp_path / "engine"
    shutil.copytree(engines / "kernel", directory)
    open_llm(directory)
    with monkeypatch.context() as patch:
        do(Manifest.load(directory), directory, patch)
        with pytest.raises(EngineError, match=message) as caught:
            LLM(directory)
    assert "\n" not in str(caught.value)


def no_driver() -> str:
    raise ImportError('cuda.bindings.driver is not installed (pip install "ddtree-trtllm[cuda]")')


def out_of_memory(plan: Plan, scratch: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_threads_do_not_go_with_a_gpu(open_llm: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match=r"threads 2 do not go with engine tensorrt, .* \(leave them out\)"):
        open_llm("kernel", threads=2)


def test_tensorrt_for_rtx_itself_says_why_it_does_not_open_a_file(tmp_path: Path) -> None:
    """The real library, with a GPU or without."""
    (tmp_path / "no.engine").write_bytes(b"no engine" * 100)
    stream = cuda_stand_in.Stream()
    with pytest.raises(
        EngineError, match=rf"no.engine: tensorrt_rtx {tensorrt_rtx.__version__} cannot open it: .*[a-z]"
    ):
        Plan(tensorrt_rtx, tmp_path / "no.engine", 1, 1, stream, tmp_path / "none")
