"""`pmtrain rest` and `pmtrain wake`: a peer hands its stage over and waits, and takes part again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protomodels_cli.cli import on_disk
from protomodels_cli.cli.control import ask_owner
from protomodels_cli.cli.place import complete_run, folder_of
from protomodels_cli.cli.say import say
from protomodels_cli.errors import UserError

if TYPE_CHECKING:
    from protomodels_cli.worker.resting import Word

PeerArgument = Annotated[
    str | None,
    typer.Argument(metavar="[PEER]", help="The name or the id of a peer. Default: all that run on this machine."),
]
RunOption = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="The run that is meant. On the coordinator's machine its owner names any PEER of it.",
        autocompletion=complete_run,
    ),
]


def rest(peer: PeerArgument = None, run: RunOption = None) -> None:
    """Let a peer rest: it finishes the step, hands its stage over, and stays without one until `wake`."""
    _say("rest", peer, run)


def wake(peer: PeerArgument = None, run: RunOption = None) -> None:
    """Wake a peer that rests: it takes part again, also outside its `--hours`."""
    _say("wake", peer, run)


def _say(word: Word, peer: str | None, run: str | None) -> None:
    told = "rests after this step; `pmtrain wake` ends that" if word == "rest" else "is awake"
    folders = [found.path for found in on_disk.everything() if found.kind == "peer"]
    if run is not None:
        folder, kind = folder_of(run)
        if kind == "run":
            if peer is None:
                what = f"{run} is a run that is led here, and no PEER is named"
                raise UserError(what, f"name one, as `pmtrain peers {run}` shows it", "no_peer")
            ask_owner(run, lambda desk: desk.rest(peer, over=word == "wake"))
            say(f"{peer} {told}")
            return
        folders = [folder]
    for name in _tell(word, peer, folders):
        say(f"{name} {told}")


def _tell(word: Word, peer: str | None, folders: list[Path]) -> list[str]:
    """The names of those that were told."""
    from protomodels_cli.worker import resting

    here = [(folder, *found) for folder in folders for found in resting.running_in(folder)]
    meant = [one for one in here if peer is None or peer in one[1:]]
    if not meant:
        names = ", ".join(sorted(name for _, _, name in here))
        who = "no peer runs on this machine" if peer is None else f"no peer {peer!r} runs on this machine"
        fix = (
            f"name one that does: {names}" if names else "join first; a peer in a folder of its own needs --run FOLDER"
        )
        raise UserError(who, f"{fix}; the owner of a run adds --run RUN", "no_peer")
    for folder, id_, _ in meant:
        try:
            resting.tell(folder, id_, word)
        except OSError as e:
            raise UserError(
                f"cannot write to {folder}: {e.strerror or e}", "run this as the peer's user", "folder"
            ) from e
    return [name for *_, name in meant]
