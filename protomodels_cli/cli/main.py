"""`pmtrain`: the list of commands, and how errors are reported."""

from __future__ import annotations

import os
import sys

import typer

from protomodels_cli import __version__
from protomodels_cli.cli import (
    bench,
    control,
    coordinator,
    demo,
    eval,
    export,
    follow,
    generate,
    join,
    lab,
    plan,
    reference,
    status,
    validate,
)
from protomodels_cli.errors import EXIT_OUTSIDE, UserError
from protomodels_cli.observe import logs

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one language model together, each peer holding a slice of the layers.",
)
app.command("validate")(validate.validate)
app.command("plan")(plan.plan)
app.command("coordinator")(coordinator.coordinator)
app.command("join")(join.join)
app.command("pause")(control.pause)
app.command("resume")(control.resume)
app.command("stop")(control.stop)
app.command("status")(status.status)
app.command("peers")(status.peers)
app.command("follow")(follow.follow)
app.command("export")(export.export)
app.command("demo")(demo.demo)
app.command("reference")(reference.reference)
app.command("generate")(generate.generate)
app.command("eval")(eval.evaluate)
app.add_typer(lab.app, name="lab")
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def top(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"pmtrain {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. A user's mistake is one clear message and an exit code; a bug keeps its traceback."""
    # Otherwise pydantic reads the metadata of every installed package, a tenth of a second of a coordinator's restart.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        app()
    except UserError as e:
        logs.failed(e)
        print(e, file=sys.stderr)
        sys.exit(e.exit_code)
    except OSError as e:
        logs.failed(e)
        print(f"{e.filename or 'a file'}: {e.strerror}", file=sys.stderr)
        print("    fix:  check the path, the space left and the permissions", file=sys.stderr)
        sys.exit(EXIT_OUTSIDE)
    except Exception as e:
        logs.bug(e)
        raise
