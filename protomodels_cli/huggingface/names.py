"""Our modules' names and Hugging Face's, and which of our matrices lie the other way round."""

from __future__ import annotations

from collections.abc import Iterator

_ENDS = {"embed": "model.embed_tokens", "basis": "model.basis", "head.norm": "model.norm", "head.out": "lm_head"}
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_AT_A_START = {"anchor": "anchor", "anchor.taps": "anchor_taps"}  # in the first layer of a segment
_ONLY_WITH_QK_NORM = {"attn.q_norm", "attn.k_norm"}


def hugging_face_name(module: str) -> str:
    """`layers.3.attn.o` → `model.layers.3.self_attn.o_proj.weight`."""
    if module in _ENDS:
        return _ENDS[module] + ".weight"
    _, layer, rest = module.split(".", 2)
    return f"model.layers.{layer}.{(_IN_A_LAYER | _AT_A_START)[rest]}.weight"


def modules(layers: range, of: int, qk_norm: bool) -> Iterator[str]:
    """The modules with weights of an ordinary model's stage with these of all `of` layers, in layer order."""
    if layers.start == 0:
        yield "embed"
    for layer in layers:
        yield from (f"layers.{layer}.{rest}" for rest in _IN_A_LAYER if qk_norm or rest not in _ONLY_WITH_QK_NORM)
    if layers.stop == of:
        yield from ("head.norm", "head.out")


def is_transposed(module: str) -> bool:
    """Of a block's matrices that write to the stream: ours are (in, out), Hugging Face's (out, in)."""
    return module.endswith((".attn.o", ".mlp.down"))
