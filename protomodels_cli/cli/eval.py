"""`pmtrain eval MODEL`: how well a trained model predicts text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from protomodels_cli.cli.interrupt import leave_on_ctrl_c


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An exported folder, or a run directory.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="File, folder, pattern, builtin, hf:DATASET, or any other SOURCE:NAME; may be given several times. "
            "Text, .jsonl, .parquet, or .bin with ids. Default: the held-out windows of a run directory.",
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Field or column of .jsonl and .parquet files that holds the text.")
    ] = "text",
    windows: Annotated[
        int | None, typer.Option(min=1, help="Most windows to score. Default: all; of a run, the spec's eval.windows.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a window. Default: the model's context.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    device: Annotated[str, typer.Option(help="Device to compute on: auto, cpu or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights in memory; bfloat16 takes half.")
    ] = "float32",
) -> None:
    """Measure loss, perplexity and bits per byte of a trained model on a text."""
    leave_on_ctrl_c()

    from protomodels_cli.cli.run_eval import run

    run(model, data or [], field, windows, context, json_file, device, dtype)
