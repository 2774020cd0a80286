"""A lane is a chain of holders, one for each stage, that are linked to each other. There is one today. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protomodels_cli.coordinator.peers import Peer


@dataclass(frozen=True)
class Lane:
    generation: int
    holders: tuple[str, ...]  # by stage
    here: tuple[Peer | None, ...]  # the same; None: it is away
    home: str  # the coordinator's address in the join link
