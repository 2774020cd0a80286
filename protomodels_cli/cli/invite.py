"""`pmtrain invite RUN`: what a friend pastes to install pmtrain and join a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.output import FormatOption, print_json
from protomodels_cli.cli.place import LedArgument
from protomodels_cli.cli.say import say


def invite(
    run: LedArgument = None,
    guest: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="NAME", help="A link for this friend alone: it lets one peer join, which has this name."
        ),
    ] = None,
    install_from: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where others get pmtrain: a repository (git+https://…) or a wheel, which you send along. Default: as "
            "in the last invitation, or where this pmtrain is from.",
        ),
    ] = None,
    qr: Annotated[bool, typer.Option("--qr", help="Also as a QR code.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page that can be sent or printed.")
    ] = None,
    output: FormatOption = "text",
) -> None:
    """Print what a friend pastes into a terminal to take part: install pmtrain, then join.

    Whoever has it can join: send it to friends alone."""
    from protomodels_cli.cli.checks import check_outputs
    from protomodels_cli.cli.invitation import invitation

    check_outputs(html)
    made = invitation(run, guest, install_from)
    if html is not None:
        from protomodels_cli.files import write_whole

        write_whole(html, made.page().encode(), 0o600)
    if output == "json":
        print_json(made.fields())
        return
    say(made.text())
    if qr:
        say(made.code())
    if html is not None:
        say(f"wrote {html}: a page with the same")
