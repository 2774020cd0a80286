"""Small Hugging Face checkpoints, made by transformers with random weights, and specs that start from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from protomodels_cli.spec import RunSpec, spec_from

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def save(folder: Path, kind: str = "llama", dtype: str = "float32", shard: str = "1GB", **config: Any) -> Path:
    """A checkpoint in this folder. Its norms have gains, so that no two of them can be mistaken for each other."""
    import transformers

    configs = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    models = {"llama": transformers.LlamaForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}
    torch.manual_seed(0)
    model = models[kind](configs[kind](**SHAPE | config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    return folder


def starting_from(folder: Path, **sections: Any) -> RunSpec:
    base: dict[str, Any] = {
        "steps": 5,
        "stages": 2,
        "model": {"init": str(folder), "context": 16},
        "subspace": {"form": "dense"},
        "optimizer": {"lr": 3e-3},
        "batch": {"size": 4, "microbatches": 2},
        "data": {"max_bytes": 200_000, "val_fraction": 0.1},
        "tokenizer": {"kind": "bytes"},
        "eval": {"windows": 8},
        "wire": {"forward": "fp32", "backward": "fp32"},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return spec_from(base)
