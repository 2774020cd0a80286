"""Ctrl-C: during the start of a program, and after it."""

from __future__ import annotations

import os
import signal

from protomodels_cli.errors import EXIT_INTERRUPTED


def leave_on_ctrl_c() -> None:
    """Exit on Ctrl-C until the program has a handler of its own: an import of torch may swallow KeyboardInterrupt."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))


def raise_on_ctrl_c() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
