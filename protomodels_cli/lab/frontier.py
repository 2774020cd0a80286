"""`pmtrain lab frontier`: what does a byte saved cost? Held-out loss against bytes a token, at equal tokens.

Every codec on the dense form, and the subspace forms at several k, through the reference, which a pipeline equals bit
for bit. Only tuned is compared with tuned: learning rate and embedding scale of dense, learning rate and T_fixed scale
of each subspace form, for each optimizer, and a lower learning rate for every codec that costs more than a little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from protomodels_cli.codecs import parse_codec
from protomodels_cli.cost.traffic import remembered_by_codecs
from protomodels_cli.errors import OptionError
from protomodels_cli.lab.frontier_plot import plot
from protomodels_cli.lab.frontier_report import LINKS, MODEL, link_seconds, report, time_to_loss
from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.runs import Bench, Recipe, Run, Scale, scaled

__all__ = ["plot", "report", "run", "time_to_loss"]

LR_FACTOR, SCALE_FACTOR = 2.0, 10**0.5  # between neighbours when tuning
GAIN = 0.995  # of the loss: less of a gain is noise and does not lead on
ROUNDS, CODEC_ROUNDS = 5, 2  # of tuning at most: families, and rows
COSTLY = 1.02  # a codec's loss over that of its family from which a lower rate is tried
ABOVE_DENSE = (0.02, 0.05, 0.10)  # targets of `time to a loss`, over tuned dense
CACHE_LIMIT = 16 << 30  # bytes that AQ-SGD may take: it remembers every sample, at both ends of each boundary
TUNING = (
    "on seed 0 and the held-out loss, from a start to the best neighbour (learning rate × or ÷ 2, scale × or ÷ √10) "
    "until none is better by 0.5 %; a codec that costs more than 2 % over its family tries half the learning rate, and "
    "half of that"
)

Losses = Callable[[Sequence[Recipe]], list[float]]
Neighbours = Callable[[Recipe, float], list[Recipe]]


def families(scale: Scale) -> list[Recipe]:
    """What is tuned in full: each form with each optimizer, on a wire that rounds nothing."""
    subspaces = [("reparam", "muon", k) for k in scale.ks]
    subspaces += [
        ("reparam", "adamw", scale.k),
        ("constrained", "muon", scale.k),
        ("constrained", "row_adamw", scale.k),
    ]
    starts = [Recipe("dense", None, "fp32", "fp32", rule, scale.lr) for rule in ("muon", "adamw")]
    starts += [Recipe(form, k, "fp32", "fp32", rule, scale.lr, t_fixed_scale=0.1) for form, rule, k in subspaces]
    return [start if start.optimizer == "muon" else replace(start, lr=start.lr / LR_FACTOR) for start in starts]


def family(recipe: Recipe) -> tuple[str, str, int | None]:
    return recipe.form, recipe.optimizer, recipe.k


def dense_codecs(scale: Scale) -> list[tuple[str, str]]:
    """Forward and backward: the same both ways, then what tells the legs apart."""
    low = f"lowrank:{scale.rank}"
    both = ("fp32", "bf16", "int8", "int4", "topk:0.1", "topk:0.3", low)
    feedback = ("topk:0.1+ef", "topk:0.1+ef21", "int4+ef", "int4+ef21")
    packed = ("bf16+zstd", "int8+zstd")
    return [
        *((codec, codec) for codec in both + feedback + packed),
        *((codec, "topk:mask") for codec in ("topk:0.05", "topk:0.1", "topk:0.3")),
        ("int4+aqsgd", "int8"),
        ("int4", "bf16"),
        ("bf16", "int4"),
        ("topk:0.1", "bf16"),
        ("bf16", "topk:0.1"),
    ]


def plan(scale: Scale, tuned: Sequence[Recipe]) -> list[Recipe]:
    """All rows, each with its family's learning rate and scale."""
    best = {family(r): r for r in tuned}

    def rows(
        form: str, optimizer: str, codecs: Sequence[tuple[str, str]], k: int | None = None, **fields: Any
    ) -> list[Recipe]:
        base = best.get((form, optimizer, k))
        return [] if base is None else [replace(base, forward=f, backward=b, **fields) for f, b in codecs]

    bf16, int8, int4 = ((codec, codec) for codec in ("bf16", "int8", "int4"))
    found = rows("dense", "muon", dense_codecs(scale))
    found += rows("dense", "adamw", [("fp32", "fp32"), int4, ("topk:0.1", "topk:mask")])
    for k in scale.ks:
        found += rows("reparam", "muon", [bf16, int8, int4], k)
    found += rows("reparam", "muon", [bf16], scale.k, t_fixed_scale=1.0)  # the authors' choice
    found += rows("reparam", "adamw", [int8], scale.k)
    found += rows("constrained", "muon", [bf16], scale.k)
    found += rows("constrained", "row_adamw", [bf16], scale.k)
    return list(dict.fromkeys(found))


def wanted(only: Sequence[str], *recipes: Recipe) -> bool:
    return not only or any(words in recipe.name for recipe in recipes for words in only)


def run(
    scale: str | Scale = "cpu",
    seeds: int | None = None,
    steps: int | None = None,
    only: Sequence[str] = (),
    workers: int | None = None,
    rounds: int = ROUNDS,
    kept: Path | None = None,
    device: str = "cpu",
) -> Result:
    size = scaled(scale, steps, seeds, workers) if isinstance(scale, str) else scale
    start = families(size)
    # What is left after --only, and always dense: everything is held against it.
    start = [f for f in start if f.k is None or wanted(only, *plan(size, [f]))]
    left_out = too_large(size, device)
    rows = [r for r in plan(size, start) if wanted(only, r) and r.codec not in left_out]
    if not rows:
        raise OptionError(
            f"--only {' '.join(only)}: matches no row", "run without --only to see the names of all rows", "only"
        )
    with Bench(size.workers, 8 * len(start) + int(len(rows) * (size.seeds + 0.7)), kept) as bench:
        return measure(bench, size, start, only, rounds, left_out, device)


def too_large(scale: Scale, device: str) -> dict[str, str]:
    """Codecs that this scale has no room for, and why."""
    found = {}
    for forward, backward in dense_codecs(scale):
        recipe = replace(families(scale)[0], forward=forward, backward=backward)
        samples = scale.steps * scale.batch // scale.epochs
        total = (scale.layers - 1) * sum(remembered_by_codecs(Run(scale, recipe, 0, device).spec(), samples).host)
        if total > CACHE_LIMIT:
            found[recipe.codec] = (
                f"its memory of samples would take {total / 2**30:.0f} GiB, over {CACHE_LIMIT >> 30} GiB"
            )
    return found


def measure(
    bench: Bench,
    scale: Scale,
    start: list[Recipe],
    only: Sequence[str],
    rounds: int,
    left_out: dict[str, str],
    device: str,
) -> Result:
    def losses(recipes: Sequence[Recipe]) -> list[float]:
        """On the first seed, and the better of codec on and codec off, so that no codec is held to its worse side."""
        return [better(r) for r in bench.results([Run(scale, recipe, 0, device) for recipe in recipes])]

    say(f"tuning {len(start)} families on seed 0 …")
    tuned, swept = climb(start, losses, around, rounds)
    of_family = dict(zip(map(family, tuned), losses(tuned), strict=True))
    dense = min((r for r in tuned if r.k is None), key=lambda r: of_family[family(r)])

    def gentler(recipe: Recipe, loss: float) -> list[Recipe]:
        costly = loss > COSTLY * of_family[family(recipe)]
        return [replace(recipe, lr=recipe.lr / LR_FACTOR)] if costly else []

    planned = [r for r in plan(scale, tuned) if wanted(only, r) and r.codec not in left_out]
    say(f"{len(planned)} rows, a lower learning rate where a codec costs more than {COSTLY - 1:.0%} …")
    chosen, codec_swept = climb(planned, losses, gentler, CODEC_ROUNDS)
    baselines = [r for r in tuned if r.k is None and r not in chosen]
    rows = measured_rows(bench, scale, baselines + chosen, dense, device)
    return {
        "rows": rows,
        "dense_sweep": [sweep_row(r, swept, r in tuned, r == dense) for r in swept if r.k is None],
        "subspace_sweep": [sweep_row(r, swept, r in tuned, False) for r in swept if r.k is not None],
        "codec_sweep": [sweep_row(r, codec_swept, r in chosen, False) for r in codec_swept],
        "tuning": TUNING,
        "baseline": {**asdict(dense), "codec": dense.codec, "loss": dense_loss(rows)},
        "time_to_loss": times(rows, scale),
        "left_out": left_out,
        "scale": asdict(scale),
        "tokens": scale.steps * scale.tokens_per_step,
        "train_tokens": rows[0]["train_tokens"],
        "held_out_tokens": rows[0]["held_out_tokens"],
        "epochs": rows[0]["epochs"],
        "device": device,
        "only": list(only),
    }


def climb(
    starts: Sequence[Recipe], losses: Losses, neighbours: Neighbours, rounds: int
) -> tuple[list[Recipe], dict[Recipe, float]]:
    """From each start to the best neighbour until none is better; the ends, and every point seen with its loss.

    All climbs go in step, so that there is work for every process."""
    seen = dict(zip(starts, losses(starts), strict=True))
    here, moving = list(starts), set(range(len(starts)))
    for _ in range(rounds):
        tried = {i: neighbours(here[i], seen[here[i]]) for i in sorted(moving)}
        new = [r for r in dict.fromkeys(r for near in tried.values() for r in near) if r not in seen]
        seen |= dict(zip(new, losses(new), strict=True))
        for i, near in tried.items():
            best = min([here[i], *near], key=lambda r: seen[r])
            if seen[best] < GAIN * seen[here[i]]:
                here[i] = best
            else:
                moving.discard(i)
    return here, seen


def around(recipe: Recipe, loss: float) -> list[Recipe]:
    """Learning rate and scale up and down. The scale is the embedding's where it is dense, T_fixed's otherwise."""
    rates = [replace(recipe, lr=recipe.lr * factor) for factor in (LR_FACTOR, 1 / LR_FACTOR)]
    if recipe.t_fixed_scale is None:
        return rates + [replace(recipe, embedding_std=scale) for scale in up_and_down(recipe.embedding_std)]
    return rates + [replace(recipe, t_fixed_scale=scale) for scale in up_and_down(recipe.t_fixed_scale)]


def up_and_down(scale: float) -> list[float]:
    """Rounded, so that up and down again is where it was: 0.1, 0.32, 1, …"""
    return [float(f"{scale * factor:.2g}") for factor in (SCALE_FACTOR, 1 / SCALE_FACTOR)]


def better(result: Result) -> float:
    found = [x for x in (result["loss"], result["loss_codec_off"]) if x is not None]
    return min(found, default=float("inf"))


def sweep_row(recipe: Recipe, seen: dict[Recipe, float], best: bool, baseline: bool) -> Result:
    """`settled`: all neighbours were tried."""
    row = {**asdict(recipe), "codec": recipe.codec, "seed": 0, "best": best, "baseline": baseline}
    row["settled"] = all(near in seen for near in around(recipe, seen[recipe]))
    return row | {"loss": None if seen[recipe] == float("inf") else seen[recipe]}


def measured_rows(bench: Bench, scale: Scale, recipes: Sequence[Recipe], dense: Recipe, device: str) -> list[Result]:
    """Every recipe with every seed, each held against tuned dense with the same seed."""
    runs = [Run(scale, recipe, seed, device) for recipe in recipes for seed in range(scale.seeds)]
    results = bench.results(runs)
    own = {
        (r.recipe.form, r.recipe.optimizer, r.seed): x["loss"]
        for r, x in zip(runs, results, strict=True)
        if r.recipe.k is None and rounds_nothing(r.recipe.codec)
    }
    rows = []
    for each, result in zip(runs, results, strict=True):
        r, nbytes = each.recipe, result["bytes_per_token"]
        same_optimizer = "adamw" if r.optimizer == "row_adamw" else r.optimizer
        rows.append(
            {
                "form": r.form,
                "k": r.k,
                "codec": r.codec,
                "optimizer": r.optimizer,
                "t_fixed_scale": r.t_fixed_scale,
                "seed": each.seed,
                "lr": r.lr,
                "embedding_std": r.embedding_std,
                "ratio_bf16": 2 * 2 * scale.width / nbytes,
                "ratio_fp32": 2 * 4 * scale.width / nbytes,
                "gap_to_dense": gap(result["loss"], own["dense", dense.optimizer, each.seed]),
                "gap_same_optimizer": gap(result["loss"], own["dense", same_optimizer, each.seed]),
                **result,
            }
        )
    return rows


def gap(loss: float | None, dense: float | None) -> float | None:
    return None if loss is None or dense is None else loss / dense - 1


def dense_loss(rows: Sequence[Result]) -> float:
    """Of the baseline, the mean over seeds: the rows whose gap is 0 by definition."""
    dense = [row for row in rows if row["k"] is None and rounds_nothing(row["codec"])]
    return mean(row["loss"] for row in dense if row["gap_to_dense"] == 0)


def rounds_nothing(codec: str) -> bool:
    return all(parse_codec(leg).codec.exact for leg in codec.split("|"))


def times(rows: Sequence[Result], scale: Scale) -> Result:
    entries = []
    for above in ABOVE_DENSE:
        target = dense_loss(rows) * (1 + above)
        for link in LINKS:
            seconds = link_seconds(link, scale.tokens_per_step)
            found = time_to_loss(rows, seconds, target)
            entries += [{"target": target, "above_dense": above, "link": link, **row} for row in found]
    return {"model": MODEL, "links": list(LINKS), "rows": entries}
