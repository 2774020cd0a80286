"""The memory that a process has used. What a stage has used of time and bytes is in wire/usage.py."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory() -> int:
    """The largest resident size this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def peak_memory_of(pid: int) -> int:
    """Likewise of another process that is still there; where the system does not say, what it has now."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import psutil

        return int(psutil.Process(pid).memory_info().rss)
