"""Progress in one line."""

from __future__ import annotations

import time


def count(n: float) -> str:
    """1234567 → 1.23 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.3g}"


def size(n: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} B"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Lines for steps, no more than one every two seconds, and always the first and the last."""

    def __init__(self, steps: int):
        self.steps, self._shown = steps, -1e9
        self._started, self._done, self._tokens = time.monotonic(), 0, 0

    def line(self, step: int, loss: float, lr: float, norm: float, tokens: int, applied: bool) -> str | None:
        """A step that is redone counts again: it took its time again."""
        now = time.monotonic()
        self._tokens += tokens
        self._done += 1
        if self._done > 1 and step != self.steps and applied and now - self._shown < 2:
            return None
        self._shown = now
        elapsed = max(now - self._started, 1e-9)
        width = len(str(self.steps))
        skipped = "" if applied else " | SKIPPED: not finite"
        return (
            f"step {step:{width}d}/{self.steps} ({100 * step / self.steps:5.1f}%) | loss {loss:.4f} | lr {lr:.1e} | "
            f"norm {norm:.2f} | {count(self._tokens / elapsed)} tok/s | "
            f"eta {duration((self.steps - step) * elapsed / self._done)}{skipped}"
        )
