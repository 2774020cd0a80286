"""The work of `pmtrain top`: the status every second, the keys, and what is left on the terminal afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator

from protomodels_cli.cli.asking import following
from protomodels_cli.cli.output import Format, print_json
from protomodels_cli.cli.place import READABLE, place_of, the_only_one
from protomodels_cli.observe.fields import fields
from protomodels_cli.observe.screen import Drawn, Lines, Shown, plain_console, silent, whole_screen
from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

KEYS = "q leaves; the run goes on"
LEAVE = (b"q", b"Q", b"\x04", b"")  # Ctrl-D, and a terminal that is gone


def run(named: str | None, output: Format) -> None:
    text = named or str(the_only_one(READABLE))
    place_of(text)  # a mistake is said before the screen changes
    console = plain_console()
    alone = output == "text" and console.is_terminal
    last: tuple[RunStatus | None, str] = (None, "")

    async def watch() -> None:
        lines: Lines | _JsonLines = _JsonLines() if output == "json" else Lines()
        with Drawn(console, alone=True, keys=KEYS) if alone else lines as show:
            await _until_left(_show_all(text, keep(show)))

    def keep(show: Shown) -> Shown:
        def kept(status: RunStatus | None, away: str = "") -> None:
            nonlocal last
            last = status, away
            show(status, away)

        return kept

    asyncio.run(watch())
    if alone:  # the screen is as it was before: leave the last picture on it
        console.print(whole_screen(*last, 0.0))


async def _show_all(text: str, show: Shown) -> None:
    async with contextlib.aclosing(following(text)) as found:
        async for status, away in found:
            show(status, away)


async def _until_left(showing: Coroutine[None, None, None]) -> None:
    """To its end, or until q or a signal."""
    task, loop = asyncio.create_task(showing), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    leave = _keys(lambda key: task.cancel() if key in LEAVE else None)
    with leave, contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.contextmanager
def _keys(pressed: Callable[[bytes], object]) -> Iterator[None]:
    """Each key as it is pressed, where somebody sits at a terminal; which is afterwards as it was."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    import termios
    import tty

    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, lambda: pressed(os.read(terminal, 1)))
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class _JsonLines:
    """One object a line; that the coordinator is silent is said once, on standard error."""

    def __init__(self) -> None:
        self._away = False

    def __call__(self, status: RunStatus | None, away: str = "") -> None:
        if away and not self._away:
            print(silent(away, 0), file=sys.stderr, flush=True)
        elif status is not None and not away:
            print_json(fields(status), line=True)
        self._away = bool(away)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *error: object) -> None: ...
