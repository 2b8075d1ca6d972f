"""The `ddtree` command. Text goes to standard output, everything else to standard error; a refusal is one line and
exit code 2."""

import io
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from ddtree.runtime import LLM, RequestOutput, SamplingParams

messages = Console(stderr=True, highlight=False)

_BUILD_COLUMNS = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
COMPARE_RUNS = 3  # of each method, taken in turns; the medians are compared

_PATH = click.Path(path_type=Path)
_target = click.option("--target", type=_PATH, help="Target checkpoint directory (Hugging Face layout).")
_draft = click.option("--draft", type=_PATH, help="DFlash drafter checkpoint directory of that target.")
_method = click.option("--method", help="ddtree (a draft tree), chain (the drafter's chain) or ar (plain decoding).")
_budget = click.option("--budget", type=int, help="The most draft nodes of a tree, root excluded.  [default: 16]")
_largest_budget = click.option("--budget", type=int, default=255, help="The most draft nodes of a tree, root excluded.")
_threads = click.option("--threads", type=int, help="Threads of a pass. Absent: the engine's choice.")


@click.group(context_settings={"show_default": True, "max_content_width": 100})
@click.version_option(package_name="ddtree-trtllm")
def app() -> None:
    """Tree speculative decoding with a block-diffusion drafter: the text of plain decoding, in fewer passes."""


@app.command()
@click.argument("prompt", required=False)
@click.option("--file", type=_PATH, help="Read the prompt from this file; - is standard input.")
@click.option("--engine", type=_PATH, help="Engine directory. No engine and no target: the demo pair.")
@_target
@_draft
@_method
@_budget
@click.option("--adaptive/--whole-trees", default=True, help="Cut trees, or leave drafts out, where it saves time.")
@click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0 keeps all.")
@click.option("--top-p", type=float, default=1.0, help="Keep the smallest set with this mass; 1 keeps all.")
@click.option(
    "--min-p", type=float, default=0.0, help="Keep tokens this likely relative to the likeliest; 0 keeps all."
)
@click.option("--seed", type=int, help="0 to 2^64-1. Absent: random, and reported.")
@click.option("--max-tokens", type=int, default=128, help="The most tokens to write.")
@_threads
@click.option("--compare", is_flag=True, help="Also time plain decoding, and check that the text is the same.")
@click.option("--show-tree", is_flag=True, help="Draw each round's tree and its accepted path.")
def generate(
    prompt: str | None,
    file: Path | None,
    engine: Path | None,
    target: Path | None,
    draft: Path | None,
    method: str | None,
    budget: int | None,
    adaptive: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    max_tokens: int,
    threads: int | None,
    compare: bool,
    show_tree: bool,
) -> None:
    """Continue PROMPT (or --file, or standard input; with the demo pair and none of these, a sample prompt)."""
    if engine is not None and (target is not None or draft is not None):
        raise click.UsageError("--engine has its models inside (leave --target and --draft out)")
    if draft is not None and target is None:
        raise click.UsageError("--draft without --target (give the target's checkpoint too)")
    from ddtree.builder import Manifest
    from ddtree.runtime import LLM, SamplingParams
    from ddtree.runtime.tree_view import draw_tree

    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is built on first use cleans up behind itself
    given = _read_prompt(prompt, file, required=engine is not None or target is not None)
    text = _sample_prompt() if given is None else given
    if engine is not None:
        Manifest.load(engine)  # LLM would take a checkpoint, too
    llm = LLM(
        engine or target,
        speculative_model=draft,
        method=method,  # type: ignore[arg-type]
        budget=budget,
        adaptive=adaptive,
        threads=threads,
    )
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    if seed is None:
        params.seed = params.resolved_seed()
    if show_tree:
        llm.on_round = lambda tree, verified: messages.print("", draw_tree(tree, verified, llm.tokenizer), sep="\n")
    output = _stream(llm, text, params, show_prompt=given is None)  # nobody typed it, so show what is continued
    llm.on_round = None
    if output.error is not None:
        raise click.ClickException(output.error)
    _say(_comparison(llm, text, params, output) if compare else _summary(llm, output))


def _stream(llm: "LLM", text: str, params: "SamplingParams", *, show_prompt: bool) -> "RequestOutput":
    written = 0
    outputs = llm.stream(text, params)  # a refusal comes before anything is written
    if show_prompt:
        _write(text)
    for output in outputs:
        _write(output.outputs[0].text[written:])
        written = len(output.outputs[0].text)
    _write("\n")
    return output


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough; leave quietly, and let the flush at exit succeed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _say(line: str) -> None:
    messages.print(line, style="dim", soft_wrap=True, markup=False)


def _sample_prompt() -> str:
    from ddtree.demo.prompts import DEFAULT_PROMPT

    return DEFAULT_PROMPT


def _read_prompt(prompt: str | None, file: Path | None, *, required: bool) -> str | None:
    """The prompt from where it was given, less the newline at a file's end; None if there is none and need be none."""
    if prompt is not None and file is not None:
        raise click.UsageError("a prompt and --file were given (give one)")
    if prompt is not None:
        return prompt
    if file is not None and str(file) != "-":
        source, data = str(file), file.read_bytes()
    else:
        closed = sys.stdin is None or sys.stdin.isatty()
        source, data = "standard input", b"" if closed else sys.stdin.buffer.read()
    if not data:
        if file is None and not required:
            return None
        raise click.UsageError(f"{source} holds no prompt (give one as argument, with --file, or on standard input)")
    try:
        return data.decode().removesuffix("\n")  # the one that shells and editors put there
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source} is not UTF-8 text at byte {error.start} (convert it first)") from None


def _tokens_per_second(output: "RequestOutput") -> float:
    stats = output.statistics
    return len(output.outputs[0].token_ids) / (stats.prefill_seconds + stats.decode_seconds)


def _summary(llm: "LLM", output: "RequestOutput") -> str:
    completion, stats = output.outputs[0], output.statistics
    return (
        f"{llm.method}: {len(completion.token_ids)} tokens, {_tokens_per_second(output):.0f} tokens/s, "
        f"acceptance length {stats.acceptance_length:.2f}, seed {completion.seed}"
    )


def _comparison(llm: "LLM", text: str, params: "SamplingParams", output: "RequestOutput") -> str:
    """Time this method and plain decoding in turns, and compare what they write."""
    method = llm.method
    speeds: dict[str, list[float]] = {method: [], "ar": []}
    tokens: dict[str, list[int]] = {}
    for _ in range(COMPARE_RUNS):
        for llm.method in speeds:  # type: ignore[assignment]
            result = llm.generate(text, params)
            speeds[llm.method].append(_tokens_per_second(result))
            tokens[llm.method] = result.outputs[0].token_ids
    llm.method = method
    fast, plain = statistics.median(speeds[method]), statistics.median(speeds["ar"])
    first = next((i for i, (a, b) in enumerate(zip(tokens[method], tokens["ar"], strict=False)) if a != b), None)
    same = "same text" if tokens[method] == tokens["ar"] else f"text differs from token {first} on"
    return (
        f"{method}: {len(tokens[method])} tokens, {fast:.0f} tokens/s, acceptance length "
        f"{output.statistics.acceptance_length:.2f}, {fast / plain:.2f} times plain decoding ({plain:.0f} tokens/s), "
        f"{same}, seed {output.outputs[0].seed}"
    )


@app.command()
@click.option("--output", type=_PATH, required=True, help="Where to write the engine directory.")
@_target
@_draft
@click.option("--engine", default="onnxruntime", help="onnxruntime (any CPU), tensorrt or tensorrt-rtx.")
@click.option("--arch", help="GPU: sm_120 with tensorrt-rtx; tensorrt builds for the one that is present.")
@click.option("--dtype", help="float32 with onnxruntime, else float16 or bfloat16. Absent: the checkpoint's.")
@_largest_budget
@click.option("--max-batch-size", type=int, default=8, help="The most sequences at once.")
@click.option("--max-seq-len", type=int, help="Tokens of prompt and output. Absent: the checkpoint's.")
@click.option("--verify", help="Tree operations: plugin (in the engine; tensorrt only) or kernel (right behind it).")
@click.option("--timing-cache", type=_PATH, help="Read and write tensorrt's measurements of kernels here.")
@click.option("--force", is_flag=True, help="Replace an engine that is there.")
def build(
    output: Path,
    target: Path | None,
    draft: Path | None,
    engine: str,
    arch: str | None,
    dtype: str | None,
    budget: int,
    max_batch_size: int,
    max_seq_len: int | None,
    verify: str | None,
    timing_cache: Path | None,
    force: bool,
) -> None:
    """Compile a target and its drafter into an engine directory. No target: the demo pair."""
    if draft is not None and target is None:
        raise click.UsageError("--draft without --target (give the target's checkpoint too)")
    from ddtree.builder import build_engine
    from ddtree.runtime.engine_cache import demo_pair

    if target is None:
        target, draft = demo_pair()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a build cleans up behind itself
    with Progress(*_BUILD_COLUMNS, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task(f"building {output}", total=None)

        def progress(doing: str, done: int, total: int) -> None:
            bar.update(task, description=doing, completed=done, total=total)

        manifest = build_engine(
            target,
            draft,
            output,
            engine=engine,
            arch=arch,
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_tree_nodes=budget,
            verify=verify,
            timing_cache=timing_cache,
            force=force,
            progress=progress,
        )
    for note in manifest.notes:
        _say(f"note: {note}")
    _say(f"wrote {output}")


@app.command()
@click.option("--output", type=_PATH, required=True, help="Where to write: checkpoints, or with --engines an engine.")
@_target
@_draft
@click.option("--dtype", help="float16 or bfloat16. Absent: the checkpoint's.")
@_largest_budget
@click.option("--engines", type=_PATH, help="Checkpoints that trtllm-build has made engines of: collect these.")
@click.option("--force", is_flag=True, help="With --engines, replace an engine that is there.")
def convert(
    output: Path,
    target: Path | None,
    draft: Path | None,
    dtype: str | None,
    budget: int,
    engines: Path | None,
    force: bool,
) -> None:
    """Write TensorRT-LLM checkpoints for trtllm-build, and print its commands; then, with --engines, collect what it
    has made into an engine directory."""
    if (target is None) == (engines is None):
        raise click.UsageError("--target makes checkpoints and --engines collects engines (give one of the two)")
    from ddtree.builder.trtllm_checkpoint import build_commands, convert_checkpoints
    from ddtree.builder.trtllm_engine import collect_engines

    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is half written is removed
    if engines is not None:
        if draft is not None or dtype is not None:
            raise click.UsageError("--engines has its models and its dtype inside (leave --draft and --dtype out)")
        collect_engines(engines, output, force=force)
    else:
        assert target is not None
        with Progress(*_BUILD_COLUMNS, console=messages, transient=True, disable=not messages.is_terminal) as bar:
            task = bar.add_task(f"converting {target}", total=None)

            def progress(doing: str, done: int, total: int) -> None:
                bar.update(task, description=doing, completed=done, total=total)

            convert_checkpoints(target, draft, output, dtype=dtype, max_tree_nodes=budget, progress=progress)
        for command in build_commands(output):
            _write(f"{command}\n")
    _say(f"wrote {output}")


@app.command()
@click.argument("engine", type=_PATH, required=False)
def inspect(engine: Path | None) -> None:
    """Show what an engine directory holds. No ENGINE: the demo pair's."""
    from ddtree.builder import Manifest
    from ddtree.runtime.engine_cache import cached_engine, demo_pair
    from ddtree.runtime.manifest_view import manifest_table

    directory = engine or cached_engine(*demo_pair())
    Console(highlight=False, markup=False).print(manifest_table(directory, Manifest.verify(directory)))


@app.command()
@click.option("--output", type=_PATH, required=True, help="Where to write the model repository.")
@click.option("--engine", type=_PATH, help="Engine directory. Absent: the demo pair's.")
@_method
@_budget
@click.option("--adaptive/--whole-trees", default=None, help="Cut trees, or leave drafts out, where it saves time.")
@_threads
@click.option("--max-batch-size", type=int, help="The most sequences at once. Absent: the engine's.")
@click.option("--max-queue-size", type=int, help="The most sequences that wait.  [default: 1024]")
@click.option("--force", is_flag=True, help="Replace a repository that is there.")
def triton(output: Path, engine: Path | None, force: bool, **settings: object) -> None:
    """Write a model repository from which Triton Inference Server serves an engine."""
    from ddtree.runtime.engine_cache import cached_engine, demo_pair
    from ddtree.runtime.triton_repository import write_repository

    write_repository(engine or cached_engine(*demo_pair()), output, settings, force=force)
    _say(f"wrote {output} (tritonserver --model-repository={output})")


def main() -> None:
    """Entry point of the console command."""
    # While libraries are imported an interrupt ends the process at once: some of them swallow a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ddtree.builder import BuildError
    from ddtree.runtime.errors import EngineError, RequestError

    if sys.stdout is None:
        _refuse("standard output is closed (text has nowhere to go)")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale: a model writes any character
    try:
        app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(2)
    except click.ClickException as error:
        _refuse(error.format_message())
    except (BuildError, EngineError, RequestError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)


def _refuse(message: str) -> None:
    print(f"ddtree: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
