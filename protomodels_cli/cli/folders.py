"""Where runs go."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path


def claim(run_dir: Path | None, name: str) -> Path:
    """A folder for this run alone: the one asked for, or runs/NAME, or the first free of runs/NAME-2, NAME-3, …"""
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        return run_dir
    Path("runs").mkdir(exist_ok=True)
    for n in itertools.count(1):
        folder = Path("runs") / (name if n == 1 else f"{name}-{n}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable")
