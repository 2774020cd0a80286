"""`pmtrain lab …`: the paper's experiments, each a command with --json and --plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from protomodels_cli.cli.output import OutputFile
from protomodels_cli.cli.usage import App, Commands

app = App(
    cls=Commands,
    no_args_is_help=True,
    help="Experiments that test the method's claims, each a command with --json and --plot.",
)

Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of weights, U and data order.")]
Device = Annotated[str, typer.Option(help="Device: cpu, cuda or cuda:N.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw a picture to this file (.png, .svg or .pdf).")]

KeepFile = Annotated[
    Path | None, typer.Option(help="Save finished runs in this file, and do not repeat those that are in it.")
]
ScaleSteps = Annotated[int | None, typer.Option("--steps", min=1, help="Training steps of a run. Default: by scale.")]


@app.command()
def reconstruct(
    steps: Steps = 200, seed: Seed = 0, device: Device = "cpu", json: OutputFile = None, plot: PlotFile = None
) -> None:
    """Does a boundary lose anything? Errors of forward and backward against a plain Llama without boundaries."""
    from protomodels_cli.lab import reconstruct as experiment

    _run(experiment, json, plot, device, steps, seed)


@app.command()
def optimizer(
    steps: Steps = 500, seed: Seed = 0, device: Device = "cpu", json: OutputFile = None, plot: PlotFile = None
) -> None:
    """Which optimizers keep the weights in the subspace? Drift of row AdamW, Muon, AdamW and sign updates."""
    from protomodels_cli.lab import optimizer as experiment

    _run(experiment, json, plot, device, steps, seed)


@app.command()
def rank(
    steps: Steps = 600, seed: Seed = 0, device: Device = "cpu", json: OutputFile = None, plot: PlotFile = None
) -> None:
    """Do matrices lose rank by themselves? Stable rank in a transformer, a CNN, a vision transformer, a mixer."""
    from protomodels_cli.cli.checks import check_extra

    check_extra("sklearn", "the image models")
    from protomodels_cli.lab import rank as experiment

    _run(experiment, json, plot, device, steps, seed)


@app.command()
def grassmann(
    updates: Annotated[int, typer.Option(min=4, help="Updates of U.")] = 40,
    interval: Annotated[int, typer.Option(min=3, help="Steps between updates.")] = 10,
    seed: Seed = 0,
    device: Device = "cpu",
    json: OutputFile = None,
    plot: PlotFile = None,
) -> None:
    """Does a moving subspace converge or oscillate? Angles, eigenvalues and captured energy over many updates."""
    from protomodels_cli.lab import grassmann as experiment

    _run(experiment, json, plot, device, updates, interval, seed)


ScaleSeeds = Annotated[
    int | None, typer.Option("--seeds", min=1, help="Seeds of the rows that matter. Default: by scale.")
]
Only = Annotated[list[str] | None, typer.Option(help="Only what has this in its name; NAME or NAME,NAME. Repeatable.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Runs side by side. Default: by scale.")]
Budget = Annotated[
    float | None,
    typer.Option(
        min=0, help="Seconds: start no run that is not expected to finish within them. 0: show what --keep has."
    ),
]
TextFile = Annotated[
    str | None,
    typer.Option(
        "--text", help="Text to train on: a file (.txt, .jsonl, .zst …), a folder, a pattern, or tokens (.bin)."
    ),
]
Rates = Annotated[Path | None, typer.Option(help="Start from the rates in this file, which lab frontier --json wrote.")]
ListOnly = Annotated[bool, typer.Option("--list", help="List the runs with their tokens, and train nothing.")]


@app.command()
def frontier(
    scale: Annotated[
        str, typer.Option(help="Size of the experiment: cpu (minutes on two cores), gpu (d = 512) or gpu-1024.")
    ] = "cpu",
    seeds: ScaleSeeds = None,
    steps: ScaleSteps = None,
    only: Only = None,
    workers: Workers = None,
    trials: Annotated[
        int | None, typer.Option(min=0, help="Trials of tuning for every family; 0: none. Default: by scale.")
    ] = None,
    rates: Rates = None,
    text: TextFile = None,
    budget: Budget = None,
    keep: KeepFile = None,
    listed: ListOnly = False,
    device: Device = "cpu",
    json: OutputFile = None,
    plot: PlotFile = None,
) -> None:
    """What does saving bytes cost? Loss against bytes per token, forms, anchors and codecs, and time to a loss."""
    from protomodels_cli.cli.checks import check_outputs
    from protomodels_cli.lab import frontier as experiment

    if listed:
        print(experiment.listing(scale, seeds, steps, _names(only), workers, trials, keep))
        return
    check_outputs(keep)
    arguments = (scale, seeds, steps, _names(only), workers, trials, rates, text, budget, keep)
    _run(experiment, json, plot, device, *arguments, trains=budget != 0)


@app.command()
def scaling(
    scale: Annotated[str, typer.Option(help="Sizes: cpu (d = 32, 64, 128) or gpu (d = 256, 512, 1024).")] = "cpu",
    seeds: ScaleSeeds = None,
    steps: ScaleSteps = None,
    only: Only = None,
    workers: Workers = None,
    rates: Rates = None,
    text: TextFile = None,
    budget: Budget = None,
    keep: KeepFile = None,
    listed: ListOnly = False,
    device: Device = "cpu",
    json: OutputFile = None,
    plot: PlotFile = None,
) -> None:
    """Does the gap to dense grow with the model? Over widths and layers a segment, at 30 × and 100 × fewer bytes."""
    from protomodels_cli.cli.checks import check_outputs
    from protomodels_cli.lab import scaling as experiment

    if listed:
        print(experiment.listing(scale, seeds, steps, _names(only), workers, keep))
        return
    check_outputs(keep)
    arguments = (scale, seeds, steps, _names(only), workers, rates, text, budget, keep)
    _run(experiment, json, plot, device, *arguments, trains=budget != 0)


@app.command()
def replicas(
    scale: Annotated[
        str, typer.Option(help="Size of the experiment: cpu (half an hour on two cores) or gpu (d = 512).")
    ] = "cpu",
    seeds: ScaleSeeds = None,
    steps: ScaleSteps = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step. Default: by scale.")] = None,
    only: Only = None,
    sums: Annotated[
        list[str] | None,
        typer.Option(
            "--sum",
            help="Measure this sum instead of the listed ones: exact, bf16, eden:4, eden:3|eden:4, dion:64, "
            "dion:64:eden:4 or local:8; with +ef or +late. Repeatable.",
        ),
    ] = None,
    lanes: Annotated[
        list[int] | None, typer.Option(min=1, help="Only rows with so many replicas (with --sum: 4). Repeatable.")
    ] = None,
    workers: Workers = None,
    text: TextFile = None,
    budget: Budget = None,
    keep: KeepFile = None,
    listed: ListOnly = False,
    device: Device = "cpu",
    json: OutputFile = None,
    plot: PlotFile = None,
) -> None:
    """How cheap may the sum of replicas' gradients be? Loss against bits per parameter and step, at equal tokens."""
    from protomodels_cli.cli.checks import check_outputs
    from protomodels_cli.lab import replicas as experiment

    size = (scale, seeds, steps, batch, _names(only), sums or [], lanes or [], workers)
    if listed:
        print(experiment.listing(*size, keep))
        return
    check_outputs(keep)
    _run(experiment, json, plot, device, *size, text, budget, keep, trains=budget != 0)


def _names(only: list[str] | None) -> list[str]:
    return [name.strip() for names in only or () for name in names.split(",") if name.strip()]


@app.command()
def bandwidth(
    scale: Annotated[
        str, typer.Option(help="Size of the experiment: cpu (minutes on two cores) or gpu (a larger model).")
    ] = "cpu",
    steps: ScaleSteps = None,
    seed: Seed = 0,
    speed: Annotated[
        str | None, typer.Option(help="Speed of every peer, as 20gflops or 5tflops. Default: measured on this device.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="The loss to reach. Default: dense bf16's after half of its steps.")
    ] = None,
    text: TextFile = None,
    keep: KeepFile = None,
    device: Device = "cpu",
    json: OutputFile = None,
    plot: PlotFile = None,
) -> None:
    """How much compression does a link need? Tokens/s and time to a loss from 10 Mbit/s to 1 Gbit/s."""
    from protomodels_cli.cli.checks import check_outputs, speed_of
    from protomodels_cli.lab import bandwidth as experiment

    check_outputs(keep)
    _run(experiment, json, plot, device, scale, steps, seed, speed_of(speed), target, keep, text)


def _run(
    experiment: Any, json: Path | None, plot: Path | None, device: str, *arguments: Any, trains: bool = True
) -> None:
    """Where nothing is trained, the device is that of the runs which were kept, and need not be here."""
    from protomodels_cli.cli.checks import check_device, check_outputs, check_plot
    from protomodels_cli.lab.results import write_json

    if trains:
        check_device(device)
    check_outputs(json)
    check_plot(plot)
    result = experiment.run(*arguments, device=device)
    print(experiment.report(result))
    if json is not None:
        write_json(result, json)
        print(f"numbers: {json}")
    if plot is not None:
        experiment.plot(result, plot)
        print(f"picture: {plot}")
