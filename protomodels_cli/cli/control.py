"""`pmtrain pause`, `resume`, `stop` and `kick`: what only the owner of a run may do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from protomodels_cli.cli.place import LED, complete_run, place_of
from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError

if TYPE_CHECKING:
    from protomodels_cli.wire.client import Operator
    from protomodels_cli.wire.join_link import JoinLink

T = TypeVar("T")

RunDirArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR",
        help="The run directory, or the run's name as `pmtrain runs` shows it.",
        autocompletion=complete_run,
    ),
]


def pause(run: RunDirArgument) -> None:
    """Pause a run: finish the step, save a snapshot, and wait for `resume`. Peers stay."""
    run_dir = _control(run, "PAUSE")
    say(f"pausing after this step; see `pmtrain status {run_dir}`, continue with `pmtrain resume {run_dir}`")


def resume(run: RunDirArgument) -> None:
    """Continue a paused run."""
    _control(run, "RESUME")
    say("resumed")


def stop(run: RunDirArgument) -> None:
    """Stop a run: finish the step, save a snapshot, dismiss the peers, and end the coordinator."""
    run_dir = _control(run, "STOP")
    say(f"stopping after this step; continue with `pmtrain coordinator --resume --run-dir {run_dir}`")


def kick(
    run: RunDirArgument,
    peer: Annotated[
        str, typer.Argument(metavar="PEER", help="The name or the id of the peer, as `pmtrain peers` shows them.")
    ],
) -> None:
    """Send a peer away for good. What it joined with lets nobody in any more, or it would be back as another."""
    from dataclasses import replace

    folder, link, kicked = ask_owner(run, lambda desk: desk.kick(peer))
    say(f"kicked {kicked.peer}")
    if kicked.token:
        say(f"the run has a new join link, also in {folder}/link:\n\n    {replace(link, token=kicked.token)}\n")
    elif kicked.revoked:
        say(f"nobody can join with the token {kicked.revoked} any more")


def _control(run: str, action: str) -> Path:
    """The run directory that was meant."""
    return ask_owner(run, lambda desk: desk.control(action))[0]


def ask_owner(run: str, what: Callable[[Operator], Awaitable[T]]) -> tuple[Path, JoinLink, T]:
    """The run directory that was meant, the link to its coordinator, and what that answers to its owner."""
    import asyncio

    from protomodels_cli.cli.asking import not_open
    from protomodels_cli.coordinator.run_dir import owner_secret
    from protomodels_cli.wire.client import operator
    from protomodels_cli.wire.join_link import JoinLink

    if run.startswith("pm:"):  # never printed: the token lets anyone join
        raise OptionError("a join link is not enough to control a run", "name the run directory", "join_link")
    place = place_of(run, LED)
    assert place.folder is not None
    owner = owner_secret(place.folder)
    if place.link is None:
        raise not_open(place)
    link = JoinLink.parse(place.link)

    async def ask() -> T:
        async with operator(link, owner) as coordinator:
            return await what(coordinator)

    return place.folder, link, asyncio.run(ask())
