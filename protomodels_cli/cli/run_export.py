"""The export command's work: everything that needs torch."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from protomodels_cli.errors import EXIT_INTERRUPTED
from protomodels_cli.export.source import Source, open_source
from protomodels_cli.export.write import Exported, check_free, export
from protomodels_cli.quantities import count, duration, plural, size

LINE_SECONDS = 10.0  # between two lines where there is no terminal


def run(place: str, out: Path, step: int | None, dtype: str | None) -> None:
    started = time.monotonic()
    check_free(out)
    try:
        with open_source(place, step, out.absolute().parent) as source:
            print(_header(source, place, out), flush=True)
            with _progress() as tell:
                exported = export(source, out, dtype, tell)
    except KeyboardInterrupt:
        print(f"interrupted; {out} was not written", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print(_footer(source, out, exported, time.monotonic() - started))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, now and then a line elsewhere."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), DownloadColumn(True), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines() -> Callable[[int, int], None]:
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"{size(done)} of {size(total)} written", flush=True)

    return tell


def _header(source: Source, place: str, out: Path) -> str:
    spec = source.spec
    lines = [f"exporting {spec.name} after step {source.step:,} of {spec.steps:,}, from {place} to {out} …"]
    if source.tokenizer is None:
        lines.append("without a tokenizer: the run was trained on token ids (tokenizer.kind is none)")
    return "\n".join(lines)


def _footer(source: Source, out: Path, exported: Exported, seconds: float) -> str:
    kind = "Qwen3" if source.spec.model.qk_norm else "Llama"
    lines = [
        f"wrote {out}: {kind} of {count(exported.parameters)} parameters in {exported.dtype}, "
        f"{size(exported.size)} in {duration(seconds)}, {plural(exported.files, 'file')} of weights",
        f"weights sha256 {exported.weights_sha256}",
    ]
    if source.tokenizer is not None:
        lines.append(f"next: pmtrain generate {shlex.quote(str(out))} --prompt 'The '")
    return "\n".join(lines)
