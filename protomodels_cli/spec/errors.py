"""How a bad spec is reported: every problem with its line, value, rule and fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protomodels_cli.errors import EXIT_SPEC, UserError


@dataclass(frozen=True)
class Problem:
    """One mistake in a spec. `field` is its dotted path, "" for the file as a whole; `value` is what the file has there
    (None: nothing); `kind` names the rule for programs: a check's name or the type of pydantic's error."""

    field: str
    rule: str
    fix: str
    value: Any = None
    file: str = "spec"
    line: int = 0  # 0: unknown
    kind: str = ""

    def __str__(self) -> str:
        shown = f" = {_short(self.value)}" if self.value is not None else ""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.field or 'the file'}{shown}\n    rule: {self.rule}\n    fix:  {self.fix}"


class SpecError(UserError):
    """A spec with one or more problems, all found in one pass."""

    exit_code = EXIT_SPEC
    kind = "spec"

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        Exception.__init__(self, "\n".join(map(str, problems)))


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
