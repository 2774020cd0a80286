"""Asking how a run is doing: its coordinator, or the journal where no coordinator leads it. Reads alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

from protomodels_cli.cli import on_disk
from protomodels_cli.cli.place import Place, place_of
from protomodels_cli.errors import UserError, first_line

if TYPE_CHECKING:
    from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

WATCH_SECONDS = 1.0


async def status_of(place: Place) -> RunStatus:
    """Once. Raises UserError."""
    from protomodels_cli.wire.client import operator
    from protomodels_cli.wire.join_link import FingerprintError, JoinLink, UnreachableError

    if place.link is None:
        return _without_coordinator(place, not_open(place))
    try:
        async with operator(JoinLink.parse(place.link)) as coordinator:
            return await coordinator.status()
    except (UnreachableError, FingerprintError) as e:  # the coordinator is gone, or another run has the port by now
        return _without_coordinator(place, e)


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
    from protomodels_cli.wire.client import operator
    from protomodels_cli.wire.join_link import FingerprintError, JoinLink, UnreachableError
    from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

    known: RunStatus | None = None
    while True:
        place = place_of(text)  # again: a coordinator that is started anew may have another address
        try:
            if place.link is None:
                raise not_open(place)
            async with operator(JoinLink.parse(place.link)) as coordinator:
                while True:
                    known = await coordinator.status()
                    yield known, ""
                    if known.phase == RunStatus.DONE:
                        return
                    await asyncio.sleep(WATCH_SECONDS)
        except (UnreachableError, FingerprintError, UserError) as e:
            if not isinstance(e, UnreachableError | FingerprintError) and e.kind != "no_link":
                raise
            why, over = first_line(e), _is_over(place.folder, place.kind)
            if place.kind == "run":
                with contextlib.suppress(*([UserError] if known is not None else [])):
                    known = _without_coordinator(place, e)
            elif known is None and not over:
                raise
            if over or (known is not None and known.phase == RunStatus.DONE):
                if known is not None:
                    known.phase = RunStatus.DONE
                yield known, ""
                return
            yield known, why
        await asyncio.sleep(WATCH_SECONDS)


def _is_over(folder: Path | None, kind: on_disk.Kind | None) -> bool:
    """Whether the folder itself says that the run is done."""
    return folder is not None and kind is not None and on_disk.look(folder, kind).state == "done"
