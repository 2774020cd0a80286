"""The messages of steps that may be audited, as this stage sent and got them: on disk, and a hash of each.

Kept for the last two steps that were to be recorded: whoever asks does so once the snapshot before the step is whole,
and the next may have begun by then. It must not know who asks, nor why.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from protomodels_cli.observe.logs import WIRE
from protomodels_cli.protocol.audit import digest
from protomodels_cli.wire.frames import Message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

STEPS = 2
Way = str  # in, out


@dataclass
class _Step:
    """Its messages."""

    folder: Path
    digests: dict[tuple[str, Way], dict[int, bytes]] = field(default_factory=dict)


class Recording:
    """Of one generation. `folder` is emptied when it begins and when it ends."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._steps: dict[int, _Step] = {}
        self._granted = 0  # the step that this stage is at
        self._early: list[Message] = []  # of steps that this stage has not been granted yet
        self._writing = ThreadPoolExecutor(1, "recording")
        self._writing.submit(shutil.rmtree, folder, True)

    def begin(self, step: int, record: bool) -> None:
        """The step is granted. Neighbours may have been granted it before, and their messages be here."""
        early, self._early = self._early, []
        self._granted = step
        if not record:
            return
        self._steps[step] = _Step(self._folder / str(step))
        self._writing.submit(self._steps[step].folder.mkdir, parents=True, exist_ok=True)
        for old in sorted(self._steps)[:-STEPS]:
            self._writing.submit(shutil.rmtree, self._steps.pop(old).folder, True)
        for message in early:
            self.note("in", message)

    def note(self, way: Way, message: Message) -> None:
        if message.leg == "evaluation":
            return
        if message.step > self._granted:
            self._early.append(message)
        if message.step != self._granted or (found := self._steps.get(message.step)) is None:
            return
        of_leg = found.digests.setdefault((message.leg, way), {})
        of_leg[message.microbatch] = digest_of(message)
        path = found.folder / f"{message.leg}-{way}-{message.microbatch}"
        self._writing.submit(_write, path, message)

    def reported(self, step: int) -> pb.Recorded | None:
        if (found := self._steps.get(step)) is None:
            return None

        def hashes(leg: str, way: Way) -> Iterator[bytes]:
            of_leg = found.digests.get((leg, way), {})
            return (of_leg[microbatch] for microbatch in sorted(of_leg))

        ways = [(leg, way) for leg in ("forward", "backward") for way in ("in", "out")]
        return pb.Recorded(step=step, **{f"{leg}_{way}": hashes(leg, way) for leg, way in ways})

    def show(self, step: int, microbatch: int, to_next: bool) -> bytes | None:
        """Both messages of a microbatch over the boundary to the next stage or to the one before, as a Crossing. Waits
        for the disk; None: they are not there any more."""
        if (found := self._steps.get(step)) is None:
            return None
        ways = {"forward": "out", "backward": "in"} if to_next else {"forward": "in", "backward": "out"}
        paths = {leg: found.folder / f"{leg}-{way}-{microbatch}" for leg, way in ways.items()}
        try:
            read = {leg: self._writing.submit(path.read_bytes).result() for leg, path in paths.items()}
        except (OSError, RuntimeError):
            return None
        return pb.Crossing(**{leg: pb.Carried.FromString(c) for leg, c in read.items()}).SerializeToString()

    def end(self) -> None:
        self._writing.submit(shutil.rmtree, self._folder, True)
        self._writing.shutdown(wait=False)


def digest_of(message: Message) -> bytes:
    m = message
    return digest(m.leg, m.step, m.microbatch, m.basis_version, m.ids, m.payload)


def _write(path: Path, message: Message) -> None:
    carried = pb.Carried(
        basis_version=message.basis_version,
        ids=message.ids,
        payload=bytes(message.payload or b""),
        poison=message.payload is None,
    )
    try:
        path.write_bytes(carried.SerializeToString())
    except OSError as e:  # what is not there cannot be shown, and nothing else comes of it
        WIRE.warning("a message that may be audited was not written to %s: %s", path, e.strerror or e)
