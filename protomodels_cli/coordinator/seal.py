"""The key that the owner of a run keeps, and what is sealed under it: AES-256-GCM, so that it is secret and whole.

Knows keys, bytes and the file that holds a key. It must not know what is sealed, nor where that goes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole

KEY_FILE, KEY_VARIABLE = "store.key", "PMTRAIN_STORE_KEY"
PREFIX = "pmtrain-store-key-1:"
MAGIC = b"pmtrain sealed 1\n"
SECRET, ID, NONCE = 32, 8, 12  # bytes; a random nonce is good for 2³² seals: one a second for a century
MOST_TEXT = 4096


class StoreKeyError(UserError):
    """A key that cannot be used. Its text is never shown: it may be a good one."""


class OtherKey(ValueError):
    """Sealed under another key."""


class NotWhole(ValueError):
    """Not what was sealed, or sealed for another purpose."""


@dataclass(frozen=True)
class StoreKey:
    secret: bytes = field(repr=False)

    @property
    def text(self) -> str:
        return PREFIX + base64.urlsafe_b64encode(self.secret).decode().rstrip("=")

    @property
    def id(self) -> bytes:
        """Goes with all that is sealed, so that a wrong key is not taken for damage. It says nothing of the key."""
        return hashlib.sha256(b"pmtrain store key id" + self.secret).digest()[:ID]

    def seal(self, purpose: str, content: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        return MAGIC + self.id + nonce + AESGCM(self.secret).encrypt(nonce, content, purpose.encode())

    def open(self, purpose: str, sealed: bytes) -> bytes:
        """Raises OtherKey and NotWhole."""
        head, rest = sealed[: len(MAGIC) + ID], sealed[len(MAGIC) + ID :]
        if not head.startswith(MAGIC) or len(head) < len(MAGIC) + ID:
            raise NotWhole("not sealed by pmtrain")
        if head != MAGIC + self.id:
            raise OtherKey("sealed under another key")
        try:
            return AESGCM(self.secret).decrypt(rest[:NONCE], rest[NONCE:], purpose.encode())
        except (InvalidTag, ValueError):
            raise NotWhole("not the bytes that were sealed") from None


def parse_key(text: str, where: str) -> StoreKey:
    body = text.strip().removeprefix(PREFIX)
    try:
        secret = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != SECRET or not text.strip().startswith(PREFIX):
        raise StoreKeyError(
            f"{where} holds no store key: that is one line, {PREFIX} and 43 characters",
            f"name the file {KEY_FILE} that the coordinator wrote to its run directory, or a copy of it",
            kind="store_key_malformed",
        )
    return StoreKey(secret)


def read_key(file: Path) -> StoreKey:
    try:
        with file.open(encoding="ascii", errors="replace") as opened:
            return parse_key(opened.read(MOST_TEXT), str(file))
    except OSError as e:
        fix = f"name a copy of the run's {KEY_FILE} that this user can read"
        raise StoreKeyError(
            f"cannot read the store key {file}: {e.strerror}", fix, kind="store_key_unreadable"
        ) from None


def given_key(file: Path | None) -> StoreKey | None:
    """The owner's: from the file, or else from the environment."""
    if file is not None:
        return read_key(file)
    text = os.environ.get(KEY_VARIABLE)
    return None if not text else parse_key(text, f"the environment variable {KEY_VARIABLE}")


def own_key(run_dir: Path, given: StoreKey | None) -> tuple[StoreKey, bool]:
    """The key of a run and whether it was made just now: the one in its directory, else the given one, else a new
    one. It is in the run directory then, as all secrets of the run are."""
    file = run_dir / KEY_FILE
    if file.exists():
        key = read_key(file)
        if given is not None and given != key:
            raise StoreKeyError(
                f"{file} is another key than the one that was named",
                f"leave out --key and {KEY_VARIABLE}: the store's copy of this run is sealed under {file}",
                kind="store_key_other",
            )
        return key, False
    key = given or StoreKey(secrets.token_bytes(SECRET))
    write_whole(file, f"{key.text}\n".encode(), 0o600)
    return key, given is None
