"""What is on this machine: run directories, peers' folders, exported models. Reads folders; knows no torch, no network.

A folder is told by the files in it. What cannot be read is said of it and ends nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from protomodels_cli.coordinator.file_names import EVENTS, JOURNAL, LINK, LOCK, LOG, METRICS, PRIVATE, SPEC, SUMMARY
from protomodels_cli.coordinator.identity import FORMAT
from protomodels_cli.files import peer_homes
from protomodels_cli.observe.metrics import rows_from_last
from protomodels_cli.worker.own_log import OwnLog, own_logs

Kind = Literal["run", "reference", "peer", "model"]
State = Literal["running", "done", "not_running", "other_version", "unreadable", "exported"]
RUNS = Path("runs")  # below the working folder, as `coordinator`, `reference` and `demo` choose it
PEER_LOG, PEER_SHOWS = "peer.log", "shown.json"  # as worker/join.py calls them
LOOKED_AT = 5000  # rows from the end of a file, among which a step is looked for


@dataclass(frozen=True)
class Found:
    """A folder of ours."""

    kind: Kind
    name: str
    path: Path
    state: State
    step: int | None  # None: no step is known
    steps: int | None
    bytes: int
    last_activity: float  # seconds since 1970


def kind_of(path: Path) -> Kind | None:
    """None where this is no folder of ours, or cannot be looked into."""
    try:
        names = set(os.listdir(path))
    except OSError:
        return None
    if {JOURNAL, PRIVATE} & names:
        return "run"
    if SPEC in names and METRICS in names:
        return "reference"
    if PEER_LOG in names or {EVENTS, "parts"} <= names:
        return "peer"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "model"
    return None


def everything() -> list[Found]:
    """Below the working folder, in its runs/, and where peers keep their folders; what was used last comes first."""
    found = [look(path, kind) for path, kind in _folders()]
    return sorted(found, key=lambda one: (-one.last_activity, str(one.path)))


def names() -> list[str]:
    """Of runs and peers' folders, by which commands know them; without looking into them further."""
    return sorted({path.name for path, kind in _folders() if kind != "model"})


def named(name: str) -> list[Path]:
    """The runs and peers' folders with this name: a peer's folder has the run's name and eight letters."""
    fits = re.compile(rf"{re.escape(name)}(-[A-Za-z0-9_-]{{8}})?")
    own = [path for path, kind in _folders() if kind in ("run", "reference") and path.name == name]
    return own or [path for path, kind in _folders() if kind == "peer" and fits.fullmatch(path.name)]


def model_named(name: str) -> Path | None:
    """The exported model with this name, which no run has; None where there is none, or several."""
    found = [path for path, kind in _folders() if kind == "model" and path.name == name]
    return found[0] if len(found) == 1 and not named(name) else None


def _folders() -> Iterator[tuple[Path, Kind]]:
    for home in (Path(), RUNS, *peer_homes()):
        for path in _below(home):
            if kind := kind_of(path):
                yield path, kind
                if kind in ("run", "reference"):
                    yield from ((inner, "model") for inner in _below(path) if kind_of(inner) == "model")


def _below(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def look(path: Path, kind: Kind) -> Found:
    step, steps = _progress(path, kind)
    return Found(kind, _name(path, kind), path, _state(path, kind, step, steps), step, steps, *_size_and_age(path))


def _name(path: Path, kind: Kind) -> str:
    return re.sub(r"-[A-Za-z0-9_-]{8}$", "", path.name) if kind == "peer" else path.resolve().name


def _progress(path: Path, kind: Kind) -> tuple[int | None, int | None]:
    """The last step and the number of steps."""
    if kind == "peer":
        row = _last(own_logs(path)[0].events, lambda row: row.get("kind") == "step_decided")
        return _whole(row, "step"), _whole(row, "steps")
    if kind == "model":
        return None, None
    row = _last(path / METRICS, lambda row: row.get("event") == "step")
    try:
        steps = re.search(r"(?m)^steps: (\d+)$", (path / SPEC).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        steps = None
    return _whole(row, "step") or (0 if kind == "run" else None), int(steps[1]) if steps else None


def _whole(row: dict[str, Any], name: str) -> int | None:
    value = row.get(name)
    return value if isinstance(value, int) else None


def _last(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The last such row; an empty one where there is none."""
    try:
        for row, _ in zip(rows_from_last(path), range(LOOKED_AT), strict=False):
            if wanted(row):
                return row
    except OSError:
        pass
    return {}


def _state(path: Path, kind: Kind, step: int | None, steps: int | None) -> State:
    match kind:
        case "model":
            return "exported"
        case "reference":
            return "done" if step is not None and step == steps else "not_running"
        case "peer":
            over = _last(own_logs(path)[0].events, lambda row: True)
            if is_locked(path / LOCK):
                return "running"
            return "done" if (over.get("kind"), over.get("reason")) == ("released", "run_finished") else "not_running"
        case _:
            if is_locked(path / LOCK):
                return "running"
            format_ = _format(path / PRIVATE)
            if format_ is not None and format_ != FORMAT:
                return "other_version"
            if format_ is None:
                return "unreadable"
            return "done" if (path / SUMMARY).exists() else "not_running"


def _format(private: Path) -> int | None:
    """None where it cannot be read."""
    try:
        return int(json.loads(private.read_bytes()).get("format", 1))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def is_locked(path: Path) -> bool:
    """Whether a process of ours is at work there."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _size_and_age(path: Path) -> tuple[int, float]:
    """Bytes of all files below, and when the newest of those that are written while it is in use was."""
    live, total, newest = {METRICS, EVENTS, LOG, PEER_LOG, SPEC, "config.json"}, 0, 0.0
    live |= {file.name for own in own_logs(path) for file in (own.log, own.events)}
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                facts = os.stat(os.path.join(folder, file), follow_symlinks=False)
            except OSError:  # dropped just now
                continue
            total += facts.st_size
            if file in live and Path(folder) == path:
                newest = max(newest, facts.st_mtime)
    return total, newest or path.stat().st_mtime


def fingerprint_of(path: Path) -> str | None:
    """The eight letters that folders of a run's peers end with; None where they cannot be known."""
    try:
        return (path / LINK).read_text(encoding="utf-8").strip().partition("#")[2][:8] or None
    except (OSError, ValueError):
        return None


def port_of(one: Found) -> int | None:
    """At which the coordinator of a run that is led here listens; None: nobody leads it here."""
    if one.kind != "run" or one.state != "running":
        return None
    try:
        found = re.search(r":(\d+)[,/]", (one.path / LINK).read_text(encoding="utf-8").removeprefix("pm:"))
    except (OSError, ValueError):
        return None
    return int(found[1]) if found else None


def peers_of(run: Path) -> dict[str, OwnLog]:
    """The logs on this machine of peers of a run, by the names that they joined with."""
    run_is, found = fingerprint_of(run), dict[str, OwnLog]()
    if run_is is None:
        return found
    for home in (*peer_homes(), *_below(run / "peers")):
        for path in _below(home):
            if path.name.endswith(f"-{run_is}"):
                found |= peers_in(path)
    return found


def peers_in(folder: Path) -> dict[str, OwnLog]:
    """The same, of one peer's folder, which several may share."""
    found = dict[str, OwnLog]()
    for own in own_logs(folder):  # the newest first
        joined = {} if own.name else _last(own.events, lambda row: row.get("kind") == "joined")
        found.setdefault(own.name or str(joined.get("name") or folder.parent.name), own)
    return found
