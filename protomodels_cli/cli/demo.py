"""`pmtrain demo`: a whole run on this machine, as real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.devices import NAMES, device_named
from protomodels_cli.cli.log_options import LogLevelOption, Verbose
from protomodels_cli.cli.output import OutputFile


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: those of the demo's spec.")] = None,
    stages: Annotated[int, typer.Option(min=1, help="Number of peers, each with one stage.")] = 4,
    device: Annotated[str, typer.Option(help=f"Device that every peer computes on: {NAMES}.")] = "cpu",
    run_dir: Annotated[
        Path | None, typer.Option("--dir", "--run-dir", help="The run directory. Default: a new folder in runs/.")
    ] = None,
    json_file: OutputFile = None,
    chaos: Annotated[
        int | None,
        typer.Option(
            metavar="SEED",
            help="Kill, stop and cut off peers and the coordinator at random, with this seed.",
        ),
    ] = None,
    verbose: Verbose = False,
    log_level: LogLevelOption = None,
) -> None:
    """Train a small model on this machine: a coordinator and four peers as processes that talk over TLS."""
    from protomodels_cli.cli.run_demo import run

    options = ["--verbose"] * verbose + (["--log-level", log_level] if log_level else [])
    run(steps, stages, device_named(device), run_dir, json_file, chaos, options)
