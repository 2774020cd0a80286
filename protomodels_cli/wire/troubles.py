"""What keeps a peer from working, as both programs know it: facts, and their fields in the message.

observe/troubles.py says how they read. It must not know who is told, nor what follows from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from protomodels_cli.facts import Fact
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

# With a neighbour: new links may cure it


@dataclass(frozen=True)
class LinkBroken(Fact):
    stage: int  # at the other end
    detail: str = ""  # what the relay says, where there is one
    kind: Literal["link_broken"] = "link_broken"


@dataclass(frozen=True)
class LinkNotOpened(Fact):
    stage: int
    detail: str
    kind: Literal["link_not_opened"] = "link_not_opened"


@dataclass(frozen=True)
class InvalidInput(Fact):
    """A message from another stage that cannot be."""

    stage: int
    detail: str
    kind: Literal["invalid_input"] = "invalid_input"


@dataclass(frozen=True)
class InvalidFeed(Fact):
    """Token ids from the coordinator that cannot be: the first stage has to be fed again."""

    stage: int  # the first: the one that reports it
    detail: str
    kind: Literal["invalid_feed"] = "invalid_feed"


# Of the peer itself: it cannot go on


@dataclass(frozen=True)
class OutOfMemory(Fact):
    detail: str
    kind: Literal["out_of_memory"] = "out_of_memory"


@dataclass(frozen=True)
class DeviceStuck(Fact):
    """limits.device_seconds."""

    seconds: float
    kind: Literal["device_stuck"] = "device_stuck"


@dataclass(frozen=True)
class PartNotWritten(Fact):
    """A part of a snapshot that was fetched to restore a stage does not fit on the disk."""

    detail: str
    kind: Literal["part_not_written"] = "part_not_written"


@dataclass(frozen=True)
class Failed(Fact):
    """Whatever has no name here; a bug, most likely."""

    detail: str
    kind: Literal["failed"] = "failed"


WithNeighbour = LinkBroken | LinkNotOpened | InvalidInput | InvalidFeed
Own = OutOfMemory | DeviceStuck | PartNotWritten | Failed
Trouble = WithNeighbour | Own
KINDS: dict[str, type[Any]] = {fact.kind: fact for fact in get_args(Trouble)}


def to_message(trouble: Trouble, generation: int) -> pb.Trouble:
    fields = dataclasses.asdict(trouble)
    if "stage" in fields:
        fields["about"] = fields.pop("stage")
    return pb.Trouble(**fields, generation=generation)


def from_message(message: pb.Trouble, detail: str) -> Trouble:
    """`detail` is the message's, made fit to be shown. A kind that this version does not know has only that."""
    known = KINDS.get(message.kind, Failed)
    values = {"stage": message.about, "detail": detail, "seconds": message.seconds, "kind": known.kind}
    trouble: Trouble = known(**{field.name: values[field.name] for field in dataclasses.fields(known)})
    return trouble
