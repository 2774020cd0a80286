"""Each peer's own log and events in a folder that several peers of a run may share, and whose they are.

The first name in a folder has peer.log and events.jsonl, every other one files with its name. Knows locks and files.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OWNER = re.compile(r"\.peer(|-.+)\.name")
MOST_LETTERS, MOST_FILES = 40, 1000


@dataclass(frozen=True)
class OwnLog:
    name: str  # of the peer
    log: Path
    events: Path


@contextlib.contextmanager
def own_log(folder: Path, name: str) -> Iterator[OwnLog]:
    """The files of a peer with this name, which no other process writes meanwhile. Where nothing can be locked, the
    first ones: whoever needs the disk says so."""
    with contextlib.ExitStack() as held:
        suffix = next((s for s in _suffixes(name) if _takes(folder, s, name, held)), "")
        yield _files(folder, suffix, name)


def own_logs(folder: Path) -> list[OwnLog]:
    """Those in a peer's folder, the one that was written last first."""
    found = []
    try:
        names = [path for path in folder.iterdir() if OWNER.fullmatch(path.name)]
    except OSError:
        names = []
    for path in names:
        match = OWNER.fullmatch(path.name)
        assert match is not None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append(_files(folder, match[1], path.read_text(encoding="utf-8")))
    return sorted(found, key=_written, reverse=True) or [_files(folder, "", "")]


def _files(folder: Path, suffix: str, name: str) -> OwnLog:
    return OwnLog(name, folder / f"peer{suffix}.log", folder / f"events{suffix}.jsonl")


def _suffixes(name: str) -> Iterator[str]:
    plain = re.sub(r"[^\w.-]", "_", name)[:MOST_LETTERS]
    yield from ("", f"-{plain}", *(f"-{plain}-{n}" for n in range(2, MOST_FILES)))


def _takes(folder: Path, suffix: str, name: str, held: contextlib.ExitStack) -> bool:
    """Whether these files are this peer's from now on: nobody has them, or a peer of this name had them."""
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context((folder / f".peer{suffix}.name").open("a+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            if (known := file.read()) and known != name:
                return False
            if not known:
                file.write(name)
                file.flush()
        except BlockingIOError:
            return False
        except (OSError, UnicodeDecodeError):
            return suffix == ""
        held.enter_context(opened.pop_all())
    return True


def _written(files: OwnLog) -> float:
    try:
        return files.log.stat().st_mtime
    except OSError:
        return 0.0
