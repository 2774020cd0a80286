"""Asking how a run is doing: its coordinator, or the journal where no coordinator leads it. Reads alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from protomodels_cli.cli import on_disk
from protomodels_cli.cli.place import Place, place_of
from protomodels_cli.errors import UserError, first_line

if TYPE_CHECKING:
    from protomodels_cli.wire.client import Metadata
    from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

WATCH_SECONDS = 1.0


async def status_of(place: Place) -> RunStatus:
    """Once. Raises UserError."""
    from protomodels_cli.wire.client import operator
    from protomodels_cli.wire.join_link import FingerprintError, JoinLink, UnreachableError

    if place.link is None:
        return _without_coordinator(place, not_open(place))
    try:
        async with operator(JoinLink.parse(place.link), peer=shown_by(place)) as coordinator:
            return await coordinator.status()
    except (UnreachableError, FingerprintError) as e:  # the coordinator is gone, or another run has the port by now
        return _without_coordinator(place, e)


def shown_by(place: Place) -> Metadata:
    """What the peer in this folder shows to the coordinator: it may look on, whichever link the run has by now."""
    if place.kind != "peer" or place.folder is None:
        return ()
    try:
        return tuple(
            dict[str, str](json.loads((place.folder / on_disk.PEER_SHOWS).read_text(encoding="utf-8"))).items()
        )
    except (OSError, ValueError, TypeError):  # of a peer that joined with an earlier version
        return ()


def _without_coordinator(place: Place, error: UserError) -> RunStatus:
    """As the journal has it; where there is none to look into, the error stands."""
    from protomodels_cli.coordinator.file_names import JOURNAL
    from protomodels_cli.coordinator.stopped import from_journal

    if place.folder is None or place.kind != "run" or (place.link is None and not (place.folder / JOURNAL).exists()):
        raise error
    return from_journal(place.folder)


def not_open(place: Place) -> UserError:
    if place.kind == "peer":
        fix = "name the join link (pm://…); a peer that joins from now on keeps it"
        return UserError(f"{place.folder} is a peer's folder without a link to its coordinator", fix, "no_link")
    return UserError(
        f"the coordinator of {place.folder} has not opened its port yet",
        f"look into {place.folder}/coordinator.log, or start the coordinator again",
        "no_link",
    )


async def following(text: str) -> AsyncGenerator[tuple[RunStatus | None, str], None]:
    """Every second what the coordinator says, until the run is done; or the last that is known, and why it says nothing
    now. Raises UserError where there is nothing to begin with."""
    from protomodels_cli.wire.client import Refused, operator
    from protomodels_cli.wire.join_link import FingerprintError, JoinLink, UnreachableError
    from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

    known: RunStatus | None = None
    while True:
        place = place_of(text)  # again: a coordinator that is started anew may have another address
        shown = shown_by(place)
        away: UserError = not_open(place)
        try:
            if place.link is not None:
                async with operator(JoinLink.parse(place.link), peer=shown) as coordinator:
                    while True:
                        known = await coordinator.status()
                        yield known, ""
                        if known.phase == RunStatus.DONE:
                            return
                        await asyncio.sleep(WATCH_SECONDS)
        except (UnreachableError, FingerprintError) as e:
            away = e
        except Refused:
            now = place_of(text)
            if (now.link, shown_by(now)) == (place.link, shown):
                raise
            continue  # a kick has made the run's link another, which is in the folder by now
        known = _as_folders_say(place, known, away)
        over = known.phase == RunStatus.DONE
        yield known, "" if over else first_line(away)
        if over:
            return
        await asyncio.sleep(WATCH_SECONDS)


def _as_folders_say(place: Place, known: RunStatus | None, away: UserError) -> RunStatus:
    """What is known without a coordinator: from the journal, from a peer's folder, or as it was. Raises `away` where
    nothing is."""
    from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

    if place.kind == "peer" and place.folder is not None:
        here = on_disk.look(place.folder, place.kind)
        if here.state == "done":
            return RunStatus(name=here.name, phase=RunStatus.DONE, step=here.step or 0, steps=here.steps or 1)
    try:
        return _without_coordinator(place, away)
    except UserError:
        if known is None:
            raise
        return known
