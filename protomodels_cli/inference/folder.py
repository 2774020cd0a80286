"""A checkpoint folder as Hugging Face's libraries write it, ours and others' alike: config.json and tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protomodels_cli.data.tokenizers import Json
from protomodels_cli.errors import UserError
from protomodels_cli.huggingface.architecture import Architecture
from protomodels_cli.huggingface.segments import segments_in
from protomodels_cli.spec.checkpoint import CONFIG, IN_SEGMENTS, CheckpointError, read_shape
from protomodels_cli.spec.model import ModelSpec

_CONTEXTS = {"llama": 2048, "qwen3": 32768}  # what transformers takes where config.json has none; ours always has one


class FolderError(UserError):
    """A folder that holds no checkpoint, or half of one."""


def is_checkpoint(path: Path) -> bool:
    return (path / CONFIG).is_file()


def architecture_in(folder: Path) -> Architecture:
    """Raises FolderError with the name of the field where config.json asks for what is not so here."""
    config = _json(folder / CONFIG)
    try:
        shape = read_shape(folder, or_in_segments=True)
    except CheckpointError as e:
        raise _unlike(folder, e.rule) from None
    kind = config["model_type"]
    context: Any = config.get("max_position_embeddings") or _CONTEXTS.get(kind)
    try:  # what a spec bounds is bounded here too: nothing is made of the size that a stranger's file claims
        ModelSpec.model_validate({**shape.model, "context": context})
    except ValidationError as e:
        [where, *_] = e.errors()
        raise _unlike(folder, f"{CONFIG} has {where['input']!r} for {where['loc'][0]}, and {where['msg']}") from None
    try:
        segments = segments_in(config, shape.model["layers"]) if kind == IN_SEGMENTS else None
    except ValueError as e:
        raise _unlike(folder, f"{CONFIG} has {e}") from None
    sizes = {**shape.model, "context": context, "vocab_size": shape.vocab_size}
    found = Architecture(**sizes, tied=shape.tied, segments=segments)
    if found.heads % found.kv_heads:
        raise _unlike(
            folder, f"{CONFIG} has num_key_value_heads = {found.kv_heads}, which does not divide {found.heads}"
        )
    if found.head_dim % 2:
        raise _unlike(folder, f"{CONFIG} has head_dim = {found.head_dim}, and rotary positions turn pairs")
    return found


def _unlike(folder: Path, why: str) -> FolderError:
    fix = "use an exported run, or another plain Llama or Qwen3"
    return FolderError(f"the model in {folder} cannot be used: {why}", fix, "unsupported")


def tokenizer_in(folder: Path) -> Json | None:
    """None where there is none: a model of ids."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Json(file.read_text(encoding="utf-8"), str(file))
    except (ValueError, OSError) as e:
        raise _unreadable(file, _reason(e)) from None


def ends_in(folder: Path) -> tuple[int, ...]:
    """The ids at which a text ends."""
    files = [file for name in ("generation_config.json", CONFIG) if (file := folder / name).is_file()]
    found = next((ids for file in files if (ids := _json(file).get("eos_token_id")) is not None), None)
    return tuple(i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int))


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as e:
        raise _unreadable(file, _reason(e)) from None
    if not isinstance(found, dict):
        raise _unreadable(file, "it is no JSON object")
    return found


def _unreadable(file: Path, reason: str) -> FolderError:
    fix = "export the run again, or fetch the file again"
    return FolderError(f"{file} cannot be read: {reason}", fix, "json_damaged")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return (isinstance(error, OSError) and error.strerror) or str(error)
