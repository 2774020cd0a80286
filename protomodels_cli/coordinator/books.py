"""What a coordinator writes down as it goes: journal, metrics and events. Opened together, closed together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

from protomodels_cli.coordinator import notices
from protomodels_cli.coordinator.file_names import EVENTS, JOURNAL, METRICS
from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.journal import Journal
from protomodels_cli.coordinator.rebuild import rebuild
from protomodels_cli.coordinator.run_dir import RunDir
from protomodels_cli.coordinator.state import KEPT_SECONDS
from protomodels_cli.coordinator.trust import check_beside
from protomodels_cli.observe.metrics import JsonLines, rows_from_last
from protomodels_cli.observe.notices import Teller

LOOKED_AT = 5000  # events from the end, among which peers' names are looked for


def open_books(
    run_dir: RunDir, beginning: History, teller: Teller[notices.Notice], closing: contextlib.ExitStack
) -> tuple[Journal, JsonLines]:
    """The journal, rebuilt where that was asked for, and the metrics; from now on events go to their file too."""
    path, identity, found = run_dir.path, run_dir.identity, list[notices.Notice](run_dir.found)
    if run_dir.rebuild:
        rebuild(path, identity, beginning, found.append)
    journal = Journal(path / JOURNAL, identity)
    closing.callback(journal.close)
    check_beside(path, identity, journal.history)
    metrics, teller.rows = (JsonLines(path / name, run_dir.resumed) for name in (METRICS, EVENTS))
    closing.callback(_suppressing, metrics.close)
    closing.callback(_suppressing, teller.close)
    for notice in found:
        teller(notice)
    return journal, metrics


def known_seconds(metrics: Path) -> tuple[float, ...]:
    """What the last steps took, from the grant on, as far as the metrics tell. Blocks."""
    found = list[float]()
    try:
        for row, _ in zip(rows_from_last(metrics), range(LOOKED_AT), strict=False):
            if (
                row.get("event") == "step"
                and isinstance(seconds := row.get("seconds"), float)
                and 0 <= seconds < math.inf
            ):
                found.append(seconds)
            if len(found) == KEPT_SECONDS:
                break
    except OSError:
        pass
    return tuple(reversed(found))


def known_names(events: Path) -> dict[str, str]:
    """The names of peers by id, as far as the last events tell. Blocks."""
    found = dict[str, str]()
    try:
        for row, _ in zip(rows_from_last(events), range(LOOKED_AT), strict=False):
            holders = row.get("holders")
            for named in (row, *(holders if isinstance(holders, list) else ())):
                if (
                    isinstance(named, dict)
                    and isinstance(named.get("peer"), str)
                    and isinstance(named.get("name"), str)
                ):
                    found.setdefault(named["peer"], named["name"])
    except OSError:
        pass
    return {peer: name for peer, name in found.items() if name}


def _suppressing(close: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # a full disk was reported already
        close()
