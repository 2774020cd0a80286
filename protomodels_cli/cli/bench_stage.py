"""`pmtrain bench stage`: where a device's time goes in one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.output import OutputFile
from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError


def stage(
    shape: Annotated[str, typer.Option(help="Shape of the model: 2b (the paper's), 1b, 8b, or tiny for a CPU.")] = "2b",
    stages: Annotated[int, typer.Option(min=1, help="Stages that the model is cut into.")] = 8,
    number: Annotated[int | None, typer.Option("--stage", min=0, help="Which one. Default: a middle one.")] = None,
    method: Annotated[str, typer.Option(help="FORM/CODEC or FORM/CODEC/K.")] = "reparam/int8",
    k: Annotated[int, typer.Option(min=1, help="Dimensions k of the subspace, where the method names none.")] = 40,
    microbatch: Annotated[int | None, typer.Option(min=1, help="Windows a microbatch. Default: by shape.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Windows a step. Default: by shape.")] = None,
    device: Annotated[str, typer.Option(help="Device to compute on: auto, cpu or cuda:N.")] = "auto",
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for chrome://tracing to this file.")] = None,
    json_file: OutputFile = None,
) -> None:
    """Device time of one stage by itself: the model's kernels, and those of its messages (checks, codecs, packing)."""
    import json

    import torch

    from protomodels_cli.bench.gpu_cases import Case, Plan, shape_named
    from protomodels_cli.bench.stage_profile import measure
    from protomodels_cli.bench.wan import Method
    from protomodels_cli.cli.checks import check_outputs, chosen_device
    from protomodels_cli.quantities import duration, size

    check_outputs(json_file, trace)
    chosen, where = shape_named(shape), stages // 2 if number is None else number
    if where >= stages:
        raise OptionError(f"--stage {where}: there are {stages} stages", f"use 0 to {stages - 1}", "stage")
    plan = Plan(chosen, microbatch or chosen.microbatch)
    case = Case(windows or chosen.windows[0], method=Method.parse(method, k), stages=stages)
    plan.check([case])
    found = measure(plan.spec(case), where, torch.device(chosen_device(device)), trace)
    say(
        f"stage {where} of {stages}, {method}: {duration(found['step_s'])} a step, of which the device works "
        f"{duration(found['device_s'])}; {100 * found['messages_share']:.1f} % of that for messages"
    )
    saved = found["snapshot"]
    say(f"a snapshot of {size(saved['bytes'])} keeps the compute thread for {duration(saved['stall_s'])}")
    if found["not_compiled"]:
        say(f"operators could not be compiled: {found['not_compiled']}")
    for kernel in found["longest"]:
        what = "message" if kernel["is_message"] else "model"
        say(f"  {1000 * kernel['seconds']:9.2f} ms  {what:7}  {kernel['name'][:90]}")
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n")
