"""`pmtrain lab …`: the paper's experiments, each a command with --json and --plot."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="The method's claims, measured: each a command with --json and --plot.")
