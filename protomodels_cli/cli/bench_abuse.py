"""`pmtrain bench abuse`: what attackers of the coordinator's port cost the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.say import say


def abuse(
    connections: Annotated[int, typer.Option(min=1, max=5000, help="Connections that say nothing.")] = 1000,
    slow: Annotated[int, typer.Option(min=0, max=1000, help="Connections that say a byte a second.")] = 100,
    rate: Annotated[float, typer.Option(min=1, help="Messages that are none, a second.")] = 1000.0,
    link: Annotated[str, typer.Option(help="BANDWIDTH,LATENCY of every peer's line, emulated.")] = "10mbit,25ms",
    seconds: Annotated[float, typer.Option(min=1, help="Length of a phase, at least.")] = 20.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a phase, at least.")] = 30,
    turns: Annotated[int, typer.Option(min=1, help="Repetitions of the three phases.")] = 3,
    cores: Annotated[float, typer.Option(min=0.05, max=8, help="Cores that the attacker may use.")] = 0.5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Cost of attacks on the coordinator's port to a link-bound run, against the same attacks on an unrelated port."""
    import json

    from protomodels_cli.bench.abuse import Setting, measure
    from protomodels_cli.cli.checks import check_outputs
    from protomodels_cli.spec.link import parse_link

    check_outputs(json_file)
    parse_link(link)
    result = measure(Setting(connections, slow, rate, link, seconds, turns, steps, cores), say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
