"""The run directory: claimed by one coordinator at a time; the run's authority, its secrets and its link are in it."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from protomodels_cli import __version__
from protomodels_cli.coordinator.identity import FORMAT, Identity
from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole
from protomodels_cli.spec.load import spec_from, with_absolute_paths
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.join_link import JoinLink, LinkError, new_token
from protomodels_cli.wire.tls import Authority, new_authority

PRIVATE = "private.json"
JOURNAL, SNAPSHOTS, METRICS, EVENTS, BASES = "journal.sqlite", "snapshots", "metrics.jsonl", "events.jsonl", "basis"


@dataclass(frozen=True)
class RunDir:
    path: Path
    lock: TextIO  # held while it is open
    spec: RunSpec
    base: Path  # what the spec's paths are relative to
    authority: Authority
    token: str  # whoever has it may join and look on
    owner: str  # … may pause, resume and stop
    peers_key: bytes
    resumed: bool
    rebuild: bool = False  # its journal is to be made anew first

    @property
    def identity(self) -> Identity:
        return Identity(self.authority.fingerprint, self.spec.sha256())

    def secret_of(self, peer: str) -> str:
        """What a peer shows to be known again: also to a coordinator that was started again."""
        return hmac.new(self.peers_key, peer.encode(), hashlib.sha256).hexdigest()

    def write_link(self, host: str, port: int) -> JoinLink:
        link = JoinLink(host, port, self.token, self.authority.fingerprint)
        write_whole(self.path / "link", f"{link}\n".encode(), 0o600)
        return link

    def last_address(self) -> tuple[str, int] | None:
        """Where its peers look for it."""
        try:
            link = JoinLink.parse((self.path / "link").read_text(encoding="utf-8"))
        except (OSError, LinkError):
            return None
        return link.host, link.port


def holds_a_run(path: Path) -> bool:
    """Also one whose journal is gone: what is beside it was made after it."""
    beside = (path / METRICS).exists() or any((path / SNAPSHOTS).glob("[0-9]*"))
    return (path / JOURNAL).exists() or ((path / PRIVATE).exists() and beside)


def open_run_dir(path: Path, spec: RunSpec | None, base: Path, rebuild: bool = False) -> RunDir:
    """A new run's directory, or that of a run to go on with: then the spec must be the same, or left out."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a")
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}", "choose another --run-dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another coordinator runs in {path}", "stop it first, or choose another --run-dir") from None
    if holds_a_run(path):
        return _go_on(path, lock, spec, rebuild)
    if spec is None:
        raise UserError(f"{path} holds no run", "name its directory with --run-dir, or give the spec")
    if (path / METRICS).exists():
        raise UserError(f"{path} holds another run", "choose another --run-dir; nothing is written over")
    if (path / "ca" / "ca.pem").exists():  # of a start that came no further
        authority = Authority.load(path / "ca")
    else:
        authority = new_authority()
        authority.save(path / "ca")
    saved = with_absolute_paths(spec, base).model_dump(mode="json")
    write_whole(path / "run.yaml", yaml.safe_dump(saved, sort_keys=False).encode())
    token, owner, key = new_token(), secrets.token_urlsafe(32), secrets.token_bytes(32)
    private = {
        "format": FORMAT,
        "token": token,
        "owner": owner,
        "peers_key": key.hex(),
        "base": str(base.resolve()),
        "spec": spec.model_dump(mode="json"),
    }
    write_whole(path / PRIVATE, json.dumps(private).encode(), 0o600)
    return RunDir(path, lock, spec, base, authority, token, owner, key, resumed=False)


def private_of(path: Path) -> dict[str, Any]:
    """What only the owner of a run's directory can read. Raises UserError, also where the directory has another
    format."""
    try:
        private = json.loads((path / PRIVATE).read_text(encoding="utf-8"))
        found = private.get("format", 1)
    except (OSError, ValueError, AttributeError) as e:
        raise UserError(f"{path / PRIVATE} cannot be read: {e}", "put it back from a copy") from None
    if found != FORMAT:
        raise UserError(
            f"{path} has format {found}, and pmtrain {__version__} reads run directories of format {FORMAT}",
            "go on with the version of pmtrain that made it, or begin a new run in another --run-dir",
        )
    return dict(private)


def identity_of(path: Path) -> Identity:
    """Of the run in a directory, for whoever only reads it."""
    spec = spec_from(private_of(path)["spec"])
    return Identity(Authority.load(path / "ca").fingerprint, spec.sha256())


def _go_on(path: Path, lock: TextIO, asked: RunSpec | None, rebuild: bool) -> RunDir:
    private = private_of(path)
    try:
        spec, key = spec_from(private["spec"]), bytes.fromhex(private["peers_key"])
    except (ValueError, KeyError) as e:
        raise UserError(f"{path / PRIVATE} cannot be read: {e}", "put it back from a copy") from None
    if asked is not None and asked.sha256() != spec.sha256():
        raise UserError(
            f"{path} holds a run with another spec", "choose another --run-dir, or leave the spec out to go on with it"
        )
    authority = Authority.load(path / "ca")
    base = Path(private["base"])
    return RunDir(path, lock, spec, base, authority, private["token"], private["owner"], key, True, rebuild)


def owner_secret(path: Path) -> str:
    """Of whoever can read the run's directory."""
    try:
        return str(json.loads((path / PRIVATE).read_text(encoding="utf-8"))["owner"])
    except (OSError, ValueError, KeyError):
        raise UserError(f"{path} is not a run's directory, or not yours", "name the run's directory") from None
