"""Ctrl-C before anything has begun."""

from __future__ import annotations

import os
import signal

from protomodels_cli.errors import EXIT_INTERRUPTED


def leave_on_ctrl_c() -> None:
    """Until a program has a handler of its own: an import of torch may swallow the exception that is the default."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
