"""From ids to text as they come, and how many bytes of text ids stand for."""

from __future__ import annotations

import numpy as np

from protomodels_cli.data.tokenizers import Tokenizer

_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t"}
_HALF = "\ufffd"  # what the first bytes of a character decode to


class Detokenizer:
    """Ids come one by one, text goes out as soon as no later id can change it: never half a character.

    A tokenizer may write a piece differently at the beginning of a text (without its space), so that each is decoded
    behind those that went out last."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self._tokenizer = tokenizer
        self._behind = prompt  # the ids that went out last
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that has become certain with this id."""
        self._waiting.append(token)
        text = self._text()
        if not text or text.endswith(_HALF):
            return ""
        self._behind, self._waiting = self._waiting, []
        return text

    def end(self) -> str:
        """The rest, as it is."""
        text, self._waiting = self._text(), []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._behind)
        return self._tokenizer.decode(self._behind + self._waiting)[len(before) :]


def bytes_of(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """UTF-8 bytes of the text that these ids stand for. Marks of a document's end are no text."""
    if (each := tokenizer.bytes_per_id) is not None:
        return int(each[ids].sum())
    return len(tokenizer.decode([i for i in ids.tolist() if i != tokenizer.end_id]).encode())


def printable(text: str) -> str:
    """For a terminal: it would obey control characters (titles, colours, what is typed next), so they are written out,
    all but the end of a line and the tab."""
    return text.translate(_CONTROLS)
