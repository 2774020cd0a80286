"""`pmtrain export [RUN] OUT`: the trained model as a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from protomodels_cli.cli.interrupt import leave_on_ctrl_c
from protomodels_cli.cli.output import FormatOption
from protomodels_cli.cli.place import complete_run, run_and, trained


def export(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] OUT",
            help="The run, where there are several: its directory, its name, its join link, or a copy in a store (the "
            "folder or URL that snapshots.copy_to names). Then a new folder for the model.",
            autocompletion=complete_run,
        ),
    ],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the snapshot to export. Default: the newest complete one.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the weights in OUT. Default: the run's."),
    ] = None,
    output: FormatOption = "text",
) -> None:
    """Write the trained model as a Hugging Face checkpoint: a plain Llama, or with qk-norm a Qwen3.

    A model whose segments have anchors or a stream of their own is neither: it comes with a modelling file."""
    leave_on_ctrl_c()
    run, out = run_and(words, "OUT")

    from protomodels_cli.export.out import check_free
    from protomodels_cli.export.runs import run_at

    check_free(Path(out))
    place = trained(run)
    run_at(place)

    from protomodels_cli.cli.run_export import run as run_export

    run_export(place, Path(out), step, dtype, output)
