"""Choosing the run directory."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protomodels_cli.cli.beginning import Beginning
    from protomodels_cli.spec.schema import RunSpec


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


def claim_or_find(run_dir: Path | None, spec: RunSpec | None, beginning: Beginning) -> Path:
    """A folder for this run: the one asked for, or that of the same run, interrupted, or a new one."""
    if run_dir is not None or spec is None:
        beginning.will_make(run_dir or Path())
        return claim(run_dir, "")
    for folder in sorted(Path("runs").glob(f"{spec.name}*"), reverse=True):
        if _is_interrupted(folder, spec):
            return folder
    above = [] if Path("runs").exists() else [Path("runs")]
    folder = claim(None, spec.name)
    beginning.made(folder, above)
    return folder


def _is_interrupted(folder: Path, spec: RunSpec) -> bool:
    """Whether the folder holds this very run, not finished and without a coordinator."""
    import fcntl

    from protomodels_cli.coordinator.run_dir import holds_a_run, run_of
    from protomodels_cli.coordinator.trust import believe
    from protomodels_cli.errors import UserError

    if not holds_a_run(folder):
        return False
    try:
        with (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _, identity = run_of(folder)
    except (OSError, UserError):  # of another format, say
        return False
    return identity.spec_sha256 == spec.sha256() and not believe(folder, identity)[0].over
