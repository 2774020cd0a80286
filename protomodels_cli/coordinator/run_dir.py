"""The run directory: claimed by one coordinator at a time; the run's authority, its secrets and its link are in it."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import yaml
from pydantic import ValidationError

from protomodels_cli import __version__
from protomodels_cli.coordinator.as_json import as_json, from_json
from protomodels_cli.coordinator.file_names import JOURNAL, LINK, LOCK, METRICS, PRIVATE, SNAPSHOTS, SPEC
from protomodels_cli.coordinator.identity import FORMAT, RunIdentity
from protomodels_cli.coordinator.notices import Notice
from protomodels_cli.coordinator.seal import StoreKey
from protomodels_cli.coordinator.tokens import GuestList
from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole
from protomodels_cli.spec.load import spec_from, with_absolute_paths
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.join_link import Address, JoinLink, LinkError, new_token
from protomodels_cli.wire.tls import Authority, new_authority


@dataclass(frozen=True)
class Private:
    """The content of the file that only the owner can read."""

    format: int
    token: str
    owner: str
    peers_key: str  # in hexadecimal digits
    base: str
    spec: dict[str, Any]
    guests: GuestList = field(default_factory=GuestList)


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
    rebuild: bool = False  # make a new journal first
    store_key: StoreKey | None = None  # the owner's own, where one was named
    found: tuple[Notice, ...] = ()  # what there is to tell of how the directory came to be

    @property
    def identity(self) -> RunIdentity:
        return RunIdentity(self.authority.fingerprint, self.spec.sha256())

    @property
    def shown_as(self) -> str:
        """What the page and relays know the run by: which one it is, and nothing else."""
        return hashlib.sha256(self.authority.fingerprint.encode()).hexdigest()[:16]

    @property
    def name_there(self) -> str:
        """Of the run's folder in the store."""
        return self.identity.name_in_store(self.spec.name)

    def secret_of(self, peer: str, until: int) -> str:
        """What a peer authenticates itself with until then, also after a restart of the coordinator."""
        return f"{until}.{hmac.new(self.peers_key, f'{peer} {until}'.encode(), hashlib.sha256).hexdigest()}"

    def write_link(self, host: str, port: int, others: Iterable[Address] = ()) -> JoinLink:
        elsewhere = tuple(dict.fromkeys(one for one in others if one != (host, port)))
        link = JoinLink(host, port, self.token, self.authority.fingerprint, elsewhere)
        write_whole(self.path / LINK, f"{link}\n".encode(), 0o600)
        return link

    def last_link(self) -> JoinLink | None:
        """Where this run's peers look for the coordinator."""
        try:
            return JoinLink.parse((self.path / LINK).read_text(encoding="utf-8"))
        except (OSError, LinkError):
            return None

    def addresses(self) -> tuple[Address, ...]:
        """The same, without the secret."""
        link = self.last_link()
        return () if link is None else link.addresses


def holds_a_run(path: Path) -> bool:
    """True also where the journal is gone: metrics and snapshots are only made after it."""
    beside = (path / METRICS).exists() or any((path / SNAPSHOTS).glob("[0-9]*"))
    return (path / JOURNAL).exists() or ((path / PRIVATE).exists() and beside)


def open_run_dir(
    path: Path, spec: RunSpec | None, base: Path, rebuild: bool = False, store_key: StoreKey | None = None
) -> RunDir:
    """The directory of a new run, or of a run to continue: then the spec must be the same, or None."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK).open("a")
    except OSError as e:
        fix = "choose another --dir"
        raise UserError(f"cannot write to {path}: {e.strerror}", fix, kind="run_dir_not_writable") from None
    if not _claimed(lock):
        fix = f"stop that coordinator first (`pmtrain stop {path}`), or choose another --dir"
        raise UserError(f"another coordinator is running in {path}", fix, kind="run_dir_in_use") from None
    if holds_a_run(path):
        return replace(_go_on(path, lock, spec, rebuild), store_key=store_key)
    if spec is None:
        fix = "name the directory of a run with --dir, or give the spec of a new run"
        raise UserError(f"{path} holds no run", fix, kind="run_dir_empty")
    if (path / METRICS).exists():
        fix = "choose another --dir; pmtrain overwrites no run"
        raise UserError(f"{path} holds the metrics of another run", fix, kind="run_dir_taken")
    if (path / "ca" / "ca.pem").exists():  # of a start that came no further
        authority = Authority.load(path / "ca")
    else:
        authority = new_authority()
        authority.save(path / "ca")
    saved = with_absolute_paths(spec, base).model_dump(mode="json")
    write_whole(path / SPEC, yaml.safe_dump(saved, sort_keys=False).encode())
    token, owner, key = new_token(), secrets.token_urlsafe(32), secrets.token_bytes(32)
    private = Private(FORMAT, token, owner, key.hex(), str(base.resolve()), spec.model_dump(mode="json"))
    write_whole(path / PRIVATE, as_json(private), 0o600)
    return RunDir(path, lock, spec, base, authority, token, owner, key, resumed=False, store_key=store_key)


def _claimed(lock: TextIO) -> bool:
    """A second time after a moment: `pmtrain runs` holds a lock for an instant, to see whether somebody has it."""
    for wait in (0.1, 0.0):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(wait)
    return False


def private_of(path: Path) -> Private:
    """Raises UserError, also where the run directory has another format."""
    try:
        content = (path / PRIVATE).read_bytes()
        found = json.loads(content).get("format", 1)
        if found == FORMAT:
            return from_json(Private, content)
    except (OSError, ValueError, AttributeError) as e:
        raise _unreadable(path / PRIVATE, e) from None
    raise UserError(
        f"the run directory {path} has format {found}, and pmtrain {__version__} reads format {FORMAT}",
        "continue with the version of pmtrain that began the run, or begin a new run in another --dir",
        kind="run_dir_other_format",
    )


def run_of(path: Path) -> tuple[RunSpec, RunIdentity]:
    """The run in a directory, without claiming the directory. Its spec is what it began with, whatever has become of
    run.yaml. Raises UserError."""
    spec = spec_from(private_of(path).spec)
    return spec, RunIdentity(Authority.load(path / "ca").fingerprint, spec.sha256())


def _go_on(path: Path, lock: TextIO, asked: RunSpec | None, rebuild: bool) -> RunDir:
    private = private_of(path)
    try:
        spec, key = spec_from(private.spec), bytes.fromhex(private.peers_key)
    except ValueError as e:
        raise _unreadable(path / PRIVATE, e) from None
    if asked is not None and asked.sha256() != spec.sha256():
        raise UserError(
            f"{path} holds a run with another spec",
            "choose another --dir, or leave out the spec to continue the run that is there",
            kind="run_dir_other_spec",
        )
    authority = Authority.load(path / "ca")
    base = Path(private.base)
    return RunDir(path, lock, spec, base, authority, private.token, private.owner, key, True, rebuild)


def owner_secret(path: Path) -> str:
    """What the owner shows to pause, resume and stop the run."""
    try:
        (path / PRIVATE).open().close()
    except (FileNotFoundError, NotADirectoryError):
        what, fix = f"{path} is not a run directory", "name the directory of a run that was begun on this machine"
        raise UserError(what, fix, kind="not_a_run_dir") from None
    except OSError:
        fix = "name the run's directory, as the user who started the coordinator"
        raise UserError(
            f"cannot read {path / PRIVATE}, which only the run's owner can", fix, kind="not_owner"
        ) from None
    return private_of(path).owner


def _unreadable(file: Path, error: Exception) -> UserError:
    detail = error.strerror if isinstance(error, OSError) else f"damaged ({error})"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        detail = f"damaged ({'.'.join(map(str, first['loc']))}: {first['msg']})"
    return UserError(f"cannot read {file}: {detail}", f"restore {file} from a copy", kind="run_dir_damaged")
