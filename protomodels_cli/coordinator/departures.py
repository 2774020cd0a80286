"""Peers that are gone: their names, and how they went. Pure; a status shows them. It must not decide anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from protomodels_cli.coordinator import reasons

How = Literal["lost", "left", "kicked", "dismissed"]
MOST = 32  # that are remembered


@dataclass(frozen=True)
class Departed:
    name: str
    how: How
    at: float


def how_it_went(reason: reasons.Loss) -> How:
    match reason:
        case reasons.NoHeartbeat() | reasons.ConnectionClosed() | reasons.NotRenewed():
            return "lost"
        case reasons.AskedToLeave():
            return "left"
        case reasons.Kicked():
            return "kicked"
        case _:
            return "dismissed"


def with_new(
    departed: Mapping[str, Departed], new: Mapping[str, Departed], holders: Collection[str]
) -> dict[str, Departed]:
    """Those that went last, the newest last. The last holders of stages stay: a vacant stage names one."""
    found = {**{peer: d for peer, d in departed.items() if peer not in new}, **new}
    surplus = [peer for peer in found if peer not in holders][: max(0, len(found) - MOST)]
    return {peer: d for peer, d in found.items() if peer not in surplus}
