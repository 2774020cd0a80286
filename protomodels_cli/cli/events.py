"""`pmtrain events RUN`: what happened in a run, and why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protomodels_cli.cli.output import FormatOption, end_with_the_reader, print_json, wait_with_the_reader
from protomodels_cli.cli.place import RunArgument, folder_of
from protomodels_cli.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")]
LastOption = Annotated[int | None, typer.Option("--last", "-n", min=1, help="Only this many, the newest.")]


def events(
    run: RunArgument = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only events of this kind or with such a reason; * stands for anything. May be repeated."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only later ones: 30min, 2h, 1d ago, or 2026-11-16T02:46.")
    ] = None,
    last: LastOption = None,
    follow: FollowOption = False,
    output: FormatOption = "text",
) -> None:
    """Show what happened in a run and why: who joined and was lost, stages assigned, snapshots, rollbacks.

    From the run directory on the coordinator's machine, or a peer's own from its folder; times are UTC."""
    from protomodels_cli.coordinator.file_names import EVENTS
    from protomodels_cli.observe.event_rows import Wanted, in_words
    from protomodels_cli.observe.tail import EVERY, Tail
    from protomodels_cli.worker.own_log import own_logs

    end_with_the_reader()
    wanted = Wanted(tuple(kind or ()), None if since is None else moment_of(since, time.time()))
    folder, found = folder_of(run)
    file = folder / EVENTS if found == "run" else own_logs(folder)[0].events
    reading = _Reading(Tail(file))
    shown: Iterator[dict[str, Any]] = filter(wanted, reading.rows())
    if last is not None:
        shown = iter(deque(shown, last))
    try:
        while True:
            for row in shown:
                if output == "json":
                    print_json(row, line=True)
                else:
                    print(in_words(row), flush=follow)
            if not follow:
                break
            wait_with_the_reader(EVERY)
            shown = filter(wanted, reading.rows())
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    reading.finish(file, wanted.kinds)


class _Reading:
    """The rows of a file, and what was seen of them."""

    def __init__(self, tail: Any):
        self._tail, self._kinds, self._unreadable = tail, set[str](), 0

    def rows(self) -> Iterator[dict[str, Any]]:
        from protomodels_cli.observe.event_rows import kinds_of, parse

        for line in self._tail.texts():
            if (row := parse(line)) is None:
                self._unreadable += 1
                continue
            self._kinds |= kinds_of(row)
            yield row

    def finish(self, file: Path, kinds: tuple[str, ...]) -> None:
        """Raises OptionError where a kind was asked for that no event has."""
        from protomodels_cli.observe.event_rows import unknown

        if self._unreadable:
            from protomodels_cli.quantities import plural

            typer.echo(f"{plural(self._unreadable, 'line')} of {file} cannot be read", err=True)
        missing = unknown(kinds, self._kinds)
        if missing and (missing := unknown(missing, known_kinds())):
            import difflib

            near = difflib.get_close_matches(missing[0], known_kinds(), 1)
            there = f"this run has {', '.join(sorted(self._kinds))}" if self._kinds else "nothing has happened yet"
            fix = f"use {near[0]}; {there}" if near else there
            raise OptionError(f"--kind {missing[0]}: there is no such kind of event", fix, "kind")


def known_kinds() -> set[str]:
    """Of all events and reasons that coordinators and peers know."""
    import dataclasses

    from protomodels_cli.coordinator import notices as _coordinators  # noqa: F401
    from protomodels_cli.facts import Fact
    from protomodels_cli.worker import notices as _peers  # noqa: F401

    found, todo = set[str](), [Fact]
    while todo:
        fact = todo.pop()
        todo += fact.__subclasses__()
        if dataclasses.is_dataclass(fact):
            found |= {str(field.default) for field in dataclasses.fields(fact) if field.name == "kind"}
    return found


def moment_of(text: str, now: float) -> float:
    """--since, in seconds since 1970. Raises OptionError."""
    from protomodels_cli.spec.units import long_seconds

    try:
        return now - long_seconds(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()  # this machine's zone where it names none
    except ValueError:
        fix = "write a time like 30min, 2h or 1d (ago), or a moment like 2026-11-16 or 2026-11-16T02:46Z"
        raise OptionError(f"--since {text}: neither a time nor a moment", fix, "since") from None
