"""When a peer rests, as people at its machine wish: by a timetable (`join --hours`), or by `pmtrain rest` and `wake`.

The commands leave their word as a file in the peer's folder, which the peer looks at every second. It must not know the
run, nor torch: the commands import it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Literal

from protomodels_cli.errors import OptionError
from protomodels_cli.files import write_whole

Word = Literal["rest", "wake"]
FOLDER = "here"  # in a peer's folder: a file for each of its processes, locked by it
LOOK_SECONDS = 1.0
MOST_NAME = 200  # bytes of a name that is read back


@dataclass(frozen=True)
class Hours:
    """A part of every day, by this machine's clock; over midnight where it ends before it begins. Pure."""

    begin: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Hours:
        """HH:MM-HH:MM. Raises OptionError."""
        found = re.fullmatch(r"\s*(\d{1,2})(?::(\d{2}))?\s*-\s*(\d{1,2})(?::(\d{2}))?\s*", text)
        try:
            assert found is not None
            begin, end = (time(int(h), int(m or 0)) for h, m in ((found[1], found[2]), (found[3], found[4])))
        except (AssertionError, ValueError):
            what = f"--hours {text}: must be two times of day, from 0:00 to 23:59, with a dash between them"
            raise OptionError(what, "write for example --hours 22:00-07:00", "hours") from None
        if begin == end:
            what = f"--hours {text}: begins when it ends"
            raise OptionError(what, "leave --hours out to take part all day", "hours")
        return cls(begin, end)

    def has(self, now: datetime) -> bool:
        at = now.time()
        return self.begin <= at < self.end if self.begin < self.end else at >= self.begin or at < self.end

    def next_begin(self, now: datetime) -> datetime:
        today = datetime.combine(now.date(), self.begin)
        return today if today > now else datetime.combine(now.date() + timedelta(days=1), self.begin)


def wish(hours: Hours | None, word: Word | None, now: datetime) -> float | None:
    """None: to take part. Else until when it rests, in seconds since 1970; 0: until it is woken. Pure."""
    if word == "rest":
        return 0.0
    if word == "wake" or hours is None or hours.has(now):
        return None
    return hours.next_begin(now).timestamp()


class Wishes:
    """Of one peer's process, while its `with` block lasts."""

    def __init__(self, folder: Path, peer: str, name: str, hours: Hours | None):
        self._file, self._name, self._hours = folder / FOLDER / peer, name, hours
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Wishes:
        self._file.parent.mkdir(exist_ok=True)
        self._word_file.unlink(missing_ok=True)  # of a process before this one
        file = self._closing.enter_context(self._file.open("w", encoding="utf-8"))
        file.write(self._name)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()
        for file in (self._file, self._word_file):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)

    @property
    def _word_file(self) -> Path:
        return self._file.with_name(f"{self._file.name}.word")

    def now(self) -> float | None:
        """As `wish`. Once the hours have begun, a word that woke it early has had its day."""
        now, word = datetime.now(), self._word()
        if word == "wake" and (self._hours is None or self._hours.has(now)):
            self._word_file.unlink(missing_ok=True)
        return wish(self._hours, word, now)

    def _word(self) -> Word | None:
        try:
            said = self._word_file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        return "rest" if said == "rest" else "wake" if said == "wake" else None


def running_in(folder: Path) -> Iterator[tuple[str, str]]:
    """The ids and names of the peers that are at work there."""
    try:
        files = sorted(folder.joinpath(FOLDER).iterdir())
    except OSError:
        return
    for path in files:
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            if re.fullmatch(r"p[0-9a-f]{8,12}", path.name) is None:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield path.name, os.read(file.fileno(), MOST_NAME).decode(errors="replace")


def tell(folder: Path, peer: str, word: Word) -> None:
    """Raises OSError."""
    write_whole(folder / FOLDER / f"{peer}.word", word.encode(), 0o600)
