"""`pmtrain bench recovery`: what faults cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from protomodels_cli.cli.output import OutputFile
from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError

Recovery = Literal["takeover", "snapshots", "journal", "month"]


def recovery(
    turns: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement with real processes.")] = 3,
    runs: Annotated[int, typer.Option(min=0, help="Runs of a day in virtual time that the bound is checked in.")] = 100,
    months: Annotated[int, typer.Option(min=1, help="Months in virtual time, of each kind.")] = 4,
    seed: Annotated[int, typer.Option(help="The first month's seed; the others and the runs have the next ones.")] = 0,
    rates: Annotated[float, typer.Option(min=0.01, help="Months with so many times the faults, too.")] = 3.0,
    only: Annotated[Recovery | None, typer.Option(help="Only this measurement.")] = None,
    json_file: OutputFile = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the month to this file (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Cost of faults: time to notice and to continue, snapshots during the steps, a restart after a million steps; and
    a month of an 8B model on home machines, in virtual time."""
    import json

    from protomodels_cli.bench.recovery import measure
    from protomodels_cli.cli.checks import check_outputs, check_plot

    check_outputs(json_file)
    check_plot(plot)
    if plot is not None and only not in (None, "month"):
        what = f"--plot {plot}: the picture is of the month, and --only {only} leaves that out"
        raise OptionError(what, "use --only month, or no --plot", "plot")

    result = measure(turns, only, say, runs=runs, rates=rates, months=months, seed=seed)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None:
        from protomodels_cli.bench.month_report import plot as draw

        draw(result["month"], plot)
