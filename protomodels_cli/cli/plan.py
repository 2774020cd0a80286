"""`pmtrain plan SPEC`: what a run would need and how fast it would go over a link."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.amounts import memory_of
from protomodels_cli.cli.completing import spec_files
from protomodels_cli.cli.devices import NAMES, device_named
from protomodels_cli.cli.line import HELP, LINE
from protomodels_cli.cli.output import FormatOption


def plan(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC", help="The run's spec.", autocompletion=spec_files)],
    link: Annotated[str, typer.Option(help=f"Connection of every peer, both ways, or none: {HELP}")] = LINE,
    peers: Annotated[
        int | None, typer.Option(min=1, help="Cut the model for this many peers. Default: the spec's stages.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Device memory of every peer, as 24gib. Default: enough.")
    ] = None,
    speed: Annotated[
        str | None, typer.Option(help="Speed of every peer, as 20gflops or 5tflops. Default: measured on this machine.")
    ] = None,
    card: Annotated[
        str | None, typer.Option(help="Every peer's card, as 'RTX 3090': its memory and its speed.")
    ] = None,
    any_recipe: Annotated[
        bool, typer.Option("--any-recipe", help="Recommend also what nobody has measured the loss of.")
    ] = False,
    device: Annotated[str, typer.Option(help=f"Device to measure if --speed is not given: {NAMES}.")] = "auto",
    output: FormatOption = "text",
) -> None:
    """Predict memory, bytes, step time and bottleneck, and recommend k and codec for a link."""
    from protomodels_cli.cli.run_plan import run

    found = memory_of(memory)
    gib = None if found is None else found / 2**30
    run(spec_file, link, peers, gib, speed, card, any_recipe, device_named(device), output)
