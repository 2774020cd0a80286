"""Rows of events.jsonl as people and programs read them, and which of them are wanted. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from protomodels_cli.observe.tail import as_row

WILD = frozenset("*?[")


@dataclass(frozen=True)
class Wanted:
    """Rows of any of these kinds, which may be patterns as peer_*, or with a reason of one of them; none: of all."""

    kinds: tuple[str, ...] = ()
    since: float | None = None  # seconds since 1970

    def __call__(self, row: dict[str, Any]) -> bool:
        if self.since is not None and row["at"] < self.since:
            return False
        return not self.kinds or any(fnmatch.fnmatchcase(kind, k) for kind in kinds_of(row) for k in self.kinds)


def kinds_of(row: dict[str, Any]) -> set[str]:
    """The row's own and its reason's."""
    reason = row.get("reason")
    inner = reason.get("kind") if isinstance(reason, dict) else reason
    return {row["kind"], *([inner] if isinstance(inner, str) else [])}


def parse(line: str) -> dict[str, Any] | None:
    """None where this is no event: a power cut may leave anything."""
    row = as_row(line)
    if row is None or not isinstance(row.get("kind"), str) or not isinstance(row.get("text"), str):
        return None
    return row if type(row.get("at")) in (int, float) else None


def in_words(row: dict[str, Any]) -> str:
    """2026-11-16T02:46:46Z peer_lost: lost desk (stage 2): no heartbeat for 5 s"""
    return f"{moment(row['at'])} {printable(row['kind'])}: {printable(row['text'])}"


def printable(text: str) -> str:
    """Peers choose their names: nothing of theirs reaches a terminal as a command to it."""
    return "".join(c if c.isprintable() else "�" for c in text)


def moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def unknown(kinds: Collection[str], known: Collection[str]) -> list[str]:
    """Those of the wanted kinds that nothing can have."""
    return [kind for kind in kinds if not WILD & set(kind) and kind not in known]
