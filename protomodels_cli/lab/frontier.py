"""`pmtrain lab frontier`: what does a byte saved cost? Held-out loss against bytes a token, at equal tokens.

Tuned is compared with tuned, seed by seed, on the same tokens in the same order: with the plain dense model, and with
the dense model that gets trained anchors too. Everything goes through the reference, which a pipeline equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from protomodels_cli.errors import OptionError
from protomodels_cli.lab import tuning
from protomodels_cli.lab.bench import Bench
from protomodels_cli.lab.frontier_plot import plot
from protomodels_cli.lab.frontier_report import BASELINE, report
from protomodels_cli.lab.mapl import Mapl
from protomodels_cli.lab.recipes import CARRIED, EXACT, Anchor, Recipe, carried, dense, is_installed, with_rates
from protomodels_cli.lab.relay import Relay
from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.runs import Run
from protomodels_cli.lab.scales import Scale, scaled, text_of
from protomodels_cli.lab.shared_anchor import Sharing
from protomodels_cli.lab.time_to_loss import lighter_seconds, step_seconds, times
from protomodels_cli.lab.tuning import Tuned
from protomodels_cli.lab.wires import BY_RATIO, LEGS, RATIOS, k_for
from protomodels_cli.quantities import count, duration, plural

__all__ = ["plot", "report", "run"]

DENSE_CODECS = ("bf16", "int8", "int4", "eden:4", "eden:2")
ANCHORS: tuple[Anchor, ...] = ("fixed", "segment")
AT_ONCE, CHEAP = Sharing(), Sharing(bits=4, every=4, late=2)
SHARINGS = (Sharing(bits=8, late=2), Sharing(bits=4, every=16, late=2))  # between and beyond them


@dataclass(frozen=True)
class Row:
    recipe: Recipe
    matters: bool = False  # has all seeds; the others one


def families(scale: Scale, rates: dict[str, Recipe]) -> dict[str, Recipe]:
    """What is tuned: rows that matter, at the larger k; from the starting recipe, or other `rates`."""
    found = [dense(EXACT, width=scale.width), dense(EXACT, "segment")]
    for form in ("reparam", "two_stream"):
        found += [Recipe(form, anchor, scale.ks[0], "int8") for anchor in ANCHORS]
    return {r.family: carried(with_rates(r, rates.get(r.family, r)), scale) for r in found}


def plan(scale: Scale) -> list[Row]:
    """All rows, without rates; what matters comes first."""
    mild, strong = scale.ks
    found = [Row(dense(EXACT), True), Row(dense(EXACT, "segment"), True)]
    found += [Row(Recipe("two_stream", "segment", k, "int8"), True) for k in (mild, strong)]
    found += [Row(Recipe("two_stream", "fixed", k, "int8")) for k in (mild, strong)]
    found += [Row(Recipe("reparam", anchor, k, "int8")) for k in (mild, strong) for anchor in ("fixed", "segment")]
    found += [Row(Recipe("two_stream", "segment", k, "int8", anchor_rank=scale.width // 8)) for k in (mild, strong)]
    found += [Row(dense(codec)) for codec in DENSE_CODECS]
    wires = {(k_for(scale.width, ratio, codec), codec): ratio for ratio in RATIOS for codec in LEGS}
    found += [Row(Recipe("two_stream", "segment", k, codec), codec in BY_RATIO[wires[k, codec]]) for k, codec in wires]
    shared = [(k, sharing) for k in (mild, strong) for sharing in (AT_ONCE, CHEAP)] + [(strong, s) for s in SHARINGS]
    found += [Row(Recipe("two_stream", "shared", k, "int8", sharing=sharing)) for k, sharing in shared]
    found += [Row(Recipe(form.name, "segment", k, "int8")) for form in (Relay, Mapl) for k in (mild, strong)]
    found += [Row(Recipe("constrained", "fixed", mild, "bf16"))]  # the paper's own
    alone = scale.layers
    if alone != scale.segments:  # a layer a segment: the most boundaries
        found += [Row(replace(dense(EXACT, "segment"), segments=alone))]
        found += [Row(Recipe("two_stream", "segment", k, "int8", segments=alone)) for k in (mild, strong)]
    return [row for row in found if is_installed(row.recipe)]


def wanted(only: Sequence[str], recipe: Recipe) -> bool:
    """Those named, and always both dense ones: everything is held against them."""
    baseline = recipe.k is None and recipe.codec == EXACT and recipe.segments is None
    return not only or baseline or any(words in recipe.name for words in only)


def run(
    scale: str | Scale = "cpu",
    seeds: int | None = None,
    steps: int | None = None,
    only: Sequence[str] = (),
    workers: int | None = None,
    trials: int | None = None,
    rates: Path | None = None,
    text: str | None = None,
    budget: float | None = None,
    kept: Path | None = None,
    device: str = "cpu",
) -> Result:
    size = scale if isinstance(scale, Scale) else _scaled(scale, seeds, steps, workers, trials, text)
    rows, starts = _chosen(size, only, {} if rates is None else tuning.tuned_rates(rates))
    with Bench(size.workers, kept, budget) as bench:
        found = text_of(size)
        if size.trials:
            say(f"tuning {plural(len(starts), 'family', 'families')} …")
        tuned = tuning.tune(starts, size.trials, tuning.trial_losses(bench, size, device))
        measured = _measured(bench, size, rows, tuned, device)
        measured += _measured(bench, size, _at_equal_bytes(measured), tuned, device)
    compare(measured)
    return {
        "rows": measured,
        "families": {name: one.as_json() for name, one in tuned.items()},
        "tuning": tuning.in_words(size)
        if size.trials
        else f"not here; rates from {rates or 'the starting recipe'}, carried {CARRIED}",
        "time_to_loss": times(measured),
        "missing": bench.missing,
        "scale": asdict(size),
        "tokens": size.tokens,
        "train_tokens": len(found.corpus.train),
        "held_out_tokens": {"tuning": len(found.tuning), "report": len(found.corpus.held_out)},
        "text_sha256": found.sha256,
        "device": device,
        "only": list(only),
    }


def listing(
    scale: str,
    seeds: int | None,
    steps: int | None,
    only: Sequence[str],
    workers: int | None,
    trials: int | None,
    kept: Path | None,
) -> str:
    """The runs that there would be, with their tokens, and their time as far as runs that were kept tell it."""
    size = _scaled(scale, seeds, steps, workers, trials, None)
    rows, starts = _chosen(size, only, {})
    bench = Bench(1, kept)
    each = [(f"tuning {name}", size.trials, Run(size, r, 0, "cpu")) for name, r in starts.items()]
    each = each * bool(size.trials)
    for row in rows:
        recipe = with_rates(row.recipe, starts[row.recipe.family])
        each.append((row.recipe.name, size.seeds if row.matters else 1, Run(size, recipe, 0, "cpu")))
    lines, total, seconds = [], 0, 0.0
    for name, times_, one in each:
        expected = bench.expected(one)
        total, seconds = total + times_ * one.tokens, seconds + times_ * (expected or 0.0)
        told = "" if expected is None else f"  {duration(expected)} each"
        lines.append(f"  {name:52} {times_:3} × {count(one.tokens):>8} tokens, {one.flops:.2e} FLOP{told}")
    runs = sum(times_ for _, times_, _ in each)
    last = f"{plural(runs, 'run')}, {count(total)} tokens"
    if seconds:
        last += f", about {duration(seconds / size.workers)} with {size.workers} side by side"
    return "\n".join([*lines, last])


def _scaled(
    scale: str, seeds: int | None, steps: int | None, workers: int | None, trials: int | None, text: str | None
) -> Scale:
    return scaled(scale, text, seeds=seeds, steps=steps, workers=workers, trials=trials)


def _chosen(scale: Scale, only: Sequence[str], rates: dict[str, Recipe]) -> tuple[list[Row], dict[str, Recipe]]:
    """The rows that are asked for, and the families that they take their rates from."""
    rows = [row for row in plan(scale) if wanted(only, row.recipe)]
    if only and not any(words in row.recipe.name for row in rows for words in only):
        raise OptionError(f"--only {','.join(only)}: matches no row", "see the names of all rows with --list", "only")
    needed = {row.recipe.family for row in rows}
    return rows, {name: start for name, start in families(scale, rates).items() if name in needed}


def _measured(bench: Bench, scale: Scale, rows: Sequence[Row], tuned: dict[str, Tuned], device: str) -> list[Result]:
    """The first seed of all rows, then the other seeds of those that matter. A family that is still being tuned has
    no rows."""
    runs = []
    for seed in range(scale.seeds):
        for row in rows:
            family = tuned[row.recipe.family]
            if family.unfinished:
                bench.missing[row.recipe.name] = "its family is not tuned yet"
            elif seed == 0 or row.matters:
                runs.append(Run(scale, with_rates(row.recipe, family.best), seed, device))
    found = []
    for run, result in zip(runs, bench.results(runs), strict=True):
        if result is not None:
            seconds: Result = {"step_seconds": step_seconds(run, result)}
            if run.recipe.name == BASELINE:
                seconds["lighter_seconds"] = lighter_seconds(run, result)
            found.append(as_row(run, result) | seconds)
    return found


def as_row(run: Run, result: Result) -> Result:
    r, nbytes = run.recipe, result["bytes_per_token"]
    return {
        "name": r.name,
        **asdict(r),
        "segments": r.segments or run.scale.segments,
        "seed": run.seed,
        "ratio_bf16": 2 * 2 * run.scale.width / nbytes,
        "ratio_fp32": 2 * 4 * run.scale.width / nbytes,
        **result,
    }


def compare(rows: Sequence[Result]) -> None:
    """Adds each row's gap to the dense rows of the same seed: the plain one, and the one with as many trained anchors.
    None where there is no such row."""
    exact = [row for row in rows if row["k"] is None and row["codec"] == EXACT]
    plain = {row["seed"]: row["loss"] for row in exact if row["anchor"] == "fixed"}
    anchored = {(row["seed"], row["segments"]): row["loss"] for row in exact if row["anchor"] == "segment"}
    for row in rows:
        row["gap_to_dense"] = gap(row["loss"], plain.get(row["seed"]))
        row["gap_to_anchored"] = gap(row["loss"], anchored.get((row["seed"], row["segments"])))


def gap(loss: float | None, dense: float | None) -> float | None:
    return None if loss is None or dense is None else loss / dense - 1


def _at_equal_bytes(rows: Sequence[Result]) -> list[Row]:
    """For each shared anchor whose sums are affordable: the same bytes spent on a larger k, each segment with an anchor
    of its own."""
    found = []
    for row in rows:
        if row["sharing"] is not None and row["sharing"]["bits"] is not None:
            k = row["k"] + int(row["bytes_of_sums"] / 2)
            if k < row["width"]:
                found.append(Row(Recipe(row["form"], "segment", k - k % 8 if k > 16 else k, row["codec"])))
    there = {row["name"] for row in rows}
    return [row for row in dict.fromkeys(found) if row.recipe.name not in there]
