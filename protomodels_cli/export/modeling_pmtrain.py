"""A model that pmtrain has trained in segments: a Llama decoder, with `qk_norm` Qwen3's, apart from two things.

Anchors: for every token a segment adds a row of a table to the stream x, in place of the row of the segment before it.
With `num_anchors` 1 one table serves all segments; else each has its own, at its first layer. Of `anchor_tokens` n the
rows of the n - 1 tokens before it are added too, each with a weight for each channel.

Two streams, where `carried_width` k is not null: only k coordinates c go from segment to segment, x = anchor[token] +
c·Uᵀ at the start of each (U is `basis`). In all segments but the last a block writes to both, c and x, so that its
matrices have k + d rows. Without it x goes through all segments.

An ordinary Llama has neither: what it writes stays in the stream to the end, and a token's row is added once.
"""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast


class PmtrainConfig(PretrainedConfig):
    model_type = "pmtrain"

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        intermediate_size: int = 192,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        head_dim: int = 16,
        max_position_embeddings: int = 128,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        qk_norm: bool = False,
        segments: tuple[int, ...] = (1, 1),  # layers in each
        num_anchors: int = 2,
        anchor_tokens: int = 1,
        carried_width: int | None = None,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        **others: Any,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.head_dim, self.qk_norm = num_key_value_heads, head_dim, qk_norm
        self.max_position_embeddings, self.rope_theta = max_position_embeddings, rope_theta
        self.rms_norm_eps, self.initializer_range, self.use_cache = rms_norm_eps, initializer_range, use_cache
        self.segments, self.num_anchors, self.anchor_tokens = list(segments), num_anchors, anchor_tokens
        self.carried_width = carried_width
        super().__init__(**{"tie_word_embeddings": False, **others})


class Attention(nn.Module):
    def __init__(self, config: PmtrainConfig, layer: int, written: int):
        super().__init__()
        self.layer, self.heads, self.head_dim = layer, config.num_attention_heads, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        width, inner, kv = config.hidden_size, self.heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj, self.k_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, kv, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, kv, bias=False), nn.Linear(inner, written, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, remember: Any) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotated(q.transpose(1, 2), cos, sin), rotated(k.transpose(1, 2), cos, sin), v.transpose(1, 2)
        if remember is not None:
            k, v = remember(k, v, self.layer)
        k, v = (y[:, :, : mask.shape[-1]].repeat_interleave(self.groups, dim=1) for y in (k, v))  # of a cache with room
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: PmtrainConfig, written: int):
        super().__init__()
        width, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, written, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Taps(nn.Module):
    def __init__(self, config: PmtrainConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.anchor_tokens - 1, config.hidden_size))

    def forward(self, rows: Tensor, mask: Tensor, past: int) -> Tensor:
        """Of the last tokens, which the mask has a row for; `rows` begins with those before them that count. What a
        token may not look at adds nothing to it."""
        before = min(past, len(self.weight))
        mixed = rows[:, before:].clone()
        tokens = mixed.shape[1]
        for back, weight in enumerate(self.weight, 1):
            first = max(0, back - before)  # token that has one so far before it
            visible = mask.diagonal(past - back, -2, -1)
            visible = (visible if visible.dim() == 1 else visible[:, 0])[..., None]
            there = visible if visible.dtype == torch.bool else visible >= 0
            mixed[:, first:] += rows[:, before + first - back : before + tokens - back] * weight * there
        return mixed


class Layer(nn.Module):
    def __init__(self, config: PmtrainConfig, layer: int, attended: int, fed: int, has_anchor: bool):
        super().__init__()
        self.anchor = nn.Embedding(config.vocab_size, config.hidden_size) if has_anchor else None
        self.anchor_taps = Taps(config) if has_anchor and config.anchor_tokens > 1 else None
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, attended)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, fed)


class Decoder(nn.Module):
    def __init__(self, config: PmtrainConfig):
        super().__init__()
        width, carried = config.hidden_size, config.carried_width
        self.starts = [0, *accumulate(config.segments)][:-1]  # the first layer of each segment
        self.embed_tokens = nn.Embedding(config.vocab_size, carried or width)
        self.basis = nn.Linear(carried, width, bias=False) if carried else None
        self.layers = nn.ModuleList()
        for i in range(config.num_hidden_layers):
            written = width + carried if carried and i < self.starts[-1] else width
            last = carried if carried and i + 1 in self.starts else written  # of a segment: all that goes on
            self.layers.append(Layer(config, i, written, last, i in self.starts[: config.num_anchors]))
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)

    def forward(self, ids: Tensor, seen: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, remember: Any) -> Tensor:
        """`seen`: the tokens so far, these included."""
        x = c = self.embed_tokens(ids)
        layer: Any
        anchor: Any = 0
        for i, layer in enumerate(self.layers):
            if i in self.starts:
                before, anchor = anchor, anchor if layer.anchor is None else self.anchor_of(layer, ids, seen, mask)
                x = x + (anchor - before) if self.basis is None else self.basis(c) + anchor
            x, c = self.add(x, c, layer.self_attn(layer.input_layernorm(x), cos, sin, mask, remember))
            x, c = self.add(x, c, layer.mlp(layer.post_attention_layernorm(x)))
        return self.norm(x)

    def anchor_of(self, layer: Any, ids: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        if layer.anchor_taps is None:
            return layer.anchor(ids)
        past = seen.shape[1] - ids.shape[1]
        return layer.anchor_taps(layer.anchor(seen[:, max(0, past - len(layer.anchor_taps.weight)) :]), mask, past)

    def add(self, x: Tensor, c: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        if self.basis is None or written.shape[-1] == x.shape[-1]:
            return x + written, c
        to_c, to_x = written.tensor_split([c.shape[-1]], dim=-1)
        return x + self.basis(to_c) + to_x if to_x.shape[-1] else x, c + to_c


class PmtrainForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = PmtrainConfig
    _supports_sdpa = True

    def __init__(self, config: PmtrainConfig):
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = DynamicCache() if use_cache and past_key_values is None else past_key_values
        past, tokens = 0 if cache is None else int(cache.get_seq_length()), input_ids.shape[1]
        places = torch.arange(past, past + tokens, device=input_ids.device)
        position_ids = places[None] if position_ids is None else position_ids
        cos, sin = rotary(position_ids, self.config.head_dim, self.config.rope_theta, self.lm_head.weight.dtype)
        mask = causal_mask(attention_mask, past, tokens, input_ids.device)

        def remember(k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            return cache.update(k, v, layer, {"cache_position": places})

        seen = input_ids if cache is None else self.seen(cache, input_ids, past, remember)
        x = self.model(input_ids, seen, cos, sin, mask, None if cache is None else remember)
        logits = self.lm_head(x[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def seen(self, cache: Any, ids: Tensor, past: int, remember: Any) -> Tensor:
        """The tokens so far, these included: one more layer of the cache, so that they are kept, repeated and put into
        another order as keys are."""
        layer = self.config.num_hidden_layers
        if self.config.anchor_tokens == 1:
            return ids
        if cache.layer_class_to_replicate is None and len(cache.layers) == layer:
            grows = isinstance(cache.layers[0], DynamicLayer)  # one that rounds keys, too: ids are not rounded
            cache.layers.append(DynamicLayer() if grows else copy.deepcopy(cache.layers[0]))  # nothing is in it yet
        keys, _ = remember(*2 * (ids[:, None, :, None].float(),), layer)
        return keys[:, 0, : past + ids.shape[1], 0].long()


def causal_mask(attention_mask: Tensor | None, past: int, tokens: int, device: torch.device) -> Tensor:
    """Where a query may look, as booleans: at itself and before, but not at padding."""
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    before = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)
    if attention_mask is None:
        return before
    itself = before.triu(past)  # padding too: what sees nothing has no mean
    return before & attention_mask[:, None, None, : past + tokens].bool() | itself


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * theta**-half
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
