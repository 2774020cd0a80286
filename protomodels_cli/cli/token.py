"""`pmtrain token …`: further tokens that let peers join, which end by themselves or can be revoked."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from protomodels_cli.cli.amounts import seconds_of
from protomodels_cli.cli.control import ask_owner
from protomodels_cli.cli.output import FormatOption, print_json
from protomodels_cli.cli.place import LedArgument, complete_run, run_and
from protomodels_cli.cli.say import say
from protomodels_cli.cli.usage import App, Commands

app = App(cls=Commands, no_args_is_help=True, help="Tokens that let peers join: make, list, revoke.")
MOST_USES = 1000


@app.command()
def create(
    run: LedArgument = None,
    uses: Annotated[int, typer.Option(min=1, max=MOST_USES, help="How many peers may join with it.")] = 1,
    lasts: Annotated[
        str | None,
        typer.Option(
            "--lasts", "--hours", metavar="TIME", help="How long peers can join with it, as 8h. Default: until revoked."
        ),
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
    output: FormatOption = "text",
) -> None:
    """Make a join link of its own, for one peer unless you say otherwise. It is shown this once.

    A peer that comes again from the same folder counts once. Peers with one token do not audit each other: give each
    person one."""
    seconds = seconds_of(lasts, "--lasts")
    _, link, made = ask_owner(run, lambda desk: desk.create_token(uses, seconds or 0.0, person))
    from dataclasses import replace

    joining = f"pmtrain join '{replace(link, token=made.token)}'"
    if output == "json":
        print_json({"id": made.id, "person": person or None, "uses": uses, "seconds": seconds, "join": joining})
        return
    who = person or "others"
    say(f"token {_titled(made.id, person)}: {who} can join with\n\n    {joining}\n\nwithout pmtrain: `pmtrain invite`")


@app.command("list")
def list_tokens(run: LedArgument = None, output: FormatOption = "text") -> None:
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
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] TOKEN",
            help="The run, where there are several, and the token's id, as `pmtrain token list` shows it.",
            autocompletion=complete_run,
        ),
    ],
) -> None:
    """Let nobody join with a token any more. `run`, the run's own, is replaced. Peers that are in the run stay."""
    run, token = run_and(words, "TOKEN")
    folder, link, revoked = ask_owner(run, lambda desk: desk.revoke_token(token))
    from dataclasses import replace

    if revoked.token:
        joining = f"pmtrain join '{replace(link, token=revoked.token)}'"
        say(f"the run has a new join link, also in {folder}/link; new peers join with:\n\n    {joining}\n")
    else:
        say(f"nobody can join with {token} any more")
