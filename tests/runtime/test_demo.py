"""The demo pair: what a user gets who gives neither engine nor checkpoint."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddtree.builder import BuildError
from ddtree.demo.prompts import DEFAULT_PROMPT, KINDS, held_out_prompts
from ddtree.runtime import LLM, SamplingParams
from ddtree.runtime.engine_cache import cached_engine, demo_pair


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def demo_llm(cache: Path) -> LLM:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DDTREE_CACHE", str(cache))
        return LLM(threads=1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_held_out_prompts_get_the_same_text_from_every_method(demo_llm: LLM, temperature: float) -> None:
    prompts = [prompt for kind in KINDS for prompt in held_out_prompts(kind, 2, seed=2)]
    params = [
        SamplingParams(max_tokens=64, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    demo_llm.method = "ar"
    expected = [output.outputs[0].token_ids for output in demo_llm.generate(prompts, params)]
    rounds = {}
    runs = [("chain", 0, False), ("ddtree", 8, False), ("ddtree", 64, False), ("ddtree", 64, True)]
    for demo_llm.method, demo_llm.budget, demo_llm.adaptive in runs:
        outputs = demo_llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        rounds[demo_llm.method, demo_llm.budget, demo_llm.adaptive] = sum(o.statistics.rounds for o in outputs)
    # Whole trees of 64 nodes need fewer rounds than the chain, and the chain fewer than plain decoding; these are
    # counts, not times.
    assert rounds["ddtree", 64, False] < rounds["chain", 0, False] < 63 * len(prompts) / 1.5


def test_the_engine_is_built_once_and_again_if_it_is_damaged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_CACHE", str(cache))
    engine = cached_engine(*demo_pair())
    manifest = engine / "config.json"
    before = manifest.stat().st_mtime_ns
    assert cached_engine(*demo_pair()) == engine
    assert manifest.stat().st_mtime_ns == before
    (engine / "target.onnx").write_bytes(b"cut")
    assert cached_engine(*demo_pair()) == engine
    LLM(engine)


def test_a_drafter_that_is_not_there_is_refused_whatever_the_cache_holds(cache: Path, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("DDTREE_CACHE", str(cache))
    target = demo_pair()[0]
    cached_engine(target, None)
    with pytest.raises(BuildError, match="nowhere is not a directory"):
        cached_engine(target, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BuildError, match="empty"):
        cached_engine(target, tmp_path / "empty")


def test_first_uses_at_the_same_time_share_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        engines = list(pool.map(lambda _: cached_engine(*demo_pair()), range(3)))
    assert len(set(engines)) == 1
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [engines[0]]
    LLM(engines[0])


def test_the_command_without_arguments_continues_the_sample_prompt(cache: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", "from ddtree.runtime.cli import main; main()", "generate", "--max-tokens", "24"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"DDTREE_CACHE": str(cache)},
        check=True,
    )
    assert process.stdout.startswith(DEFAULT_PROMPT)
    assert len(process.stdout) > len(DEFAULT_PROMPT) + 24
    assert process.stderr.startswith("ddtree: 24 tokens")
