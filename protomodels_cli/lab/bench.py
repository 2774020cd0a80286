"""Where the runs of a sweep are trained: each once, several side by side, and none that the time left is too short for.

What is finished is kept, so that a sweep which was interrupted, or had a machine for some minutes only, goes on where
it was.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from statistics import median
from types import TracebackType

from protomodels_cli.errors import UserError, first_line
from protomodels_cli.lab.results import Result, say
from protomodels_cli.lab.runs import Run, train
from protomodels_cli.observe.metrics import strict
from protomodels_cli.quantities import duration, plural

MARGIN = 1.2  # on the time that a run is expected to take


class Bench:
    """`kept` outlives the process; `budget` is how many seconds it may take in all; with 0 nothing is trained."""

    def __init__(self, workers: int, kept: Path | None = None, budget: float | None = None):
        self.workers, self.kept, self.budget, self.started = workers, kept, budget, time.monotonic()
        self.done: dict[str, Result] = {}
        self.missing: dict[str, str] = {}  # names of runs that were not trained, and why
        self.trained = 0
        if kept is not None and kept.exists():
            self.done = {row["key"]: row["result"] for row in _kept(kept)}
            say(f"{kept} already has {plural(len(self.done), 'run')}")
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def results(self, runs: Sequence[Run]) -> list[Result | None]:
        """One result per run, in the order of `runs`; None for those that are missing."""
        new = {key: run for run in runs if (key := run.key()) not in self.done}
        for key, run, result in self._side_by_side(new) if self.workers > 1 else self._one_by_one(new):
            self._finish(key, run, result)
        return [self.done.get(run.key()) for run in runs]

    def expected(self, run: Run) -> float | None:
        """Seconds, from the runs done: by their arithmetic, of the same width where there are some."""
        known = [r for r in self.done.values() if r["seconds"] and r["flops"]]
        alike = [r for r in known if r["width"] == run.scale.width] or known
        return MARGIN * run.flops * median(r["seconds"] / r["flops"] for r in alike) if alike else None

    def _one_by_one(self, new: dict[str, Run]) -> Iterator[tuple[str, Run, Result]]:
        for key, run in new.items():
            if self._has_time_for(run):
                yield key, run, train(run)

    def _side_by_side(self, new: dict[str, Run]) -> Iterator[tuple[str, Run, Result]]:
        """A run is handed out when a process is free for it: whether there is time for it is known only then."""
        if self._pool is None:
            self._pool = self._new_pool()
        waiting, under_way = list(new.items()), dict[Future[Result], tuple[str, Run]]()
        while waiting or under_way:
            while waiting and len(under_way) < self.workers:
                key, run = waiting.pop(0)
                if self._has_time_for(run):
                    under_way[self._pool.submit(train, run)] = key, run
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                key, run = under_way.pop(future)
                try:
                    result = future.result()
                except (UserError, KeyboardInterrupt):
                    raise
                except BrokenProcessPool:  # a process was killed, and all runs under way are lost with it
                    self._pool.shutdown(wait=False)
                    self._pool = self._new_pool()
                    self._miss(run, "its process was killed, or another's beside it; try fewer --workers")
                    continue
                except Exception as error:  # of this run alone: the others are worth having
                    self._miss(run, f"failed: {first_line(error)}")
                    continue
                yield key, run, result

    def _new_pool(self) -> ProcessPoolExecutor:
        """Spawned, not forked: torch's threads and CUDA do not survive a fork."""
        return ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"))

    def _has_time_for(self, run: Run) -> bool:
        if self.budget is None:
            return True
        if not self.budget:
            self.missing[run.name] = "not trained yet"
            return False
        left = self.budget - (time.monotonic() - self.started)
        expected = self.expected(run)
        if left <= 0 or (expected is not None and expected > left):
            self._miss(run, "no time left for it" + ("" if expected is None else f": it takes {duration(expected)}"))
            return False
        return True

    def _miss(self, run: Run, why: str) -> None:
        self.missing[run.name] = why
        say(f"left out: {run.name}: {why}")

    def _finish(self, key: str, run: Run, result: Result) -> None:
        self.done[key] = result
        self.trained += 1
        self.missing.pop(run.name, None)
        if self.kept is not None:
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "name": run.name, "result": strict(result)}) + "\n")
        loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
        say(
            f"[{self.trained}] {duration(time.monotonic() - self.started)} | {run.name}: {loss} in "
            f"{duration(result['seconds'])}"
        )


def _kept(path: Path) -> list[Result]:
    """The last line may have been cut off with the experiment: it is dropped."""
    lines, found = path.read_text(encoding="utf-8").splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found.append({"key": row["key"], "result": row["result"]})
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                what = f"{path}:{number} is not a result of this experiment"
                raise UserError(what, "name another file with --keep", "not_a_result") from None
            path.write_text("".join(f"{whole}\n" for whole in lines[:-1]), encoding="utf-8")
    return found
