"""The run directory: claimed by one coordinator at a time, with the run's authority, token and link in it."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import yaml

from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole
from protomodels_cli.spec.load import with_absolute_paths
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.link import JoinLink, new_token
from protomodels_cli.wire.tls import Authority, new_authority


@dataclass(frozen=True)
class RunDir:
    path: Path
    lock: TextIO  # held while it is open
    authority: Authority
    token: str

    def write_link(self, host: str, port: int) -> JoinLink:
        link = JoinLink(host, port, self.token, self.authority.fingerprint)
        write_whole(self.path / "link", f"{link}\n".encode(), 0o600)
        return link


def open_run_dir(path: Path, spec: RunSpec, base: Path) -> RunDir:
    """A new run's directory. Refuses one that holds a run or that another process has."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a")
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}", "choose another --run-dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another coordinator runs in {path}", "stop it first, or choose another --run-dir") from None
    if (path / "journal.sqlite").exists() or (path / "metrics.jsonl").exists():
        raise UserError(f"{path} holds a run already", "choose another --run-dir; nothing is written over")
    if (path / "ca" / "ca.pem").exists():  # of a start that came no further
        authority = Authority.load(path / "ca")
    else:
        authority = new_authority()
        authority.save(path / "ca")
    saved = with_absolute_paths(spec, base).model_dump(mode="json")
    write_whole(path / "run.yaml", yaml.safe_dump(saved, sort_keys=False).encode())
    return RunDir(path, lock, authority, new_token())
