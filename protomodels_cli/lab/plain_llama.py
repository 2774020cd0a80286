"""A plain Llama, written on its own as an oracle: no stages, no forms, nothing shared with `model/`.

Where `model/llama.py` rotates halves, this multiplies complex numbers; where that calls fused attention, this
writes out the softmax. Weights have Hugging Face's names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def streams_and_logits(
    weights: Mapping[str, Tensor], config: dict[str, Any], ids: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The residual stream before each layer (and after the last), and the logits."""
    x = weights["model.embed_tokens.weight"][ids]
    streams = [x]
    for layer in range(config["num_hidden_layers"]):
        w = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + _attention(_norm(x, w["input_layernorm"], config), w, config)
        h = _norm(x, w["post_attention_layernorm"], config)
        gate = h @ w["mlp.gate_proj"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
        streams.append(x)
    return streams, _norm(x, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy from its definition."""
    picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, -1) - picked).mean()


def _norm(x: Tensor, gain: Tensor, config: dict[str, Any]) -> Tensor:
    return gain * x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + config["rms_norm_eps"])


def _attention(x: Tensor, w: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def split(projection: str, count: int, norm: str) -> Tensor:
        y = torch.einsum("btd,od->bto", x, w[projection]).unflatten(-1, (count, size))
        return _norm(y, w[norm], config) if norm in w else y

    q = _turn(split("self_attn.q_proj", heads, "self_attn.q_norm"), config)
    k = _turn(split("self_attn.k_proj", groups, "self_attn.k_norm"), config)
    v = split("self_attn.v_proj", groups, "")
    q = q.unflatten(2, (groups, heads // groups))  # query head h reads key/value head h // (heads / groups)
    scores = torch.einsum("bigre,bjge->bgrij", q, k) / size**0.5
    length = x.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    mixed = torch.einsum("bgrij,bjge->bigre", weights, v).flatten(2)
    return torch.einsum("bto,do->btd", mixed, w["self_attn.o_proj"])


def _turn(y: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotary positions as multiplication by e^{i·position·frequency}."""
    half = y.shape[-1] // 2
    frequency = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64, device=y.device) / half)
    angle = torch.arange(y.shape[1], dtype=torch.float64, device=y.device)[:, None] * frequency
    phase = torch.polar(torch.ones_like(angle), angle)[None, :, None, :]
    turned = torch.complex(y[..., :half].double(), y[..., half:].double()) * phase
    return torch.cat((turned.real, turned.imag), dim=-1).to(y.dtype)
