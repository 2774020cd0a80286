"""`pmtrain pause`, `resume`, `stop` and `kick`: what only the owner of a run may do."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from protomodels_cli.cli import on_disk
from protomodels_cli.cli.place import LED, LedArgument, complete_run, place_of, run_and
from protomodels_cli.cli.say import say
from protomodels_cli.coordinator.file_names import LOCK
from protomodels_cli.errors import EXIT_INTERRUPTED, OptionError, UserError

if TYPE_CHECKING:
    from protomodels_cli.wire.client import Operator
    from protomodels_cli.wire.join_link import JoinLink

T = TypeVar("T")

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do it without a question.")]


def pause(run: LedArgument = None) -> None:
    """Pause a run: finish the step, save a snapshot, and wait for `resume`. Peers stay."""
    run_dir, before = _control(run, "PAUSE")
    how = f"see `pmtrain status {run_dir}`, continue with `pmtrain resume {run_dir}`"
    say(f"the run is paused already; {how}" if before else f"pausing after this step; {how}")


def resume(run: LedArgument = None) -> None:
    """Continue a paused run."""
    _, before = _control(run, "RESUME")
    say("resumed" if before else "the run is not paused: it goes on as before")


def stop(run: LedArgument = None) -> None:
    """Stop a run: finish the step, save a snapshot, dismiss the peers, and end the coordinator."""
    run_dir, _ = _control(run, "STOP")
    say(f"stopping after this step; continue with `pmtrain coordinator --resume --dir {run_dir}`")


def kick(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] PEER",
            help="The run, where there are several, and the name or the id of the peer, as `pmtrain peers` shows them.",
            autocompletion=complete_run,
        ),
    ],
    yes: YesOption = False,
) -> None:
    """Send a peer away for good. What it joined with lets nobody in any more, or it would be back as another.

    The others stay, and have nothing to do."""
    from dataclasses import replace

    run, peer = run_and(words, "PEER")
    confirm(f"kick {peer}", f"kick {peer} for good? The other peers stay", yes)
    folder, link, kicked = ask_owner(run, lambda desk: desk.kick(peer))
    say(f"kicked {kicked.peer}; the peers that are in the run stay, and have nothing to do")
    if kicked.token:
        joining = f"pmtrain join '{replace(link, token=kicked.token)}'"
        say(f"the run has a new join link, also in {folder}/link; new peers join with:\n\n    {joining}\n")
    elif kicked.revoked:
        say(f"nobody can join with the token {kicked.revoked} any more")


def confirm(what: str, question: str, yes: bool) -> None:
    """Ask on a terminal. A program that calls us has to say --yes. Raises OptionError."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise OptionError(
            f"{what}: must be confirmed, and there is no terminal to ask on", "add --yes", "not_confirmed"
        )
    if not typer.confirm(question):
        say("nothing was done")
        raise typer.Exit(EXIT_INTERRUPTED)


def _control(run: str | None, action: str) -> tuple[Path, bool]:
    """The run directory that was meant, and whether the run was paused before."""

    async def ask(desk: Operator) -> bool:
        from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

        status = await desk.status()
        paused = status.phase == RunStatus.PAUSED or bool(status.reason_kind)
        if paused != (action == "PAUSE") or action == "STOP":
            await desk.control(action)
        return paused

    folder, _, paused = ask_owner(run, ask)
    return folder, paused


def ask_owner(run: str | None, what: Callable[[Operator], Awaitable[T]]) -> tuple[Path, JoinLink, T]:
    """The run directory that was meant, the link to its coordinator, and what that answers to its owner."""
    import asyncio

    from protomodels_cli.cli.asking import not_open
    from protomodels_cli.coordinator.run_dir import owner_secret
    from protomodels_cli.wire.client import operator
    from protomodels_cli.wire.join_link import FingerprintError, JoinLink, UnreachableError

    place = place_of(run, LED)
    assert place.folder is not None
    folder = place.folder
    owner = owner_secret(folder)
    if place.link is None:
        raise not_open(place) if on_disk.is_locked(folder / LOCK) else _not_led(folder)
    link = JoinLink.parse(place.link)

    async def ask() -> T:
        async with operator(link, owner) as coordinator:
            return await what(coordinator)

    try:
        return folder, link, asyncio.run(ask())
    except (UnreachableError, FingerprintError):
        if on_disk.is_locked(folder / LOCK):
            raise
        raise _not_led(folder) from None


def _not_led(folder: Path) -> UserError:
    if on_disk.look(folder, "run").state == "done":
        fix = f"take the model out with `pmtrain export {folder} OUT`"
        return UserError(f"the run in {folder} is done: there is no coordinator to ask", fix, "run_is_done")
    fix = f"start it with `pmtrain coordinator --resume --dir {folder}`"
    return UserError(f"the run in {folder} is not running: no coordinator leads it", fix, "not_running")
