"""How many ids a tokenizer.json has."""

from __future__ import annotations

import json
from pathlib import Path


class VocabularyError(ValueError):
    """Why a file does not say that: the rule that it breaks."""


def ids_in(path: Path) -> int:
    """One more than the highest id. Raises VocabularyError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids = list(content["model"]["vocab"].values()) + [t["id"] for t in content.get("added_tokens", [])]
        return int(max(ids)) + 1
    except OSError as e:
        raise VocabularyError(f"must be readable: {e.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
        rule = "must be a tokenizer.json, as Hugging Face's tokenizers write it, with a vocabulary"
        raise VocabularyError(rule) from None
