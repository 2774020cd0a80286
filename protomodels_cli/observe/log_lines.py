"""Lines of a log as data. Pure; logs.py writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([A-Z]+) ([a-z.]+): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    at: str  # UTC
    level: str
    logger: str
    text: str  # several lines where it is a traceback


def entries(lines: Iterable[str]) -> Iterator[Entry]:
    """A line that does not begin as one goes on from the one before, as tracebacks do."""
    block: list[str] = []
    for line in lines:
        if LINE.match(line) and block:
            yield _entry(block)
            block = []
        block.append(line)
    if block:
        yield _entry(block)


def _entry(lines: list[str]) -> Entry:
    text = "\n".join(lines)
    found = LINE.fullmatch(text)
    return Entry(found[1], found[2].lower(), found[3], found[4]) if found else Entry("", "", "", text)
