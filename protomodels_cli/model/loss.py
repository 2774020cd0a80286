"""Cross-entropy in chunks of a fixed number of tokens: the whole logits tensor never exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from protomodels_cli.model.llama import Head, Running
from protomodels_cli.model.precise import home_of_float64, to_float64
from protomodels_cli.model.products import add_product


def _chunks(x: Tensor, targets: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.flatten(0, -2).split(chunk), targets.flatten().split(chunk), strict=True)


@torch.no_grad()
def loss_sum(logits: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Sum of the tokens' losses in float64, without gradients."""
    total = torch.zeros((), dtype=torch.float64, device=home_of_float64(x.device))
    for x_chunk, target in _chunks(x, targets, chunk):
        total += to_float64(F.cross_entropy(logits(x_chunk), target, reduction="sum"))
    return total


def loss_and_gradient(
    head: Head, run: Running, x: Tensor, targets: Tensor, chunk: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Sum of the losses, and the gradient of scale × that sum with respect to x.

    Each chunk goes forward and backward before the next, adding to the head's own gradients.
    """
    total = torch.zeros((), dtype=torch.float64, device=home_of_float64(x.device))
    leaf = x.detach().requires_grad_()
    normed = head.norm(leaf, run)
    gradients = torch.empty_like(normed)
    matrix, precise = head.out.working.detach(), head.out.weight.dtype
    factor = torch.full((), scale, dtype=precise, device=x.device)  # a number would be compiled in, each anew
    for (h, target), out in zip(
        _chunks(normed.detach(), targets, chunk), gradients.flatten(0, -2).split(chunk), strict=True
    ):
        losses, gradient = run.operators.losses_and_gradient(F.linear(h, matrix), target, factor, precise)
        total += to_float64(losses.sum())
        torch.mm(gradient, matrix, out=out)
        add_product(head.out.weight, gradient, h)
    normed.backward(gradients)
    assert leaf.grad is not None
    return total, leaf.grad
