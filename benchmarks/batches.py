"""Many prompts at once: the processor time of plain decoding over that of adaptive trees, for the same texts.

A batch's pass has many rows already, so a tree gains less there than with one prompt. Both methods take turns in one
process on one thread. Processor time, because a batch keeps the machine busy by itself.
"""

import time

import click

from ddtree.demo.prompts import KINDS, held_out_prompts
from ddtree.runtime import LLM, SamplingParams
from ddtree.runtime.round import Method


@click.command(context_settings={"show_default": True})
@click.option("--prompts", default=2, help="Prompts of each of the four kinds, all at once.")
@click.option("--max-tokens", default=96, help="Tokens of each output.")
@click.option("--repeats", default=7, help="Runs of each method.")
def main(prompts: int, max_tokens: int, repeats: int) -> None:
    """Measure adaptive trees against plain decoding in a batch."""
    texts = [text for kind in KINDS for text in held_out_prompts(kind, prompts, seed=0)]
    with LLM(threads=1, max_batch_size=len(texts)) as llm:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
            seconds: dict[Method, list[float]] = {"ar": [], "ddtree": []}
            outputs: dict[Method, list[list[int]]] = {}
            for _ in range(repeats):
                for method, taken in seconds.items():
                    llm.method = method
                    start = time.process_time()
                    results = llm.generate(texts, params)
                    taken.append(time.process_time() - start)
                    outputs[method] = [result.outputs[0].token_ids for result in results]
            ratios = sorted(plain / tree for plain, tree in zip(seconds["ar"], seconds["ddtree"], strict=True))
            same = sum(a == b for a, b in zip(outputs["ar"], outputs["ddtree"], strict=True))
            fastest = min(seconds["ar"]) / min(seconds["ddtree"])
            click.echo(
                f"temperature {temperature}, {len(texts)} prompts at once: {ratios[0]:.2f} to {ratios[-1]:.2f}, "
                f"fastest of each {fastest:.2f}, {same} of {len(texts)} texts the same"
            )


if __name__ == "__main__":
    main()
