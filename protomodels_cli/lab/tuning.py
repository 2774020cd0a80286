"""Tuning: from a family's start to better rates, one at a time, with the same number of trials for every family.

A trial is a run on seed 0 of full length, judged on the held-out part that is not reported: trials of a quarter of the
steps prefer twice the matrices' rate and four times the anchors', which cost a full run 1 to 2 %. All families go in
step, so that there is work for every process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from protomodels_cli.errors import OptionError
from protomodels_cli.lab.bench import Bench
from protomodels_cli.lab.recipes import Recipe, carried_back
from protomodels_cli.lab.results import Result
from protomodels_cli.lab.runs import Run
from protomodels_cli.lab.scales import Scale

FACTOR = 2.0  # between neighbours
GAIN = 0.999  # of the loss: less of a gain is noise and does not lead on

Losses = Callable[[Sequence[Recipe]], list[float | None]]  # None: there was no time for it
Climb = Generator[Recipe, float, None]


@dataclass
class Tuned:
    """A family's search: the best recipe so far, and every trial."""

    best: Recipe
    loss: float = float("inf")
    trials: list[tuple[Recipe, float]] = field(default_factory=list)
    unfinished: bool = False

    def as_json(self) -> Result:
        rows = [{**asdict(recipe), "loss": None if loss == float("inf") else loss} for recipe, loss in self.trials]
        return {"best": asdict(self.best), "trials": rows, "unfinished": self.unfinished}


def coordinates(recipe: Recipe) -> tuple[str, ...]:
    """The rates that are tuned: four for every family."""
    own = "anchor_lr" if recipe.trains_anchors else "embedding_std" if recipe.k is None else "t_fixed_scale"
    return "lr", own, "embedding_lr", "weight_decay"


def tune(starts: Mapping[str, Recipe], trials: int, losses: Losses) -> dict[str, Tuned]:
    """From each start to the best that so many trials find; without trials, the starts."""
    found = {name: Tuned(start) for name, start in starts.items()}
    climbs = {name: _climb(tuned, trials) for name, tuned in found.items()} if trials else {}
    asked = {name: next(climb) for name, climb in climbs.items()}
    while asked:
        answers = dict(zip(asked, losses(list(asked.values())), strict=True))
        asked = {name: recipe for name in asked if (recipe := _next(climbs[name], found[name], answers[name]))}
    return found


def _next(climb: Climb, tuned: Tuned, loss: float | None) -> Recipe | None:
    if loss is None:
        tuned.unfinished = True
        return None
    try:
        return climb.send(loss)
    except StopIteration:
        return None


def _climb(tuned: Tuned, trials: int) -> Climb:
    """Asks for the losses of recipes. Along each coordinate up or else down, as far as it gets better; again from the
    first once all were tried, until nothing near is better."""

    def tried(recipe: Recipe) -> bool:
        return any(_close(recipe, seen) for seen, _ in tuned.trials)

    tuned.loss = yield tuned.best
    tuned.trials.append((tuned.best, tuned.loss))
    settled = False
    while not settled:
        settled = True
        for name in coordinates(tuned.best):
            for factor in (FACTOR, 1 / FACTOR):
                went = False
                while True:
                    near = replace(tuned.best, **{name: getattr(tuned.best, name) * factor})
                    if len(tuned.trials) >= trials:
                        return
                    if tried(near):
                        break
                    loss = yield near
                    tuned.trials.append((near, loss))
                    if not loss < GAIN * tuned.loss:
                        break
                    tuned.best, tuned.loss, went, settled = near, loss, True, False
                if went:
                    break


def _close(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes are the same: a rate that went up and down again is where it was."""
    return all(abs(getattr(a, name) / getattr(b, name) - 1) < 1e-6 for name in coordinates(a))


def trial_losses(bench: Bench, scale: Scale, device: str) -> Losses:
    def losses(recipes: Sequence[Recipe]) -> list[float | None]:
        runs = [Run(scale, recipe, 0, device) for recipe in recipes]
        return [None if result is None else of(result) for result in bench.results(runs)]

    def of(result: Result) -> float:
        return float("inf") if result["loss_tuning"] is None else float(result["loss_tuning"])

    return losses


def tuned_rates(path: Path) -> dict[str, Recipe]:
    """What `lab frontier --json` found best for each family, carried back to where the starting recipe is from."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        scale = Scale(**result["scale"])
        best = {name: Recipe(**family["best"]) for name, family in result["families"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        what = f"--rates {path}: is not a result of lab frontier"
        raise OptionError(what, "name a file that lab frontier --json wrote", "rates") from None
    return {name: carried_back(recipe, scale) for name, recipe in best.items()}


def in_words(scale: Scale) -> str:
    return (
        f"{scale.trials} trials a family on seed 0 and a held-out part of its own, dense over a wire that rounds "
        "nothing, the others over int8 with the larger k; from the start one rate at a time × or ÷ 2 while the loss "
        "falls by 0.1 %: matrices', then anchors' (T_fixed's scale, dense: embedding's std), embedding's, weight "
        "decay. Codecs, k and shared anchors take their family's rates, constrained reparam's, relay two_stream's"
    )
