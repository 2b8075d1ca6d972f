"""The console command as a user meets it: a process of its own, its two streams, its exit code."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ddtree.builder import Manifest
from ddtree.runtime.cli import main

DDTREE = [sys.executable, "-c", "from ddtree.runtime.cli import main; main()"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def ddtree(cache: Path):
    def run(*arguments: object, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
        process = subprocess.run(
            [*DDTREE, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            env=os.environ | {"DDTREE_CACHE": str(cache)} | environment,
            timeout=120,
            check=False,
        )
        return subprocess.CompletedProcess(
            process.args, process.returncode, process.stdout.decode(), process.stderr.decode()
        )

    return run


def refusal(process: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal."""
    assert process.returncode == 2, process.stderr
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("ddtree: ")
    return lines[0].removeprefix("ddtree: ")


def test_text_and_nothing_else_goes_to_standard_output(ddtree, tiny_engine: Path) -> None:
    process = ddtree(
        "generate", "w1 w2 w3", "--engine", tiny_engine, "--max-tokens", 20, "--seed", 7, "--temperature", 1
    )
    assert process.returncode == 0, process.stderr
    assert set(process.stdout.split()) <= {f"w{i}" for i in range(24)}
    assert process.stderr.count("\n") == 1
    assert "tokens/s" in process.stderr
    assert "acceptance length" in process.stderr


def test_every_method_prints_the_same_text(ddtree, tiny_engine: Path) -> None:
    settings = ["w1 w2", "--engine", tiny_engine, "--max-tokens", 30, "--seed", 9, "--temperature", 0.9, "--top-k", 20]
    runs = [ddtree("generate", *settings, "--method", method) for method in ("ddtree", "chain", "ar")]
    runs.append(ddtree("generate", *settings, "--budget", 100))
    assert [run.returncode for run in runs] == [0] * 4
    assert len(runs[0].stdout.split()) == 30
    assert len({run.stdout for run in runs}) == 1


def test_compare_says_the_speed_up_and_that_the_text_is_the_same(ddtree, tiny_engine: Path) -> None:
    process = ddtree("generate", "w1", "--engine", tiny_engine, "--max-tokens", 20, "--compare")
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("\n") == 1
    assert "times plain decoding" in process.stderr
    assert "same text" in process.stderr


def test_show_tree_draws_each_round_on_standard_error(ddtree, tiny_engine: Path) -> None:
    process = ddtree("generate", "w1", "--engine", tiny_engine, "--max-tokens", 12, "--budget", 5, "--show-tree")
    assert process.returncode == 0, process.stderr
    assert "└──" in process.stderr
    assert "bonus" in process.stderr
    assert "─" not in process.stdout


def test_a_prompt_comes_from_a_file_or_from_standard_input(ddtree, tiny_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("w1 w2 w3")
    settings = ["--engine", tiny_engine, "--max-tokens", 9]
    expected = ddtree("generate", "w1 w2 w3", *settings).stdout
    assert len(expected.split()) == 9
    assert ddtree("generate", "--file", file, *settings).stdout == expected
    assert ddtree("generate", *settings, stdin=b"w1 w2 w3\n").stdout == expected
    assert ddtree("generate", "--file", "-", *settings, stdin=b"w1 w2 w3").stdout == expected


def test_checkpoints_are_built_once_and_then_opened(ddtree, tiny_pair: tuple[Path, Path], cache: Path) -> None:
    settings = ["generate", "w4", "--target", tiny_pair[0], "--draft", tiny_pair[1], "--max-tokens", 5]
    first = ddtree(*settings)
    assert first.returncode == 0, first.stderr
    engines = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert ddtree(*settings).stdout == first.stdout
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == engines


def test_build_then_inspect(ddtree, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    build = ["build", "--target", tiny_pair[0], "--draft", tiny_pair[1], "--output", engine]
    assert ddtree(*build, "--budget", 31).returncode == 0
    shown = ddtree("inspect", engine)
    assert shown.returncode == 0, shown.stderr
    assert "31" in shown.stdout
    assert "qwen3" in shown.stdout
    assert "model.safetensors" in shown.stdout  # what it was built of
    assert str(engine) in refusal(ddtree(*build))  # what is there is not overwritten
    assert ddtree(*build, "--force").returncode == 0


def test_an_engine_for_sm_120_is_built_and_shown(ddtree, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    process = ddtree(
        *("build", "--target", tiny_pair[0], "--draft", tiny_pair[1], "--output", engine, "--engine", "tensorrt-rtx"),
        *("--arch", "sm_120", "--dtype", "float16", "--verify", "kernel"),
        *("--budget", 15, "--max-batch-size", 2, "--max-seq-len", 100),
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    assert process.stderr == f"wrote {engine}\n"  # no note: no kernel copies a cache
    shown = " ".join(ddtree("inspect", engine, COLUMNS="200").stdout.split())
    compiled = Manifest.load(engine).compiled
    assert compiled is not None
    # Keys and values, float16: 4 layers, 2 KV heads and 16 columns of the target, 2 layers of the drafter.
    caches = 2 * 2 * 2 * 2 * 16 * (4 * compiled.target_cache_length + 2 * compiled.draft_cache_length)
    for words in ("tensorrt_rtx", "sm_120", "GPUs of compute capability 12.0 only", f"{caches / 1000:.3g} KB"):
        assert words in shown
    (engine / "target.engine").write_bytes(b"x" * (engine / "target.engine").stat().st_size)
    assert "target.engine has changed since the engine was built" in refusal(ddtree("inspect", engine))


def test_a_refusal_comes_before_the_sample_prompt(ddtree) -> None:
    assert "temperature -1.0 is out of range" in refusal(ddtree("generate", "--temperature", -1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--engine", "tensorrt-rtx", "--dtype", "float32"], "dtype 'float32' does not go with engine tensorrt_rtx"),
        (["--engine", "tensorrt-rtx", "--verify", "plugin"], "verify 'plugin' does not go with engine tensorrt_rtx"),
        (["--timing-cache", "there"], "timing cache there does not go with engine onnxruntime"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    ddtree, tiny_pair: tuple[Path, Path], tmp_path: Path, settings: list[str], message: str
) -> None:
    process = ddtree("build", "--target", tiny_pair[0], "--output", tmp_path / "engine", *settings)
    assert message in refusal(process)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "many"], "Invalid value for '--max-tokens': 'many' is not a valid integer."),
        (["--method", "eagle"], "method 'eagle' is not known (use one of ddtree, chain, ar)"),
        (["--budget", "-1"], "budget -1 is negative (use 0 to 255)"),
        (["--budget", "500"], "budget 500 exceeds the engine's max_tree_nodes 255 (rebuild with --budget 500)"),
        (["--temperature", "-1"], "temperature -1.0 is out of range (use 0 or more)"),
        (["--top-p", "0"], "top_p 0 keeps no token (use a value above 0, 1 turns the filter off)"),
        (["--seed", "-4"], f"seed -4 is out of range (use 0 to {2**64 - 1})"),
        (["--threads", "0"], f"threads 0 is out of range (use 1 to {os.cpu_count()}, the cores of this machine)"),
        (["--file", "there"], "a prompt and --file were given (give one)"),
        (["--draft", "there"], "--engine has its models inside (leave --target and --draft out)"),
        (
            ["--max-tokens", "3000"],
            "prompt of 2 tokens and max_tokens 3000 exceed the engine's max_seq_len 2048 "
            "(lower max_tokens to 2046, or rebuild with a larger --max-seq-len)",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    tiny_engine: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddtree", "generate", "w1 w2", "--engine", str(tiny_engine), *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr() == ("", f"ddtree: {message}\n")


def test_a_prompt_that_cannot_be_read_is_refused(ddtree, tiny_engine: Path, tmp_path: Path) -> None:
    settings = ["generate", "--engine", tiny_engine]
    assert refusal(ddtree(*settings)).startswith("standard input holds no prompt")
    assert refusal(ddtree(*settings, "--file", tmp_path / "nowhere.txt")).endswith(
        "nowhere.txt: No such file or directory"
    )
    assert refusal(ddtree(*settings, "--file", tmp_path)).endswith("Is a directory")
    assert "max_seq_len 2048" in refusal(ddtree(*settings, "w1 " * 3000))


def test_a_prompt_file_that_is_not_text_is_refused(ddtree, tiny_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"w1 w2 \xff\xfe")
    assert refusal(ddtree("generate", "--file", file, "--engine", tiny_engine)).endswith(
        "is not UTF-8 text at byte 6 (convert it first)"
    )


def test_a_checkpoint_or_engine_that_cannot_be_used_is_refused(
    ddtree, tiny_pair, tiny_engine: Path, tmp_path: Path
) -> None:
    target, draft = tiny_pair
    truncated = tmp_path / "truncated"
    truncated.mkdir()
    for file in target.iterdir():
        data = file.read_bytes()
        (truncated / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    config = json.loads((draft / "config.json").read_text()) | {"hidden_size": 64}
    (foreign / "config.json").write_text(json.dumps(config))
    save_file(load_file(draft / "model.safetensors"), foreign / "model.safetensors")
    output = tmp_path / "output"
    for arguments, named in [
        (["build", "--target", tmp_path / "nothing", "--draft", draft, "--output", output], "nothing"),
        (["build", "--target", truncated, "--draft", draft, "--output", output], "model.safetensors"),
        (["build", "--target", target, "--draft", foreign, "--output", output], "hidden"),
        (["build", "--target", target, "--draft", draft, "--output", output, "--engine", "tensorrt"], "tensorrt"),
        (["generate", "w1", "--engine", tmp_path / "nothing"], "nothing"),
        (["generate", "w1", "--engine", target], "is not an engine directory"),
        (["generate", "w1", "--target", tmp_path / "nothing"], "nothing"),
        (["inspect", tmp_path], str(tmp_path)),
    ]:
        assert named in refusal(ddtree(*arguments))
        assert not output.exists()
        assert not [path for path in tmp_path.iterdir() if path.name not in ("truncated", "foreign")]


def test_a_cache_that_cannot_be_written_is_named(ddtree, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = refusal(ddtree("generate", "w1", "--target", tiny_pair[0], DDTREE_CACHE=str(tmp_path / "file" / "cache")))
    assert "DDTREE_CACHE" in message


def test_text_is_utf_8_whatever_the_locale_and_closed_streams_are_refused(tiny_engine: Path) -> None:
    def shell(redirect: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = f"{shlex.join(DDTREE)} generate {redirect} --engine {tiny_engine} --max-tokens 3"
        return subprocess.run(
            command, shell=True, capture_output=True, text=True, env=os.environ | environment, check=False
        )

    assert shell("w1", PYTHONIOENCODING="ascii").returncode == 0
    assert shell("w1 <&-").returncode == 0
    assert refusal(shell("<&-")).startswith("standard input holds no prompt")
    assert refusal(shell("w1 >&-")) == "standard output is closed (text has nowhere to go)"


def test_nan_logits_are_an_error_with_exit_code_2(ddtree, poisoned_engine: Path) -> None:
    process = ddtree("generate", "w5 " * 70, "--engine", poisoned_engine)
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert "hold NaN" in process.stderr


def test_a_reader_that_leaves_early_is_no_error(tiny_engine: Path) -> None:
    process = subprocess.run(
        f"{sys.executable} -c 'from ddtree.runtime.cli import main; main()' generate w1 --max-tokens 200 "
        f"--engine {tiny_engine} | head -c 3; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0
    assert b"Traceback" not in process.stderr
