"""`pmtrain bench …`: benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from protomodels_cli.cli.bench_abuse import abuse
from protomodels_cli.cli.bench_gpu import gpu
from protomodels_cli.cli.bench_recovery import recovery
from protomodels_cli.cli.bench_stage import stage
from protomodels_cli.cli.bench_swarm import swarm
from protomodels_cli.cli.bench_transfers import transfers
from protomodels_cli.cli.bench_viewers import viewers
from protomodels_cli.cli.output import OutputFile
from protomodels_cli.cli.say import say
from protomodels_cli.cli.usage import App, Commands

Measurement = Literal["overhead", "commit", "wire", "memory", "link"]
app = App(cls=Commands, no_args_is_help=True, help="Benchmarks: real runs, compared with each other.")


app.command()(abuse)
app.command()(gpu)
app.command()(recovery)
app.command()(stage)
app.command()(swarm)
app.command()(transfers)
app.command()(viewers)


@app.callback()
def bench() -> None:
    pass


@app.command()
def loopback(
    steps: Annotated[int, typer.Option(min=2, help="Training steps of the run whose CPU time is compared.")] = 40,
    only: Annotated[Measurement | None, typer.Option(help="Only this measurement.")] = None,
    json_file: OutputFile = None,
) -> None:
    """Overhead of the pipeline on this machine: CPU time, round trips per step, bytes at the socket, memory, links."""
    import json

    from protomodels_cli.bench.loopback import measure
    from protomodels_cli.cli.checks import check_outputs

    check_outputs(json_file)

    result = measure(steps, only, say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


@app.command()
def wan(
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="FORM/CODEC or FORM/CODEC/K, repeatable. Default: dense/bf16, dense/int8 and reparam/int8/16."
        ),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(help="BANDWIDTH,LATENCY, repeatable. Default: 80mbit,25ms, 10mbit,25ms and 5mbit,25ms."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=3, help="Most training steps of a run; the first two are not measured.")
    ] = 10,
    turns: Annotated[int, typer.Option(min=1, help="Repetitions of each run, taking turns.")] = 1,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Emulate the link inside pmtrain: needs no root, and leaves torch out.")
    ] = False,
    torch: Annotated[bool, typer.Option(help="Measure torch.distributed.pipelining too.")] = True,
    json_file: OutputFile = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw a picture to this file (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Speed over slow links, compared with the bounds and with torch.distributed.pipelining on the same link."""
    import json
    import sys

    from protomodels_cli.bench import wan_report
    from protomodels_cli.bench.wan import Method, measure
    from protomodels_cli.cli.checks import check_outputs, check_plot
    from protomodels_cli.launch.hosts import require
    from protomodels_cli.spec.link import parse_link

    check_outputs(json_file)
    check_plot(plot)
    methods = [Method.parse(text) for text in method or ("dense/bf16", "dense/int8", "reparam/int8/16")]
    links = link or ["80mbit,25ms", "10mbit,25ms", "5mbit,25ms"]
    for text in links:
        parse_link(text)
    if not emulated:
        require()

    result = measure(methods, links, steps, turns, not emulated, torch, lambda text: print(text, file=sys.stderr))
    say(wan_report.in_words(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None:
        wan_report.plot(result, plot)
