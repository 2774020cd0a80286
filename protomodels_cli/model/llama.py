"""The blocks of a LLaMA-style decoder, reading and writing the residual stream through a Form.

Shapes: B windows, T tokens, D width, H heads, J key/value heads, E head_dim, F hidden.
The two matrices of a block that write to the stream are Writers, stored as (in, out) like the rows they write;
all others are stored as (out, in) like Hugging Face's. No bias, gain or dropout on what a block writes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protomodels_cli.forms import Dense, Form
from protomodels_cli.model.precise import home_of_float64
from protomodels_cli.model.shape import Shape, Slice


class Matrix(nn.Module):
    """A matrix that reads: x ↦ x·Wᵀ, stored (out, in)."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Writer(nn.Module):
    """A matrix whose rows are written to the stream: h ↦ h·W, stored (rows, d), or (rows, k) as coordinates."""

    def __init__(self, rows: int, form: Form, shape: Shape):
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.empty(rows, form.state_width(shape.sizes), dtype=shape.dtype))

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.weight

    def lookup(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary(tokens: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, (T, E/2) each, made in float64: positions keep their precision at any context length."""
    home = home_of_float64(torch.device(device))
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=home) / head_dim
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64, device=home), theta**-half)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2), the pairing Hugging Face's checkpoints use."""
    a, b = x_BHTE.chunk(2, dim=-1)
    return torch.cat((a * cos_TE - b * sin_TE, b * cos_TE + a * sin_TE), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, form: Form):
        super().__init__()
        self.shape = shape
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = Matrix(shape.width, inner, shape.dtype)
        self.k = Matrix(shape.width, kv, shape.dtype)
        self.v = Matrix(shape.width, kv, shape.dtype)
        self.o = Writer(inner, form, shape)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, shape.dtype)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, shape.dtype)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        batch, tokens, _ = x_BTD.shape
        q = self.q(x_BTD).view(batch, tokens, s.heads, s.head_dim)
        k = self.k(x_BTD).view(batch, tokens, s.kv_heads, s.head_dim)
        v = self.v(x_BTD).view(batch, tokens, s.kv_heads, s.head_dim)
        if s.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if s.kv_heads != s.heads:
            k, v = (y.repeat_interleave(s.heads // s.kv_heads, dim=1) for y in (k, v))
        y_BHTE = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y_BHTE.transpose(1, 2).reshape(batch, tokens, s.heads * s.head_dim))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape, form: Form):
        super().__init__()
        self.gate = Matrix(shape.width, shape.hidden, shape.dtype)
        self.up = Matrix(shape.width, shape.hidden, shape.dtype)
        self.down = Writer(shape.hidden, form, shape)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """One layer. Both branches read x from the state and write to the state."""

    def __init__(self, shape: Shape, form: Form):
        super().__init__()
        self.form = form
        self.attn_norm = RMSNorm(shape.width, shape.norm_eps, shape.dtype)
        self.attn = Attention(shape, form)
        self.mlp_norm = RMSNorm(shape.width, shape.norm_eps, shape.dtype)
        self.mlp = FeedForward(shape, form)

    def forward(self, state: Tensor, anchor: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        state = state + self.attn(self.attn_norm(self.form.read(state, anchor)), cos, sin)
        return state + self.mlp(self.mlp_norm(self.form.read(state, anchor)))


class Head(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.norm = RMSNorm(shape.width, shape.norm_eps, shape.dtype)
        self.out = Matrix(shape.width, shape.vocab_size, shape.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class StageModules(nn.Module):
    """The modules of a slice of the layers, by the names that they have in the whole model. Weights are not filled."""

    def __init__(self, shape: Shape, slice_: Slice, form: Form):
        super().__init__()
        self.shape, self.slice, self.form = shape, slice_, form
        # The first layer that reads and writes x itself: from here on the stream is never sent.
        self.release_layer = shape.layers - shape.free_layers
        if slice_.is_first:
            self.embed = Writer(shape.vocab_size, form, shape)
        self.layers = nn.ModuleDict(
            {str(i): Block(shape, form if i < self.release_layer else Dense()) for i in slice_.layers}
        )
        if slice_.is_last:
            self.head = Head(shape)
