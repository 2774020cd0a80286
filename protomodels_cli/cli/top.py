"""`pmtrain top [RUN]`: a run live, from anywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from protomodels_cli.cli.output import FormatOption
from protomodels_cli.cli.place import complete_run


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run directory, a run's name as `pmtrain runs` shows it, or a join link. Default: the one run that "
            "is led or joined on this machine.",
            autocompletion=complete_run,
        ),
    ] = None,
    output: FormatOption = "text",
) -> None:
    """Watch a run live: stages, peers, speed, what it waits for. Changes nothing; q or Ctrl-C leaves.

    Reconnects by itself. Without a terminal it prints a line now and then."""
    from protomodels_cli.cli.run_top import run as run_top

    run_top(run, output)
