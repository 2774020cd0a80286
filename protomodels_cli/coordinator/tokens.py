"""The tokens that a run's owner gives out beside the run's own, and the peers that were kicked. Pure: no clock, no
file.

A token is kept as its hash alone: whoever reads the run directory cannot join with it. It has 128 random bits, so the
hash needs no salt.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

End = Literal["used", "expired", "revoked"]
MOST_TOKENS = 1000
MOST_GUESTS = 1000  # of one token
MOST_NAME = 64  # characters of whom a token is for
OWN = "run"  # the id of the run's own token


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True)
class Token:
    id: str
    sha256: str
    made: float  # seconds since 1970, as the next
    expires: float | None = None  # None: never
    uses: int = 1  # how many peers may join with it
    guests: tuple[tuple[str, str], ...] = ()  # the hashes of keys that came with it, and the peers' ids
    revoked: bool = False
    person: str = ""  # whom the owner made it for; empty: not said

    def end(self, now: float) -> End | None:
        """Why nobody can join with it any more."""
        if self.revoked:
            return "revoked"
        if self.expires is not None and now >= self.expires:
            return "expired"
        return "used" if len(self.guests) >= self.uses else None

    def peer_with(self, key: str) -> str | None:
        """Whoever comes again with the same key is the same peer."""
        return next((peer for known, peer in self.guests if known == key), None)


@dataclass(frozen=True)
class GuestList:
    tokens: tuple[Token, ...] = ()
    kicked: tuple[str, ...] = ()

    def find(self, token: str) -> Token | None:
        """Compares with all of them in constant time."""
        shown, found = hash_of(token), None
        for one in self.tokens:
            if hmac.compare_digest(shown, one.sha256):
                found = one
        return found

    def named(self, id: str) -> Token | None:
        return next((one for one in self.tokens if one.id == id), None)

    def add(self, token: Token, now: float) -> GuestList:
        """Those that have ended long ago make room. Raises ValueError where there is none."""
        kept = self.tokens
        if len(kept) >= MOST_TOKENS:
            kept = tuple(one for one in kept if one.end(now) is None)
        if len(kept) >= MOST_TOKENS:
            raise ValueError(f"{MOST_TOKENS} tokens")
        return replace(self, tokens=(*kept, token))

    def use(self, id: str, key: str, peer: str) -> GuestList:
        return self._with(id, lambda one: replace(one, guests=(*one.guests, (key, peer))))

    def revoke(self, id: str) -> GuestList:
        return self._with(id, lambda one: replace(one, revoked=True))

    def kick(self, peer: str) -> GuestList:
        """With the token that it came with: or it would be back as another."""
        barred = self if peer in self.kicked else replace(self, kicked=(*self.kicked, peer))
        came_with = self.token_of(peer)
        return barred if came_with is None else barred.revoke(came_with.id)

    def token_of(self, peer: str) -> Token | None:
        return self._by_peer.get(peer)

    @cached_property
    def _by_peer(self) -> dict[str, Token]:
        """Asked for with every session, of up to a million guests."""
        return {peer: one for one in self.tokens for _, peer in one.guests}

    def _with(self, id: str, change: Callable[[Token], Token]) -> GuestList:
        return replace(self, tokens=tuple(change(one) if one.id == id else one for one in self.tokens))
