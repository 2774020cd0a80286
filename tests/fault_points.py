"""A signal at a named point of a step, for the process that comes there first."""

from __future__ import annotations

import os
from typing import Any

from marks import first, mark


def fail_at(patch: Any, phase: str, stage: int = 0, step: int = 0, signal: str = "SIGKILL") -> None:
    """The process that comes first to this point of a step gets a signal: for peers, whoever holds the stage."""
    import signal as signals

    from protomodels_cli.coordinator.dispatch import Dispatch
    from protomodels_cli.coordinator.history import Adopted, Decided, Ended
    from protomodels_cli.coordinator.journal import Journal
    from protomodels_cli.worker.session import Session
    from protomodels_cli.worker.snapshots.part_store import PartStore
    from protomodels_cli.worker.stage_work import StageWork

    def here(*place: Any) -> None:
        if place == (phase, stage, step) and first():
            mark(phase=phase, stage=stage, step=step, signal=signal)
            os.kill(os.getpid(), getattr(signals, signal))

    def before(owner: Any, name: str, where: Any) -> None:
        method = getattr(owner, name)

        def first_fail(self: Any, *arguments: Any) -> Any:
            here(*where(self, *arguments))
            return method(self, *arguments)

        patch.setattr(owner, name, first_fail)

    def after(owner: Any, name: str, where: Any) -> None:
        method = getattr(owner, name)

        def then_fail(self: Any, *arguments: Any) -> Any:
            result = method(self, *arguments)
            here(*where(self, *arguments))
            return result

        patch.setattr(owner, name, then_fail)

    def decided(records: Any, kind: type) -> int:
        return next((r.step if kind is Decided else r.after for r in records if isinstance(r, kind)), -1)

    before(StageWork, "forward", lambda w, work, message: ("forward", w.slice.index, work.step))
    before(StageWork, "backward", lambda w, work, message: ("backward", w.slice.index, work.step))
    after(StageWork, "prepare", lambda w, *_: ("prepared", w.slice.index, w.step + 1))
    before(StageWork, "decide", lambda w, s, *_: ("before decide", w.slice.index, s))
    after(StageWork, "decide", lambda w, s, *_: ("decided", w.slice.index, s))
    before(StageWork, "switch_basis", lambda w, *_: ("switch", w.slice.index, w.step + 1))
    after(Session, "_take_basis", lambda s, b: ("basis", s._generation.stage if s._generation else -1, b.version))
    before(PartStore, "write", lambda p, lineage, s, i, state: ("saving", i, s))
    # The coordinator; it has no stage
    before(
        Dispatch,
        "turn",
        lambda d, turn: ("grant", 0, turn.task.step if turn.task and turn.task.kind == "step" else -1),
    )
    before(Journal, "append", lambda j, records, now: ("ready", 0, decided(records, Decided)))
    after(Journal, "append", lambda j, records, now: ("commit", 0, decided(records, Decided)))
    after(Journal, "append", lambda j, records, now: ("adopted", 0, decided(records, Adopted)))
    after(Journal, "append", lambda j, records, now: ("ended", 0, -any(isinstance(r, Ended) for r in records)))
