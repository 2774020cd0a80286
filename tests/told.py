"""What a coordinator has told, as data: the rows of a run's events.jsonl, by kind and fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from waiting import wait_for


def events(run_dir: Path, kind: str | None = None, since: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
    """Those of this kind with these fields, oldest first. A line that is being written is not there yet."""
    file = run_dir / "events.jsonl"
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
