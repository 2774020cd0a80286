"""A run on a terminal, drawn over itself; where there is no terminal, a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from protomodels_cli.observe.view import headline, picture
from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

PLAIN_SECONDS = 5.0  # between two lines
WIDTH = 140  # where there is no terminal
BEFORE_THE_FIRST_STEP = (RunStatus.WAITING_FOR_PEERS, RunStatus.ASSIGNING)
WAITING = (*BEFORE_THE_FIRST_STEP, RunStatus.WAITING, RunStatus.NOT_RUNNING)


def plain_console() -> Console:
    """As wide as the terminal, or wide enough for a table that goes into a file."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def whole_screen(status: RunStatus | None, away: str, seconds: float, keys: str = "") -> RenderableType:
    """The picture of a run, and who leads it no more: for so many seconds, for this reason."""
    rows: list[RenderableType] = []
    if status is not None:
        rows.append(picture(status))
    elif not away:
        rows.append(Text("asking the coordinator …", style="dim"))
    if away:
        rows.append(Text(silent(away, seconds), style="bold red"))
    if keys:
        rows.append(Text(f"\n{keys}", style="dim"))
    return Group(*rows)


def silent(away: str, seconds: float) -> str:
    from protomodels_cli.quantities import duration

    what = f"has not answered for {duration(round(seconds))}" if seconds >= 1 else "does not answer"
    return f"the coordinator {what} ({away}); trying again every second"


class Shown(Protocol):
    """Where a run is shown."""

    def __call__(self, status: RunStatus | None, away: str = "") -> None: ...


class Silence:
    """For how long the coordinator has not answered."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, away: str) -> float:
        now = time.monotonic()
        self._since = (self._since or now) if away else None
        return 0.0 if self._since is None else now - self._since


class Drawn:
    """The picture, drawn over itself: below what is there, or on a screen of its own that leaves nothing behind."""

    def __init__(self, console: Console, alone: bool = False, keys: str = ""):
        self._live, self._keys, self._silence = Live(console=console, auto_refresh=False, screen=alone), keys, Silence()

    def __call__(self, status: RunStatus | None, away: str = "") -> None:
        self._live.update(whole_screen(status, away, self._silence.seconds(away), self._keys), refresh=True)

    def __enter__(self) -> Shown:
        self._live.__enter__()
        if self._keys:
            self(None)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(None, None, None)


class Lines:
    """A line now and then, and whenever the phase changes or the coordinator goes."""

    def __init__(self) -> None:
        self._shown, self._before = -PLAIN_SECONDS, (RunStatus.UNSPECIFIED, False)

    def __call__(self, status: RunStatus | None, away: str = "") -> None:
        now, state = time.monotonic(), (status.phase if status else RunStatus.UNSPECIFIED, bool(away))
        if state == self._before and (away or now - self._shown < PLAIN_SECONDS):
            return
        self._shown, self._before = now, state
        if status is not None:
            waits = f" | waiting for {status.waiting_for}" if status.phase in WAITING and status.waiting_for else ""
            print(headline(status) + waits, flush=True)
        if away:
            print(silent(away, 0), flush=True)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *error: object) -> None: ...
