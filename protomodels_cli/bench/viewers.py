"""What viewers of the page cost the steps of a run whose pace is that of its links.

One run of real processes over an emulated line. In turns, as many viewers watch the page, the same events come to as
many from a process that has nothing to do with the run, or nobody watches. Steps wholly within phases of one kind are
compared with those of another: against the second kind, what is left is what serving them costs the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protomodels_cli.bench.phases import Row, link_bound, median_step, wait_for_steps
from protomodels_cli.coordinator.watching import PAGE
from protomodels_cli.launch.local import LocalRun, local_run
from protomodels_cli.quantities import duration

BOUND = 0.05  # that a step may be slower by
SETTLE = 3.0  # seconds at the beginning of a phase that are not looked at
KINDS = ("nobody", "elsewhere", "page")


@dataclass(frozen=True)
class Setting:
    viewers: int
    link: str
    seconds: float  # of a phase
    turns: int


def measure(setting: Setting, say: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        with local_run(link_bound("viewers", setting.link), Path(name) / "run") as running:
            phases = _phases(setting, running)
        rows = [json.loads(line) for line in (running.folder / "metrics.jsonl").read_text().splitlines()]
    found = {"setting": asdict(setting), **compared([row for row in rows if row["event"] == "step"], phases)}
    say(in_words(found))
    return found


def compared(steps: Sequence[Row], phases: Sequence[Row]) -> dict[str, Any]:
    """The median step of each kind of phase; `slowed`: the page's against that of viewers elsewhere."""
    of = {kind: median_step(steps, [p for p in phases if p["kind"] == kind]) for kind in KINDS}
    ratio = of["page"]["step_s"] / of["elsewhere"]["step_s"] - 1 if all(row["steps"] for row in of.values()) else None
    return {**of, "slowed": ratio, "bound": BOUND, "within": ratio is not None and ratio < BOUND}


def _phases(setting: Setting, running: LocalRun) -> list[Row]:
    wait_for_steps(running)
    page = (running.folder / PAGE).read_text().partition("?")[0]
    found = []
    with _process("relay", page) as (_, port):
        urls = {"elsewhere": f"http://127.0.0.1:{port}/", "page": page}
        for turn in range(setting.turns):
            for kind in KINDS if turn % 2 == 0 else reversed(KINDS):  # no kind is always after another
                with contextlib.ExitStack() as closing:
                    if kind in urls:
                        closing.enter_context(_process("watch", urls[kind], str(setting.viewers)))
                    time.sleep(SETTLE)
                    began = time.time()
                    time.sleep(setting.seconds)
                    found.append({"kind": kind, "began": began, "ended": time.time()})
                if running.coordinator.poll() is not None:
                    raise running.failure()
    return found


@contextlib.contextmanager
def _process(*words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """With the number that it says once it is ready."""
    command = [sys.executable, "-m", "protomodels_cli.bench.viewers_load", *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def in_words(found: dict[str, Any]) -> str:
    setting, slowed = found["setting"], found["slowed"]
    rows = [f"{kind}: {r['steps']} steps of {duration(r['step_s'] or 0)}" for kind in KINDS if (r := found[kind])]
    verdict = "too few steps to compare" if slowed is None else f"{slowed:+.1%} (bound {found['bound']:.0%})"
    what = f"{setting['viewers']} viewers, {setting['link']}"
    return f"{what}: {'; '.join(rows)}\nthe page's viewers against the same load elsewhere: {verdict}"
