"""How what keeps a peer from working reads, at the peer and at the coordinator alike."""

from __future__ import annotations

from typing import assert_never

from protomodels_cli.quantities import duration
from protomodels_cli.wire.troubles import (
    DeviceStuck,
    Failed,
    InvalidFeed,
    InvalidInput,
    LinkBroken,
    LinkNotOpened,
    OutOfMemory,
    PartNotWritten,
    Trouble,
)


def in_words(trouble: Trouble) -> str:
    """After "trouble at desk (stage 1): "."""
    match trouble:
        case LinkBroken(stage, detail):
            return f"the link to stage {stage} broke" + (f" ({detail})" if detail else "")
        case LinkNotOpened(stage, detail):
            return f"the link to stage {stage} did not open: {detail}"
        case InvalidInput(stage, detail):
            return f"received an invalid message from stage {stage}: {detail}"
        case InvalidFeed(_, detail):
            return f"received an invalid message from the coordinator: {detail}"
        case OutOfMemory(detail):
            return f"the device ran out of memory: {detail}"
        case DeviceStuck(seconds):
            return f"the device did not finish one piece of work within {duration(seconds)} (limits.device_seconds)"
        case PartNotWritten(detail):
            return f"could not write the fetched part of a snapshot to disk: {detail}"
        case Failed(detail):
            return f"failed: {detail}"
        case _:
            assert_never(trouble)
