"""`pmtrain runs`: what is on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from protomodels_cli.cli.output import FormatOption, end_with_the_reader, print_json

if TYPE_CHECKING:
    from protomodels_cli.cli.on_disk import Found

HEAD = ("what", "name", "state", "step", "size", "last activity", "where")


def runs(output: FormatOption = "text") -> None:
    """List what is on this machine: runs that were led or joined here, and exported models.

    Looks into this folder, into runs/ below it, and where peers keep their files."""
    from protomodels_cli.cli.on_disk import everything

    end_with_the_reader()
    found = everything()
    if output == "json":
        print_json({"runs": [asdict(one) for one in found]})
    elif found:
        print("\n".join(table(found, time.time())))
    else:
        print("no run, peer's folder or exported model here; `pmtrain demo` makes one in about two minutes")


def table(found: Sequence[Found], now: float) -> list[str]:
    """Without colours or borders: for `grep` and `awk` as well."""
    rows = [HEAD, *(_row(one, now) for one in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD) - 1)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def _row(one: Found, now: float) -> tuple[str, ...]:
    from protomodels_cli.quantities import duration, size

    step = "–" if one.step is None else str(one.step) if one.steps is None else f"{one.step}/{one.steps}"
    ago = f"{duration(max(0.0, round(now - one.last_activity)))} ago"
    return one.kind, one.name, one.state.replace("_", " "), step, size(one.bytes), ago, str(one.path)
