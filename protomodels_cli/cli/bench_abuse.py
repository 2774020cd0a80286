"""`pmtrain bench abuse`: what attackers of the coordinator's port cost the steps, and what attackers from within do."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from protomodels_cli.cli.output import OutputFile
from protomodels_cli.cli.say import say
from protomodels_cli.errors import OptionError

LINK, SECONDS, RATE = "10mbit,25ms", 20.0, 1000.0
INSIDER_LINK, INSIDER_SECONDS, INSIDER_RATE = "100mbit,20ms", 300.0, 50.0


def abuse(
    connections: Annotated[int, typer.Option(min=1, max=5000, help="Connections that say nothing.")] = 1000,
    slow: Annotated[int, typer.Option(min=0, max=1000, help="Connections that say a byte a second.")] = 100,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1, help="Messages a second: that are none, or of `edges`. Default: 1000, or 50 with --insider."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="BANDWIDTH,LATENCY of every peer's line, emulated. Default: 10mbit,25ms; 100mbit,20ms with --insider."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Length of a phase, at least, or of an attack. Default: 20, or 300 with --insider."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a phase, at least.")] = 30,
    turns: Annotated[int, typer.Option(min=1, help="Repetitions of the three phases.")] = 3,
    cores: Annotated[float, typer.Option(min=0.05, max=8, help="Cores that the attacker may use.")] = 0.5,
    insider: Annotated[
        bool, typer.Option("--insider", help="Attacks by somebody with the run's token, from within.")
    ] = False,
    attack: Annotated[
        list[str] | None, typer.Option(help="Only this attack from within, repeatable. Default: all of them.")
    ] = None,
    messages: Annotated[
        int, typer.Option(min=0, help="Messages of the attack `edges`. 0: as many as there is time for.")
    ] = 0,
    json_file: OutputFile = None,
) -> None:
    """Cost of attacks on the coordinator's port to a link-bound run, against the same attacks on an unrelated port; or
    attacks from within, each of which a run must outlive: else the exit code is 1."""
    from protomodels_cli.cli.checks import check_outputs
    from protomodels_cli.spec.link import parse_link

    check_outputs(json_file)
    if not insider and (attack or messages):
        name = "attack" if attack else "messages"
        what = f"--{name} {attack[0] if attack else messages}: is of attacks from within"
        raise OptionError(what, f"add --insider, or leave out --{name}", name)
    rate = rate or (INSIDER_RATE if insider else RATE)
    link, seconds = link or (INSIDER_LINK if insider else LINK), seconds or (INSIDER_SECONDS if insider else SECONDS)
    parse_link(link)
    if insider:
        result = _from_within(attack, seconds, messages, rate, link)
    else:
        from protomodels_cli.bench.abuse import Setting, measure

        result = measure(Setting(connections, slow, rate, link, seconds, turns, steps, cores), say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if insider and not result["within"]:
        raise typer.Exit(1)


def _from_within(attacks: list[str] | None, seconds: float, messages: int, rate: float, link: str) -> dict[str, object]:
    from protomodels_cli.bench.insider import ATTACKS, Setting, measure

    for name in attacks or ():
        if name not in ATTACKS:
            raise OptionError(f"--attack {name}: there is no such attack", f"use one of {', '.join(ATTACKS)}", "attack")
    return measure(Setting(tuple(attacks or ATTACKS), seconds, messages=messages, per_second=rate, link=link), say)
