"""Metrics as TensorBoard reads them: one event file, a pure function of the rows, so that what a kill left half written
is cut off and written again to the same bytes. Needs the package tensorboard."""

from __future__ import annotations

import os
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from protomodels_cli.observe.follow.following import Points, Position, load, save

EVENTS, STATE = "events.out.tfevents.pmtrain", "pmtrain.json"


class TensorBoard:
    def __init__(self, folder: Path, run: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._events, self._state, self._run = folder / EVENTS, folder / STATE, run
        self._lineage = 0

    def begin(self) -> Position:
        known = load(self._state, self._run) or {"rows": 0, "offset": 0, "length": 0, "lineage": 0}
        self._lineage = known["lineage"]
        self._file = self._events.open("r+b" if self._events.exists() else "w+b")
        self._file.truncate(known["length"])
        self._file.seek(0, os.SEEK_END)
        self._writer = RecordWriter(self._file)
        if not known["length"]:
            self._put(Event(file_version="brain.Event:2"))
        return Position(known["rows"], known["offset"])

    def write(self, points: Points) -> None:
        if points.lineage != self._lineage:
            if self._lineage:  # a rollback: TensorBoard drops what it had from this step on
                log = SessionLog(status=SessionLog.START)
                self._put(Event(step=points.step, wall_time=points.at, session_log=log))
            self._lineage = points.lineage
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.values.items()]
        self._put(Event(step=points.step, wall_time=points.at, summary=Summary(value=values)))

    def _put(self, event: Event) -> None:
        self._writer.write(event.SerializeToString(deterministic=True))

    def commit(self, position: Position) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        save(self._state, self._run, position, length=self._file.tell(), lineage=self._lineage)

    def close(self) -> None:
        self._file.close()
