"""`pmtrain bench …`: benchmarks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.say import say


class Part(StrEnum):
    overhead = "overhead"
    commit = "commit"
    wire = "wire"
    memory = "memory"


app = typer.Typer(no_args_is_help=True, help="Benchmarks: real runs, measured as ratios.")


@app.callback()
def bench() -> None:
    pass


@app.command()
def loopback(
    steps: Annotated[int, typer.Option(min=2, help="Steps of the run whose CPU time is compared.")] = 40,
    only: Annotated[Part | None, typer.Option(help="One part of it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """What the pipeline costs on this machine: CPU time, round trips a step, bytes at the socket, memory."""
    import json

    from protomodels_cli.bench.loopback import measure
    from protomodels_cli.cli.checks import check_outputs

    check_outputs(json_file)

    result = measure(steps, only, say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
