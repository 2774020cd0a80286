"""`pmtrain pause`, `pmtrain resume` and `pmtrain stop`: what only the owner of a run may do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError

RunDirArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory.")]


def pause(run_dir: RunDirArgument) -> None:
    """Pause a run: finish the step, save a snapshot, and wait for `resume`. Peers stay."""
    _control(run_dir, "PAUSE")
    say(f"pausing after this step; see `pmtrain status {run_dir}`, continue with `pmtrain resume {run_dir}`")


def resume(run_dir: RunDirArgument) -> None:
    """Continue a paused run."""
    _control(run_dir, "RESUME")
    say("resumed")


def stop(run_dir: RunDirArgument) -> None:
    """Stop a run: finish the step, save a snapshot, dismiss the peers, and end the coordinator."""
    _control(run_dir, "STOP")
    say(f"stopping after this step; continue with `pmtrain coordinator --resume --run-dir {run_dir}`")


def _control(run_dir: Path, action: str) -> None:
    from protomodels_cli.coordinator.run_dir import owner_secret
    from protomodels_cli.wire.client import operator
    from protomodels_cli.wire.join_link import JoinLink

    if str(run_dir).startswith("pm:"):  # never printed: the token lets anyone join
        raise OptionError("a join link is not enough to control a run", "name the run directory", "join_link")
    owner = owner_secret(run_dir)
    link = JoinLink.parse((run_dir / "link").read_text(encoding="utf-8"))

    async def tell() -> None:
        async with operator(link) as coordinator:
            await coordinator.control(action, owner)

    asyncio.run(tell())
