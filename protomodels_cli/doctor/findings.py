"""What a check says: how bad, a figure, and what to do about it, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warn", "fail", "skipped"]
_ORDER: tuple[Severity, ...] = ("skipped", "ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    check: str  # what was looked at, for people
    kind: str  # what was found, for programs
    severity: Severity
    figure: str
    problem: str = ""  # one sentence; empty where nothing is wrong
    fixes: tuple[str, ...] = ()
    refused: bool = False  # the coordinator said no


def ok(check: str, figure: str) -> Finding:
    return Finding(check, "ok", "ok", figure)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, "not_checked", "skipped", why)


def worst(findings: Iterable[Finding]) -> Severity:
    return max((f.severity for f in findings), key=_ORDER.index, default="ok")
