"""`pmtrain`: the list of commands, and how errors are reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

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
    invite,
    join,
    lab,
    plan,
    reference,
    relay,
    rest,
    rm,
    runs,
    status,
    token,
    top,
    validate,
)
from protomodels_cli.cli import logs as show_logs
from protomodels_cli.cli.usage import USAGE_ERROR, App, Commands, refused
from protomodels_cli.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, EXIT_SPEC, UserError
from protomodels_cli.observe import logs

app = App(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train one language model together, each peer holding a slice of the layers.",
)
START, LEAD, JOIN = "Start a run", "Lead a run", "Join a run"
WATCH, TAKE, STUDY = "Watch", "Take the model out", "Study the method"
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {  # in the order of `--help`
    START: {"init": init.init, "validate": validate.validate, "plan": plan.plan, "demo": demo.demo},
    LEAD: {
        "coordinator": coordinator.coordinator,
        "invite": invite.invite,
        "pause": control.pause,
        "resume": control.resume,
        "stop": control.stop,
        "kick": control.kick,
        "rm": rm.rm,
        "relay": relay.relay,
    },
    JOIN: {"join": join.join, "rest": rest.rest, "wake": rest.wake, "doctor": doctor.doctor},
    WATCH: {
        "top": top.top,
        "status": status.status,
        "peers": status.peers,
        "events": events.events,
        "logs": show_logs.logs,
        "runs": runs.runs,
        "follow": follow.follow,
    },
    TAKE: {"export": export.export, "generate": generate.generate, "eval": eval.evaluate},
    STUDY: {"reference": reference.reference},
}
for group, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=group)(command)
app.add_typer(token.app, name="token", rich_help_panel=LEAD)
app.add_typer(lab.app, name="lab", rich_help_panel=STUDY)
app.add_typer(bench.app, name="bench", rich_help_panel=STUDY)


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
