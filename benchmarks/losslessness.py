"""How often a text written with draft trees differs from plain decoding, and by how little it then did.

The draw at a position is the same function of its logits in both. The logits are not quite: in a tree pass the keys and
values of a node's ancestors lie at other cache slots than in plain decoding, and attention sums in slot order, so
float32 rounding differs in the last bits. Where the two best keys (logit / temperature + noise) lie nearer than that
rounding, the other token may win. This script counts such texts on the demo pair, and prints the gap between the two
best keys at each first difference.
"""

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from ddtree.demo.prompts import KINDS, held_out_prompts
from ddtree.plugins.philox import gumbel, token_uniforms
from ddtree.runtime import LLM, SamplingParams
from ddtree.runtime.masks import causal_mask


@click.command(context_settings={"show_default": True})
@click.option("--prompts", default=50, help="Prompts of each kind.")
@click.option("--max-tokens", default=96, help="Tokens of each text.")
@click.option("--budget", type=int, multiple=True, default=(16, 255), help="May be given several times.")
@click.option("--temperature", type=float, multiple=True, default=(0.0, 0.8), help="May be given several times.")
def main(
    prompts: int,
    max_tokens: int,
    budget: tuple[int, ...],
    temperature: tuple[float, ...],
) -> None:
    """Compare trees with plain decoding, text by text."""
    console = Console(highlight=False)
    llm = LLM()
    texts = [text for kind in KINDS for text in held_out_prompts(kind, prompts, seed=1)]
    for t in temperature:
        tokens, compared, differing = 0, 0, 0
        for seed, text in enumerate(track(texts, f"temperature {t}", console=Console(stderr=True))):
            params = SamplingParams(max_tokens=max_tokens, temperature=t, seed=seed, ignore_eos=True)
            llm.method = "ar"
            plain = llm.generate(text, params).outputs[0].token_ids
            whole = [("ddtree", b, False) for b in budget]
            for llm.method, llm.budget, llm.adaptive in [("chain", 0, False), *whole, ("ddtree", budget[0], True)]:
                written = llm.generate(text, params).outputs[0].token_ids
                compared += 1
                tokens += len(plain)
                if written == plain:
                    continue
                differing += 1
                first = next(i for i, (a, b) in enumerate(zip(plain, written, strict=True)) if a != b)
                gap = key_gap(llm, llm.tokenizer.encode(text).ids + plain[:first], t, seed)
                console.print(
                    f"  {llm.method} {llm.budget}, prompt {seed}: token {first} of {max_tokens} is another; the two "
                    f"best keys there are {gap:.1e} apart"
                )
        console.print(f"temperature {t}: {differing} of {compared} texts differ, {tokens} tokens compared")


def key_gap(llm: LLM, token_ids: list[int], temperature: float, seed: int) -> float:
    """Distance of the two best keys of the draw after ``token_ids``, from a prompt pass over them."""
    rows = len(token_ids)
    llm.engine.reset(1)
    llm.engine.reserve_target(rows)
    positions = torch.arange(rows)[None]
    mask = causal_mask(0, rows, llm.engine.target_cache_length, torch.float32, None)
    logits, _ = llm.engine.target(
        0, torch.tensor([token_ids]), positions, [mask], torch.tensor([0]), torch.tensor([[rows - 1]])
    )
    keys = logits[0, 0].double().numpy()
    if temperature > 0:
        groups = np.arange(-(-len(keys) // 4))
        noise = gumbel(token_uniforms(seed, np.array([rows]), groups)).reshape(-1)
        keys = keys / temperature + noise[: len(keys)]
    second, best = np.sort(keys)[-2:]
    return float(best - second)


if __name__ == "__main__":
    main()
