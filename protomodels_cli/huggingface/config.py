"""config.json and generation_config.json of a model that a run has trained: a Llama, with qk-norm a Qwen3, or ours."""

from __future__ import annotations

from typing import Any

from protomodels_cli.huggingface.segments import Segments, segments_of
from protomodels_cli.spec.checkpoint import IN_SEGMENTS
from protomodels_cli.spec.schema import RunSpec

MODELING = "modeling_pmtrain"  # the module beside config.json that computes a model in segments


def config_of(spec: RunSpec, dtype: str | None = None, end_id: int | None = None) -> dict[str, Any]:
    """`dtype`: of the weights in the files; by default the run's. `end_id`: the token between two documents."""
    m = spec.model
    segments = segments_of(spec)
    return {
        **(_ordinary(spec) if segments is None else _in_segments(segments, m.qk_norm)),
        "torch_dtype": dtype or spec.compute.stored,
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
        "tie_word_embeddings": False,
        "initializer_range": spec.groups.matrices.std,
        "use_cache": True,
        **special_ids(end_id),
    }


def _ordinary(spec: RunSpec) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM" if spec.model.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if spec.model.qk_norm else "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.model.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }


def _in_segments(segments: Segments, qk_norm: bool) -> dict[str, Any]:
    model = "PmtrainForCausalLM"
    return {
        "architectures": [model],
        "model_type": IN_SEGMENTS,
        "auto_map": {"AutoConfig": f"{MODELING}.PmtrainConfig", "AutoModelForCausalLM": f"{MODELING}.{model}"},
        "qk_norm": qk_norm,
        **segments.fields(),
    }


def generation_config_of(end_id: int | None) -> dict[str, Any]:
    return {"do_sample": True, **special_ids(end_id)}


def special_ids(end_id: int | None) -> dict[str, int | None]:
    """A document begins where another has ended, so one token does for both, and where nothing is to be seen. A null
    keeps transformers from assuming ids of its own."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_id)
