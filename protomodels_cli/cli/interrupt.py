"""Ctrl-C, SIGTERM and SIGHUP: during the start of a program, and after it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

import typer

from protomodels_cli.errors import EXIT_INTERRUPTED


def leave_on_ctrl_c(words: str = "") -> None:
    """Exit on Ctrl-C until the program has a handler of its own: an import of torch may swallow KeyboardInterrupt."""

    def leave(*_: object) -> None:
        if words:
            _say(words)
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, leave)


def raise_on_ctrl_c() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_on_every_end() -> None:
    """From now on SIGTERM and SIGHUP are a KeyboardInterrupt too: for programs that have something to clear away."""
    raise_on_ctrl_c()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
            signal.signal(number, signal.default_int_handler)


def interrupted(words: str) -> NoReturn:
    """Leave after a KeyboardInterrupt."""
    _say(words)
    raise typer.Exit(EXIT_INTERRUPTED) from None


def _say(words: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"interrupted; {words}", file=sys.stderr, flush=True)
