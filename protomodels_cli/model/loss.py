"""Cross-entropy in chunks of a fixed number of tokens: the whole logits tensor never exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from protomodels_cli.model.precise import home_of_float64, to_float64

Head = Callable[[Tensor], Tensor]


def _chunks(x: Tensor, targets: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.flatten(0, -2).split(chunk), targets.flatten().split(chunk), strict=True)


def loss_sum(head: Head, x: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Sum of the tokens' losses in float64, without gradients."""
    total = torch.zeros((), dtype=torch.float64, device=home_of_float64(x.device))
    with torch.no_grad():
        for x_chunk, target_chunk in _chunks(x, targets, chunk):
            total += to_float64(F.cross_entropy(head(x_chunk), target_chunk, reduction="sum"))
    return total


def loss_and_gradient(head: Head, x: Tensor, targets: Tensor, chunk: int, scale: float) -> tuple[Tensor, Tensor]:
    """Sum of the losses, and the gradient of scale × that sum with respect to x.

    Each chunk goes forward and backward before the next, adding to the head's own gradients.
    """
    total = torch.zeros((), dtype=torch.float64, device=home_of_float64(x.device))
    gradients = []
    for x_chunk, target_chunk in _chunks(x.detach(), targets, chunk):
        leaf = x_chunk.requires_grad_()
        loss = F.cross_entropy(head(leaf), target_chunk, reduction="sum")
        (loss * scale).backward()
        total += to_float64(loss.detach())
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return total, torch.cat(gradients).view_as(x)
