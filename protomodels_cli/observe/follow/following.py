"""The loop that all followers share, and the scalars that a row of metrics has. Knows no tool."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole
from protomodels_cli.observe.tail import Tail, as_row

EVERY = 1.0  # seconds between two looks
COMMIT_ROWS = 2000
OF_STEP = ("loss", "lr", "grad_norm", "seconds")
OF_STAGE = ("compute_s", "wait_s", "wire_s", "forward_bytes", "backward_bytes", "peak_memory")


@dataclass(frozen=True)
class Position:
    """Behind so many rows of metrics.jsonl, which end at this byte."""

    rows: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Points:
    """A row, as other tools know it."""

    row: int  # its number, from 1
    lineage: int
    step: int
    at: float  # seconds since 1970
    values: Mapping[str, float]


class Follower(Protocol):
    def begin(self) -> Position:
        """Where it left off."""

    def write(self, points: Points) -> None: ...

    def commit(self, position: Position) -> None:
        """All up to there was written."""

    def close(self) -> None: ...


def points_of(number: int, row: Mapping[str, Any]) -> Points | None:
    """None where there is nothing to draw."""
    step, at, event = row.get("step"), row.get("at"), row.get("event")
    if not isinstance(step, int) or not isinstance(at, float | int):
        return None
    values = dict(_values(str(event), row))
    return Points(number, int(row.get("lineage", 1)), step, at, values) if values else None


def _values(event: str, row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    match event:
        case "step":
            for name in OF_STEP:
                if _is_number(row.get(name)):
                    yield f"train/{name}", float(row[name])
            if _is_number(row.get("seconds")) and row["seconds"] > 0 and _is_number(row.get("tokens")):
                yield "train/tokens_per_s", row["tokens"] / row["seconds"]
            for name in OF_STAGE:
                for stage, value in enumerate((row.get("stages") or {}).get(name, ())):
                    yield f"stage {stage}/{name}", float(value)
        case "eval":
            if _is_number(row.get("loss")):
                yield "held-out/loss", float(row["loss"])
        case "subspace":
            yield from ((f"subspace/{k}", float(v)) for k, v in row.items() if isinstance(v, float) and k != "at")


def _is_number(value: Any) -> bool:
    """Not what JSON has no number for: the name of one that is not finite."""
    return isinstance(value, float | int) and not isinstance(value, bool)


def follow(metrics: Path, followers: Sequence[Follower], over: Callable[[], bool], every: float = EVERY) -> int:
    """Pass rows on until `over`, and what was appended before that. Returns the number of rows passed on."""
    passed = 0
    tails = [(follower, *_tail(metrics, follower.begin())) for follower in followers]
    counts = [count for _, _, count in tails]
    while True:
        last = over()
        for i, (follower, tail, _) in enumerate(tails):
            if tail.waiting < 0:
                raise UserError(
                    f"{metrics} is shorter than what was read of it before",
                    "follow it into another place: it is not the run that was followed there",
                    "metrics_replaced",
                )
            before = counts[i]
            for line in tail.lines():
                if counts[i] - before == COMMIT_ROWS:
                    follower.commit(Position(counts[i], tail.offset))
                    before = counts[i]
                counts[i] += 1
                passed += 1
                row = as_row(line)
                if row is not None and (points := points_of(counts[i], row)) is not None:
                    follower.write(points)
            if counts[i] > before:
                follower.commit(Position(counts[i], tail.offset))
        if last:
            return passed
        time.sleep(every)


def _tail(metrics: Path, position: Position) -> tuple[Tail, int]:
    """`position` may say rows alone: then they are counted."""
    tail = Tail(metrics, position.offset)
    if position.rows and not position.offset:
        for number, _ in enumerate(tail.lines(), 1):
            if number > position.rows:
                break
    return tail, position.rows


def load(path: Path, run: str) -> dict[str, Any] | None:
    """What a follower has put down there of this run; None: nothing. Raises UserError where it is of another."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {path}: {e}", "follow the run into another place", "follower_damaged") from None
    if not isinstance(found, dict) or found.get("run") != run:
        raise UserError(f"{path.parent} follows another run", "follow this run into another place", "follows_another")
    return found


def save(path: Path, run: str, position: Position, **more: Any) -> None:
    write_whole(path, json.dumps({"run": run, **asdict(position), **more}).encode())
