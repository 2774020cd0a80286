"""The frontier experiment's picture: loss against bytes, and time to a loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protomodels_cli.lab.frontier_report import BASELINE, contenders, grouped
from protomodels_cli.lab.results import Result
from protomodels_cli.observe.pictures import figure, save_figure

COLOURS = {"dense": "#2a6f97", "reparam": "#e07a5f", "two_stream": "#6d597a", "constrained": "#81b29a"}
COLOURS |= {"relay": "#b08968", "mapl": "#d4a017"}
MARKERS = {"fixed": "o", "segment": "s", "shared": "D"}
LINK_COLOURS = ("#14213d", "#2a6f97", "#81b29a")
SIZE = 6.5  # of labels, in points
CEILING = 1.25  # of the lowest loss: what lies above is drawn at the edge
ABOVE = 0.02  # dense, for the time to a loss


def plot(result: Result, path: Path) -> None:
    fig, (left, right) = figure(1, 2, "What a byte saved costs, at equal tokens")
    fig.set_size_inches(15, 6.5)
    _draw_times(right, result["time_to_loss"])
    _draw_front(left, result)  # last: its labels are put where nothing else is
    save_figure(fig, path)


def _draw_front(ax: Any, result: Result) -> None:
    groups = grouped(result["rows"])
    _log_axis(ax)
    lowest = min((g["paired_loss"] for g in groups if g["paired_loss"] is not None), default=1.0)
    top = lowest * CEILING
    front = [g for g in groups if g["pareto"] and g["paired_loss"] <= top]
    ax.step(
        [g["bytes_per_token"] for g in front],
        [g["paired_loss"] for g in front],
        where="post",
        color="#999999",
        zorder=1,
    )
    points = []
    for g in groups:
        height = g["paired_loss"] if g["paired_loss"] is not None and g["paired_loss"] < top else top
        colour, marker = COLOURS[g["form"]], MARKERS[g["anchor"]] if height < top else "^"
        face = colour if g["pareto"] else "white"
        ax.scatter(g["bytes_per_token"], height, marker=marker, s=34, facecolor=face, edgecolor=colour, zorder=3)
        points.append((g["bytes_per_token"], height, _short(g), g["pareto"]))
    for name, style in ((BASELINE, ":"), ("dense segment fp32", "--")):
        for g in (g for g in groups if g["name"] == name and g["paired_loss"] is not None):
            ax.axhline(g["paired_loss"], color="black", linestyle=style, linewidth=1)
    ax.set_xlabel("bytes a token over one boundary, both legs, token id and what a shared anchor needs")
    ax.set_ylabel("held-out loss: dense's mean, with the gap to dense of the same seeds")
    ax.set_title("filled: on the front; anchor: ● fixed ■ segment ◆ shared; ▲: above the picture", fontsize=9)
    for form in dict.fromkeys(g["form"] for g in groups):
        ax.scatter([], [], color=COLOURS[form], label=form)
    ax.legend(fontsize=8, loc="upper right")
    ax.margins(x=0.12, y=0.1)
    _label(ax, points)


def _log_axis(ax: Any) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def _short(group: Result) -> str:
    """A label: form and anchor are told by colour and marker."""
    return str(group["name"]).removeprefix(group["form"]).strip().removeprefix(group["anchor"]).strip()


def _label(ax: Any, points: Sequence[tuple[float, float, str, bool]]) -> None:
    """Write each label at the first of a few places near its point where it covers nothing; otherwise leave it out."""
    ax.figure.canvas.draw()  # settles where everything is
    pixel = 72 / ax.figure.dpi  # in points, which a saved picture keeps
    at = [tuple(ax.transData.transform((x, y)) * pixel) for x, y, _, _ in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at]
    left, bottom, right, top = ax.bbox.extents * pixel
    for i in sorted(range(len(points)), key=lambda i: not points[i][3]):  # those on the front first
        (x, y, text, front), (here_x, here_y) = points[i], at[i]
        wide, high = SIZE * 0.62 * len(text), SIZE * 1.1
        for dx, dy in _PLACES:
            middle = here_x + dx * (wide / 2 + 6), here_y + dy * (high / 2 + 5)
            box = (middle[0] - wide / 2, middle[1] - high / 2, middle[0] + wide / 2, middle[1] + high / 2)
            inside = left < box[0] and box[2] < right and bottom < box[1] and box[3] < top
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                place = {"xytext": (middle[0] - here_x, middle[1] - here_y), "textcoords": "offset points"}
                style = {"fontsize": SIZE, "weight": "bold" if front else "normal", "ha": "center", "va": "center"}
                paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4}  # over grid and lines
                ax.annotate(text, (x, y), **place, **style, bbox=paper, zorder=2)
                break


_PLACES = ((1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1))


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _draw_times(ax: Any, found: Result) -> None:
    links, rows = found["links"], [row for row in found["rows"] if row["above_dense"] == ABOVE]
    if not rows:
        return
    names = contenders(rows, links)
    for place, (link, colour) in enumerate(zip(links, LINK_COLOURS, strict=True)):
        mine = {row["name"]: row["seconds"] for row in rows if row["link"] == link}
        heights = [i + (place - 1) * 0.25 for i in range(len(names))]
        ax.barh(heights, [mine[name] or 0 for name in names], 0.24, color=colour, label=link)
    for i, name in enumerate(names):
        if all(row["seconds"] is None for row in rows if row["name"] == name):
            ax.annotate(" not reached", (0, i), xycoords=ax.get_yaxis_transform(), va="center", fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    _log_axis(ax)
    ax.set_xlabel("seconds")
    line = f"by uplink, {found['stages']} stages {found['latency']} apart"
    ax.set_title(f"time to held-out loss {rows[0]['target']:.3f} (dense's last {ABOVE:+.0%}), {line}", fontsize=9)
    ax.legend(fontsize=8, loc="lower right")
