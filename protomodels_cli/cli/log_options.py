"""`--verbose` and `--log-level`, the same for all commands that take part in a run."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

LogLevel = Literal["debug", "info", "warning", "error"]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also show the log on the terminal, at level debug.")]
LogLevelOption = Annotated[
    LogLevel | None, typer.Option("--log-level", help="Lowest level that is logged. Default: info; with -v: debug.")
]
