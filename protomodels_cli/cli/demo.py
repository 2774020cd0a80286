"""`pmtrain demo`: a whole run on this machine, as real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.log_options import LogLevelOption, Verbose


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Steps. Default: as the demo's spec says.")] = None,
    stages: Annotated[int, typer.Option(min=1, help="Peers, each with one stage.")] = 4,
    device: Annotated[str, typer.Option(help="What every peer computes on: cpu, cuda:N or mps.")] = "cpu",
    run_dir: Annotated[Path | None, typer.Option(help="Where the run goes. Default: a new folder in runs/.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write a summary here.")] = None,
    chaos: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Kill, stop and cut off peers and the coordinator all the while."),
    ] = None,
    verbose: Verbose = False,
    log_level: LogLevelOption = None,
) -> None:
    """Train a small model on this machine: a coordinator and four peers that talk over TLS, as they would apart."""
    from protomodels_cli.cli.run_demo import run

    options = ["--verbose"] * verbose + (["--log-level", log_level.value] if log_level else [])
    run(steps, stages, device, run_dir, json_file, chaos, options)
