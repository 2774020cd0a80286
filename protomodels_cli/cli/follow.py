"""`pmtrain follow [RUN]`: pass a run's metrics on to TensorBoard or Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli import installing
from protomodels_cli.cli.place import LED, LedArgument, folder_of
from protomodels_cli.cli.say import say


def follow(
    run: LedArgument = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write TensorBoard's events there (`tensorboard --logdir DIR`).")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Send to this project of Weights & Biases.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Pass on what is there, and do not wait for more.")] = False,
) -> None:
    """Pass every row of a run's metrics on, until the run is over or Ctrl-C.

    Run the same command again to go on: no row is passed on twice, and none is left out."""
    from protomodels_cli.coordinator.run_dir import METRICS, holds_a_run, run_of
    from protomodels_cli.errors import EXIT_INTERRUPTED, OptionError, UserError
    from protomodels_cli.observe.follow.following import Follower
    from protomodels_cli.observe.follow.following import follow as pass_on

    if tensorboard is None and wandb is None:
        fix = "add --tensorboard DIR or --wandb PROJECT"
        raise OptionError("nothing says where the metrics go", fix, "follow_nowhere")
    run_dir, _ = folder_of(run, LED)
    if not holds_a_run(run_dir):
        raise UserError(f"{run_dir} is not a run directory", "name a run directory", "no_run")
    spec, identity = run_of(run_dir)
    shown_as = identity.name_in_store(spec.name)
    followers: list[Follower] = []
    try:
        if tensorboard is not None:
            from protomodels_cli.observe.follow.tensorboard import TensorBoard

            followers.append(TensorBoard(tensorboard, shown_as))
        if wandb is not None:
            from protomodels_cli.observe.follow.wandb import WeightsAndBiases

            followers.append(WeightsAndBiases(wandb, spec.name, shown_as, Path()))
    except ImportError as e:
        extra = "tensorboard" if tensorboard is not None and not followers else "wandb"
        what = f"--{extra} needs the package {e.name or extra}"
        raise UserError(what, installing.package(extra), "missing_package") from None
    try:
        rows = pass_on(run_dir / METRICS, followers, lambda: once or (run_dir / "summary.json").exists())
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        for follower in followers:
            follower.close()
    say(f"passed on {rows} rows of {run_dir / METRICS}")
