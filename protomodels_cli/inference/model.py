"""A Llama or Qwen3, or one in segments, that remembers keys and values, from weights in Hugging Face's names.

Shapes: B windows, T tokens, D width, H heads, J key/value heads, E head_dim, F hidden. Matrices that read the same
vector lie in one tensor: a token costs the interpreter more than the arithmetic of a small model. Knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from protomodels_cli.huggingface.architecture import Architecture
from protomodels_cli.huggingface.names import hugging_face_name
from protomodels_cli.model.llama import rotary
from protomodels_cli.model.operators import rotated

Weights = Iterable[tuple[str, Callable[[], Tensor]]]


class Cache:
    """Keys and values of the tokens so far, with room for `capacity` of them."""

    def __init__(self, model: Decoder, batch: int, capacity: int):
        a = model.architecture
        self.tokens, self.capacity = 0, capacity
        shape = (2, batch, a.kv_heads, capacity, a.head_dim)
        self.kv = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(a.layers)]
        self.ids = torch.empty((batch, capacity), dtype=torch.int64, device=model.device)


class _Layer:
    def __init__(self, a: Architecture, i: int, empty: Callable[..., Tensor]):
        inner, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        attended, fed = (a.width, a.width) if a.segments is None else a.segments.written(i, a.width)
        self.attention_norm, self.mlp_norm = empty(a.width), empty(a.width)
        self.qkv, self.o = empty(inner + 2 * kv, a.width), empty(attended, inner)
        self.gate_up, self.down = empty(2 * a.hidden, a.width), empty(fed, a.hidden)
        self.qk_norm = empty(a.heads + a.kv_heads, a.head_dim) if a.qk_norm else None
        q, k, v = self.qkv.split([inner, kv, kv])
        self.places = {
            "attn_norm": self.attention_norm,
            "mlp_norm": self.mlp_norm,
            "attn.q": q,
            "attn.k": k,
            "attn.v": v,
            "attn.o": self.o,
            "mlp.gate": self.gate_up[: a.hidden],
            "mlp.up": self.gate_up[a.hidden :],
            "mlp.down": self.down,
        }
        has_anchor = a.segments is not None and i in a.segments.anchored
        self.anchor = empty(a.vocab_size, a.width) if has_anchor else None
        self.taps = empty(*a.shape("anchor.taps")) if has_anchor else None
        if self.anchor is not None and self.taps is not None:
            self.places["anchor"] = self.anchor
            if len(self.taps):
                self.places["anchor.taps"] = self.taps
        if self.qk_norm is not None:  # one gain for all heads
            self.places["attn.q_norm"] = self.qk_norm[: a.heads]
            self.places["attn.k_norm"] = self.qk_norm[a.heads :]


class Decoder:
    """Takes its weights, which are those that its architecture asks for, one at a time, straight to their device and
    type: never two copies of the model."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.architecture, self.device, self.dtype = architecture, torch.device(device), dtype
        a = architecture

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._embedding, self._norm = empty(*a.shape("embed")), empty(a.width)
        self._head = self._embedding if a.tied else empty(a.vocab_size, a.width)
        self._layers = [_Layer(a, i, empty) for i in range(a.layers)]
        self._starts = frozenset(() if a.segments is None else a.segments.starts)
        self._basis = empty(*a.shape("basis")) if a.segments is not None and a.segments.carried else None
        self._fill(weights)
        self._rotary = (torch.empty(0), torch.empty(0))

    def _fill(self, weights: Weights) -> None:
        modules = {"embed": self._embedding, "head.norm": self._norm, "head.out": self._head}
        if self._basis is not None:
            modules["basis"] = self._basis
        for i, layer in enumerate(self._layers):
            modules |= {f"layers.{i}.{name}": place for name, place in layer.places.items()}
        places = {hugging_face_name(module): place for module, place in modules.items()}
        shapes = self.architecture.weights
        for name, read in weights:
            tensor = read()
            assert tensor.shape == shapes.pop(name), name  # or it would be repeated until it fits
            places[name].copy_(tensor)
        assert not shapes, shapes

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.architecture.weights.values())

    @torch.inference_mode()
    def stream(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """The stream before the head, (B, T, D). With a cache the tokens follow those in it, and are added to it."""
        past = 0 if cache is None else cache.tokens
        end = past + tokens_BT.shape[1]
        if cache is not None:
            assert end <= cache.capacity
            cache.tokens = end
            cache.ids[:, past:end] = tokens_BT
        cos, sin = (table[past:end] for table in self._tables(end if cache is None else cache.capacity))
        mask = self._mask(past, end) if past and end - past > 1 else None
        x = c = F.embedding(tokens_BT, self._embedding)
        seen = tokens_BT if cache is None else cache.ids[:, :end]
        anchor: Tensor | float = 0.0
        for i, layer in enumerate(self._layers):
            if i in self._starts:
                before, anchor = anchor, anchor if layer.anchor is None else self._anchor(layer, seen, past)
                x = x + (anchor - before) if self._basis is None else F.linear(c, self._basis) + anchor
            kv = None if cache is None else cache.kv[i]
            written = self._attention(self._normed(x, layer.attention_norm), layer, cos, sin, kv, past, mask)
            x, c = self._add(x, c, written)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x, c = self._add(x, c, F.linear(F.silu(gate) * up, layer.down))
        return x

    def _anchor(self, layer: _Layer, seen: Tensor, past: int) -> Tensor:
        """Of the tokens behind the first `past` that were seen, with what those before each of them add."""
        assert layer.anchor is not None
        assert layer.taps is not None
        first = max(0, past - len(layer.taps))
        rows = F.embedding(seen[:, first:], layer.anchor)
        anchor = rows
        for back, weight in enumerate(layer.taps, 1):
            anchor = anchor + F.pad(rows, (0, 0, back, 0))[:, : rows.shape[1]] * weight
        return anchor[:, past - first :]

    def _add(self, x: Tensor, c: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """To the stream, and to the coordinates that go on to the next segment where there are such; at a segment's end
        to them alone, since the stream is made anew."""
        if self._basis is None or written.shape[-1] == x.shape[-1]:
            return x + written, c
        to_c, to_x = written.tensor_split([c.shape[-1]], dim=-1)
        return x + F.linear(to_c, self._basis) + to_x if to_x.shape[-1] else x, c + to_c

    @torch.inference_mode()
    def head(self, x: Tensor) -> Tensor:
        """Logits, in float32 whatever the weights are."""
        return F.linear(self._normed(x, self._norm), self._head).float()

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.architecture.norm_eps)

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        if len(self._rotary[0]) < length:
            a = self.architecture
            self._rotary = rotary(length, a.head_dim, a.rope_theta, self.dtype, self.device)
        return self._rotary

    def _mask(self, past: int, end: int) -> Tensor:
        return torch.ones(end - past, end, dtype=torch.bool, device=self.device).tril(past)

    def _attention(
        self, x_BTD: Tensor, layer: _Layer, cos: Tensor, sin: Tensor, kv: Tensor | None, past: int, mask: Tensor | None
    ) -> Tensor:
        a = self.architecture
        batch, tokens, _ = x_BTD.shape
        qkv = F.linear(x_BTD, layer.qkv).view(batch, tokens, a.heads + 2 * a.kv_heads, a.head_dim)
        qk, v = qkv.split([a.heads + a.kv_heads, a.kv_heads], dim=2)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (a.head_dim,), None, a.norm_eps) * layer.qk_norm
        qk, v = rotated(qk.transpose(1, 2), cos, sin), v.transpose(1, 2)
        q, k = qk.split([a.heads, a.kv_heads], dim=1)
        if kv is not None:
            end = past + tokens
            kv[0, :, :, past:end], kv[1, :, :, past:end] = k, v
            k, v = kv[0, :, :, :end], kv[1, :, :, :end]
        if tokens == 1:  # the heads that share a key/value head are so many queries of it, and all see all of it
            q = q.reshape(batch, a.kv_heads, a.heads // a.kv_heads, a.head_dim)
            y = F.scaled_dot_product_attention(q, k, v).reshape(batch, 1, -1)
        else:
            k, v = (y.repeat_interleave(a.heads // a.kv_heads, dim=1) for y in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            y = y.transpose(1, 2).reshape(batch, tokens, -1)
        return F.linear(y, layer.o)
