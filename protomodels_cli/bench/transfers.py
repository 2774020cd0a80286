"""What parts of snapshots on their way cost the steps: a run of real processes over an emulated line that both use.

Three stages, which sleep instead of computing (`transfer_peer.py`); the middle one has most layers, and the part of the
size that is asked for. After the first snapshot its holder fetches that part, and uploads the next, beside the steps:
for some seconds each at the pace at which a peer does; the same over a line of its own (what is slower then is so for
want of processors, which all share here); without yielding; and nothing in between. Steps wholly within phases of one
kind are compared with those of another.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from protomodels_cli.bench.wan import Method, spec_of
from protomodels_cli.cost.line import wire_bytes
from protomodels_cli.cost.saving import largest_part
from protomodels_cli.launch.local import local_run
from protomodels_cli.quantities import duration, rate, size
from protomodels_cli.spec.link import parse_link
from protomodels_cli.spec.schema import RunSpec

LAYERS = 1, 3, 1
MIDDLE = 1  # the stage that has parts on its line
LAYER_SECONDS = 0.02  # of a microbatch forward; backward twice as long
MESSAGE = 3 << 16  # bytes: 20 ms at 80 Mbit/s
MICROBATCHES = 6
SNAPSHOT_STEPS = 8
LOOK = 1.0  # seconds between two looks at a run
PHASES_FILE = "phases.jsonl"
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Phase:
    what: Literal["none", "fetch", "upload"]
    how: Literal["yields", "own_line", "pushes"]
    seconds: float


NOTHING, FETCH = Phase("none", "yields", 6), Phase("fetch", "yields", 60)
PHASES = (
    *(NOTHING, FETCH, NOTHING, FETCH),
    Phase("fetch", "own_line", 8),
    Phase("upload", "yields", 10),
    NOTHING,
    Phase("upload", "own_line", 8),
    Phase("fetch", "pushes", 8),
    NOTHING,
    Phase("upload", "pushes", 8),
)


@dataclass(frozen=True)
class Setting:
    link: str
    part: int  # bytes, about
    minutes: float  # after which it ends, if the part was not fetched before

    def spec(self) -> RunSpec:
        """AdamW keeps three numbers for each of twelve width² in a layer."""
        width = max(64, 8 * round(math.sqrt(self.part / (4 * 3 * 12 * LAYERS[MIDDLE])) / 8))
        return spec_of(
            Method("dense", 16, "fp32"),
            steps=1_000_000,
            stages=list(LAYERS),
            model={"layers": sum(LAYERS), "width": width, "heads": 4, "context": MESSAGE // (4 * width)},
            batch={"size": MICROBATCHES, "microbatches": MICROBATCHES},
            data={"source": "python", "max_bytes": 1_000_000},
            snapshots={"interval": SNAPSHOT_STEPS, "keep": 4},  # none goes that is being fetched
            wire={"forward": "fp32", "backward": "fp32", "link": parse_link(self.link).model_dump()},
        )


def measure(setting: Setting, say: Say) -> dict[str, Any]:
    steps, phases = _run(setting)
    found = {
        "setting": {**asdict(setting), "part_bytes": largest_part(setting.spec(), LAYERS)},
        **compared(setting.link, steps, phases),
    }
    say(in_words(found))
    return found


def compared(link: str, steps: Sequence[Row], phases: Sequence[Row]) -> dict[str, Any]:
    """The median step of each kind of phase; against that of phases without a transfer, and against that of phases with
    one on a line of its own."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for phase in phases:
        kinds.setdefault((phase["what"], phase["how"]), []).append(phase)
    alone = _median(steps, kinds.get(("none", "yields"), []))
    rows = []
    for (what, how), spans in kinds.items():
        if what == "none":
            continue
        seconds = sum(phase["ended"] - phase["began"] for phase in spans)
        row = {"what": what, "how": how, **_median(steps, spans), "seconds": seconds}
        row |= {"bytes": (moved := sum(phase["bytes"] for phase in spans)), "bytes_per_s": moved / seconds}
        row["slowed"] = _slowed(row, alone)
        if how != "own_line":
            row["slowed_against_own_line"] = _slowed(row, _median(steps, kinds.get((what, "own_line"), [])))
        rows.append(row)
    # Of either way of the middle stage's line, which has two messages of each microbatch:
    busy = 8 * 2 * MICROBATCHES * wire_bytes(MESSAGE) / parse_link(link).bits_per_second
    mine = kinds.get(("fetch", "yields"), [])
    return {
        "alone": alone,
        "line_used_by_steps": busy / alone["step_s"] if alone["steps"] else None,
        "fetched_s": sum(p["ended"] - p["began"] for p in mine) if any(p["whole"] for p in mine) else None,
        "rows": rows,
    }


def _median(steps: Sequence[Row], phases: Sequence[Row]) -> Row:
    """Of the steps that were wholly within one of the phases."""
    within = [s for s in steps if any(p["began"] <= s["at"] - s["seconds"] and s["at"] <= p["ended"] for p in phases)]
    return {"steps": len(within), "step_s": statistics.median(s["seconds"] for s in within) if within else None}


def _slowed(row: Row, other: Row) -> float | None:
    return row["step_s"] / other["step_s"] - 1 if row["steps"] and other["steps"] else None


def _run(setting: Setting) -> tuple[list[Row], list[Row]]:
    """The steps, and what was on its way when, until the part is fetched and every kind of phase has been."""
    module, ends = "protomodels_cli.bench.transfer_peer", time.monotonic() + 60 * setting.minutes
    with tempfile.TemporaryDirectory() as name:
        with local_run(setting.spec(), Path(name) / "run", module=module) as running:
            while True:
                phases = [row for path in running.folder.glob(f"peers/*/*/{PHASES_FILE}") for row in _rows(path)]
                is_fetched = any(row["whole"] for row in phases if row["how"] == "yields")
                if (is_fetched and len(phases) >= len(PHASES)) or time.monotonic() > ends:
                    break
                for who, process in {"coordinator": running.coordinator, **running.peers}.items():
                    if process.poll() is not None:
                        raise running.failure(who)
                time.sleep(LOOK)
        rows = _rows(running.folder / "metrics.jsonl")
    return [row for row in rows if row["event"] == "step"], phases


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_words(found: dict[str, Any]) -> str:
    setting, alone = found["setting"], found["alone"]
    lines = [
        f"parts of {size(setting['part_bytes'])} over {setting['link']}; {_of(alone)} beside nothing"
        + ("" if found["fetched_s"] is None else f"; fetched within {duration(found['fetched_s'])}")
    ]
    for row in found["rows"]:
        if row["slowed"] is not None:
            against = row.get("slowed_against_own_line")
            lines.append(
                f"  {row['what']} {row['how'].replace('_', ' ')}: {_of(row)}, {row['slowed']:+.1%}"
                + ("" if against is None else f" ({against:+.1%} against a line of its own)")
                + f", at {rate(8 * row['bytes_per_s'], 'bit/s')}"
            )
    return "\n".join(lines)


def _of(row: Row) -> str:
    return f"{row['steps']} steps of {duration(row['step_s'])}" if row["steps"] else "no steps"
