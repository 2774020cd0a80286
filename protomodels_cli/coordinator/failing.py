"""What ends a coordinator, or costs it a snapshot, as an error or in words."""

from __future__ import annotations

import errno
from collections.abc import Awaitable
from pathlib import Path

from protomodels_cli.coordinator.sentences import part_failure
from protomodels_cli.coordinator.snapshots.failures import Unfit
from protomodels_cli.errors import UserError


async def flaw_of(look: Awaitable[Unfit | None]) -> str:
    """What is wrong with a part whose bytes are right; empty: nothing."""
    try:
        flaw = await look
    except OSError as e:
        return e.strerror or str(e)
    return "" if flaw is None else part_failure(flaw)


def no_memory(checkpoint: str) -> UserError:
    what = f"there is too little memory to cut {checkpoint}: its largest tensor is needed three times"
    return UserError(what, "free memory, or lead the run from a larger machine", "memory")


def no_beginning(stage: int, checkpoint: str) -> UserError:
    return UserError(
        f"stage {stage}'s part of the first snapshot is missing or damaged, and cannot be cut from {checkpoint} again",
        f"put the checkpoint that the run began with at {checkpoint}, and start the coordinator again",
        kind="no_beginning",
    )


def own_fault(event: str, error: Exception) -> UserError:
    """The state machine raised, and no peer's message is to blame."""
    what = f"a fault in pmtrain itself stopped the coordinator: {type(error).__name__} while it processed {event}"
    again = "start the coordinator again with the same command: the journal has every decision"
    return UserError(what, f"{again}; and report the traceback above", kind="own_fault")


def cannot_write(folder: Path, error: OSError) -> UserError:
    again = "start the coordinator again with the same command: the journal has every decision"
    if isinstance(error, FileExistsError):
        what = f"{error.filename} is there already, and belongs to no run that has begun"
        return UserError(what, f"move it away, or choose another run directory than {folder}", kind="leftover")
    what = f"cannot write to {folder}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(what, f"free some space and {again}", kind="disk_full")
    return UserError(what, f"check the disk and the permissions of {folder}, then {again}", kind="cannot_write")
