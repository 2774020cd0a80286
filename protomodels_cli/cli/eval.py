"""`pmtrain eval [MODEL]`: how well a trained model predicts text."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from protomodels_cli.cli.devices import DeviceOption, device_named
from protomodels_cli.cli.interrupt import leave_on_ctrl_c
from protomodels_cli.cli.output import FormatOption, OutputFile
from protomodels_cli.cli.place import ModelArgument, trained


def evaluate(
    model: ModelArgument = None,
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
    json_file: OutputFile = None,
    device: DeviceOption = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights in memory; bfloat16 takes half.")
    ] = "float32",
    output: FormatOption = "text",
) -> None:
    """Measure loss, perplexity and bits per byte of a trained model on a text."""
    leave_on_ctrl_c()
    place, where = trained(model, models=True), device_named(device)

    from protomodels_cli.inference.places import check_model

    check_model(place)

    from protomodels_cli.cli.run_eval import run

    run(place, data or [], field, windows, context, json_file, where, dtype, output)
