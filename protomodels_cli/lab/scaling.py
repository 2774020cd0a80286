"""`pmtrain lab scaling`: does the gap to dense grow or shrink with the model? Over widths, and over layers a segment.

The rates are those tuned at one width (`lab frontier`, or the starting recipe), carried to the others by one rule.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from protomodels_cli.errors import OptionError
from protomodels_cli.lab.bench import Bench
from protomodels_cli.lab.frontier import as_row, compare
from protomodels_cli.lab.frontier_report import grouped, number, percent
from protomodels_cli.lab.recipes import CARRIED, EXACT, Recipe, carried, dense, with_rates
from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.runs import Run
from protomodels_cli.lab.scales import SCALES, Scale, scaled, text_of
from protomodels_cli.lab.tuning import tuned_rates
from protomodels_cli.lab.wires import FIRST, RATIOS, k_for
from protomodels_cli.observe.pictures import figure, save_figure
from protomodels_cli.quantities import count, plural

WIDTHS = {"cpu": (32, 64, 128), "gpu": (256, 512, 1024)}


@dataclass(frozen=True)
class Point:
    """A size that a gap is measured at."""

    scale: Scale
    layers_per_segment: int

    @property
    def name(self) -> str:
        return f"d={self.scale.width}, {self.layers_per_segment} a segment"

    def recipes(self) -> list[Recipe]:
        segments = self.scale.layers // self.layers_per_segment
        own = None if segments == self.scale.segments else segments
        wires = dict.fromkeys((k_for(self.scale.width, ratio, FIRST[ratio]), FIRST[ratio]) for ratio in RATIOS)
        anchored = [dense(EXACT, "segment"), *(Recipe("two_stream", "segment", k, codec) for k, codec in wires)]
        return [dense(EXACT, width=self.scale.width), *(replace(recipe, segments=own) for recipe in anchored)]


def points(scale: Scale) -> list[Point]:
    """Widths at two layers a segment, then other segments at the middle width."""
    widths = WIDTHS[scale.name]
    middle = widths[1]
    return [
        *(Point(at_width(scale, width), 2) for width in widths),
        *(Point(at_width(scale, middle), layers) for layers in (1, 4) if scale.layers >= 2 * layers),
    ]


def at_width(scale: Scale, width: int) -> Scale:
    """The scale made for that width, where there is one: its runs are those of the frontier."""
    known = next((s for s in SCALES.values() if s.width == width and s.name.startswith(scale.name)), None)
    if known is not None:
        steps = known.steps * scale.steps // SCALES[scale.name].steps
        names = ("source", "files", "text", "seeds", "workers")
        return replace(known, steps=steps, **{name: getattr(scale, name) for name in names})
    heads = max(1, width // (scale.width // scale.heads))
    return replace(scale, width=width, heads=heads, kv_heads=heads)


def run(
    scale: str = "cpu",
    seeds: int | None = None,
    steps: int | None = None,
    only: Sequence[str] = (),
    workers: int | None = None,
    rates: Path | None = None,
    text: str | None = None,
    budget: float | None = None,
    kept: Path | None = None,
    device: str = "cpu",
) -> Result:
    size = _scaled(scale, seeds, steps, workers, text)
    chosen = _chosen(size, only)
    tuned = {} if rates is None else tuned_rates(rates)
    found = []
    with Bench(size.workers, kept, budget) as bench:
        for point in chosen:
            text_of(point.scale)
        runs = [
            (point, Run(point.scale, _with_rates(recipe, point.scale, tuned), seed, device))
            for seed in range(size.seeds)
            for point in chosen
            for recipe in point.recipes()
        ]
        say(f"{plural(len(runs), 'run')} …")
        for (point, one), result in zip(runs, bench.results([one for _, one in runs]), strict=True):
            if result is not None:
                found.append(
                    {**as_row(one, result), "point": point.name, "layers_per_segment": point.layers_per_segment}
                )
    for point in chosen:
        compare([row for row in found if row["point"] == point.name])
    return {
        "rows": found,
        "rule": CARRIED,
        "rates": "the starting recipe's" if rates is None else str(rates),
        "missing": bench.missing,
        "scales": {point.name: asdict(point.scale) for point in chosen},
        "device": device,
    }


def listing(
    scale: str, seeds: int | None, steps: int | None, only: Sequence[str], workers: int | None, kept: Path | None
) -> str:
    size = _scaled(scale, seeds, steps, workers, None)
    lines, total = [], 0
    bench = Bench(1, kept)
    for point in _chosen(size, only):
        for recipe in point.recipes():
            one = Run(point.scale, _with_rates(recipe, point.scale, {}), 0, "cpu")
            expected = bench.expected(one)
            told = "" if expected is None else f", {expected:.0f} s"
            lines.append(
                f"  {point.name:22} {recipe.name:44} {count(one.tokens):>8} tokens, {one.flops:.2e} FLOP{told}"
            )
            total += size.seeds * one.tokens
    return "\n".join([*lines, f"{plural(size.seeds * len(lines), 'run')}, {count(total)} tokens"])


def _scaled(scale: str, seeds: int | None, steps: int | None, workers: int | None, text: str | None) -> Scale:
    if scale not in WIDTHS:
        raise OptionError(f"--scale {scale}: there is no such scale", f"use {' or '.join(WIDTHS)}", "scale")
    return scaled(scale, text, seeds=seeds or 1, steps=steps, workers=workers)


def _chosen(scale: Scale, only: Sequence[str]) -> list[Point]:
    found = [point for point in points(scale) if not only or any(words in point.name for words in only)]
    if not found:
        raise OptionError(f"--only {','.join(only)}: matches no size", "see the names of all sizes with --list", "only")
    return found


def _with_rates(recipe: Recipe, scale: Scale, tuned: dict[str, Recipe]) -> Recipe:
    start = tuned.get(recipe.family)
    return carried(recipe if start is None else with_rates(recipe, start), scale)


def report(result: Result) -> str:
    lines = textwrap.wrap(f"rates: {result['rates']}, carried {result['rule']}.", 118)
    wide = max((len(row["name"]) for row in result["rows"]), default=0)
    lines.append(
        f"{'':22} {'':{wide}} {'tokens':>8} {'×fp32':>6} {'loss':>7} {'to dense':>15} {'to dense+anchors':>17}"
    )
    for name in result["scales"]:
        for g in grouped([row for row in result["rows"] if row["point"] == name]):
            lines.append(
                f"{name:22} {g['name']:{wide}} {count(g['members'][0]['tokens']):>8} {g['ratio_fp32']:6.1f} "
                f"{number(g['loss'], 7, 4)} {percent(g, 'gap_to_dense'):>15} {percent(g, 'gap_to_anchored'):>17}"
            )
    return "\n".join(lines + [f"missing: {name}: {why}" for name, why in result["missing"].items()])


def plot(result: Result, path: Path) -> None:
    fig, (left, right) = figure(1, 2, "The gap to the dense model, and how it scales (two_stream, segments' anchors)")
    rows = [row for row in result["rows"] if row["k"] is not None and row["gap_to_dense"] is not None]
    middle = sorted({row["width"] for row in rows})
    for ax, x, fixed in ((left, "width", "layers_per_segment"), (right, "layers_per_segment", "width")):
        here = [r for r in rows if r[fixed] == (2 if fixed == "layers_per_segment" else middle[len(middle) // 2])]
        for colour, ratio in enumerate(RATIOS):
            of_ratio = [
                r for r in here if (r["k"], r["codec"]) == (k_for(r["width"], ratio, FIRST[ratio]), FIRST[ratio])
            ]
            for to, style, against in (("dense", "o-", "gap_to_dense"), ("dense+anchors", "s--", "gap_to_anchored")):
                xs = sorted({r[x] for r in of_ratio if r[against] is not None})
                means = [100 * fmean(r[against] for r in of_ratio if r[x] == at) for at in xs]
                ax.plot(xs, means, f"C{colour}{style}", label=f"{ratio} × or as near as k = 2 gets, to {to}")
        ax.set(xscale="log", xlabel=x.replace("_", " "), ylabel="loss above dense, %")
        ticks = sorted({r[x] for r in here})
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
        ax.axhline(0, color="black", linewidth=0.8)
    left.legend(frameon=False, fontsize=7)
    save_figure(fig, path)
