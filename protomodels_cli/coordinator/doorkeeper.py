"""Whom the run lets in: its tokens, its peers' secrets, its owner's, and who was kicked. Kept in the private file.

Knows secrets and one file. It must not know gRPC, addresses or what a peer does. The event loop asks who may call;
changes block until they are on the disk, and are made in other threads, one at a time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from protomodels_cli.coordinator import refusals
from protomodels_cli.coordinator.as_json import as_json
from protomodels_cli.coordinator.file_names import LINK, PRIVATE
from protomodels_cli.coordinator.run_dir import Private, RunDir, private_of
from protomodels_cli.coordinator.tokens import OWN, GuestList, Token, hash_of
from protomodels_cli.files import write_whole
from protomodels_cli.observe import logs
from protomodels_cli.wire.join_link import new_token

MOST_DIGITS = 13  # of a time, in seconds since 1970


@dataclass(frozen=True)
class Revoked:
    id: str  # of the token; empty: none had to be
    new: str = ""  # the run's own, where it was replaced


class Doorkeeper:
    def __init__(self, run_dir: RunDir, clock: Callable[[], float] = time.time):
        self._run_dir, self._clock = run_dir, clock
        self._private, self._one_change = private_of(run_dir.path), threading.Lock()
        self.on_change: Callable[[], object] = lambda: None  # what the private file holds is kept elsewhere too

    @property
    def token(self) -> str:
        """The run's own."""
        return self._private.token

    def now(self) -> float:
        return self._clock()

    @property
    def guests(self) -> GuestList:
        return self._private.guests

    # Who may call

    def may_come(self, token: str) -> refusals.Refusal | None:
        """Why not. A token that was used up still shows that its holder belongs to the run."""
        if _same(token, self.token):
            return None
        found = self.guests.find(token)
        end = None if found is None else found.end(self._clock())
        if end in ("expired", "revoked"):
            return refusals.EndedToken(end)
        return refusals.WrongToken() if found is None else None

    def id_of(self, token: str) -> str:
        """Of a token that is good."""
        found = self.guests.find(token)
        return OWN if found is None else found.id

    def may_call(self, peer: str, secret: str) -> refusals.Refusal | None:
        until = self.end_of(secret)
        if not peer or not _same(secret, self._run_dir.secret_of(peer, until)):
            return refusals.NotEnrolled()
        if peer in self.guests.kicked:
            return refusals.Kicked()
        return refusals.CertificateExpired() if until <= self._clock() else None

    def end_of(self, secret: str) -> int:
        """When it ends, in seconds since 1970, if it is a peer's."""
        until = secret.partition(".")[0]
        return int(until) if until.isascii() and until.isdecimal() and len(until) < MOST_DIGITS else 0

    def may_decide(self, owner: str) -> refusals.Refusal | None:
        return None if _same(owner, self._private.owner) else refusals.NotOwner()

    def admit(self, token: str, key: bytes) -> str | refusals.Refusal:
        """The id of a peer that joins with this token and key. Blocks."""
        with self._one_change:
            new, found = f"p{secrets.token_hex(6)}", self.guests.find(token)
            if _same(token, self.token):
                return new
            if found is None:  # it was replaced while the caller waited
                return refusals.WrongToken()
            if (before := found.peer_with(key_hash := hashlib.sha256(key).hexdigest())) is not None:
                return before
            if (end := found.end(self._clock())) is not None:
                return refusals.EndedToken(end)
            self._keep(self.guests.use(found.id, key_hash, new))
            return new

    def joined_with(self, peer: str) -> tuple[str, str]:
        """The id of the token that it came with, and whom that was made for."""
        token = self.guests.token_of(peer)
        return (OWN, "") if token is None else (token.id, token.person)

    # What the owner decides. All of it blocks.

    def create(self, uses: int, seconds: float | None, person: str = "") -> tuple[Token, str]:
        """Raises ValueError where there are too many."""
        token, now = new_token(), self._clock()
        expires = None if seconds is None else now + seconds
        made = Token(secrets.token_hex(3), hash_of(token), now, expires, uses, person=person)
        logs.hide(token)
        with self._one_change:
            self._keep(self.guests.add(made, now))
        return made, token

    def revoke(self, id: str) -> Revoked | None:
        """None: there is no such token."""
        with self._one_change:
            if id == OWN:
                return Revoked(OWN, self._replace_own())
            if self.guests.named(id) is None:
                return None
            self._keep(self.guests.revoke(id))
            return Revoked(id)

    def kick(self, peer: str) -> Revoked:
        """It stays out, and whatever it joined with lets nobody in any more."""
        with self._one_change:
            came_with, now = self.guests.token_of(peer), self._clock()
            self._keep(self.guests.kick(peer))
            if came_with is None:
                return Revoked(OWN, self._replace_own())
            return Revoked(came_with.id if came_with.end(now) is None else "")

    def _replace_own(self) -> str:
        new = new_token()
        logs.hide(new)
        self._write(replace(self._private, token=new))
        if (link := self._run_dir.last_link()) is not None:
            write_whole(self._run_dir.path / LINK, f"{replace(link, token=new)}\n".encode(), 0o600)
        return new

    def _keep(self, guests: GuestList) -> None:
        self._write(replace(self._private, guests=guests))

    def _write(self, private: Private) -> None:
        write_whole(self._run_dir.path / PRIVATE, as_json(private), 0o600)
        self._private = private_of(self._run_dir.path)
        self.on_change()


def _same(shown: str, right: str) -> bool:
    return hmac.compare_digest(shown.encode(), right.encode())
