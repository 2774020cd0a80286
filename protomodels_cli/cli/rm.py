"""`pmtrain rm RUN`: delete a run's folder, or a peer's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli import on_disk
from protomodels_cli.cli.control import YesOption, confirm
from protomodels_cli.cli.place import complete_run, folder_to_delete
from protomodels_cli.cli.say import say
from protomodels_cli.errors import UserError


def rm(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a peer's folder, or a run's name as `pmtrain runs` shows it.",
            autocompletion=complete_run,
        ),
    ],
    yes: YesOption = False,
) -> None:
    """Delete what a run left on this machine: its journal, its snapshots, its logs. Nothing brings them back.

    Refuses where a coordinator or a peer is at work. Exported models stay, unless they are in the folder."""
    from protomodels_cli.quantities import size

    folder, kind = folder_to_delete(run)
    found = on_disk.look(folder, kind)
    if busy := _at_work(folder):
        what = f"{folder} is in use: a {'coordinator' if busy == folder else 'peer'} is at work in {busy}"
        fix = f"stop the run first: `pmtrain stop {folder}`" if kind == "run" else "stop that peer first, with Ctrl-C"
        raise UserError(what, fix, "run_in_use")
    step = "" if found.step is None else f", step {found.step} of {found.steps}"
    confirm(f"rm {folder}", f"delete {folder} ({size(found.bytes)}{step})?", yes)
    try:
        shutil.rmtree(folder)
    except OSError as e:
        fix = "delete it as the user who owns it"
        raise UserError(f"cannot delete {e.filename}: {e.strerror}", fix, "cannot_delete") from None
    say(f"deleted {folder}")


def _at_work(folder: Path) -> Path | None:
    """The folder in which somebody of ours is at work: this one, or one below it."""
    locks = (folder / on_disk.LOCK, *folder.rglob(on_disk.LOCK))
    return next((lock.parent for lock in locks if on_disk.is_locked(lock)), None)
