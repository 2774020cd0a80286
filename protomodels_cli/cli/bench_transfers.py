"""`pmtrain bench transfers`: what parts of snapshots on their way cost the steps."""

from __future__ import annotations

from typing import Annotated

import typer

from protomodels_cli.cli.output import OutputFile
from protomodels_cli.cli.say import say


def transfers(
    link: Annotated[str, typer.Option(help="BANDWIDTH,LATENCY of every peer's line, emulated.")] = "80mbit,25ms",
    size: Annotated[int, typer.Option(min=1, help="MiB of the part, about.")] = 1024,
    minutes: Annotated[float, typer.Option(min=1, help="Ends after this time, even if the part is not there.")] = 7.5,
    json_file: OutputFile = None,
) -> None:
    """Cost of fetching and uploading a part to the steps, on a line that both use, with yielding and without."""
    import json

    from protomodels_cli.bench.transfers import Setting, measure
    from protomodels_cli.cli.checks import check_outputs
    from protomodels_cli.spec.link import parse_link

    check_outputs(json_file)
    parse_link(link)
    result = measure(Setting(link, size << 20, minutes), say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
