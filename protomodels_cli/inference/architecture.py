"""What a Llama or Qwen3 computes with its weights, in the spec's words."""

from __future__ import annotations

from dataclasses import dataclass, fields

from protomodels_cli.spec.schema import RunSpec


@dataclass(frozen=True)
class Architecture:
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    context: int
    vocab_size: int
    tied: bool = False  # the head is the embedding


def architecture_of(spec: RunSpec) -> Architecture:
    of_model = {f.name: getattr(spec.model, f.name) for f in fields(Architecture) if hasattr(spec.model, f.name)}
    return Architecture(**of_model, vocab_size=spec.vocab_size)
