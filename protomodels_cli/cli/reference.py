"""`pmtrain reference SPEC`: train the whole model in this one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.completing import spec_files
from protomodels_cli.cli.devices import NAMES, device_named
from protomodels_cli.cli.output import OutputFile


def reference(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC", help="The run's spec.", autocompletion=spec_files)],
    run_dir: Annotated[
        Path | None,
        typer.Option("--dir", "--run-dir", help="Folder for metrics and snapshots. Default: a new folder in runs/."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps. Default: all.")] = None,
    device: Annotated[
        str, typer.Option(help=f"Device: {NAMES}. Results are bit-identical to a pipeline's on cpu only.")
    ] = "cpu",
    json_file: OutputFile = None,
) -> None:
    """Train the whole model in one process: the reference whose numbers every pipeline must reproduce."""
    from protomodels_cli.spec import load_spec

    spec, where = load_spec(spec_file), device_named(device)

    from protomodels_cli.cli.run_reference import run

    run(spec, spec_file.parent, run_dir, min(steps or spec.steps, spec.steps), where, json_file)
