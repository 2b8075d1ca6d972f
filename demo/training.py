"""One training loop for target and drafter: deterministic in the step number, and resumable.

Nothing random survives a step: a step's batch is drawn from (seed, step) alone. So parameters, optimiser state and the
step number are all that a checkpoint needs to go on exactly as if nothing had happened.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ddtree.demo.muon import Muon
from ddtree.demo.recipe import Recipe

CHECKPOINT_SECONDS = 60.0

# (steps done, steps in all, what to show beside the bar)
Report = Callable[[int, int, str], None]


def train(
    model: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    *,
    rates: Sequence[float],
    recipe: Recipe,
    checkpoint: Path,
    report: Report,
) -> None:
    """Run the steps that `checkpoint` does not have yet. `loss_of_step(step)` is the loss on that step's batch.

    Layer matrices are trained by Muon, the embedding and the norms by AdamW, both at the learning rate that `rates`
    has for the step.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    product_dtype = torch.bfloat16 if recipe.bfloat16 else torch.float32
    optimisers = [
        Muon(matrices, product_dtype=product_dtype),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    first = _resume(checkpoint, model, optimisers)
    saved = time.monotonic()
    running = None
    for step in range(first, len(rates)):
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rates[step]
        loss = loss_of_step(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        running = loss.item() if running is None else 0.95 * running + 0.05 * loss.item()
        report(step + 1, len(rates), f"loss {running:.3f}")
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            _save(checkpoint, model, optimisers, step + 1)
            saved = time.monotonic()
    _save(checkpoint, model, optimisers, len(rates))


def learning_rates(steps: int, peak: float, recipe: Recipe, *, falls: bool = True) -> list[float]:
    """The rate of each step: a linear rise to `peak`, a plateau and, where it `falls`, a linear fall to zero."""
    rise, fall = recipe.warmup_steps, recipe.decay_fraction * steps
    return [peak * min(1.0, (step + 1) / rise, (steps - step) / fall if falls else 1.0) for step in range(steps)]


def _save(path: Path, model: nn.Module, optimisers: list, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "model": model.state_dict(), "optimisers": [o.state_dict() for o in optimisers]}
    torch.save(state, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)  # an interrupted save leaves the last checkpoint as it was


def _resume(path: Path, model: nn.Module, optimisers: list) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    return state["step"]
