"""`pmtrain bench viewers`: what viewers of the page cost the steps."""

from __future__ import annotations

from typing import Annotated

import typer

from protomodels_cli.cli.output import OutputFile
from protomodels_cli.cli.say import say


def viewers(
    count: Annotated[int, typer.Option(min=1, max=400, help="Browsers that watch at a time.")] = 200,
    link: Annotated[str, typer.Option(help="BANDWIDTH,LATENCY of every peer's line, emulated.")] = "10mbit,25ms",
    seconds: Annotated[float, typer.Option(min=1, help="Length of a phase.")] = 20.0,
    turns: Annotated[int, typer.Option(min=1, help="Repetitions of the three phases.")] = 4,
    json_file: OutputFile = None,
) -> None:
    """Cost of viewers of the page to a link-bound run's steps, against the same load on an unrelated port."""
    import json

    from protomodels_cli.bench.viewers import Setting, measure
    from protomodels_cli.cli.checks import check_outputs
    from protomodels_cli.spec.link import parse_link

    check_outputs(json_file)
    parse_link(link)
    result = measure(Setting(count, link, seconds, turns), say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
