"""Ctrl-C and SIGTERM, as calls in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def signals_call(loop: asyncio.AbstractEventLoop, interrupt: Callable[[], None]) -> Iterator[None]:
    """Until the block ends; then the handlers of before are back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    taken = []
    with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows, or not the main thread
        for number in before:
            loop.add_signal_handler(number, interrupt)
            taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
