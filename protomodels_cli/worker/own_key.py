"""A peer's own key, kept beside its files: who comes again with it is the same peer, which a token lets in but once.

Knows a lock and a file. Several peers may share a folder: the first has the key, the others make one for the day.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from protomodels_cli.files import write_whole
from protomodels_cli.wire.tls import InvalidPem, new_key, public_key_of


@contextlib.contextmanager
def own_key(folder: Path, fingerprint: str) -> Iterator[bytes]:
    """For as long as it is used. `fingerprint`: of the run's authority."""
    path = folder / f".{fingerprint[:8]}.key"
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(path.with_suffix(".lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            key = _kept(path)
        except OSError:  # another peer has it, or nothing can be kept here: whoever needs the folder says so
            key = new_key()
        yield key


def _kept(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError, InvalidPem):
        key = path.read_bytes()
        public_key_of(key)
        return key
    key = new_key()
    write_whole(path, key, 0o600)
    return key
