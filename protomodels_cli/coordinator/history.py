"""What was decided: the records of the journal, and the history that they add up to.

A run is its records. `fold` is used when a record is made and when it is read back, so the two cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Placed:
    """Who holds which layers, in a new generation; or, without holders, that nobody does any more."""

    generation: int
    layers: tuple[int, ...]
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Decided:
    """A step's outcome. Every stage applies it, or every stage skips it."""

    step: int
    apply: bool
    lr: float
    clip: float
    loss: float
    norm: float


@dataclass(frozen=True)
class Adopted:
    """A new basis, in use from `first_step` on."""

    version: int
    sha256: str
    first_step: int


@dataclass(frozen=True)
class Synced:
    """All stages were seen to use the right bytes of U and T_fixed after this step."""

    step: int


@dataclass(frozen=True)
class Evaluated:
    step: int
    loss: float


@dataclass(frozen=True)
class Saved:
    """The snapshot of this step is complete."""

    step: int


@dataclass(frozen=True)
class Ended:
    weights_sha256: str


@dataclass(frozen=True)
class Stopped:
    why: str
    fix: str


Record = Placed | Decided | Adopted | Synced | Evaluated | Saved | Ended | Stopped
RECORDS: dict[str, type[Record]] = {
    kind.__name__: kind for kind in (Placed, Decided, Adopted, Synced, Evaluated, Saved, Ended, Stopped)
}


@dataclass(frozen=True)
class History:
    generation: int = 0
    lineage: int = 1
    layers: tuple[int, ...] = ()
    holders: tuple[str, ...] = ()
    step: int = 0  # the last one decided
    decision: Decided | None = None  # the outcome of that step
    skipped_in_a_row: int = 0
    basis_version: int = 0
    basis_sha256: str = ""
    next_basis: Adopted | None = None  # waits for its step
    synced: int = -1  # the last step after which …
    evaluated: int = -1
    saved: int = -1
    eval_loss: float | None = None
    ended: Ended | None = None
    stopped: Stopped | None = None

    def basis_for(self, step: int) -> tuple[int, str]:
        """Version and hash of the basis that a step is computed with."""
        if self.next_basis is not None and step >= self.next_basis.first_step:
            return self.next_basis.version, self.next_basis.sha256
        return self.basis_version, self.basis_sha256

    @property
    def over(self) -> bool:
        return self.ended is not None or self.stopped is not None


def fold(history: History, record: Record) -> History:
    match record:
        case Placed(generation, layers, holders):
            return replace(history, generation=generation, layers=layers, holders=holders)
        case Decided(step, apply):
            version, sha256 = history.basis_for(step)
            waits = history.next_basis is not None and history.next_basis.version != version
            return replace(
                history,
                step=step,
                decision=record,
                skipped_in_a_row=0 if apply else history.skipped_in_a_row + 1,
                basis_version=version,
                basis_sha256=sha256,
                next_basis=history.next_basis if waits else None,
            )
        case Adopted():
            return replace(history, next_basis=record)
        case Synced(step):
            return replace(history, synced=step)
        case Evaluated(step, loss):
            return replace(history, evaluated=step, eval_loss=loss)
        case Saved(step):
            return replace(history, saved=step)
        case Ended():
            return replace(history, ended=record)
        case Stopped():
            return replace(history, stopped=record)
