"""How far tokens are made, or a model is written: a bar on a terminal, else a line now and then; on standard error."""

from __future__ import annotations

import sys
import time
from typing import Literal

from protomodels_cli.data import work
from protomodels_cli.quantities import duration, size

Doing = work.Doing | Literal["writing"]
BAR = 24
WORDS: dict[Doing, str] = {
    "waiting": "waiting for another process that tokenises the same text",
    "hashing": "hashing the files",
    "learning": "learning the vocabulary",
    "tokenising": "tokenising",
    "writing": "writing",
}
EVERY = 0.2  # seconds between two pictures of the bar
PLAIN_EVERY = 10.0  # and between two lines where there is no terminal


class BytesDone:
    """Quiet for what takes less than a second."""

    def __init__(self) -> None:
        self._what: Doing | None = None
        self._from, self._began = 0, 0.0
        self._shown = time.monotonic() + 1 - EVERY

    def __call__(self, what: Doing, done: int, total: int | None) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if what != self._what:  # what is there already took its time before: it takes no part in bytes a second
            self._what, self._from, self._began = what, done, now
        at_once = not done and (terminal or what == "waiting")  # nothing more is heard of it for a while
        if at_once or now - self._shown >= (EVERY if terminal else PLAIN_EVERY):
            self._shown = now
            words = line(what, done, total, done - self._from, now - self._began, BAR if terminal else 0)
            start, end = ("\r\x1b[K", "\r") if terminal else ("", "\n")
            print(start + words, end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> BytesDone:
        return self

    def __exit__(self, *error: object) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def line(what: Doing, done: int, total: int | None, new: int, seconds: float, bar: int) -> str:
    """`new` bytes were done in these seconds."""
    if not done:
        return f"{WORDS[what]} …"
    rate = new / seconds if seconds > 0 else 0.0
    facts = [f"{size(done)} of {size(total)} ({done / total:.1%})" if total else size(done)]
    facts += [f"{size(rate)}/s"] if rate else []
    facts += [f"eta {duration((total - done) / rate)}"] if rate and total else []
    full = round(bar * done / total) if total else 0
    drawn = f"{'━' * full}{' ' * (bar - full)} " if bar and total else ""
    return f"{WORDS[what]} {drawn}{' | '.join(facts)}"
