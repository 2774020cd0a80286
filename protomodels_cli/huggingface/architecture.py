"""What a Llama or Qwen3, or one with segments, computes with its weights, in the spec's words, and which those are."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from protomodels_cli.huggingface.names import hugging_face_name, modules
from protomodels_cli.huggingface.segments import Segments, segments_of
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
    segments: Segments | None = None  # None: an ordinary Llama or Qwen3

    @property
    def modules(self) -> list[str]:
        """Those with weights, by our names."""
        ordinary = list(modules(range(self.layers), self.layers, self.qk_norm))
        if self.segments is None:
            return ordinary
        basis = ["basis"] if self.segments.carried else []
        own = ["anchor", "anchor.taps"] if self.segments.anchor_tokens > 1 else ["anchor"]
        return [*ordinary, *basis, *(f"layers.{i}.{name}" for i in self.segments.anchored for name in own)]

    def name(self, module: str) -> str:
        """Of its weight, as Hugging Face has it."""
        return hugging_face_name("embed" if module == "head.out" and self.tied else module)

    def shape(self, module: str) -> tuple[int, ...]:
        """Of its weight, as Hugging Face has it: (out, in)."""
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        carried, written = self.width, (self.width, self.width)
        layer = re.match(r"layers\.(\d+)\.", module)
        if self.segments is not None:
            carried = self.segments.carried or self.width
            written = self.segments.written(int(layer[1]), self.width) if layer else written
        return {
            "embed": (self.vocab_size, carried),
            "basis": (self.width, carried),
            "anchor": (self.vocab_size, self.width),
            "anchor.taps": (0 if self.segments is None else self.segments.anchor_tokens - 1, self.width),
            "head.out": (self.vocab_size, self.width),
            "head.norm": (self.width,),
            "attn_norm": (self.width,),
            "mlp_norm": (self.width,),
            "attn.q": (inner, self.width),
            "attn.k": (kv, self.width),
            "attn.v": (kv, self.width),
            "attn.o": (written[0], inner),
            "attn.q_norm": (self.head_dim,),
            "attn.k_norm": (self.head_dim,),
            "mlp.gate": (self.hidden, self.width),
            "mlp.up": (self.hidden, self.width),
            "mlp.down": (written[1], self.hidden),
        }[module[layer.end() :] if layer else module]

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face's name and shape of each."""
        return {self.name(module): self.shape(module) for module in self.modules}


def architecture_of(spec: RunSpec) -> Architecture:
    of_model = {f.name: getattr(spec.model, f.name) for f in fields(Architecture) if hasattr(spec.model, f.name)}
    return Architecture(**of_model | {"vocab_size": spec.vocab_size, "segments": segments_of(spec)})
