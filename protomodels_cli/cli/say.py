"""Lines on the terminal."""

from __future__ import annotations

import contextlib


def say(text: str) -> None:
    """Print at once. A terminal that is gone, or a closed pipe, must not end a run."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)
