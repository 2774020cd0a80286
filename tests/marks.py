"""Marks: every fault that really happens writes one, at the moment it happens, by whoever makes it happen.

A test that asks for a fault fails unless the fault left its mark: what was never injected was not survived.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

_here: tuple[Path, str] | None = None  # where this process writes, and the kind of the fault that is put into it


def mark_in(folder: Path | None, kind: str = "") -> None:
    """From now on this process's marks are of this kind and go to this folder; None: it makes none."""
    global _here
    _here = None if folder is None else (folder, kind)


def mark(**what: Any) -> None:
    """The fault happens now, and here. After the end of the job that it was meant for it leaves no mark."""
    if _here is not None:
        write_mark(*_here, **what)


def write_mark(folder: Path, kind: str, **what: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    row = {"kind": kind, "at": time.time(), "pid": os.getpid(), **what}
    file = os.open(folder / "marks.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, json.dumps(row).encode() + b"\n")  # in one write: others append too
    finally:
        os.close(file)


def first() -> bool:
    """For whoever asks first, in whichever process of the run; the fault is then that one's to make."""
    assert _here is not None, "a fault outside injection.fault"
    folder, kind = _here
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / f"{kind}.first").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def marks(folder: Path, kind: str) -> list[dict[str, Any]]:
    file = folder / "marks.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["kind"] == kind]


def injected(folder: Path, kind: str, **what: Any) -> dict[str, Any]:
    """The first mark of this fault, with these fields; there must be one."""
    rows = marks(folder, kind)
    found = [row for row in rows if what.items() <= row.items()]
    assert found, f"the fault {kind} {what} was never injected; of its kind: {rows}"
    return found[0]
