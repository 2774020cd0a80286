"""Products with a stage's matrices, whose gradients are added in place to those of earlier microbatches.

In bf16 a matrix is multiplied as a bfloat16 copy of itself; its gradient is summed in the weight's own precision. On
CUDA the product itself does that: no gradient of a matrix exists twice, and none is rounded before it is added.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter


class Read(torch.autograd.Function):
    """x·Wᵀ, for a matrix stored (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.weight = weight
        return F.linear(x, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, matrix = ctx.saved_tensors
        add_product(ctx.weight, gradient, x)
        return gradient @ matrix, None, None


class Write(torch.autograd.Function):
    """h·W, for a matrix stored (in, out)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Parameter, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(h, matrix)
        ctx.weight = weight
        return h @ matrix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        h, matrix = ctx.saved_tensors
        add_product(ctx.weight, h, gradient)
        return F.linear(gradient, matrix), None, None


class Lookup(torch.autograd.Function):
    """Rows of a table; only the rows of the tokens at hand have a gradient, and no second table is made for it."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Parameter) -> Tensor:
        ctx.tokens, ctx.weight = tokens, weight
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        add_rows(weight.grad, ctx.tokens.flatten(), gradient.flatten(0, -2).to(weight.dtype))
        return None, None


def add_rows(sums: Tensor, places: Tensor, rows: Tensor) -> None:
    """sums[places] += rows, in an order that is always the same."""
    if not sums.is_cuda:
        sums.index_add_(0, places, rows)
    else:  # index_add_ would add the rows of one place in any order
        sums.index_add_(0, *summed_by_place(places, rows))


def summed_by_place(places: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each place once, with the sum of its rows; then place 0 with zeros, up to as many as there were."""
    in_order, order = places.sort(stable=True)
    group = torch.cat((in_order.new_zeros(1), (in_order[1:] != in_order[:-1]).cumsum(0)))  # of the sorted rows
    of_group = torch.zeros_like(places).scatter_(0, group, in_order)
    of_row = torch.empty_like(places).scatter_(0, order, group)
    return of_group, torch.ops.aten.embedding_dense_backward(rows, of_row, len(rows), -1, False)


def add_product(weight: Parameter, left: Tensor, right: Tensor) -> None:
    """weight.grad += leftᵀ·right, over all tokens."""
    a, b = left.flatten(0, -2).T, right.flatten(0, -2)
    if a.dtype == weight.dtype:
        weight.grad = a @ b if weight.grad is None else weight.grad.addmm_(a, b)
    elif not _sums_in(weight.dtype, a):
        product = a @ b
        weight.grad = product.to(weight.dtype) if weight.grad is None else weight.grad.add_(product)
    elif weight.grad is None:
        weight.grad = torch.mm(a, b, out_dtype=weight.dtype)
    else:
        torch.addmm(weight.grad, a, b, out_dtype=weight.dtype, out=weight.grad)


def _sums_in(dtype: torch.dtype, factor: Tensor) -> bool:
    """Whether products of such factors can be summed in this type there: on CUDA, since torch 2.10."""
    return factor.is_cuda and _can_sum(dtype, factor.dtype, factor.device)


@cache
def _can_sum(dtype: torch.dtype, factors: torch.dtype, device: torch.device) -> bool:
    one = torch.ones((16, 16), dtype=factors, device=device)
    total = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
