"""`pmtrain bench gpu`: cards under the pipeline and under plain torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError


def gpu(
    shape: Annotated[str, typer.Option(help="Shape of the model: 2b (the paper's), 1b, 8b, or tiny for a CPU.")] = "2b",
    layers: Annotated[int | None, typer.Option(min=1, help="Another number of layers than the shape's own.")] = None,
    stages: Annotated[
        str | None, typer.Option(help="Numbers of stages, as 1,8. Links are for the largest. Default: by shape.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="FORM/CODEC or FORM/CODEC/K, repeatable. Default: dense/bf16, dense/fp32 and reparam/int8 with --k."
        ),
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="Dimensions k of the subspace, for methods that name none.")] = 40,
    link: Annotated[
        list[str] | None, typer.Option(help="BANDWIDTH,LATENCY, repeatable; none: no link. Default: 80mbit,25ms.")
    ] = None,
    torch: Annotated[
        str, typer.Option(help="Plain torch to compare with: compile, eager and float32, or none.")
    ] = "compile,eager,float32",
    microbatch: Annotated[int | None, typer.Option(min=1, help="Windows a microbatch. Default: by shape.")] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="Windows a step, as 32,128: the first for all, others for subspaces over links only."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device that all peers share: auto, cpu or cuda:N.")] = "auto",
    devices: Annotated[str | None, typer.Option(help="GPUs to deal the peers out over, as 0,1.")] = None,
    dtype: Annotated[str, typer.Option(help="Value of compute.dtype in the runs.")] = "auto",
    compiled: Annotated[str, typer.Option("--compile", help="Value of compute.compile in the runs.")] = "auto",
    recompute: Annotated[str, typer.Option(help="Value of compute.recompute in the runs.")] = "auto",
    in_flight: Annotated[int | None, typer.Option(min=1, help="Value of batch.in_flight in the runs.")] = None,
    memory: Annotated[float | None, typer.Option(min=0.001, help="Most device memory of a peer, in GiB.")] = None,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before those that count.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, at most.")] = 8,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Time after which slow steps end, one of each kind at least.")
    ] = 30.0,
    limit: Annotated[float, typer.Option(min=1, help="Most seconds for a measurement, its start included.")] = 540.0,
    minutes: Annotated[float | None, typer.Option(min=0.1, help="Most minutes in all; a later call goes on.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(min=0.001, help="What MFU is of. Default: known for H200, H100 and A100 in bf16.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only these measurements: names or patterns as 'torch-*'.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the names of the measurements and end.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure again what failed before.")] = False,
    work: Annotated[
        Path | None, typer.Option(help="Folder for the runs and their logs, kept. Default: a temporary one.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "--json",
            "--out",
            help="Results: written after each measurement, those in it are not repeated.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw a picture to this file (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Speed of stages as processes on one card or several, with and without a link, beside plain torch."""
    import math
    import tempfile
    import time

    from protomodels_cli.bench import gpu as measuring
    from protomodels_cli.bench import gpu_cases as cases
    from protomodels_cli.bench import gpu_report as report
    from protomodels_cli.bench.gpu_run import Bench, ended_by_sigterm
    from protomodels_cli.bench.timing import Timing
    from protomodels_cli.bench.wan import Method
    from protomodels_cli.cli.checks import check_outputs, check_plot

    check_outputs(json_file)
    check_plot(plot)
    chosen = cases.shape_named(shape, layers)
    plan = cases.Plan(
        chosen,
        microbatch or chosen.microbatch,
        in_flight,
        {"dtype": dtype, "compile": compiled, "recompute": recompute},
    )
    methods = [Method.parse(text, k) for text in method or ("dense/bf16", "dense/fp32", "reparam/int8")]
    todo = cases.cases(
        cases.ways(torch),
        methods,
        cases.numbers("--stages", stages) if stages else chosen.stages,
        cases.numbers("--windows", windows) if windows else chosen.windows,
        cases.links(link or ["80mbit,25ms"]),
    )
    todo = cases.named(todo, only)
    plan.check(todo)
    bench = Bench(plan, _devices(device, devices), Timing(warm_up, steps, seconds), limit, memory)
    result = measuring.read(json_file, measuring.setting(bench))
    if listed:
        for case in todo:
            entry = result["entries"].get(case.name)
            say(f"{case.name}  {'to do' if entry is None else 'failed' if 'failed' in entry else 'done'}")
        return
    peak = peak_tflops * 1e12 if peak_tflops else measuring.peak_of(result["setting"]["hardware"])
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as temporary, ended_by_sigterm():
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measuring.measure(bench, todo, result, json_file, folder.resolve(), until, say, peak, again)
    say(report.in_words(result, peak))
    if plot is not None:
        report.plot(result, plot)


def _devices(one: str, several: str | None) -> tuple[str, ...]:
    from protomodels_cli.cli.checks import chosen_device

    if several is None:
        return (chosen_device(one),)
    if not re.fullmatch(r"\d+(,\d+)*", several):
        raise OptionError(
            f"--devices {several}: must be numbers of GPUs, separated by commas", "write for example 0,1", "devices"
        )
    return tuple(f"cuda:{number}" for number in several.split(","))
