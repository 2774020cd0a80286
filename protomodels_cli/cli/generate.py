"""`pmtrain generate [MODEL]`: text from a trained model."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from protomodels_cli.cli.devices import DeviceOption, device_named
from protomodels_cli.cli.interrupt import leave_on_ctrl_c
from protomodels_cli.cli.place import ModelArgument, trained


def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to continue; - reads it from standard input, which a pipe does by itself."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Chance: 0 always takes the likeliest token, 1 draws as the model predicts.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that together have this share.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed: the same one, the same text. Default: any.")] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights in memory; bfloat16 takes half.")
    ] = "float32",
) -> None:
    """Continue a text with a trained model, word by word as they come.

    Only the text goes to standard output, the prompt first."""
    leave_on_ctrl_c()
    place, where = trained(model, models=True), device_named(device)

    from protomodels_cli.inference.places import check_model

    check_model(place)

    from protomodels_cli.cli.run_generate import run

    run(place, prompt, tokens, temperature, top_p, seed, where, dtype)
