"""The blocks of a LLaMA-style decoder, reading and writing the residual stream through a Form.

Shapes: B windows, T tokens, D width, H heads, J key/value heads, E head_dim, F hidden.
The two matrices of a block that write to the stream are Writers, stored as (in, out) like the rows they write;
all others are stored as (out, in) like Hugging Face's. No bias, gain or dropout on what a block writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protomodels_cli.forms import Dense, Form
from protomodels_cli.model.anchor import Anchor
from protomodels_cli.model.operators import EAGER, Operators
from protomodels_cli.model.precise import home_of_float64
from protomodels_cli.model.products import Lookup, Read, Write
from protomodels_cli.model.shape import Shape, Slice


class Multiplied(nn.Module):
    """A matrix, and the copy of it that is multiplied where that is of another type."""

    weight: nn.Parameter
    _copy: Tensor | None = None

    @property
    def working(self) -> Tensor:
        return self.weight if self._copy is None else self._copy

    def refresh(self, dtype: torch.dtype) -> None:
        """The weight has changed, and is multiplied as `dtype`."""
        if dtype == self.weight.dtype:
            self._copy = None
        elif self._copy is None:
            self._copy = self.weight.detach().to(dtype)
        else:
            self._copy.copy_(self.weight.detach())


class Matrix(Multiplied):
    """A matrix that reads: x ↦ x·Wᵀ, stored (out, in)."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return Read.apply(x, self.weight, self.working)


class Writer(Multiplied):
    """A matrix whose rows are written to the stream: h ↦ h·W, stored (rows, d), or (rows, k) as coordinates."""

    def __init__(self, rows: int, columns: int, form: Form, dtype: torch.dtype):
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype))

    def forward(self, h: Tensor) -> Tensor:
        return Write.apply(h, self.weight, self.working)


class Table(Writer):
    """The embedding: its rows are looked up, and it is never multiplied."""

    def refresh(self, dtype: torch.dtype) -> None:
        pass

    def forward(self, tokens: Tensor) -> Tensor:
        return Lookup.apply(tokens, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, run: Running) -> Tensor:
        return run.operators.normed(x, self.weight, self.eps, run.dtype)


@dataclass(frozen=True)
class Running:
    """What the blocks of a stage have in common: operators, the type of products, rotary tables."""

    operators: Operators
    dtype: torch.dtype
    cos: Tensor
    sin: Tensor

    @property
    def is_compiled(self) -> bool:
        return self.operators is not EAGER


def rotary(tokens: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, (T, E/2) each, made in float64: positions keep their precision at any context length."""
    home = home_of_float64(torch.device(device))
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=home) / head_dim
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64, device=home), theta**-half)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


class Attention(nn.Module):
    def __init__(self, shape: Shape, form: Form):
        super().__init__()
        self.shape = shape
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = Matrix(shape.width, inner, shape.dtype)
        self.k = Matrix(shape.width, kv, shape.dtype)
        self.v = Matrix(shape.width, kv, shape.dtype)
        self.o = Writer(inner, form.state_width(shape.sizes), form, shape.dtype)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, shape.dtype)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, shape.dtype)

    def forward(self, x_BTD: Tensor, run: Running) -> Tensor:
        s = self.shape
        batch, tokens, _ = x_BTD.shape
        q = self.q(x_BTD).view(batch, tokens, s.heads, s.head_dim)
        k = self.k(x_BTD).view(batch, tokens, s.kv_heads, s.head_dim)
        v = self.v(x_BTD).view(batch, tokens, s.kv_heads, s.head_dim)
        if s.qk_norm:
            q, k = self.q_norm(q, run), self.k_norm(k, run)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        cos, sin = run.cos[:tokens], run.sin[:tokens]
        y_BHTE = _attend(run.operators.rotated(q, cos, sin), run.operators.rotated(k, cos, sin), v)
        return self.o(y_BHTE.transpose(1, 2).reshape(batch, tokens, s.heads * s.head_dim))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention. Fused kernels share keys and values among heads, except CUDA's for float32."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and q.dtype == torch.float32:
        k, v = (y.repeat_interleave(groups, dim=1) for y in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class FeedForward(nn.Module):
    def __init__(self, shape: Shape, form: Form, closes: bool):
        super().__init__()
        columns = (form.closing_width if closes else form.state_width)(shape.sizes)
        self.gate = Matrix(shape.width, shape.hidden, shape.dtype)
        self.up = Matrix(shape.width, shape.hidden, shape.dtype)
        self.down = Writer(shape.hidden, columns, form, shape.dtype)

    def forward(self, x_BTD: Tensor, run: Running) -> Tensor:
        return self.down(run.operators.gated(self.gate(x_BTD), self.up(x_BTD)))


class Block(nn.Module):
    """One layer. Both branches read x from the state and write to the state.

    The first of a segment also holds the change of the anchor that the whole segment reads, the last a head of its own
    on what the segment sends."""

    def __init__(
        self, shape: Shape, form: Form, segment: int | None = None, closes: bool = False, has_head: bool = False
    ):
        """`segment`: the first layer of the segment that begins here, where anchors are trained. `closes`: a segment
        ends here, and another follows."""
        super().__init__()
        self.form = form
        if segment is not None:
            self.anchor = Anchor(shape, segment)
        self.attn_norm = RMSNorm(shape.width, shape.norm_eps, shape.dtype)
        self.attn = Attention(shape, form)
        self.mlp_norm = RMSNorm(shape.width, shape.norm_eps, shape.dtype)
        self.mlp = FeedForward(shape, form, closes)
        if has_head:
            self.early = Head(shape, shape.boundary_width)

    def forward(self, state: Tensor, anchor: Tensor | None, run: Running) -> Tensor:
        state = self.form.add(state, self.attn(self.attn_norm(self.form.read(state, anchor), run), run))
        return self.form.add(state, self.mlp(self.mlp_norm(self.form.read(state, anchor), run), run))


class Head(nn.Module):
    def __init__(self, shape: Shape, width: int):
        super().__init__()
        self.norm = RMSNorm(width, shape.norm_eps, shape.dtype)
        self.out = Matrix(width, shape.vocab_size, shape.dtype)

    def forward(self, x: Tensor, run: Running) -> Tensor:
        return self.out(self.norm(x, run)).to(self.out.weight.dtype)


def is_in_head(name: str) -> bool:
    """Whether a module of that name is part of a head: of the model's, or of a segment's own."""
    return name.startswith("head.") or is_early(name)


def is_early(name: str) -> bool:
    """Whether that is part of a segment's own head, which is there in training alone."""
    return ".early." in name


@dataclass(frozen=True)
class Section:
    """Layers of a stage that lie on one device. Its form is its own, since U lies there too."""

    device: torch.device
    layers: range
    form: Form


class StageModules(nn.Module):
    """The modules of a slice of the layers, by the names that they have in the whole model; over several sections, with
    the embedding in the first, the head in the last. Weights are not filled."""

    def __init__(self, shape: Shape, slice_: Slice, *sections: Section):
        super().__init__()
        assert [i for section in sections for i in section.layers] == list(slice_.layers)
        self.shape, self.slice = shape, slice_
        # The first layer that reads and writes x itself: from here on the stream is never sent.
        self.release_layer = shape.layers - shape.free_layers
        if slice_.is_first:
            with sections[0].device:
                form = sections[0].form
                self.embed = Table(shape.vocab_size, form.embedding_width(shape.sizes), form, shape.dtype)
        self.layers = nn.ModuleDict()
        for section in sections:
            with section.device:
                for i in section.layers:
                    form = section.form if i < self.release_layer else Dense()
                    holds_anchor = shape.trains_anchors and i in shape.segment_starts
                    closes = i + 1 in shape.segment_starts
                    has_head = i in shape.heading_layers
                    self.layers[str(i)] = Block(shape, form, i if holds_anchor else None, closes, has_head)
        if slice_.is_last:
            with sections[-1].device:
                self.head = Head(shape, shape.width)
