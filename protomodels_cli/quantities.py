"""Numbers as people write them: durations, sizes, rates, counts. The one place where a quantity becomes text."""

from __future__ import annotations

import math
import time
from datetime import datetime

MINUTE, HOUR = 60, 3600


def figures(x: float) -> str:
    """Three significant figures, or all before the point; never an exponent."""
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    text = f"{x:,.{max(0, 2 - math.floor(math.log10(abs(x))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """0.35 → 350 ms, 5 → 5 s, 213 → 3 min 33 s, 1440 → 24 min, 3900 → 1 h 05 min, 200 000 → 2 d 07 h."""
    if not math.isfinite(seconds):
        return "forever" if seconds > 0 else "unknown"
    if seconds < 0.9995:
        return "0 s" if seconds <= 0 else f"{figures(seconds * 1000)} ms"
    if seconds < MINUTE - 0.5:
        return f"{figures(seconds)} s"
    whole = round(seconds)
    if whole < 10 * MINUTE:
        minutes, rest = divmod(whole, MINUTE)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / MINUTE)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60:02d} min" if minutes % 60 else "")
    hours = round(seconds / HOUR)
    return f"{hours // 24:,} d" + (f" {hours % 24:02d} h" if hours % 24 else "")


LATEST = 1e11  # seconds since 1970: the year 5138. Calendars end soon after


def until_when(clock: float) -> str:
    """Seconds since 1970 as this machine's clock on the wall shows them; 0: nobody knows when."""
    if not clock:
        return "until it is woken"
    then = datetime.fromtimestamp(min(clock, LATEST))
    return f"until {then:%H:%M}" if abs(clock - time.time()) < 20 * HOUR else f"until {then:%d %b %H:%M}"


def size(n: float) -> str:
    """Bytes: 3 221 225 472 → 3 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= scale:
            return f"{figures(n / scale)} {unit}"
    return f"{n:.0f} B"


def count(n: float) -> str:
    """1 234 567 → 1.23 M; 8e9 → 8 B, as people count parameters and tokens."""
    number, prefix = _scaled(n)
    return f"{number} {'B' if prefix == 'G' else prefix}".rstrip()


def rate(n: float, unit: str) -> str:
    """6e13 and FLOP/s → 60 TFLOP/s, 8e7 and bit/s → 80 Mbit/s; 1234 and tok/s → 1.23k tok/s: words take no prefix."""
    number, prefix = _scaled(n)
    return f"{number} {prefix}{unit}" if unit.startswith(("FLOP", "bit")) else f"{number}{prefix} {unit}"


def plural(n: int, one: str, many: str | None = None) -> str:
    """1, step → 1 step; 2, step → 2 steps."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _scaled(n: float) -> tuple[str, str]:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= 0.9995 * scale:
            return figures(n / scale), prefix
    return figures(n), ""
