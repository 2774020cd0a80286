"""The trained model as an ordinary Llama (Qwen3 with qk-norm): coordinates multiplied out, Hugging Face's names.

The exported embedding is T_fixed + E·Uᵀ, written for the first and only time as floats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protomodels_cli.huggingface.names import hugging_face_name
from protomodels_cli.model.llama import Matrix, RMSNorm, Writer
from protomodels_cli.model.stage import Stage
from protomodels_cli.spec.schema import RunSpec


@torch.no_grad()
def multiplied_out(stages: list[Stage]) -> dict[str, Tensor]:
    """All weights of a plain Llama, in Hugging Face's names and shapes."""
    out: dict[str, Tensor] = {}
    for stage in stages:
        for name, module in stage.named_modules():
            if isinstance(module, Writer):
                rows = module.form.rows(module.weight)
                if name == "embed":
                    if stage.t_fixed is not None:
                        rows = rows + stage.t_fixed.rows(torch.arange(len(rows), device=rows.device), rows.dtype)
                    out[hugging_face_name(name)] = rows.clone()
                else:
                    out[hugging_face_name(name)] = rows.T.contiguous()
            elif isinstance(module, Matrix | RMSNorm):
                out[hugging_face_name(name)] = module.weight.clone()
    return out


def hugging_face_config(spec: RunSpec) -> dict[str, Any]:
    """config.json of the exported model."""
    m = spec.model
    return {
        "architectures": ["Qwen3ForCausalLM" if m.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if m.qk_norm else "llama",
        "hidden_size": m.width,
        "intermediate_size": m.hidden,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": m.context,
        "rms_norm_eps": m.norm_eps,
        "rope_theta": m.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
