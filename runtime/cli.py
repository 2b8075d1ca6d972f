"""The `ddtree` command. Text goes to standard output, everything else to standard error; a refusal is one line and
exit code 2."""

import os
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from rich.console import Console

if TYPE_CHECKING:
    from ddtree.runtime import LLM, RequestOutput, SamplingParams

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
messages = Console(stderr=True, highlight=False)

COMPARE_RUNS = 3  # of each method, taken in turns; the medians are compared


@app.callback(invoke_without_command=True)
def _app(show_version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Tree speculative decoding with a block-diffusion drafter: the same text as plain decoding, in fewer passes."""
    if show_version:
        print(version("ddtree-trtllm"))
        raise typer.Exit


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue. Absent: --file, else standard input, else a sample.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file; - is standard input.")] = None,
    engine: Annotated[
        Path | None, typer.Option(help="Engine directory. No engine and no target: the demo pair.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="Target checkpoint directory (its engine is built and kept).")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="Drafter checkpoint directory of that target.")] = None,
    method: Annotated[str | None, typer.Option(help="ddtree, chain or ar (plain decoding). [default: ddtree]")] = None,
    budget: Annotated[int | None, typer.Option(help="Draft nodes of a tree, root excluded. [default: 16]")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set with this mass; 1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the likeliest; 0 keeps all.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="0 to 2^64-1. Absent: random, and reported.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens to write.")] = 128,
    threads: Annotated[int | None, typer.Option(help="Threads of a pass. [default: the engine's choice]")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also time plain decoding, and check that the text is the same.")
    ] = False,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Draw each round's tree and its accepted path.")
    ] = False,
) -> None:
    """Continue a prompt."""
    if engine is not None and (target is not None or draft is not None):
        raise click.UsageError("--engine has its models inside (leave --target and --draft out)")
    if draft is not None and target is None:
        raise click.UsageError("--draft without --target (give the target's checkpoint too)")
    from ddtree.runtime import LLM, SamplingParams
    from ddtree.runtime.tree_view import draw_tree

    llm = LLM(engine or target, speculative_model=draft, method=method, budget=budget, threads=threads)  # type: ignore[arg-type]
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    if seed is None:
        params.seed = params.resolved_seed()
    text = _read_prompt(prompt, file, demo=engine is None and target is None)
    if show_tree:
        llm.on_round = lambda tree, verified: messages.print(draw_tree(tree, verified, llm.tokenizer))

    written = 0
    for output in llm.stream(text, params):
        sys.stdout.write(output.outputs[0].text[written:])
        sys.stdout.flush()
        written = len(output.outputs[0].text)
    sys.stdout.write("\n")
    llm.on_round = None
    if output.error is not None:
        raise click.ClickException(output.error)
    messages.print(_summary(llm, output) if not compare else _comparison(llm, text, params, output), style="dim")


def _read_prompt(prompt: str | None, file: Path | None, *, demo: bool) -> str:
    if prompt is not None and file is not None:
        raise click.UsageError("a prompt and --file were given (give one)")
    if prompt is not None:
        return prompt
    source = str(file) if file is not None else "standard input"
    if file is not None and str(file) != "-":
        data = file.read_bytes()
    else:
        data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    if not data and file is None and demo:
        from ddtree.demo.prompts import DEFAULT_PROMPT

        sys.stdout.write(DEFAULT_PROMPT)  # nobody typed it, so show what is being continued
        return DEFAULT_PROMPT
    if not data:
        raise click.UsageError(f"{source} holds no prompt (give one as argument, with --file, or on standard input)")
    try:
        return data.decode()
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
def build(
    output: Annotated[Path, typer.Option(help="Where to write the engine directory.")],
    target: Annotated[Path | None, typer.Option(help="Target checkpoint directory. No target: the demo pair.")] = None,
    draft: Annotated[
        Path | None, typer.Option(help="DFlash drafter checkpoint directory; absent: plain decoding only.")
    ] = None,
    engine: Annotated[str, typer.Option(help="onnxruntime.")] = "onnxruntime",
    dtype: Annotated[str | None, typer.Option(help="float32 with onnxruntime.")] = None,
    budget: Annotated[int, typer.Option(help="The most draft nodes of a tree, root excluded.")] = 255,
    max_batch_size: Annotated[int, typer.Option(help="The most sequences at once.")] = 8,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Prompt and output together. [default: the checkpoint's]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an engine that is there.")] = False,
) -> None:
    """Compile a target and its drafter into an engine directory."""
    if draft is not None and target is None:
        raise click.UsageError("--draft without --target (give the target's checkpoint too)")
    from ddtree.builder import build_engine
    from ddtree.runtime.engine_cache import demo_pair

    if target is None:
        target, draft = demo_pair()
    with messages.status(f"building {output}"):
        build_engine(
            target,
            draft,
            output,
            engine=engine,
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_tree_nodes=budget,
            force=force,
        )
    messages.print(f"wrote {output}")


@app.command()
def inspect(
    engine: Annotated[Path | None, typer.Argument(help="Engine directory. Absent: the demo pair's.")] = None,
) -> None:
    """Show what an engine directory holds."""
    from ddtree.builder import Manifest
    from ddtree.runtime.engine_cache import cached_engine, demo_pair
    from ddtree.runtime.manifest_view import manifest_table

    directory = engine or cached_engine(*demo_pair())
    Console(highlight=False).print(manifest_table(directory, Manifest.load(directory)))


def main() -> None:
    """Entry point of the console command."""
    from ddtree.builder import BuildError
    from ddtree.runtime.errors import EngineError, RequestError

    try:
        code = app(standalone_mode=False)
    except click.ClickException as error:
        code = _refuse(error.format_message())
    except (BuildError, EngineError, RequestError) as error:
        code = _refuse(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; the exit flush must not fail
        code = 0
    except OSError as error:
        code = _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, click.Abort):
        code = 130
    sys.exit(code)


def _refuse(message: str) -> int:
    print(f"ddtree: {' '.join(message.split())}", file=sys.stderr)
    return 2
