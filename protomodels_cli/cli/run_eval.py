"""The eval command's work: everything that needs torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from protomodels_cli.cli.checks import check_outputs, chosen_device, enough_memory
from protomodels_cli.cli.interrupt import raise_on_ctrl_c
from protomodels_cli.cli.output import Format, beside_json, print_json
from protomodels_cli.cli.prepared import left_out
from protomodels_cli.data.errors import DataError
from protomodels_cli.errors import EXIT_INTERRUPTED, OptionError
from protomodels_cli.inference.data import Data
from protomodels_cli.inference.evaluate import Score, score, windows
from protomodels_cli.inference.held_out import HeldOut
from protomodels_cli.inference.load import Loaded, load
from protomodels_cli.observe.bytes_done import BytesDone
from protomodels_cli.observe.metrics import strict
from protomodels_cli.quantities import figures, plural, rate, size

Share = Callable[[Score], float]  # how much of all windows has been scored


def run(
    place: str,
    data: list[str],
    field: str,
    most: int | None,
    context: int | None,
    json_file: Path | None,
    device: str,
    dtype: str,
    output: Format = "text",
) -> None:
    import torch

    check_outputs(json_file)
    where = chosen_device(device)
    with beside_json(output), enough_memory(where, "a smaller --context"):
        loaded = load(place, where, getattr(torch, dtype))
        if context is not None and context > loaded.context:
            raise OptionError(
                f"--context {context}: the model's context is {loaded.context}",
                f"use {loaded.context} or less",
                "context",
            )
        batches, share = _windows(loaded, data, field, most, context)
        started = time.perf_counter()
        found = _scored(loaded, batches, share)
    if not found.tokens:
        raise DataError("there is nothing to predict in this data", "name a longer text with --data", "too_short")
    seconds = time.perf_counter() - started
    summary = {
        "model": place,
        "step": None if loaded.source is None else loaded.source.step,
        "data": data or None,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "bytes": found.bytes or None,
        "windows": found.windows,
        "context": context or loaded.context,
        "device": where,
        "dtype": dtype,
        "seconds": seconds,
    }
    print_json(strict(summary)) if output == "json" else print(_words(found, seconds))
    if json_file is not None:
        json_file.write_text(json.dumps(strict(summary), indent=1) + "\n")


def _windows(
    loaded: Loaded, data: list[str], field: str, most: int | None, context: int | None
) -> tuple[Iterator[np.ndarray], Share]:
    if data:
        reading = Data(data, field, loaded)
        if reading.skipped:
            print(left_out(reading.skipped), file=sys.stderr)

        def share(so_far: Score) -> float:
            return max(reading.share, so_far.windows / most if most else 0.0)

        return windows(reading.chunks(), context or loaded.context, most), share
    if loaded.source is None:
        raise OptionError(
            "an exported folder has no text of its own",
            "name one with --data, or name the run directory in place of the folder",
            "no_data",
        )
    with BytesDone() as show:
        held_out = HeldOut(loaded.source, most, context, show)
    return held_out.batches(), lambda so_far: so_far.windows / held_out.windows


def _scored(loaded: Loaded, batches: Iterator[np.ndarray], share: Share) -> Score:
    """With a bar, on a terminal."""
    columns: list[Any] = [BarColumn(40), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn()]
    console = Console(stderr=True)
    raise_on_ctrl_c()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=1.0)

            def show(so_far: Score) -> None:
                bar.update(task, completed=share(so_far), description=f"loss {so_far.loss:.4f}")

            return score(loaded.decoder, loaded.tokenizer, batches, show)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _words(found: Score, seconds: float) -> str:
    loss = f"loss {found.loss:.4f} nats per token, perplexity {figures(found.perplexity)}"
    if found.bits_per_byte is not None:
        loss += f", {found.bits_per_byte:.4f} bits per byte"
    text = f" ({size(found.bytes)} of text)" if found.bytes else ""
    return (
        f"{loss}\n{plural(found.tokens, 'token')}{text} in {plural(found.windows, 'window')}, "
        f"{rate(found.tokens / seconds, 'tok/s')}"
    )
