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
    doctor,
    eval,
    events,
    export,
    follow,
    generate,
    init,
    join,
    lab,
    plan,
    reference,
    relay,
    runs,
    status,
    token,
    top,
    validate,
)
from protomodels_cli.cli import logs as show_logs
from protomodels_cli.cli.usage import USAGE_ERROR, Commands, refused
from protomodels_cli.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, EXIT_SPEC, UserError
from protomodels_cli.observe import logs

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train one language model together, each peer holding a slice of the layers.",
)
app.command("init")(init.init)
app.command("validate")(validate.validate)
app.command("plan")(plan.plan)
app.command("coordinator")(coordinator.coordinator)
app.command("doctor")(doctor.doctor)
app.command("join")(join.join)
app.command("relay")(relay.relay)
app.command("pause")(control.pause)
app.command("resume")(control.resume)
app.command("stop")(control.stop)
app.command("kick")(control.kick)
app.command("status")(status.status)
app.command("peers")(status.peers)
app.command("top")(top.top)
app.command("events")(events.events)
app.command("logs")(show_logs.logs)
app.command("runs")(runs.runs)
app.command("follow")(follow.follow)
app.command("export")(export.export)
app.command("demo")(demo.demo)
app.command("reference")(reference.reference)
app.command("generate")(generate.generate)
app.command("eval")(eval.evaluate)
app.add_typer(token.app, name="token")
app.add_typer(lab.app, name="lab")
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"pmtrain {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. A user's mistake is one clear message and an exit code; a bug keeps its traceback."""
    # Otherwise pydantic reads the metadata of every installed package, a tenth of a second of a coordinator's restart.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        code = app(prog_name="pmtrain", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except USAGE_ERROR as e:
        if (error := refused(e)) is not None:
            print(error, file=sys.stderr)
        sys.exit(EXIT_SPEC)
    except typer.Abort:
        sys.exit(EXIT_INTERRUPTED)
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
