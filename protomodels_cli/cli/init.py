"""`pmtrain init [FILE]`: write a spec from a few answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from protomodels_cli.cli.line import HELP
from protomodels_cli.cli.output import FormatOption


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The spec to write.")] = Path("run.yaml"),
    size: Annotated[
        str | None, typer.Option(help="Parameters of the model, as 10M, 124M or 1.5B. Default: 124M.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="What to train on: files, folders or globs with commas between; hf:DATASET; builtin. Default: builtin."
        ),
    ] = None,
    peers: Annotated[int | None, typer.Option(min=1, max=1024, help="Machines that will join. Default: 4.")] = None,
    link: Annotated[str | None, typer.Option(help=f"Connection of the slowest, both ways: {HELP}")] = None,
    card: Annotated[
        str | None,
        typer.Option(help="Their card, as 'RTX 3090', the weakest where they differ: its memory and its speed."),
    ] = None,
    device: Annotated[Literal["gpu", "cpu"] | None, typer.Option(help="What they compute on. Default: gpu.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Free device memory of the smallest, as 11gib. Default: the card's; 11gib on a GPU, 4gib on a CPU."
        ),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(help="Speed of each, as 20tflops. Default: the card's; 20tflops on a GPU, 50gflops on a CPU."),
    ] = None,
    any_recipe: Annotated[
        bool, typer.Option("--any-recipe", help="Choose also among recipes that nobody has measured the loss of.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to train for. Default: for 20 tokens a parameter.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=2, max=1 << 24, help="Token ids, where the data are .bin shards. Default: 50257.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: the file's.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it exists.")] = False,
    output: FormatOption = "text",
) -> None:
    """Write a commented spec for a model, its data and your peers: shape, cut, compression, batch, snapshots.

    On a terminal it asks for what no option says. What does not fit, or would take more than a year, is refused."""
    from protomodels_cli.cli.run_init import Asked, run

    asked = Asked(size, data, peers, link, card, device, memory, speed, any_recipe, steps, vocabulary, name)
    run(file, asked, yes, force, output)
