"""Which run a command means: a join link, a folder, or the name of a run on this machine."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from protomodels_cli.cli import on_disk
from protomodels_cli.coordinator.file_names import LINK
from protomodels_cli.errors import UserError

LED: tuple[on_disk.Kind, ...] = ("run",)
READABLE: tuple[on_disk.Kind, ...] = (*LED, "peer")


def complete_run(incomplete: str) -> list[str]:
    """For the shell: the names of the runs here. Folders it completes by itself."""
    try:
        return [name for name in on_disk.names() if name.startswith(incomplete)]
    except OSError:
        return []


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run directory, a run's name as `pmtrain runs` shows it, or a join link.",
        autocompletion=complete_run,
    ),
]


@dataclass(frozen=True)
class Place:
    """Where a run can be asked about: a coordinator's folder, a peer's folder, or a link alone."""

    folder: Path | None
    kind: on_disk.Kind | None  # of the folder
    link: str | None  # None: the folder has none (yet)


def place_of(text: str, kinds: Collection[on_disk.Kind] = READABLE) -> Place:
    """Raises UserError."""
    if "://" in text:
        return Place(None, None, text)
    folder = Path(text)
    if not folder.exists():
        folder = _by_name(text)
    kind = on_disk.kind_of(folder)
    if kind is None or kind not in kinds:
        _refuse(text, folder, kind)
    try:
        return Place(folder, kind, (folder / LINK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Place(folder, kind, None)


def folder_of(text: str, kinds: Collection[on_disk.Kind] = READABLE) -> tuple[Path, on_disk.Kind]:
    """For what only a folder has. Raises UserError."""
    place = place_of(text, kinds)
    if place.folder is None or place.kind is None:  # the link is never printed: its token lets anyone join
        raise UserError(
            "a join link shows a run's state alone: events and logs are in the folders of coordinator and peers",
            "name a run directory or a peer's folder on this machine (see `pmtrain runs`), or use `pmtrain top`",
            "link_not_enough",
        )
    return place.folder, place.kind


def _by_name(text: str) -> Path:
    found = on_disk.named(text)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{text} may be any of {_list(found)}", f"name one of them, as {found[0]}", "several_runs")
    near = difflib.get_close_matches(text.removeprefix("runs/"), on_disk.names(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"{text}: there is no such folder, nor a run with this name here",
        f"{hint}`pmtrain runs` lists what is on this machine; elsewhere, name the join link (pm://…)",
        "no_run",
    )


def _refuse(text: str, folder: Path, kind: on_disk.Kind | None) -> NoReturn:
    if kind == "model":
        fix = f"use `pmtrain generate {text}` or `pmtrain eval {text}`, or name the run it came from"
        raise UserError(f"{text} is an exported model, not a run directory", fix, "no_run")
    if kind == "reference":
        fix = f"see {folder}/metrics.jsonl; `pmtrain export` and `pmtrain eval` take such a run"
        raise UserError(f"{text} is a run of `pmtrain reference`, which no coordinator leads", fix, "no_run")
    if kind == "peer":
        fix = "do that on the coordinator's machine, in the run directory"
        raise UserError(f"{text} is a peer's folder, not a run directory", fix, "no_run")
    below = [path for path in sorted(folder.iterdir()) if on_disk.kind_of(path) == "run"] if folder.is_dir() else []
    fix = f"name one of those in it, as {below[0]}" if below else "`pmtrain runs` lists what is on this machine"
    raise UserError(f"{text} is not a run directory", f"{fix}, or name a join link (pm://…)", "no_run")


def _list(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))
