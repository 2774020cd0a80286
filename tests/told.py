"""What a coordinator or a peer has told, as data: the rows of its events.jsonl, by kind and fields."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from waiting import wait_for

from protomodels_cli.wire.client import operator
from protomodels_cli.wire.join_link import JoinLink


def events(run_dir: Path, kind: str | None = None, since: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
    """Those of this kind with these fields, oldest first. A line that is being written is not there yet."""
    return _those(run_dir / "events.jsonl", kind, since, fields)


def peer_events(folder: Path, kind: str | None = None, since: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
    """Of the peer that keeps its files below this folder (`join --dir`)."""
    return [row for file in sorted(folder.glob("*/events*.jsonl")) for row in _those(file, kind, since, fields)]


def _those(file: Path, kind: str | None, since: float, fields: dict[str, Any]) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [
        row
        for row in rows
        if kind in (None, row["kind"]) and row["at"] >= since and all(row.get(k) == v for k, v in fields.items())
    ]


def wait_for_event(run_dir: Path, kind: str, since: float = 0.0, **fields: Any) -> dict[str, Any]:
    """The first such event, once it is there."""
    found = wait_for(
        lambda: events(run_dir, kind, since, **fields),
        f"no {kind} with {fields}",
        details=lambda: str([e["text"] for e in events(run_dir)][-20:]),
    )
    return found[0]


def wait_for_peer_event(folder: Path, kind: str, since: float = 0.0, **fields: Any) -> dict[str, Any]:
    found = wait_for(
        lambda: peer_events(folder, kind, since, **fields),
        f"no {kind} with {fields}",
        details=lambda: str([e["text"] for e in peer_events(folder)][-20:]),
    )
    return found[0]


def status_of(run_dir: Path) -> Any:
    """What the coordinator says of the run."""

    async def ask() -> Any:
        async with operator(JoinLink.parse((run_dir / "link").read_text())) as coordinator:
            return await coordinator.status()

    return asyncio.run(ask())
