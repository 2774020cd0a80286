"""Small checkpoints with random weights, as transformers writes them, and transformers' own model of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from protomodels_cli.data.tokenizers import Json, train_bpe

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rope_theta": 500.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TEXT = "The cat sat on the mat, and the dog — 狗 🐕 — ate the cat's déjeuner.\n" * 40


def make_model(kind: str, **config: Any) -> Any:
    """transformers' Llama or Qwen3; every weight random, gains included."""
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config_class(**SIZES | config)).eval()
        for name, p in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(p, 1.0, 0.1)
    return model


def make_tokenizer() -> Json:
    return train_bpe([TEXT], SIZES["vocab_size"])


def save(model: Any, folder: Path, tokenizer: Json | None = None, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder
