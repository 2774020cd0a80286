"""What a coordinator has told, as data: the rows of a run's events.jsonl, by kind and fields."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


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


def wait_for_event(run_dir: Path, kind: str, since: float = 0.0, seconds: float = 60, **fields: Any) -> dict[str, Any]:
    """The first such event, once it is there."""
    until = time.monotonic() + seconds
    while not (found := events(run_dir, kind, since, **fields)):
        assert time.monotonic() < until, f"no {kind} with {fields} in {[e['text'] for e in events(run_dir)][-20:]}"
        time.sleep(0.02)
    return found[0]
