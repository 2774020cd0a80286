"""`pmtrain lab replicas`: what may the sum of replicas' gradients cost? Loss against bits, at equal tokens and batch.

R replicas of the whole pipeline share each step's microbatches. Every row is held against one pipeline that has the
whole batch, seed by seed: the same weights at the start, the same tokens in the same order, the same rates.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from protomodels_cli.errors import OptionError
from protomodels_cli.lab.bench import Bench
from protomodels_cli.lab.frontier import gap
from protomodels_cli.lab.frontier_report import number, percent
from protomodels_cli.lab.lanes import OUTER_MOMENTUM, OUTER_RATE, LocalLanes, SummedLanes
from protomodels_cli.lab.recipes import Recipe, carried
from protomodels_cli.lab.replica_sums import parse_sum
from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.runs import Run
from protomodels_cli.lab.scales import Scale, scaled, text_of
from protomodels_cli.lab.trained import Trained
from protomodels_cli.observe.pictures import figure, save_figure
from protomodels_cli.quantities import count, duration, plural

SUMMING = 1  # to be raised when a sum or the lanes change: results kept from before are then not taken for theirs
STEPS = {"gpu": 400}  # of scales whose own are more than a table of sums needs
LEAST_MICROBATCHES = 4  # so that 1, 2 and 4 lanes compute the same messages
BASELINE = "R=1 exact"
LOCAL = "local:"
LOCAL_SUM = "eden:4"


@dataclass(frozen=True)
class Row:
    lanes: int
    way: str  # how the sum is formed
    matters: bool = False  # has all seeds; the others one

    @property
    def name(self) -> str:
        return f"R={self.lanes} {self.way}"


@dataclass(frozen=True)
class ReplicaRun(Run):
    lanes: int
    way: str

    def reference(self) -> Trained:
        own = (self.spec(), self.scale, self.recipe, self.device, self.lanes)
        if self.way.startswith(LOCAL):
            interval, way = local(self.way)
            return LocalLanes(*own, way, interval)
        return SummedLanes(*own, self.way)

    def key(self) -> str:
        parts = [super().key(), "replicas", self.lanes, self.way, SUMMING]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        return f"d={self.scale.width} {self.recipe.name} R={self.lanes} {self.way} seed {self.seed}"


def local(way: str) -> tuple[int, str]:
    """Of `local:INTERVAL` or `local:INTERVAL:SUM`: the steps between two sums, and how changes are summed."""
    interval, _, inner = way.removeprefix(LOCAL).partition(":")
    if not interval.isdecimal() or int(interval) < 1:
        raise OptionError(
            f"--sum {way}: the steps between two sums must be a whole number, at least 1",
            "write for example local:8",
            "sum",
        )
    return int(interval), inner or LOCAL_SUM


def plan(scale: Scale) -> list[Row]:
    """All rows, those that say most first."""
    rank = max(1, scale.width // 8)
    found = [
        Row(1, "exact", True),
        Row(4, "eden:4", True),
        Row(4, "eden:3", True),
        Row(4, "eden:5", True),
        Row(4, "eden:6"),
        Row(4, "eden:4+ef", True),
        Row(4, f"dion:{rank}", True),
        Row(4, "exact+late", True),
        Row(4, "local:8"),
        Row(4, "eden:3+ef", True),
        Row(4, f"dion:{rank}:eden:4", True),
        Row(4, "exact"),  # differs from one pipeline by rounding alone: how far apart equal runs end
        Row(4, "eden:2+ef"),
        Row(4, f"dion:{max(1, rank // 2)}"),
        Row(2, "local:8"),
        Row(8, "eden:4"),
        Row(2, "eden:4"),
        Row(8, "eden:3"),
        Row(2, "eden:3"),
        Row(4, "eden:4+late"),
        Row(4, "eden:3|eden:4"),
        Row(4, f"dion:{2 * rank}:eden:4"),
        Row(4, f"dion:{max(1, rank // 4)}"),
        Row(8, f"dion:{rank}:eden:4"),
        Row(4, "eden:2"),
        Row(4, "eden:5+ef"),
        Row(4, "eden:6+ef"),
        Row(8, "exact"),
        Row(4, "local:1"),
    ]
    named: dict[str, Row] = {}  # ranks of a small model may be equal
    for row in found:
        if scale.batch % row.lanes == 0:
            named.setdefault(row.name, row)
    return list(named.values())


def run(
    scale: str | Scale = "cpu",
    seeds: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    only: Sequence[str] = (),
    sums: Sequence[str] = (),
    lanes: Sequence[int] = (),
    workers: int | None = None,
    text: str | None = None,
    budget: float | None = None,
    kept: Path | None = None,
    device: str = "cpu",
) -> Result:
    size = scale if isinstance(scale, Scale) else _scaled(scale, seeds, steps, batch, workers, text)
    rows = _chosen(size, only, sums, lanes)
    with Bench(size.workers, kept, budget) as bench:
        found = text_of(size)
        runs = _runs(size, rows, device)
        say(f"{plural(len(runs), 'run')} …")
        measured = [
            {"name": row.name, "way": row.way, "seed": one.seed, "recipe": one.recipe.name, **result}
            for (row, one), result in zip(runs, bench.results([one for _, one in runs]), strict=True)
            if result is not None
        ]
    exact = {row["seed"]: row["loss"] for row in measured if row["name"] == BASELINE}
    for one in measured:
        one["gap"] = gap(one["loss"], exact.get(one["seed"]))
    return {
        "rows": measured,
        "missing": bench.missing,
        "scale": asdict(size),
        "tokens": size.tokens,
        "train_tokens": len(found.corpus.train),
        "text_sha256": found.sha256,
        "outer": {"rate": OUTER_RATE, "momentum": OUTER_MOMENTUM},
        "device": device,
        "only": list(only),
    }


def listing(
    scale: str,
    seeds: int | None,
    steps: int | None,
    batch: int | None,
    only: Sequence[str],
    sums: Sequence[str],
    lanes: Sequence[int],
    workers: int | None,
    kept: Path | None,
) -> str:
    """The runs that there would be, with their tokens, and their time as far as runs that were kept tell it."""
    size = _scaled(scale, seeds, steps, batch, workers, None)
    bench, lines, seconds = Bench(1, kept), [], 0.0
    runs = _runs(size, _chosen(size, only, sums, lanes), "cpu")
    for row, one in runs:
        expected = bench.expected(one)
        seconds += expected or 0.0
        told = "" if expected is None else f"  {duration(expected)}"
        lines.append(f"  {row.name:24} seed {one.seed} {count(one.tokens):>8} tokens, {one.flops:.2e} FLOP{told}")
    last = f"{plural(len(runs), 'run')}, {count(len(runs) * size.tokens)} tokens"
    if seconds:
        last += f", about {duration(seconds / size.workers)} with {size.workers} side by side"
    return "\n".join([*lines, last])


def _scaled(
    scale: str, seeds: int | None, steps: int | None, batch: int | None, workers: int | None, text: str | None
) -> Scale:
    return scaled(scale, text, seeds=seeds, steps=steps or STEPS.get(scale), batch=batch, workers=workers)


def _chosen(scale: Scale, only: Sequence[str], sums: Sequence[str], lanes: Sequence[int]) -> list[Row]:
    """The rows that are asked for, and always the one pipeline that all are held against."""
    for way in sums:
        parse_sum(local(way)[1] if way.startswith(LOCAL) else way, [], 1, 0)
    for r in lanes:
        if scale.batch % r:
            what = f"--lanes {r}: a step's {scale.batch} sequences cannot be shared equally"
            raise OptionError(what, f"use a divisor of {scale.batch}, or another --batch", "lanes")
    baseline, *others = plan(scale)
    if sums:
        others = [Row(r, way, True) for way in sums for r in lanes or [4]]
    elif lanes:
        others = [row for row in others if row.lanes in lanes]
    found = [row for row in others if not only or any(words in row.name for words in only)]
    if only and not found and not any(words in baseline.name for words in only):
        raise OptionError(f"--only {','.join(only)}: matches no row", "see the names of all rows with --list", "only")
    return [baseline, *found]


def _runs(scale: Scale, rows: Sequence[Row], device: str) -> list[tuple[Row, ReplicaRun]]:
    """The first seed of all rows, then the other seeds of those that matter."""
    recipe = carried(Recipe("two_stream", "segment", scale.ks[0], "int8"), scale)
    return [
        (row, ReplicaRun(shared(scale, row.lanes), recipe, seed, device, row.lanes, row.way))
        for seed in range(scale.seeds)
        for row in rows
        if seed == 0 or row.matters
    ]


def shared(scale: Scale, lanes: int) -> Scale:
    """With as many microbatches as lanes can share."""
    least = LEAST_MICROBATCHES if scale.batch % LEAST_MICROBATCHES == 0 else 1
    return replace(scale, microbatches=max(least, lanes))


# What the rows say


def grouped(rows: Sequence[Result]) -> list[Result]:
    """Rows that differ by seed alone as one, by the bits that a replica sends, with the Pareto mark."""
    seeds: dict[str, list[Result]] = {}
    for row in rows:
        seeds.setdefault(row["name"], []).append(row)
    groups = []
    for name, members in seeds.items():
        group: Result = {"name": name, "lanes": members[0]["lanes"], "way": members[0]["way"], "members": members}
        for field in ("loss", "gap", "sum_bits"):
            there = [m[field] for m in members if m[field] is not None]
            group[field] = fmean(there) if len(there) == len(members) else None
            group[f"{field}_spread"] = max(there) - min(there) if there else None
        groups.append(group)
    groups.sort(key=lambda g: (g["lanes"] == 1, g["sum_bits"]))
    lowest = float("inf")
    for group in groups:
        height = float("inf") if group["gap"] is None else group["gap"]
        group["pareto"] = group["lanes"] > 1 and height < lowest
        lowest = min(lowest, height) if group["lanes"] > 1 else lowest
    return groups


def report(result: Result) -> str:
    s = result["scale"]
    lines = [
        f"{s['layers']} layers in {s['segments']} segments, d={s['width']}, V={s['vocabulary']}; {s['steps']} steps × "
        f"{s['batch'] * s['context']} tokens in all, each token once of {count(result['train_tokens'])}",
        f"  {'':22} {'bits':>7} {'matrices':>9} {'tables':>7} {'rows':>6} {'error':>8} {'loss':>8} {'seeds':>5} "
        f"{'to one pipeline':>17} {'s/step':>7}",
    ]
    for g in grouped(result["rows"]):
        first = g["members"][0]
        by, facts = first["sum_bits_by"], first["sum"]
        lines.append(
            f"{'*' if g['pareto'] else ' '} {g['name']:22} {g['sum_bits']:7.2f} {by['matrices']:9.2f} "
            f"{by['tables']:7.2f} {number(facts.get('touched'), 6, 2)} {number(facts.get('error'), 8, 4)} "
            f"{number(g['loss'], 8, 4)} {len(g['members']):5} {percent(g, 'gap'):>17} "
            f"{first['compute_seconds'] * first['stages']:7.3f}"
        )
    lines += textwrap.wrap(
        "bits: what a replica sends for each parameter of its model in a step, contributions and sums, with scales and "
        "padding; then the part for matrices and gains, and that for tables, of which touched rows alone travel (rows: "
        "their share). Error: squared, of the sum, over the exact sum. R=1 sends nothing. Gaps: mean over paired seeds "
        "± half of lowest to highest. * nothing with fewer bits is nearer. local:H: lanes step by themselves, and sum "
        f"their changes every H steps in {LOCAL_SUM}; Nesterov {OUTER_MOMENTUM} with rate {OUTER_RATE}.",
        118,
    )
    return "\n".join(lines + [f"missing: {name}: {why}" for name, why in result["missing"].items()])


CEILING = 0.06  # of the gap: what lies above is drawn at the edge
MARKERS = {2: "v", 4: "o", 8: "s"}


def plot(result: Result, path: Path) -> None:
    fig, (ax,) = figure(1, 1, "What the sum of replicas' gradients may cost, at equal tokens and batch")
    fig.set_size_inches(9, 6)
    groups = [g for g in grouped(result["rows"]) if g["lanes"] > 1 and g["sum_bits"]]
    for g in groups:
        height = CEILING if g["gap"] is None else min(g["gap"], CEILING)
        marker = MARKERS.get(g["lanes"], "D") if height < CEILING else "^"
        ax.scatter(g["sum_bits"], 100 * height, marker=marker, color=_colour(g["way"]), s=36, zorder=3)
        label: dict[str, Any] = {"xytext": (5, 3), "textcoords": "offset points", "fontsize": 7}
        ax.annotate(g["name"], (g["sum_bits"], 100 * height), **label)
    front = [g for g in groups if g["pareto"] and g["gap"] < CEILING]
    ax.step([g["sum_bits"] for g in front], [100 * g["gap"] for g in front], where="post", color="#999999", zorder=1)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="bits that a replica sends for a parameter in a step", ylabel="loss above one pipeline's, %")
    ax.set_title("▼ 2, ● 4, ■ 8 replicas; ▲: above the picture; dotted: +0.5 %", fontsize=9)
    save_figure(fig, path)


def _colour(way: str) -> str:
    kinds = {"dion": "#e07a5f", LOCAL: "#81b29a", "exact": "#14213d"}
    late = "#b08968" if way.endswith("+late") else "#6d597a" if way.endswith("+ef") else "#2a6f97"
    return next((colour for kind, colour in kinds.items() if way.startswith(kind) and "+late" not in way), late)
