"""Waiting with an end: every loop of a test that waits goes through here, and says what it waited for."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest

from protomodels_cli import timeouts

PATIENCE = 150.0  # seconds that whatever must come may take: what a quiet machine takes is for benchmarks to say


def wait_for(
    what: Callable[[], Any], why: str = "", seconds: float = PATIENCE, details: Callable[[], str] = lambda: ""
) -> Any:
    """Ask until the answer is true, and return it. `why` names what is missing; `details` may say more then."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, f"{_in_words(what, why, seconds)} {details()}"
        time.sleep(0.02)
    return found


async def until(what: Callable[[], Any], why: str = "", seconds: float = PATIENCE) -> Any:
    """The same beside an event loop."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, _in_words(what, why, seconds)
        await asyncio.sleep(0.005)
    return found


def _in_words(what: Callable[[], Any], why: str, seconds: float) -> str:
    return f"waited {seconds:g} s in vain: {why or inspect.getsource(what).strip()}"


def scale_timeouts(patch: pytest.MonkeyPatch, by: float) -> None:
    """Multiply all timeouts and pauses of sessions, links, relays and parts in this process."""
    for name, seconds in vars(timeouts).items():
        if name.isupper():
            scaled = tuple(by * each for each in seconds) if isinstance(seconds, tuple) else by * seconds
            patch.setattr(timeouts, name, scaled)
