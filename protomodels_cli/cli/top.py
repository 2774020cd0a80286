"""`pmtrain top [RUN]`: a run live, from anywhere."""

from __future__ import annotations

from protomodels_cli.cli.output import FormatOption
from protomodels_cli.cli.place import RunArgument


def top(
    run: RunArgument = None,
    output: FormatOption = "text",
) -> None:
    """Watch a run live: stages, peers, speed, what it waits for. Changes nothing; q or Ctrl-C leaves.

    Reconnects by itself. Without a terminal it prints a line now and then."""
    from protomodels_cli.cli.run_top import run as run_top

    run_top(run, output)
