"""Reads a Dockerfile as far as ours goes: stages, their instructions, and what each builds on."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == word]


def read(file: Path) -> dict[str, Stage]:
    """The stages by name, in their order; ARGs before the first are put in."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", file.read_text()))
    stages: dict[str, Stage] = {}
    given: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = (part.strip() for part in rest.partition(" AS "))
            stages[name] = Stage(name, re.sub(r"\$\{(\w+)\}", lambda m: given[m[1]], base))
        elif stages:
            [*stages.values()][-1].instructions.append((word, rest.strip()))
        else:
            assert word == "ARG", line
            name, _, value = rest.partition("=")
            given[name] = value
    return stages


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """The stage, the one that it builds on, and so forth; the outside image is none of ours."""
    found = []
    while name in stages:
        found.append(stages[name])
        name = stages[name].base
    return found


def copied(rest: str) -> tuple[str | None, list[str], str]:
    """Of a COPY: from which stage, what, and to where."""
    words = shlex.split(rest)
    source = words.pop(0).partition("=")[2] if words[0].startswith("--from=") else None
    assert not words[0].startswith("-"), rest
    return source, words[:-1], words[-1]


def command(rest: str) -> list[str]:
    """Of an ENTRYPOINT, CMD or HEALTHCHECK … CMD in the form of a list: what passes no shell."""
    return [str(word) for word in json.loads(rest[rest.index("[") :])]
