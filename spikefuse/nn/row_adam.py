"""Adam that leaves alone the rows of weights whose inputs did not fire."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class RowAdam(torch.optim.Optimizer):
    """Adam on the rows that a gradient has; for `EventLinear(..., sparse_grad=True)`.

    Equation, for a row with the gradient g in step t::

        m = beta1 m + (1 - beta1) g,    v = beta2 v + (1 - beta2) g^2
        w = w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    A row without gradient keeps its weights and its moments: this is where it differs from
    torch.optim.Adam, whose moments go on decaying, and moving the weights, without a gradient. It
    is what torch.optim.SparseAdam computes; where all rows have gradients, all three agree.
    Gradients that are not sparse have all rows. For stochastic gradient descent without momentum
    and weight decay, torch.optim.SGD takes the same gradients, and is exact.

    Args:
        params: as of any optimizer; float32, contiguous.
        lr, betas, eps: see the equation.

    Raises:
        ValueError: a number is out of range.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not lr >= 0 or not eps >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr, betas, eps are {lr}, {betas}, {eps}: expected lr and eps of at least 0, and "
                "betas in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros(2, *parameter.shape).to(parameter).unbind()
        state["step"] += 1
        beta1, beta2 = group["betas"]
        rate = group["lr"] / (1 - beta1 ** state["step"])
        scale = 1 / math.sqrt(1 - beta2 ** state["step"])
        if grad.is_sparse:
            rows, values = grad._indices()[0], grad._values()
            # In order and without repetition, as EventLinear gives them; autograd forgets it.
            if not bool((rows[1:] > rows[:-1]).all()):
                grad = grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
        else:
            rows, values = torch.arange(len(parameter), device=parameter.device), grad
        tensors = parameter, state["mean"], state["square"]
        if parameter.is_cpu:
            from spikefuse.kernels import row_adam

            weight, mean, square = (x.view(len(x), -1) for x in tensors)
            values = values.unsqueeze(-1).flatten(1)
            betas, eps = group["betas"], group["eps"]
            row_adam.step(weight, mean, square, rows, values, rate, betas, scale, eps)
            return
        weight, mean, square = (x[rows] for x in tensors)
        mean.lerp_(values, 1 - beta1)
        square.mul_(beta2).addcmul_(values, values, value=1 - beta2)
        weight.addcdiv_(mean, square.sqrt().mul_(scale).add_(group["eps"]), value=-rate)
        for whole, part in zip(tensors, (weight, mean, square), strict=True):
            whole[rows] = part
