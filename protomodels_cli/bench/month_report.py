"""The month in words and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protomodels_cli.bench.month_books import KINDS
from protomodels_cli.observe.pictures import figure, save_figure
from protomodels_cli.quantities import count, duration, plural, size

NAMES = {
    "useful": "useful steps",
    "waiting": "waiting",
    "no spare": "without a spare",
    "restoring": "fetching, building",
    "redoing": "redoing",
    "snapshots": "snapshots",
}
COLOURS = ("#4c9f70", "#d9a441", "#7d5ba6", "#5b7db1", "#c0504d", "#999999")
TARGET = 0.85


def in_words(found: dict[str, Any]) -> str:
    s, bound = found["setting"], found["bound"]
    lines = [
        f"a month in virtual time: {s['stages']} stages and {plural(s['spares'], 'spare')}, a step takes "
        f"{duration(s['step_s'])}, a snapshot has {size(s['snapshot_bytes'])}, its largest part is uploaded in "
        f"{duration(s['upload_s'])}",
        f"{plural(s['months'], 'month')} of {plural(s['days'], 'day')} each, seeds {s['seed']} and up:",
        "",
        f"{'':26}{'goodput':>8}" + "".join(f"{NAMES[kind]:>20}" for kind in KINDS[1:]) + f"{'rollbacks':>11}",
    ]
    for row in found["months"]:
        spent = "".join(f"{row['spent'][kind]:20.1%}" for kind in KINDS[1:])
        lines.append(f"{_name(row):26}{row['goodput']:8.1%}{spent}{row['rollbacks']:11.0f}")
    if bound["runs"]:
        lines += [
            "",
            f"{count(bound['runs'])} runs of {plural(bound['days'], 'day')} with {count(bound['faults'])} faults: what "
            f"a fault cost beyond a lease and a fetch was at most {bound['worst']:.2f} × the best choice in hindsight "
            f"(bound {bound['worst_bound']:g}), on average {bound['average']:.2f} × (bound "
            f"{bound['average_bound']:g}); with that lease and fetch "
            f"{bound['average_without_lease_and_fetch']:.2f} ×",
        ]
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    rates = "" if row["rates"] == 1 else f", {row['rates']:g} × the rates"
    return f"{row['policies']}{rates}"


def plot(found: dict[str, Any], path: Path) -> None:
    fig, [months, runs] = figure(1, 2, "A month of an 8B model on home machines, in virtual time")
    rows = found["months"][::-1]
    left = [0.0] * len(rows)
    for kind, colour in zip(KINDS, COLOURS, strict=True):
        widths = [100 * row["spent"][kind] for row in rows]
        months.barh([_name(row) for row in rows], widths, left=left, color=colour, label=NAMES[kind])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, row in enumerate(rows):
        months.text(1.5, i, f"{row['goodput']:.1%}", va="center", fontsize=9, color="black")
    months.axvline(100 * TARGET, color="black", lw=1, ls="--")
    months.set_xlim(0, 100)
    months.set_xlabel("% of the time (dashed: the target)")
    months.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False, fontsize=8)
    goodputs = [100 * goodput for goodput in found["bound"]["goodputs"]]
    runs.hist(goodputs, bins=[2 * edge for edge in range(51)], color=COLOURS[0])
    runs.set_xlim(0, 100)
    runs.set_xlabel("goodput of a day, %")
    runs.set_ylabel(f"of {len(goodputs)} runs of a day")
    fig.set_size_inches(12, 4.4)
    save_figure(fig, path)
