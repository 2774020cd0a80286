"""How long a run takes to a loss over a home link: steps as they were measured, seconds a step by forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean

from protomodels_cli.cost.forecast import seconds_by_link
from protomodels_cli.lab.frontier_report import BASELINE, dense_losses, grouped
from protomodels_cli.lab.recipes import spec_of
from protomodels_cli.lab.results import Result
from protomodels_cli.lab.runs import Run
from protomodels_cli.spec.schema import LinkSpec
from protomodels_cli.spec.units import bits_per_second

LINKS = ("10mbit", "80mbit", "200mbit")
LATENCY = "50ms"
STAGES = 8
MICROBATCHES = 16  # or as many as there are sequences
ABOVE_DENSE = (0.0, 0.01, 0.02)  # targets, over dense's last
LIGHTER = ("bf16", "int8")  # codecs of dense that it may not have been trained with
MODEL = (
    "seconds = steps to the target × seconds a step. Steps: as measured, between two evaluations by straight line; all "
    f"runs have the learning rate schedule of the full length. Seconds a step: the forecast of `plan` for {STAGES} "
    f"stages with as many layers each as a stage had here, in {MICROBATCHES} microbatches (or as many as there are "
    f"sequences), every peer with this uplink and downlink, {LATENCY} each way from the others, and as fast as this "
    f"machine computed the row in one process, codecs included, with other runs beside it. Assumed: that {STAGES} "
    'stages take as many steps as those measured, and "as fp32": dense in that codec as many as in fp32'
)


def step_seconds(run: Run, result: Result) -> dict[str, float]:
    """Of a step over each link, as MODEL says. A shared anchor's sums, which no pipeline sends, come on top."""
    speed = float(result["flops"]) / run.scale.steps / (float(result["compute_seconds"]) * result["stages"])
    layers = STAGES * run.scale.layers // result["stages"]
    scale = replace(run.scale, layers=layers, segments=STAGES, microbatches=min(MICROBATCHES, run.scale.batch))
    seconds = seconds_by_link(spec_of(scale, replace(run.recipe, segments=None), run.seed), speed)
    sums = 8 * float(result["bytes_of_sums"]) * run.scale.tokens_per_step
    return {link: seconds(LinkSpec(bandwidth=link, latency=LATENCY)) + sums / bits_per_second(link) for link in LINKS}


def lighter_seconds(run: Run, result: Result) -> dict[str, dict[str, float]]:
    """The same of this row if its messages were in other codecs."""
    return {codec: step_seconds(replace(run, recipe=replace(run.recipe, codec=codec)), result) for codec in LIGHTER}


def times(rows: Sequence[Result]) -> Result:
    """Time to dense's last loss, and to a little more, over every link. Rows have their `step_seconds`, and
    dense those of lighter codecs, which count where it was not trained with them."""
    dense = dense_losses(rows)
    stages = {row["stages"] for row in rows if row["name"] == BASELINE}  # others have other stages
    paired = [row for row in rows if row["seed"] in dense and row["stages"] in stages]
    trained = {row["name"] for row in paired}
    for row in [row for row in paired if row["name"] == BASELINE]:
        for codec, seconds in row["lighter_seconds"].items():
            if f"dense {codec}" not in trained:
                paired.append(row | {"name": f"dense {codec} as fp32", "codec": codec, "step_seconds": seconds})
    entries = []
    for above in ABOVE_DENSE if dense else ():
        targets = {seed: loss * (1 + above) for seed, loss in dense.items()}
        for link in LINKS:
            found = time_to_loss(paired, link, targets)
            entries += [{"target": mean(targets.values()), "above_dense": above, "link": link, **row} for row in found]
    return {"model": MODEL, "stages": STAGES, "latency": LATENCY, "links": list(LINKS), "rows": entries}


def steps_to(evals: Sequence[Result], target: float) -> float | None:
    """The first step at which the held-out loss is at the target, between two evaluations by straight line."""
    known = [(e["step"], e["loss"]) for e in evals if e["loss"] is not None]
    if known and known[0][1] <= target:
        return float(known[0][0])
    for (step, loss), (next_step, next_loss) in pairwise(known):
        if next_loss <= target:
            return float(step + (next_step - step) * (loss - target) / (loss - next_loss))
    return None


def time_to_loss(rows: Sequence[Result], link: str, targets: Mapping[int, float]) -> list[Result]:
    """For every group of seeds the mean steps and seconds to each seed's target; None unless every seed reached it."""
    found = []
    for group in grouped(rows):
        steps = [steps_to(row["evals"], targets[row["seed"]]) for row in group["members"]]
        each = [row["step_seconds"][link] for row in group["members"]]
        reached = [(s, s * t) for s, t in zip(steps, each, strict=True) if s is not None]
        whole = len(reached) == len(steps)
        found.append(
            {key: group[key] for key in ("name", "form", "k", "codec")}
            | {"steps": mean(s for s, _ in reached) if whole else None, "step_seconds": mean(each)}
            | {"seconds": mean(t for _, t in reached) if whole else None}
            | {"seeds": len(steps), "reached": len(reached)}
        )
    return found
