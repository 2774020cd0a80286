"""What this process has used."""

from __future__ import annotations

import resource
import sys


def peak_memory() -> int:
    """The largest resident size this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
