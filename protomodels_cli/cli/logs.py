"""`pmtrain logs RUN`: the log of a coordinator or of a peer on this machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.events import FollowOption, LastOption
from protomodels_cli.cli.output import FormatOption, end_with_the_reader, print_json, wait_with_the_reader
from protomodels_cli.cli.place import RunArgument, folder_of
from protomodels_cli.errors import UserError


def logs(
    run: RunArgument = None,
    peer: Annotated[
        str | None, typer.Option(metavar="NAME", help="The log of this peer, which ran on this machine.")
    ] = None,
    last: LastOption = None,
    follow: FollowOption = False,
    output: FormatOption = "text",
) -> None:
    """Show the log of a run's coordinator, or with --peer of a peer; of a peer's folder, its own.

    Where several peers of this machine share a folder, --peer says which; otherwise it is the one that wrote last."""
    from protomodels_cli.observe.tail import EVERY, Tail

    end_with_the_reader()
    file = _file(run, peer)
    tail = Tail(file, rotated=True)
    lines: Iterable[str] = tail.texts()
    if output == "text" and last is not None:
        lines = deque(lines, last)
    try:
        while True:
            _show(lines, last, output == "json", follow)
            if not follow:
                return
            wait_with_the_reader(EVERY)
            lines, last = tail.texts(), None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _show(lines: Iterable[str], last: int | None, as_json: bool, at_once: bool) -> None:
    from protomodels_cli.observe.event_rows import printable
    from protomodels_cli.observe.log_lines import entries

    if as_json:
        found = entries(lines)
        for entry in found if last is None else deque(found, last):
            print_json(asdict(entry), line=True)
    else:
        for line in lines:
            print(printable(line), flush=at_once)


def _file(run: str | None, peer: str | None) -> Path:
    from protomodels_cli.cli.on_disk import peers_in, peers_of
    from protomodels_cli.coordinator.file_names import LOG
    from protomodels_cli.worker.own_log import own_logs

    folder, kind = folder_of(run)
    if peer is None:
        file = folder / LOG if kind == "run" else own_logs(folder)[0].log
        if not file.exists():
            raise UserError(f"{file} does not exist", "the program has begun no log yet: look again later", "no_log")
        return file
    here = peers_of(folder) if kind == "run" else peers_in(folder)
    if peer not in here:
        known = f"here are the logs of {', '.join(sorted(here))}" if here else "no peer of this run keeps its log here"
        fix = f"{known}; a peer's log is on its own machine: `pmtrain logs {folder.name}` there"
        raise UserError(f"--peer {peer}: no peer of this name has run on this machine", fix, "no_peer")
    return here[peer].log
