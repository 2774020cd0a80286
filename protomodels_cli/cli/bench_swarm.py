"""`pmtrain bench swarm`: what a crowd of peers costs the coordinator."""

from __future__ import annotations

from typing import Annotated

import typer

from protomodels_cli.cli.output import OutputFile
from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError


def swarm(
    clients: Annotated[int, typer.Option(min=1, help="Peers, without a model of their own.")] = 1000,
    stages: Annotated[int, typer.Option(min=1, help="Stages that the clients hold.")] = 64,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes measured, once all have joined.")] = 3.0,
    churn: Annotated[float, typer.Option(min=0.0, help="Percent of clients replaced a minute.")] = 1.0,
    step_seconds: Annotated[float, typer.Option(min=0.01, help="Time from a step's grant to its last report.")] = 0.5,
    json_file: OutputFile = None,
) -> None:
    """Cost of a thousand peers: latency of commits and joins, the coordinator's CPU and memory, against 8 peers."""
    import json

    from protomodels_cli.bench.swarm import Crowd, measure
    from protomodels_cli.cli.checks import check_outputs

    check_outputs(json_file)
    if clients < stages:
        what = f"--clients {clients}: every stage needs a client, and there are {stages} stages"
        raise OptionError(what, f"use --clients {stages} or more, or fewer --stages", "clients")

    result = measure(Crowd(clients, stages, minutes, churn / 100, step_seconds), say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
