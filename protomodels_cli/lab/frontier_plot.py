"""The frontier experiment's picture: loss against bytes, and time to a loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protomodels_cli.lab.frontier_report import contenders, group_key, grouped, shown_target
from protomodels_cli.lab.results import Result
from protomodels_cli.observe.pictures import figure, save_figure

COLOURS = {"dense": "#2a6f97", "reparam": "#e07a5f", "constrained": "#81b29a"}
MARKERS = {"muon": "o", "adamw": "s", "row_adamw": "s"}
LINK_COLOURS = ("#14213d", "#2a6f97", "#81b29a", "#e9c46a")
SIZE = 6.5  # of labels, in points
CEILING = 1.35  # of tuned dense: what lies above is drawn at the edge


def plot(result: Result, path: Path) -> None:
    fig, (left, right) = figure(1, 2, "What a byte saved costs, at equal tokens")
    fig.set_size_inches(15, 6.5)
    _draw_times(right, result)
    _draw_front(left, result)  # last: its labels are put where nothing else is
    save_figure(fig, path)


def _draw_front(ax: Any, result: Result) -> None:
    groups, top = grouped(result["rows"]), result["baseline"]["loss"] * CEILING
    _log_axis(ax)
    front = [g for g in groups if g["pareto"] and g["best"] <= top]
    ax.step([g["bytes_per_token"] for g in front], [g["best"] for g in front], where="post", color="#999999", zorder=1)
    for g in groups:
        height = g["best"] if g["best"] is not None and g["best"] < top else top
        marker = MARKERS[g["optimizer"]] if height < top else "^"
        face = COLOURS[g["form"]] if g["pareto"] else "white"
        ax.scatter(
            g["bytes_per_token"], height, marker=marker, s=34, facecolor=face, edgecolor=COLOURS[g["form"]], zorder=3
        )
    ax.axhline(result["baseline"]["loss"], color="black", linestyle=":", linewidth=1)
    ax.set_xlabel("bytes a token over one boundary, both legs and token id")
    ax.set_ylabel(f"held-out loss, mean of {result['scale']['seeds']} seed(s), better of codec on and off")
    ax.set_title("filled: on the Pareto front; circle: Muon, square: AdamW; ▲: above the picture", fontsize=9)
    for form, colour in COLOURS.items():
        ax.scatter([], [], color=colour, label=form)
    ax.legend(fontsize=8, loc="upper right")
    ax.margins(x=0.12, y=0.1)
    _label(ax, [(g["bytes_per_token"], min(g["best"] or top, top), _short(g), g["pareto"]) for g in groups])


def _log_axis(ax: Any) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def _short(group: Result) -> str:
    """A label: form and optimizer are told by colour and marker."""
    return str(group["name"]).removeprefix(group["form"]).strip()


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


def _draw_times(ax: Any, result: Result) -> None:
    links, above = result["time_to_loss"]["links"], shown_target(result)
    rows = [row for row in result["time_to_loss"]["rows"] if row["above_dense"] == above]
    keys = contenders(rows, links)
    for place, (link, colour) in enumerate(zip(links, LINK_COLOURS, strict=True)):
        mine = {group_key(row): row["seconds"] for row in rows if row["link"] == link}
        heights = [i + (place - 1.5) * 0.2 for i in range(len(keys))]
        ax.barh(heights, [mine[key] or 0 for key in keys], 0.19, color=colour, label=link)
    for i, key in enumerate(keys):
        if all(row["seconds"] is None for row in rows if group_key(row) == key):
            ax.annotate(" not reached", (0, i), xycoords=ax.get_yaxis_transform(), va="center", fontsize=8)
    names = {group_key(row): f"{row['name']}\n{row['optimizer']}" for row in rows}
    ax.set_yticks(range(len(keys)), [names[key] for key in keys], fontsize=8)
    ax.invert_yaxis()
    _log_axis(ax)
    ax.set_xlabel("seconds")
    ax.set_title(f"time to held-out loss {rows[0]['target']:.3f} (tuned dense {above:+.0%}), by uplink", fontsize=9)
    ax.legend(fontsize=8, loc="lower right")
