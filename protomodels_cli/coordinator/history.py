"""What was decided: the records of the journal, and the history that they add up to.

A run is its records. `fold` is used when a record is made and when it is read back, so the two cannot differ.

A *lineage* is one chain of decisions. Going back to a snapshot opens the next one: what was decided after that snapshot
is void, and its steps are decided again. A *generation* is one set of holders, linked to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from protomodels_cli.coordinator.reasons import Pause, Rollback
from protomodels_cli.protocol.parts import Part

MOST_DROPPED = 256  # that are remembered: their files go within seconds, a store's copies once it can be reached


@dataclass(frozen=True)
class Placed:
    """Who holds which layers, in a new generation."""

    generation: int
    layers: tuple[int, ...]
    holders: tuple[tuple[str, ...], ...]  # the peers of each stage: one today


@dataclass(frozen=True)
class Initialised:
    """The run's beginning is a snapshot, cut from a checkpoint: the cut, and the hash of each stage's part."""

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    source: str  # hash of the checkpoint


@dataclass(frozen=True)
class Decided:
    """A step's outcome. Every stage applies it, or every stage skips it."""

    step: int
    apply: bool
    lr: float
    clip: float
    loss: float
    norm: float
    generation: int  # whose holders computed it
    forward_bytes: int  # over all boundaries
    backward_bytes: int


@dataclass(frozen=True)
class Reported:
    """The last stage has had its word on the subspace after this step."""

    step: int


@dataclass(frozen=True)
class Adopted:
    """A new basis, computed after a step and in use from `first_step` on."""

    version: int
    sha256: str
    after: int
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
class Began:
    """All stages are to upload what they are after this step, the last one decided."""

    step: int


@dataclass(frozen=True)
class Saved:
    """The snapshot of this step is complete; the hash of each stage's part."""

    step: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class GaveUp:
    """The snapshot of this step will not be complete."""

    step: int


@dataclass(frozen=True)
class Forgot:
    """A complete snapshot that is kept no longer, or is unusable: then what there is of it is not deleted."""

    lineage: int
    step: int
    unusable: bool = False


@dataclass(frozen=True)
class RolledBack:
    """Back to a complete snapshot: a new lineage begins there."""

    lineage: int
    from_lineage: int
    step: int
    why: Rollback
    answered: int = 0  # the step up to which numbers were bad, where that is why


@dataclass(frozen=True)
class Paused:
    why: Pause


@dataclass(frozen=True)
class Resumed:
    pass


@dataclass(frozen=True)
class Ended:
    weights_sha256: str


Record = (
    Placed
    | Initialised
    | Decided
    | Reported
    | Adopted
    | Synced
    | Evaluated
    | Began
    | Saved
    | GaveUp
    | Forgot
    | RolledBack
    | Paused
    | Resumed
    | Ended
)
RECORDS: dict[str, type[Record]] = {kind.__name__: kind for kind in Record.__args__}


@dataclass(frozen=True)
class _OfStep:
    lineage: int
    step: int

    @property
    def key(self) -> tuple[int, int]:
        return self.lineage, self.step


@dataclass(frozen=True)
class Mark(_OfStep):
    """Where a run stood after a step: what must be known, beside the stages' own state, to go on from there."""

    basis_version: int
    basis_sha256: str
    next_basis: Adopted | None = None
    skipped_in_a_row: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    parts: tuple[str, ...] = ()  # hashes, where complete; the run's beginning has some if it was cut from a checkpoint
    # What only a journal that is made anew from this snapshot needs
    layers: tuple[int, ...] = ()  # per stage
    generation: int = 0
    rollbacks: int = 0
    redone: int = 0
    answered: int = 0
    loss_first: float | None = None
    eval_loss: float | None = None
    paused: Paused | None = None
    source: str = ""  # of the beginning: the hash of the checkpoint that it was cut from

    def as_parts(self) -> list[Part]:
        return [Part(self.lineage, self.step, stage, sha256) for stage, sha256 in enumerate(self.parts)]


@dataclass(frozen=True)
class Dropped(_OfStep):
    """A snapshot that this history has had, and needs no longer: its files may go, unless it is `unusable`. Of such a
    one most parts may be whole, and a store that could not be reached may have all of it."""

    complete: bool
    unusable: bool = False


@dataclass(frozen=True)
class History:
    snapshots: tuple[Mark, ...]  # complete ones, oldest first; the first is the beginning
    pending: tuple[Mark, ...] = ()  # begun ones
    dropped: tuple[Dropped, ...] = ()  # the last of those; whatever is in none of the three is not ours to delete
    generation: int = 0
    lineage: int = 1
    reserved: int = 0  # up to which lineages may have been opened by a coordinator whose journal is lost
    layers: tuple[int, ...] = ()
    stage_holders: tuple[tuple[str, ...], ...] = ()  # the peers of each stage: one today
    held: tuple[str, ...] = ()  # peers that were given a stage in this lineage: nobody else can have one in memory
    step: int = 0  # the last one decided
    decision: Decided | None = None  # the outcome of that step, in this lineage
    skipped_in_a_row: int = 0
    basis_version: int = 0
    basis_sha256: str = ""
    next_basis: Adopted | None = None  # waits for its step
    reported: int = 0  # the last step after which the last stage has reported on the subspace
    synced: int = -1  # the last step after which all stages had the run's bytes of U and T_fixed
    evaluated: int = -1  # the last step after which the held-out loss was measured
    eval_loss: float | None = None
    loss_first: float | None = None
    forward_bytes: int = 0  # sent for the steps of this lineage and those it goes back to
    backward_bytes: int = 0
    rollbacks: int = 0
    redone: int = 0  # decisions that were voided
    answered: int = 0  # the last step whose bad numbers were answered by going back
    paused: Paused | None = None
    ended: Ended | None = None

    def basis_for(self, step: int) -> tuple[int, str]:
        """Version and hash of the basis that a step is computed with."""
        if self.next_basis is not None and step >= self.next_basis.first_step:
            return self.next_basis.version, self.next_basis.sha256
        return self.basis_version, self.basis_sha256

    @cached_property
    def holders(self) -> tuple[str, ...]:  # the one of each stage
        return tuple(holder for [holder] in self.stage_holders)

    @property
    def newest(self) -> Mark:
        return self.snapshots[-1]

    @property
    def highest_lineage(self) -> int:  # the next is new to every peer, whoever led it before
        return max(self.lineage, self.reserved)

    @property
    def over(self) -> bool:
        return self.ended is not None

    def mark(self) -> Mark:
        return Mark(
            self.lineage,
            self.step,
            self.basis_version,
            self.basis_sha256,
            self.next_basis,
            self.skipped_in_a_row,
            self.forward_bytes,
            self.backward_bytes,
            layers=self.layers,
            generation=self.generation,
            rollbacks=self.rollbacks,
            redone=self.redone,
            answered=self.answered,
            loss_first=self.loss_first,
            eval_loss=self.eval_loss,
            paused=self.paused,
        )


def beginning(basis_sha256: str) -> History:
    """Before anything was decided."""
    return History(snapshots=(Mark(0, 0, 0, basis_sha256),), basis_sha256=basis_sha256)


def fold(history: History, record: Record) -> History:
    match record:
        case Placed(generation, layers, holders):
            held = dict.fromkeys((*history.held, *(peer for peers in holders for peer in peers)))
            return replace(history, generation=generation, layers=layers, stage_holders=holders, held=tuple(held))
        case Initialised(layers, parts, source):
            first = replace(history.snapshots[0], layers=layers, parts=parts, source=source)
            return replace(history, snapshots=(first, *history.snapshots[1:]))
        case Decided():
            return _decide(history, record)
        case Reported(step):
            return replace(history, reported=step)
        case Adopted():
            after = record.after  # a snapshot that was begun since then has to know of it
            pending = tuple(replace(m, next_basis=record) if m.step >= after else m for m in history.pending)
            return replace(history, next_basis=record, pending=pending)
        case Synced(step):
            return replace(history, synced=step)
        case Evaluated(step, loss):
            history = _amend(history, lambda mark: replace(mark, eval_loss=loss))
            return replace(history, evaluated=step, eval_loss=loss)
        case Began():
            again = tuple(d for d in history.dropped if d.key != (history.lineage, history.step))
            return replace(history, pending=(*history.pending, history.mark()), dropped=again)
        case Saved(step, parts):
            [mark] = [m for m in history.pending if m.step == step]
            earlier, later = _split(history.pending, lambda m: m.step <= step)
            history = _drop(history, [m for m in earlier if m != mark], complete=False)
            return replace(history, pending=later, snapshots=(*history.snapshots, replace(mark, parts=parts)))
        case GaveUp(step):
            given_up, others = _split(history.pending, lambda m: m.step == step)
            return replace(_drop(history, given_up, complete=False), pending=others)
        case Forgot(lineage, step, unusable):
            forgotten, kept = _split(history.snapshots, lambda m: m.key == (lineage, step))
            return replace(_drop(history, forgotten, complete=True, unusable=unusable), snapshots=kept)
        case RolledBack():
            return _roll_back(history, record)
        case Paused():
            return replace(_amend(history, lambda mark: replace(mark, paused=record)), paused=record)
        case Resumed():
            history = _amend(history, lambda mark: replace(mark, paused=None))
            return replace(history, paused=None, skipped_in_a_row=0)
        case Ended():
            return replace(history, ended=record)


def _amend(history: History, change: Callable[[Mark], Mark]) -> History:
    """The snapshot of the last step has to know of it, also if it was begun before."""

    def amended(marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
        return tuple(change(m) if m.step == history.step > 0 else m for m in marks)

    return replace(history, pending=amended(history.pending), snapshots=amended(history.snapshots))


def _split(marks: tuple[Mark, ...], chosen: Callable[[Mark], bool]) -> tuple[tuple[Mark, ...], tuple[Mark, ...]]:
    return tuple(m for m in marks if chosen(m)), tuple(m for m in marks if not chosen(m))


def _drop(history: History, marks: Iterable[Mark], complete: bool, unusable: bool = False) -> History:
    dropped = *history.dropped, *(Dropped(m.lineage, m.step, complete, unusable) for m in marks)
    return replace(history, dropped=dropped[-MOST_DROPPED:])


def _decide(history: History, decided: Decided) -> History:
    version, sha256 = history.basis_for(decided.step)
    waits = history.next_basis is not None and history.next_basis.version != version
    return replace(
        history,
        step=decided.step,
        decision=decided,
        skipped_in_a_row=0 if decided.apply else history.skipped_in_a_row + 1,
        basis_version=version,
        basis_sha256=sha256,
        next_basis=history.next_basis if waits else None,
        loss_first=decided.loss if history.loss_first is None else history.loss_first,
        forward_bytes=history.forward_bytes + decided.forward_bytes,
        backward_bytes=history.backward_bytes + decided.backward_bytes,
    )


def _roll_back(history: History, record: RolledBack) -> History:
    index = [m.key for m in history.snapshots].index((record.from_lineage, record.step))
    history = _drop(history, history.snapshots[index + 1 :], complete=True)
    history = _drop(history, history.pending, complete=False)
    history = replace(
        history,
        snapshots=history.snapshots[: index + 1],  # later ones are of what is void now
        pending=(),
        answered=max(history.answered, record.answered),
    )
    return back_to_newest(history, record.lineage)


def back_to_newest(history: History, lineage: int) -> History:
    """As after the newest snapshot, in a new lineage: what was decided since is void."""
    mark = history.newest
    return replace(
        history,
        lineage=lineage,
        held=(),
        step=mark.step,
        decision=None,
        skipped_in_a_row=mark.skipped_in_a_row,
        basis_version=mark.basis_version,
        basis_sha256=mark.basis_sha256,
        next_basis=mark.next_basis,
        reported=mark.step,  # it would not be complete otherwise
        synced=min(history.synced, mark.step),
        evaluated=min(history.evaluated, mark.step),
        eval_loss=mark.eval_loss,
        loss_first=mark.loss_first,
        forward_bytes=mark.forward_bytes,
        backward_bytes=mark.backward_bytes,
        rollbacks=history.rollbacks + 1,
        redone=history.redone + history.step - mark.step,
    )
