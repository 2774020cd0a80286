"""`pmtrain token …`: further tokens that let peers join, which end by themselves or can be revoked."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from protomodels_cli.cli.control import RunDirArgument, ask_owner
from protomodels_cli.cli.output import FormatOption, print_json
from protomodels_cli.cli.say import say
from protomodels_cli.cli.usage import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Tokens that let peers join: make, list, revoke.")
MOST_USES = 1000


@app.command()
def create(
    run: RunDirArgument,
    uses: Annotated[int, typer.Option(min=1, max=MOST_USES, help="How many peers may join with it.")] = 1,
    hours: Annotated[
        float | None, typer.Option(min=0.001, help="For how long peers can join with it. Default: until it is revoked.")
    ] = None,
    person: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="NAME",
            help="Whom it is for. All tokens of one name have one vote in audits.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Make a join link of its own, for one peer unless you say otherwise. It is shown this once.

    A peer that comes again from the same folder counts once. Peers with one token do not audit each other: give each
    person one."""
    seconds = 0.0 if hours is None else 3600 * hours
    _, link, made = ask_owner(run, lambda desk: desk.create_token(uses, seconds, person))
    from dataclasses import replace

    new = replace(link, token=made.token)
    say(f"token {_titled(made.id, person)}: {person or 'others'} can join with\n\n    pmtrain join '{new}'\n")


@app.command("list")
def list_tokens(run: RunDirArgument, output: FormatOption = "text") -> None:
    """List the tokens of a run: who joined with them, and which of them let peers join. `run` is the run's own."""
    from protomodels_cli.quantities import duration, plural

    _, _, found = ask_owner(run, lambda desk: desk.list_tokens())
    if output == "json":
        from protomodels_cli.observe.fields import fields

        print_json(fields(found))
        return
    for token in found.tokens:
        if not token.uses:
            say(f"{token.id}: the run's own, for any number of peers")
            continue
        left = token.expires - time.time()
        until = f", for another {duration(left)}" if token.expires and left > 0 else ""
        state = token.ended or f"lets peers join{until}"
        joined = f"{token.used} of {plural(token.uses, 'peer')} joined"
        say(f"{_titled(token.id, token.person)}: {joined} ({', '.join(token.peers) or 'none'}); {state}")


def _titled(token: str, person: str) -> str:
    return f"{token} for {person}" if person else token


@app.command()
def revoke(
    run: RunDirArgument,
    token: Annotated[
        str, typer.Argument(metavar="TOKEN", help="The id of the token, as `pmtrain token list` shows it.")
    ],
) -> None:
    """Let nobody join with a token any more. `run`, the run's own, is replaced. Peers that are in the run stay."""
    folder, link, revoked = ask_owner(run, lambda desk: desk.revoke_token(token))
    from dataclasses import replace

    if revoked.token:
        say(f"the run has a new join link, also in {folder}/link:\n\n    {replace(link, token=revoked.token)}\n")
    else:
        say(f"nobody can join with {token} any more")
