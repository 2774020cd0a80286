"""`pmtrain doctor [LINK]`: can this machine take part in a run?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.devices import DeviceOption, device_named
from protomodels_cli.cli.output import FormatOption


def doctor(
    link: Annotated[
        str | None,
        typer.Argument(
            metavar="[LINK]",
            envvar="PMTRAIN_LINK",
            help="The join link, or a file with it; without one only this machine is checked.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port at which neighbours would connect; 0: any free one.")
    ] = 0,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder for a peer's files. Default: pmtrain/peers in $XDG_DATA_HOME.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Whether to measure the line: up to 14 MiB in 5 s.")
    ] = True,
    output: FormatOption = "text",
) -> None:
    """Check this machine and its line to a coordinator, and say for each problem what to do.

    Holds no stage. The exit code is 0 where nothing fails, 3 where this machine or its line does, and 5 where the
    coordinator refuses."""
    from protomodels_cli.cli.run_doctor import run

    raise typer.Exit(run(link, device_named(device), port, folder, measure, output))
