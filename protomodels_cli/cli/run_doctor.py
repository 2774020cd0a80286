"""The work of `pmtrain doctor`, and of the same checks before `pmtrain join`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from protomodels_cli.cli.output import print_json
from protomodels_cli.cli.say import say
from protomodels_cli.doctor import machine
from protomodels_cli.doctor.facts import Contact, Kind, StepTried
from protomodels_cli.doctor.findings import Finding, worst
from protomodels_cli.doctor.line_checks import line
from protomodels_cli.doctor.local_checks import local, one_step
from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED, UserError
from protomodels_cli.files import peer_homes, user_cache
from protomodels_cli.observe import logs

AFTER_DEVICE = 3  # findings: software, torch, device
MARKS = {"ok": "ok", "warn": "warn", "fail": "FAIL", "skipped": "–"}
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def run(link: str | None, device: str, port: int, folder: Path | None, measure: bool, output: str) -> int:
    parsed = None
    if link is not None:
        from protomodels_cli.wire.join_link import read_link

        parsed = read_link(link)
        logs.hide(parsed.token)
    here = machine.look(
        {"peer": folder or peer_homes()[0], "cache": user_cache(), "runs": Path("runs").absolute()}, device
    )
    tried = None if device == "auto" or here.torch is None else _try_step(device)
    contact: Contact | None = None
    if parsed is not None:
        from protomodels_cli.doctor import contact as contacts

        if output == "text":
            say(f"looking at this machine and its line to {parsed.host}:{parsed.port} …")
        contact = asyncio.run(contacts.look(parsed, port, measure))
    found = [*local(here, contact.need if contact else None), *line(here, contact)]
    if tried is not None:
        found.insert(AFTER_DEVICE, one_step(tried))
    if output == "json":
        facts = {"machine": asdict(here), "coordinator": asdict(contact) if contact else None}
        rows = [asdict(finding) for finding in found]
        print_json({"severity": worst(found), "findings": rows, "facts": facts})
    else:
        _show(found)
    if worst(found) != "fail":
        return 0
    return EXIT_REFUSED if any(f.refused for f in found) else EXIT_OUTSIDE


def _try_step(name: str) -> StepTried:
    import torch

    from protomodels_cli.errors import first_line
    from protomodels_cli.model import self_test
    from protomodels_cli.model.devices import NoDevice, found

    try:
        device = found(name)
    except NoDevice as e:
        return StepTried(name, "mps" if name == "mps" else "cuda", detail=str(e))
    kind: Kind = "cpu" if device.type == "cpu" else "mps" if device.type == "mps" else "cuda"
    if kind == "cuda" and torch.version.hip is not None:
        kind = "rocm"
    dtypes: list[self_test.Dtype] = ["float32"]
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        dtypes.append("bf16")
    try:
        compared = self_test.compare(device, *dtypes)
    except (RuntimeError, TypeError) as e:  # an operator or a type that the device lacks
        return StepTried(str(device), kind, detail=first_line(e))
    wrong = tuple(one.dtype for one in compared if not one.is_right)
    return StepTried(str(device), kind, tuple((one.dtype, one.off) for one in compared), wrong)


def check_first(folder: Path, device: str) -> None:
    """The quick checks, before a peer joins: raises UserError where one fails, prints a line for each warning."""
    found = local(machine.look({"peer": folder}, device, every_card=False))
    for finding in found:
        if finding.severity == "warn":
            say(f"warning: {finding.check}: {finding.figure}: {finding.problem} (pmtrain doctor says what to do)")
    bad = [finding for finding in found if finding.severity == "fail"]
    if bad:
        what = "; ".join(f"{finding.check}: {finding.figure}: {finding.problem}" for finding in bad)
        fixes = "\n          ".join(numbered(fix for finding in bad for fix in finding.fixes))
        raise UserError(what, f"{fixes}\n          or join all the same with --no-preflight", bad[0].kind)


def numbered(fixes: Iterable[str]) -> list[str]:
    return [f"{i}. {fix}" for i, fix in enumerate(fixes, 1)]


def _show(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        colour = COLOURS[finding.severity]
        table.add_row(f"[{colour}]{MARKS[finding.severity]}[/]", finding.check, escape(finding.figure))
    console.print(table, highlight=False)
    for finding in found:
        if finding.severity in ("warn", "fail"):
            head = (
                f"[{COLOURS[finding.severity]}]{MARKS[finding.severity]}[/] {finding.check}: {escape(finding.problem)}"
            )
            console.print(f"\n{head}", highlight=False)
            # Not wrapped: commands are there to be copied.
            for fix in numbered(finding.fixes):
                console.print(f"  {escape(fix)}", highlight=False, soft_wrap=True)
    bad, odd = (sum(f.severity == kind for f in found) for kind in ("fail", "warn"))
    console.print(f"\n{bad} failed, {odd} warned, {sum(f.severity == 'ok' for f in found)} fine", highlight=False)
