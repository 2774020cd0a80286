"""Which run a command means: a join link, a folder, the name of a run on this machine, or the only one there is."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from protomodels_cli.cli import on_disk
from protomodels_cli.coordinator.file_names import LINK
from protomodels_cli.errors import OptionError, UserError

LED: tuple[on_disk.Kind, ...] = ("run",)
READABLE: tuple[on_disk.Kind, ...] = (*LED, "peer")
TRAINED: tuple[on_disk.Kind, ...] = (*LED, "reference")  # what has snapshots
ONLY = "Default: the only one on this machine."


def complete_run(incomplete: str) -> list[str]:
    """For the shell: the names of the runs here. Folders it completes by itself."""
    try:
        return [name for name in on_disk.names() if name.startswith(incomplete)]
    except OSError:
        return []


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help=f"A run directory, a run's name as `pmtrain runs` shows it, or a join link. {ONLY}",
        autocompletion=complete_run,
    ),
]
LedArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help=f"A run that is led on this machine: its directory, its name, or its join link. {ONLY}",
        autocompletion=complete_run,
    ),
]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help=f"An exported folder, or a run: its directory, its name, or its join link. {ONLY}",
        autocompletion=complete_run,
    ),
]


def run_and(words: list[str], name: str) -> tuple[str | None, str]:
    """`[RUN] NAME` on a command line, whose last word is the one that cannot be left out."""
    if len(words) > 2:
        fix = f"write [RUN] {name}, each in quotes where it has a space"
        raise OptionError(f"{' '.join(words)}: {len(words)} words where at most 2 are expected", fix, "too_many_words")
    return (words[0] if len(words) == 2 else None), words[-1]


@dataclass(frozen=True)
class Place:
    """Where a run can be asked about: a coordinator's folder, a peer's folder, or a link alone."""

    folder: Path | None
    kind: on_disk.Kind | None  # of the folder
    link: str | None  # None: the folder has none (yet)


def place_of(text: str | None, kinds: Collection[on_disk.Kind] = READABLE) -> Place:
    """Raises UserError."""
    if text is not None and "://" in text and "peer" in kinds:  # a link is enough to look on
        return Place(None, None, text)
    folder = _found(text, kinds)
    kind = on_disk.kind_of(folder)
    if kind is None or kind not in kinds:
        _refuse(text or str(folder), folder, kind)
    try:
        return Place(folder, kind, (folder / LINK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Place(folder, kind, None)


def _found(text: str | None, kinds: Collection[on_disk.Kind]) -> Path:
    if text is None:
        return the_only_one(kinds)
    if "://" in text:
        return _of_link(text, kinds)
    folder = Path(text)
    return folder if folder.exists() else _by_name(text, kinds)


def the_only_one(kinds: Collection[on_disk.Kind]) -> Path:
    """That runs here; if none does, that is here. Raises UserError."""
    here = [one for one in on_disk.everything() if one.kind in kinds]
    running = [one for one in here if one.state == "running"]
    led = [one for one in running if one.kind == "run"]  # who leads a run knows it best
    found = led or running or here
    if len(found) == 1:
        return found[0].path
    if found:
        names = _list([one.path for one in found])
        what = f"several runs are {'at work' if running else 'here'}: {names}"
        raise UserError(what, f"name one of them, as {found[0].path}", "several_runs")
    raise UserError(
        "no run is led or joined on this machine, as far as this folder and peers' folders show",
        "name a run directory, or begin one with `pmtrain init` and `pmtrain coordinator`",
        "no_run",
    )


def _of_link(text: str, kinds: Collection[on_disk.Kind]) -> Path:
    """The run's own folder here. The link is never printed: its token lets anyone join."""
    from protomodels_cli.wire.join_link import JoinLink

    asked = JoinLink.parse(text).fingerprint[:8]
    for one in on_disk.everything():
        if one.kind in kinds and on_disk.fingerprint_of(one.path) == asked:
            return one.path
    raise UserError(
        "a join link is not enough for this, and its run directory is not on this machine",
        "do it on the coordinator's machine, or name the run directory",
        "join_link",
    )


def folder_of(text: str | None, kinds: Collection[on_disk.Kind] = READABLE) -> tuple[Path, on_disk.Kind]:
    """For what only a folder has. Raises UserError."""
    place = place_of(text, kinds)
    if place.folder is None or place.kind is None:  # the link is never printed: its token lets anyone join
        raise UserError(
            "a join link shows a run's state alone: events and logs are in the folders of coordinator and peers",
            "name a run directory or a peer's folder on this machine (see `pmtrain runs`), or use `pmtrain top`",
            "link_not_enough",
        )
    return place.folder, place.kind


def folder_to_delete(text: str) -> tuple[Path, on_disk.Kind]:
    """A folder of a run or a peer, or what is left of a start that failed; never one that is not ours."""
    kinds: tuple[on_disk.Kind, ...] = (*TRAINED, "peer")
    folder = _found(text, kinds)
    kind = on_disk.kind_of(folder)
    if kind not in kinds:
        _refuse(text, folder, kind)
    if folder.is_symlink() or folder.resolve() in (Path.cwd(), *Path.cwd().parents, Path.home()):
        fix = "go elsewhere, or delete it by hand"
        raise UserError(f"{text} is a link, or the folder that you are in or above it", fix, "not_deletable")
    return folder, kind


def trained(text: str | None, models: bool = False) -> str:
    """Where a run's snapshots are: a run directory, a store's address, or with `models` an exported folder too."""
    if text is not None and not text.startswith("pm:") and ("://" in text or Path(text).exists()):
        return text
    if models and text is not None and (found := on_disk.model_named(text)):
        return str(found)
    return str(_found(text, TRAINED))


def _by_name(text: str, kinds: Collection[on_disk.Kind] = READABLE) -> Path:
    found = on_disk.named(text)
    if found and "peer" not in kinds:  # a peer of the same run may have a folder here too
        found = [path for path in found if on_disk.kind_of(path) in kinds] or found
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
