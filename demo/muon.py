"""The Muon optimiser: momentum whose update is made nearly orthogonal by a Newton-Schulz iteration.

Per step it learns more than AdamW at this size. Matrices of one shape are iterated as one batch: on a CPU, one big
product is faster than twelve small ones.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[Tensor], *, product_dtype: torch.dtype):
        """`product_dtype` is that of the iteration's products; momentum and parameters stay in float32."""
        super().__init__(parameters, {"lr": 0.0, "momentum": 0.95, "weight_decay": 0.01})
        self.product_dtype = product_dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            same_shape = defaultdict(list)
            for parameter in group["params"]:
                same_shape[parameter.shape].append(parameter)
            for (rows, columns), parameters in same_shape.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))  # Nesterov
                # An orthogonal update has root mean square 1 / sqrt(max(rows, columns)); scaled to 0.2 it is about as
                # large as AdamW's, so that one learning rate serves both optimisers (arXiv 2502.16982).
                scale = 0.2 * max(rows, columns) ** 0.5
                orthogonal = orthogonalise(torch.stack(updates).to(self.product_dtype))
                for parameter, update in zip(parameters, orthogonal, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """[count, rows, columns] -> the same with all singular values near 1 (between about 0.7 and 1.2).

    The coefficients are Muon's: the quintic a x + b x^3 + c x^5 that lifts small singular values fastest.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x
