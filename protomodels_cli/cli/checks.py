"""Checks of options that are made before minutes of work, not after them."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from protomodels_cli import installing
from protomodels_cli.cli.devices import device_named
from protomodels_cli.errors import OptionError, UserError
from protomodels_cli.spec.units import flops_per_second


def check_device(device: str) -> None:
    chosen_device(device)


def chosen_device(device: str) -> str:
    """As torch names it: `auto` is the first CUDA GPU, else the CPU. Raises OptionError where torch has no such one."""
    name = device_named(device)

    from protomodels_cli.model.devices import NoDevice, found

    try:
        return str(found(name))
    except NoDevice as e:
        raise OptionError(f"--device {device}: {e}", "use cpu, or a GPU that this machine has", "device") from None


@contextlib.contextmanager
def enough_memory(device: str, *savings: str) -> Iterator[None]:
    """`savings`: what else would take less, in words."""
    from protomodels_cli.model.memory import is_out_of_memory

    try:
        yield
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        raise UserError(
            f"{device} has too little free memory for this model",
            f"use {', '.join(('--dtype bfloat16, which takes half', *savings))}, or another --device",
            "memory",
        ) from None


def check_outputs(*files: Path | None) -> None:
    """Can the results be written at all?"""
    for path in filter(None, files):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"{path} cannot be written", "name a file in a folder that you may write to", "output")


def check_plot(path: Path | None) -> None:
    check_outputs(path)
    if path is not None:
        check_extra("matplotlib", "--plot")
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise OptionError(
                f"--plot {path}: unknown picture format", "use a file name that ends with .png, .svg or .pdf", "plot"
            )


def check_extra(package: str, what: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError:
        raise UserError(f"{what} needs the package {package}", installing.package(package), "missing_package") from None


def speed_of(text: str | None) -> float | None:
    """The value of --speed in FLOP/s."""
    if text is None:
        return None
    try:
        if speed := flops_per_second(text):
            return speed
        raise ValueError("must be above 0")
    except ValueError as e:
        raise OptionError(f"--speed {text}: {e}", "write for example 20gflops or 5tflops", "speed") from None
