"""Fields that are refused with a reason: some that other trainers have and that cannot exist here, and some of earlier
versions, with the fields that replace them.

Whatever is written to the residual stream must lie in the subspace S, or a boundary cannot be crossed with k
numbers. A gain, bias or dropout on what a branch *writes* leaves S; on what it *reads* (pre-norm) it does not.
"""

_WRITES = "would write outside the subspace S, so k numbers per token would no longer carry the whole residual stream"

_STD = "has moved: each group of parameters has a standard deviation of its own"

REPLACED: dict[str, tuple[str, str]] = {  # field → why, and the fix
    "limits.place_seconds": (
        "was replaced: limits.place_seconds set four limits at once",
        "set the ones you need: limits.build_seconds, limits.reuse_seconds, limits.link_seconds, limits.device_seconds "
        "(this one was twice the old value)",
    ),
    "model.init_std": (_STD, "set groups.matrices.std and groups.head.std"),
    "model.embedding_std": (_STD, "set groups.embedding.std"),
}

REFUSED: dict[str, str] = {
    "model.dropout": f"dropout on a branch or on the stream {_WRITES}",
    "model.residual_dropout": f"dropout on the stream {_WRITES}",
    "model.bias": f"a bias of width d on what a branch writes {_WRITES}",
    "model.mlp_bias": f"a bias of width d on what a branch writes {_WRITES}",
    "model.attention_bias": f"a bias of width d on what a branch writes {_WRITES}",
    "model.layer_scale": f"a gain on what a branch writes {_WRITES}",
    "model.post_norm": f"a norm with a gain on what a branch writes {_WRITES}",
    "model.norm": f"the norm is RMSNorm before each branch: LayerNorm or a norm on the stream {_WRITES}",
    "model.learned_positions": "learned absolute positions would add a term to every entry of the residual stream; "
    "positions are rotary here, inside attention",
    "model.tie_embeddings": "a tied head would need the first stage's embedding in the last stage, and a gradient "
    "outside S; the head is untied",
    "model.tie_word_embeddings": "a tied head would need the first stage's embedding in the last stage, and a "
    "gradient outside S; the head is untied",
    "model.skips": "a skip connection across stages would need messages of its own, and only neighbours are linked",
}
