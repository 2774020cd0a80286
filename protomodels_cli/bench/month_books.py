"""Where the time of a month went, and what each incident cost against the best choice in hindsight."""

from __future__ import annotations

from dataclasses import dataclass

from protomodels_cli.bench.month_size import Size

KINDS = ("useful", "waiting", "no spare", "restoring", "redoing", "snapshots")
MOST, ON_AVERAGE = 2.0, 1.5  # times the best choice in hindsight, that a fault may cost beyond a lease and a fetch


@dataclass
class Incident:
    """From a fault until steps go on: whatever else happened meanwhile belongs to it."""

    best: float = 0.0  # seconds that the better choice would have cost, for each fault by itself
    allowed: float = 0.0  # a lease and a fetch for each fault
    lost: float = 0.0  # seconds waited, restored and redone
    faults: int = 0

    @property
    def times(self) -> float:
        """How many times the best choice it cost, beyond a lease and a fetch."""
        return max(0.0, self.lost - self.allowed) / max(self.best, 1e-9)


class Books:
    def __init__(self, size: Size):
        self._size = size
        self.spent = dict.fromkeys(KINDS, 0.0)  # seconds
        self.steps: list[tuple[float, float]] = []  # of this lineage: seconds by itself, and for snapshots
        self.redone = 0  # steps
        self.rollbacks = 0
        self.incidents: list[Incident] = []
        self._open: Incident | None = None

    # Time

    def spend(self, on: str, seconds: float) -> None:
        self.spent[on] += seconds
        self._lose(seconds if on != "snapshots" else 0.0)

    def decide(self, by_itself: float, for_snapshots: float) -> None:
        self.steps.append((by_itself, for_snapshots))

    def since(self, step: int) -> float:
        """Seconds of the steps after this one."""
        return sum(map(sum, self.steps[step:]))

    def roll_back(self, step: int) -> None:
        self.redone += len(self.steps) - step
        self.rollbacks += 1
        self.break_off(self.since(step))
        del self.steps[step:]

    def break_off(self, seconds: float) -> None:
        """So much was computed for nothing."""
        self.spent["redoing"] += seconds
        self._lose(seconds)

    def close(self, partial: float) -> None:
        """At the end; `partial`: what is done of the step under way."""
        self.spent["useful"] = sum(by_itself for by_itself, _ in self.steps) + partial
        self.spent["snapshots"] += sum(beside for _, beside in self.steps)

    @property
    def goodput(self) -> float:
        return self.spent["useful"] / sum(self.spent.values())

    # Incidents

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def open_faults(self) -> int:
        return self._open.faults if self._open is not None else 0

    def fault(self, stage: int, away: float, replacing: float) -> None:
        """A holder is away for so long, or for ever; replacing it at once would have cost so much."""
        if self._open is None:
            self._open = Incident()
            self.incidents.append(self._open)
        self._open.faults += 1
        self._open.best += min(away, replacing)
        self._open.allowed += self._size.lease + self._size.fetch[stage]

    def go_on(self) -> None:
        self._open = None

    def _lose(self, seconds: float) -> None:
        if self._open is not None:
            self._open.lost += seconds
