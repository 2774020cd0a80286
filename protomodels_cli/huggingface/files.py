"""Which files of a checkpoint's folder have its weights."""

from __future__ import annotations

import json
from pathlib import Path

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class NoWeights(Exception):
    """Neither of the two is there."""


class BadIndex(Exception):
    """The index does not say which files they are, or names some outside the folder."""


def weight_files(folder: Path) -> list[Path]:
    """Where both are there the one file counts, as for transformers. Raises NoWeights, BadIndex and OSError."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        raise NoWeights from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise BadIndex from None
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise BadIndex
    return [folder / name for name in sorted(names)]
