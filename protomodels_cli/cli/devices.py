"""`--device`, the same for all commands: auto, cpu, gpu (= cuda), cuda:N or mps. Imports no torch."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from protomodels_cli import installing
from protomodels_cli.errors import OptionError

NAMES = "auto, cpu, gpu (= cuda), cuda:N or mps"
DeviceOption = Annotated[str, typer.Option(help=f"Device to compute on: {NAMES}.")]


def device_named(text: str, option: str = "--device") -> str:
    """auto, cpu, cuda, cuda:N or mps. Raises OptionError where no machine, or not this one, can have it."""
    name = text.strip().lower()
    if found := re.fullmatch(r"(gpu|cuda)(:\d+)?", name):
        name = f"cuda{found[2] or ''}"
    elif name not in ("auto", "cpu", "mps"):
        raise OptionError(f"{option} {text}: there is no such device", f"use {NAMES}", "device")
    if name == "mps" and sys.platform != "darwin":
        what = f"{option} {text}: mps is the GPU of Apple's computers, which this machine is not"
        raise OptionError(what, "use auto, cpu, gpu or cuda:N", "device_mps")
    version = _torch()
    if name.startswith("cuda") and version is not None and version.endswith("+cpu"):
        raise OptionError(
            f"{option} {text}: the torch that is installed here ({version}) is built for CPUs alone",
            f"`pmtrain doctor` names the torch for this machine's driver; or compute on the CPU with {option} cpu",
            "device_cpu_torch",
        )
    return name


def need_torch() -> None:
    """Raises OptionError where a command that computes finds no torch: a coordinator does without."""
    if _torch() is None:
        what = "this command computes, and torch is not installed here"
        raise OptionError(what, installing.package("torch>=2.9"), "no_torch")


def _torch() -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
