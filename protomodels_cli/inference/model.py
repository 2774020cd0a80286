"""A plain Llama or Qwen3 that remembers keys and values, from weights in Hugging Face's names.

Shapes: B windows, T tokens, D width, H heads, J key/value heads, E head_dim, F hidden. Matrices that read the same
vector lie in one tensor: a token costs the interpreter more than the arithmetic of a small model. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from protomodels_cli.errors import UserError
from protomodels_cli.inference.architecture import Architecture
from protomodels_cli.model.llama import rotary
from protomodels_cli.model.operators import rotated

Weights = Iterable[tuple[str, Callable[[], Tensor]]]
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class WeightsError(UserError):
    """Weights that do not belong to their config.json. `tensor` is the first one amiss."""

    def __init__(self, tensor: str, what: str):
        super().__init__(f"{tensor} {what}", "export the run again, or fetch the checkpoint again", "weights")
        self.tensor = tensor


class Cache:
    """Keys and values of the tokens so far, with room for `capacity` of them."""

    def __init__(self, model: Decoder, batch: int, capacity: int):
        a = model.architecture
        self.tokens, self.capacity = 0, capacity
        shape = (2, batch, a.kv_heads, capacity, a.head_dim)
        self.kv = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(a.layers)]


class _Layer:
    def __init__(self, a: Architecture, empty: Callable[..., Tensor]):
        inner, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self.attention_norm, self.mlp_norm = empty(a.width), empty(a.width)
        self.qkv, self.o = empty(inner + 2 * kv, a.width), empty(a.width, inner)
        self.gate_up, self.down = empty(2 * a.hidden, a.width), empty(a.width, a.hidden)
        self.qk_norm = empty(a.heads + a.kv_heads, a.head_dim) if a.qk_norm else None
        q, k, v = self.qkv.split([inner, kv, kv])
        self.places = {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.mlp_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": self.o,
            "mlp.gate_proj": self.gate_up[: a.hidden],
            "mlp.up_proj": self.gate_up[a.hidden :],
            "mlp.down_proj": self.down,
        }
        if self.qk_norm is not None:  # one gain for all heads
            self.places["self_attn.q_norm"] = self.qk_norm[: a.heads]
            self.places["self_attn.k_norm"] = self.qk_norm[a.heads :]


class Decoder:
    """Takes its weights one at a time, straight to their device and type: never two copies of the model."""

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

        self._embedding, self._norm = empty(a.vocab_size, a.width), empty(a.width)
        self._head = self._embedding if a.tied else empty(a.vocab_size, a.width)
        self._layers = [_Layer(a, empty) for _ in range(a.layers)]
        self._fill(weights)
        self._rotary = (torch.empty(0), torch.empty(0))

    def _fill(self, weights: Weights) -> None:
        places = {_EMBEDDING: self._embedding, _NORM: self._norm}
        if not self.architecture.tied:
            places[_HEAD] = self._head
        for i, layer in enumerate(self._layers):
            places |= {f"model.layers.{i}.{name}.weight": place for name, place in layer.places.items()}
        for name, read in weights:
            if name.endswith("rotary_emb.inv_freq") or (name == _HEAD and self.architecture.tied):
                continue  # follow from config.json, and older checkpoints have them all the same
            if (place := places.pop(name, None)) is None:
                raise WeightsError(name, "is no weight of the model that config.json describes")
            tensor = read()
            expected = place.shape[1:] if name.endswith(("q_norm.weight", "k_norm.weight")) else place.shape
            if tensor.shape != expected:
                raise WeightsError(name, f"has the shape {[*tensor.shape]}, and config.json asks for {[*expected]}")
            place.copy_(tensor)
        if places:
            raise WeightsError(min(places), "is missing")

    @property
    def parameters(self) -> int:
        a = self.architecture
        layer = sum(t.numel() for name, t in self._layers[0].places.items() if not name.endswith(("q_norm", "k_norm")))
        norms = 2 * a.head_dim if a.qk_norm else 0
        return (1 if a.tied else 2) * self._embedding.numel() + a.width + a.layers * (layer + norms)

    @torch.inference_mode()
    def stream(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """The stream before the head, (B, T, D). With a cache the tokens follow those in it, and are added to it."""
        past = 0 if cache is None else cache.tokens
        end = past + tokens_BT.shape[1]
        if cache is not None:
            assert end <= cache.capacity
            cache.tokens = end
        cos, sin = (table[past:end] for table in self._tables(end if cache is None else cache.capacity))
        mask = self._mask(past, end) if past and end - past > 1 else None
        x = F.embedding(tokens_BT, self._embedding)
        for i, layer in enumerate(self._layers):
            kv = None if cache is None else cache.kv[i]
            x = x + self._attention(self._normed(x, layer.attention_norm), layer, cos, sin, kv, past, mask)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x

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
