"""`--format json`: the one way in which commands speak to programs. What each prints is in json_formats.py."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

FORMAT = 1  # of all that is printed; higher where a field goes or changes its meaning, not where one is added

Format = Literal["text", "json"]
FormatOption = Annotated[Format, typer.Option("--format", help="For people, or for programs (docs/json.md).")]
OutputFile = Annotated[
    Path | None, typer.Option("--output", "--json", help="Write what was measured to this file, as JSON.")
]


def end_with_the_reader() -> None:
    """`pmtrain events RUN | head` ends quietly, as other commands do. Not for programs that talk over sockets."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def wait_with_the_reader(seconds: float) -> None:
    """Ends the program if whoever reads what it prints has left: else it would find out when it next has a line."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # that the other end is closed is always told
    if poll.poll(1000 * seconds):
        raise typer.Exit(0)


@contextlib.contextmanager
def beside_json(output: Format) -> Iterator[None]:
    """What is said meanwhile goes to standard error where a program reads standard output."""
    with contextlib.redirect_stdout(sys.stderr if output == "json" else sys.stdout):
        yield


def print_json(fields: Mapping[str, Any], line: bool = False) -> None:
    """`line`: on one, where more of them follow."""
    print(json.dumps({"format": FORMAT, **fields}, indent=None if line else 1, default=str), flush=line)
