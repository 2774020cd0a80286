"""Join links with tokens of their own: without them, all peers of one address count as one person."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from protomodels_cli.coordinator.run_dir import owner_secret
from protomodels_cli.wire.client import operator
from protomodels_cli.wire.join_link import JoinLink


def link_for(run_dir: Path, person: str) -> str:
    """For any number of peers of this person."""
    link = JoinLink.parse((run_dir / "link").read_text())

    async def create() -> str:
        async with operator(link, owner_secret(run_dir)) as owner:
            return (await owner.create_token(1000, 0.0, person)).token

    return str(replace(link, token=asyncio.run(create())))
