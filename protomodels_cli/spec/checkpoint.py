"""What a Hugging Face checkpoint's config.json says of a model: the fields of the spec that `model.init` fills in.

Reads config.json and looks for tokenizer.json; `huggingface/checkpoint.py` reads the weights. Whatever cannot be
represented here is refused with the name and the value that config.json has for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protomodels_cli.spec.errors import Problem
from protomodels_cli.spec.vocabulary import VocabularyError, ids_in

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
OTHER = "start from another checkpoint, or without model.init"
_QK_NORM = {"llama": False, "qwen3": True}  # the kinds of model that there are
IN_SEGMENTS = "pmtrain"  # and what `pmtrain export` writes where a model is neither
_NAMES = {  # our fields, and config.json's
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden": "intermediate_size",
    "qk_norm": "model_type",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
_LARGEST = 1e300  # beyond it numbers do not fit a float
_SIZES = "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"  # without a usual value


def _are_full(layers: Any) -> bool:
    return isinstance(layers, list) and all(layer == "full_attention" for layer in layers)


_UNLIKE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (  # field, what it may be, and what is so here
    ("attention_bias", lambda v: not v, "there are no biases here"),
    ("mlp_bias", lambda v: not v, "there are no biases here"),
    ("hidden_act", lambda v: v in (None, "silu"), "the feed-forward block computes silu here"),
    ("use_sliding_window", lambda v: not v, "attention is over the whole window here"),
    ("layer_types", lambda v: not v or _are_full(v), "attention is over the whole window here"),
    ("quantization_config", lambda v: not v, "weights must be floating-point numbers"),
)


class CheckpointError(ValueError):
    """Why a model cannot start from a checkpoint, and what to do."""

    def __init__(self, rule: str, fix: str):
        super().__init__(rule)
        self.rule, self.fix = rule, fix


@dataclass(frozen=True)
class CheckpointShape:
    model: dict[str, Any]  # fields of the section `model`
    vocab_size: int
    tied: bool  # the head is the embedding: here it starts as a copy of it


def read_shape(folder: Path, or_in_segments: bool = False) -> CheckpointShape:
    """The shape of the model in a checkpoint; `or_in_segments`: which may be ours. Raises CheckpointError."""
    config = _read(folder / CONFIG)
    kind = config.get("model_type")
    qk_norms = _QK_NORM | ({IN_SEGMENTS: bool(config.get("qk_norm"))} if or_in_segments else {})
    if kind == IN_SEGMENTS and not or_in_segments:
        rule = (
            "the dense form cannot represent that: segments of such a model have separate anchors, or a stream that "
            "ends with each of them, and dense is one stream through all layers"
        )
        raise _unlike("model_type", kind, rule)
    if not isinstance(kind, str) or kind not in qk_norms:
        raise _unlike("model_type", kind, f"a run can start from {' and '.join(_QK_NORM)} checkpoints")
    for name, fits, rule in _UNLIKE:
        if not fits(config.get(name)):
            raise _unlike(name, config[name], rule)
    size = {name: _size(config, name) for name in _SIZES}
    width, heads = size["hidden_size"], size["num_attention_heads"]
    # What transformers takes where config.json has nothing.
    whole = width // heads if width % heads == 0 else None
    usual_head, usual_kv = (whole, heads) if kind == "llama" else (128, 32)
    if "num_key_value_heads" in config:
        usual_kv = heads
    model: dict[str, Any] = {ours: size[name] for ours, name in _NAMES.items() if name in size}
    model |= {
        "kv_heads": _size(config, "num_key_value_heads", usual_kv),
        "head_dim": _size(config, "head_dim", usual_head),
        "qk_norm": qk_norms[kind],
        "rope_theta": _rope_theta(config),
        "norm_eps": _number(config, "rms_norm_eps", 1e-6),
    }
    return CheckpointShape(model, _size(config, "vocab_size"), bool(config.get("tie_word_embeddings", False)))


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(
            f"there is no Hugging Face checkpoint: {path} cannot be read ({e.strerror})",
            "check the path, which is relative to the spec file; a run that has begun does not need the checkpoint any "
            "more, and continues with `pmtrain coordinator --resume --dir runs/NAME`",
        ) from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object", "take the checkpoint's own config.json")
    return config


def _unlike(name: str, value: Any, rule: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG} has {name} = {json.dumps(value)}, and {rule}", OTHER)


def _size(config: dict[str, Any], name: str, usual: int | None = None) -> int:
    value = usual if config.get(name) is None else config[name]
    if type(value) is not int or value < 1:
        raise _unlike(name, value, "that is not a size")
    return value


def _number(config: dict[str, Any], name: str, usual: float) -> float:
    value = usual if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not 0 < value < _LARGEST:
        raise _unlike(name, value, "that is not a number above 0")
    return float(value)


def _rope_theta(config: dict[str, Any]) -> float:
    """Of plain rotary positions: `rope_parameters` in newer files, `rope_scaling` and `rope_theta` in older ones. Where
    a file has both, readers differ in which one counts: neither may scale."""
    theta = config.get("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        plain = isinstance(rope, dict) and not any(isinstance(v, dict) for v in rope.values())
        if not plain or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise _unlike(name, rope, "rotary positions are not scaled here")
        for place in (rope, config):
            if place.get("partial_rotary_factor") not in (None, 1):
                raise _unlike("partial_rotary_factor", place["partial_rotary_factor"], "heads are rotated as a whole")
        theta = rope.get("rope_theta", theta)
    return _number({"rope_theta": theta}, "rope_theta", 10000.0)


# Filling in


@dataclass(frozen=True)
class FilledIn:
    data: dict[str, Any]
    problems: list[Problem]
    unknown: frozenset[str]  # fields that the checkpoint should have said, and that have a stand-in now


def fill_in(data: dict[str, Any], base: Path, *, resolved: bool) -> FilledIn:
    """A spec's fields with those that its checkpoint says. `resolved`: a spec that has them all already is left alone,
    so that a peer, which does not have the checkpoint, can read it."""
    model = data.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(init, str) or (resolved and _is_resolved(data)):
        return FilledIn(data, [], frozenset())
    try:
        shape = read_shape(base / init)
    except CheckpointError as e:
        stand_ins = {"layers": 1, "width": 2, "heads": 1}
        unknown = frozenset(f"model.{name}" for name in stand_ins if name not in model)
        problem = Problem("model.init", e.rule, e.fix, init, kind="init")
        return FilledIn({**data, "model": {**stand_ins, **model}}, [problem], unknown)
    given = {name: value for name, value in model.items() if value is not None}
    problems = [
        _mismatch(f"model.{name}", given[name], f"{_NAMES[name]}: {json.dumps(value)}", init)
        for name, value in shape.model.items()
        if name in given and isinstance(given[name], int | float | str) and given[name] != value
    ]
    tokenizer, more = _tokenizer(data.get("tokenizer"), base, init, shape.vocab_size)
    filled = {**data, "model": {**given, **shape.model}, **({} if tokenizer is None else {"tokenizer": tokenizer})}
    return FilledIn(filled, problems + more, frozenset())


def _is_resolved(data: dict[str, Any]) -> bool:
    tokenizer = data.get("tokenizer")
    known = isinstance(tokenizer, dict) and tokenizer.get("vocab_size") is not None
    return known and all(data["model"].get(name) is not None for name in _NAMES)


def _mismatch(field: str, value: Any, theirs: str, init: str) -> Problem:
    name = field.rpartition(".")[2]
    return Problem(
        field,
        f"the checkpoint in {init} has another value ({CONFIG} has {theirs})",
        f"remove `{name}`: it is taken from the checkpoint",
        value,
        kind="init_mismatch",
    )


def _tokenizer(given: Any, base: Path, init: str, rows: int) -> tuple[Any, list[Problem]]:
    """The section `tokenizer`, as far as it follows from a checkpoint whose embedding has so many rows."""
    if given is None:
        if (base / init / TOKENIZER).is_file():
            given = {"kind": "file", "file": str(Path(init) / TOKENIZER)}
        else:
            return None, [
                Problem(
                    "tokenizer",
                    f"is required: the checkpoint in {init} has no {TOKENIZER}, and the embedding was not trained "
                    "with the ids of a new vocabulary",
                    "set tokenizer.kind, and tokenizer.file where that is file, to what the checkpoint was trained "
                    "with",
                    kind="init_tokenizer",
                )
            ]
    if not isinstance(given, dict):
        return None, []  # malformed
    ids = given.get("vocab_size")
    if type(ids) is int and ids != rows:
        return None, [_mismatch("tokenizer.vocab_size", ids, f"vocab_size: {rows}", init)]
    try:
        problem = _other_ids(given, base, rows)
    except VocabularyError:
        return None, []  # it is said where the ids are needed
    if problem is not None:
        return None, [problem]
    return {**given, "vocab_size": rows}, []


def _other_ids(tokenizer: dict[str, Any], base: Path, rows: int) -> Problem | None:
    """Why a tokenizer cannot be that of an embedding with so many rows, which may be more than it has ids. Raises
    VocabularyError."""
    if tokenizer.get("kind") == "bytes":
        field, ids, fits = "kind", 256, rows == 256
    elif tokenizer.get("kind") == "file" and isinstance(tokenizer.get("file"), str):
        field, ids = "file", ids_in(base / tokenizer["file"])
        fits = ids <= rows
    else:
        return None
    if fits:
        return None
    return Problem(
        f"tokenizer.{field}",
        f"has {ids} ids, and the checkpoint's embedding has {rows} rows ({CONFIG} has vocab_size: {rows})",
        "use the tokenizer that the checkpoint was trained with",
        tokenizer[field],
        kind="init_tokenizer",
    )
