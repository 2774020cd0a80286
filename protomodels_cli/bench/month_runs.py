"""Months and days of a run in virtual time, many of them: goodput, where the rest went, and the bound on lost time.

What is compared: today's policies, and those of before: whoever is silent for a lease is replaced, the rollback comes
before the fetch, and a snapshot is taken every 200 steps.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from protomodels_cli.bench.homes import DAY, Rates, homes
from protomodels_cli.bench.month import Month
from protomodels_cli.bench.month_books import KINDS, MOST, ON_AVERAGE, Books
from protomodels_cli.bench.month_size import FLOPS, LINE, Size, Steps, forecast_steps, size_of

SPARES = 2
DAYS = 30  # of a month
RUN_DAYS = 1  # of each run that the bound is checked in
BEFORE = {"interval": 200}  # and not patient


@dataclass(frozen=True)
class Job:
    predicted: Steps
    before: bool
    times: float  # the rates
    seed: int
    days: float


@dataclass(frozen=True)
class Found:
    goodput: float
    spent: dict[str, float]  # shares
    rollbacks: int
    redone: int
    faults: int
    dismissed: int
    lost: float  # in incidents, seconds
    best: float
    allowed: float
    worst: float  # of all incidents: times the best choice


def run(job: Job) -> Found:
    size = size_of(job.predicted, **(BEFORE if job.before else {}))
    month, seconds = a_month(size, job.seed, job.days * DAY, job.times, patient=not job.before), job.days * DAY
    books = month.run()
    return Found(
        goodput=books.goodput,
        spent={kind: books.spent[kind] / seconds for kind in KINDS},
        rollbacks=books.rollbacks,
        redone=books.redone,
        faults=sum(incident.faults for incident in books.incidents),
        dismissed=month.dismissed,
        **totals(books),
    )


def a_month(size: Size, seed: int, seconds: float, times: float = 1.0, patient: bool = True) -> Month:
    met = list(homes(seed, len(size.layers) + SPARES, seconds, Rates().times(times)))
    return Month(size, met, seconds, patient)


def totals(books: Books) -> dict[str, float]:
    found = books.incidents
    return {
        "lost": sum(incident.lost for incident in found),
        "best": sum(incident.best for incident in found),
        "allowed": sum(incident.allowed for incident in found),
        "worst": max((incident.times for incident in found), default=0.0),
    }


def measure(
    runs: int, rates: float, months: int = 4, seed: int = 0, days: float = DAYS, predicted: Steps | None = None
) -> dict[str, Any]:
    """Months with these policies and those of before, at the rates and at so many times the rates; and so many runs of
    a day, by other seeds."""
    predicted = predicted or forecast_steps()
    seeds = range(seed, seed + months + runs)
    kinds = [(before, times) for times in dict.fromkeys((1.0, rates)) for before in (False, True)]
    jobs = [Job(predicted, before, times, seed, days) for before, times in kinds for seed in seeds[:months]]
    jobs += [Job(predicted, False, 1.0, seed, RUN_DAYS) for seed in seeds[months:]]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(run, jobs, chunksize=1))
    rows = [
        {"policies": "before" if before else "now", "rates": times, **_together(found[i * months : (i + 1) * months])}
        for i, (before, times) in enumerate(kinds)
    ]
    setting = {"months": months, "seed": seed, "days": days, **_setting(predicted)}
    return {"setting": setting, "months": rows, "bound": _bound(found[len(kinds) * months :])}


def _together(months: list[Found]) -> dict[str, Any]:
    return {
        "goodput": statistics.mean(month.goodput for month in months),
        "goodputs": [month.goodput for month in months],
        "spent": {kind: statistics.mean(month.spent[kind] for month in months) for kind in KINDS},
        "faults": statistics.mean(month.faults for month in months),
        "rollbacks": statistics.mean(month.rollbacks for month in months),
        "steps_redone": statistics.mean(month.redone for month in months),
        "dismissed": sum(month.dismissed for month in months),
        "worst": max(month.worst for month in months),
    }


def _bound(runs: list[Found]) -> dict[str, Any]:
    """Over all runs: the worst incident, and the average of the runs, with a lease and a fetch for each fault and
    without."""

    def mean(of: Iterable[float]) -> float:
        return statistics.mean(of) if runs else 0.0

    return {
        "runs": len(runs),
        "days": RUN_DAYS,
        "faults": sum(run.faults for run in runs),
        "worst": max((run.worst for run in runs), default=0.0),
        "worst_bound": MOST,
        "beyond": sum(run.worst > MOST for run in runs),
        "average": mean(max(0.0, run.lost - run.allowed) / run.best for run in runs if run.best),
        "average_bound": ON_AVERAGE,
        "average_without_lease_and_fetch": mean(run.lost / run.best for run in runs if run.best),
        "goodputs": sorted(run.goodput for run in runs),
    }


def _setting(predicted: Steps) -> dict[str, Any]:
    size = size_of(predicted)
    return {
        "stages": len(size.layers),
        "spares": SPARES,
        "layers": size.layers,
        "flops": FLOPS,
        "bits_per_second": LINE.bits_per_second,
        "step_s": size.step,
        "snapshot_bytes": sum(size.part_bytes),
        "part_bytes": size.part_bytes,
        "upload_s": max(size.upload),
        "fetch_s": size.fetch,
        "build_s": size.build,
        "rates": asdict(Rates()),
    }
