"""What a bad spec looks like to its author: every problem with its place, value, rule and fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protomodels_cli.errors import EXIT_SPEC, UserError


@dataclass(frozen=True)
class Problem:
    """One mistake in a spec. `field` is the dotted path; `value` what stands there (None: nothing)."""

    field: str
    rule: str
    fix: str
    value: Any = None
    file: str = "spec"
    line: int = 0

    def __str__(self) -> str:
        shown = f" = {_short(self.value)}" if self.value is not None else ""
        return (
            f"{self.file}:{self.line}: {self.field or 'the file'}{shown}\n    rule: {self.rule}\n    fix:  {self.fix}"
        )


class SpecError(UserError):
    """A spec with one or more problems, all found in one pass."""

    exit_code = EXIT_SPEC

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        Exception.__init__(self, "\n".join(map(str, problems)))


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
