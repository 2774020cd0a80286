"""Fields that are refused with a reason: some that people know from other trainers and that cannot exist here, and
some of earlier versions, with what took their place.

Whatever is written to the residual stream must lie in the subspace S, or a boundary cannot be crossed with k
numbers. A gain, bias or dropout on what a branch *writes* leaves S; on what it *reads* (pre-norm) it does not.
"""

_WRITES = "would write outside the subspace S on the residual stream, so k numbers would no longer say it all"

REPLACED: dict[str, tuple[str, str]] = {  # field → why, and the fix
    "limits.place_seconds": (
        "meant four limits at once",
        "set those you mean: limits.build_seconds, limits.reuse_seconds, limits.link_seconds, or limits.device_seconds "
        "(which was twice its value)",
    ),
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
    "model.learned_positions": "learned absolute positions put a position-dependent term into every entry "
    "of the stream; positions are rotary here, inside attention, and nothing need be subtracted",
    "model.tie_embeddings": "a tied head would hold the first stage's embedding in the last stage, and its gradient "
    "leaves S; the head is untied",
    "model.tie_word_embeddings": "a tied head would hold the first stage's embedding in the last stage, and its "
    "gradient leaves S; the head is untied",
    "model.skips": "a skip across stages would need its own message; only neighbours talk",
}
