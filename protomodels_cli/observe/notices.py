"""Events as data: a notice has a kind, typed fields, and a sentence that one function renders.

Here is what all notices have in common, and where they go: events.jsonl, the log, the terminal. Which notices there are
and how they read is said by the program that gives them (coordinator/notices.py and sentences.py). Nothing ever reads a
sentence back.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from protomodels_cli.facts import Fact
from protomodels_cli.observe.logs import SHOWN
from protomodels_cli.observe.metrics import JsonLines


class Notice(Fact):
    """A fact that is told."""

    level: ClassVar[int] = logging.INFO
    shown: ClassVar[bool] = True  # on the terminal; otherwise only with --verbose
    log: ClassVar[logging.Logger | None] = None  # another than the program's own


def as_row(fact: Fact) -> dict[str, Any]:
    """The kind first, then the fields; facts within it have their kind too."""
    assert dataclasses.is_dataclass(fact)
    fields = dataclasses.asdict(fact)
    return {"kind": fields.pop("kind"), **fields}


N = TypeVar("N", bound=Notice)


class Teller(Generic[N]):
    """Every notice goes to the log, to events.jsonl where there is one, and to the terminal."""

    def __init__(
        self,
        sentence: Callable[[N], str],
        log: logging.Logger,
        say: Callable[[str], None],
        rows: JsonLines | None = None,
    ):
        self._sentence, self._log, self._say, self.rows = sentence, log, say, rows
        self.also: Callable[[N], None] = lambda notice: None

    def __call__(self, notice: N) -> None:
        text = self._sentence(notice)
        self.record(notice)
        (notice.log or self._log).log(notice.level, text, extra={SHOWN: notice.shown})
        if notice.shown:
            self._say(text)

    def record(self, notice: N) -> None:
        """In events.jsonl, and for who listens too."""
        self.also(notice)
        if self.rows is not None:
            self.rows.write({**as_row(notice), "text": self._sentence(notice)})

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()
