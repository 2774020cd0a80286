"""Tickets for relays that stand by themselves: a relay knows by its own secret that a run's coordinator let two peers
meet there, and until when.

A coordinator has the secret from whoever runs the relay, in the link that `pmtrain relay` prints. Peers have tickets
alone: those are good for one meeting, at one relay, for a day.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from protomodels_cli.errors import UserError
from protomodels_cli.files import write_whole
from protomodels_cli.wire.join_link import Address, LinkError, address, parse_address

SCHEME, SECRET_FILE = "pmr://", "secret"
SECRET = re.compile(r"[A-Za-z0-9_-]{22,64}")
TICKET_SECONDS = 24 * 3600.0
_PART = re.compile(r"[0-9a-z]{1,32}")
_TICKET = re.compile(r"([0-9a-z]{1,32})-([0-9a-z]{1,32})-([0-9a-z]{1,32})-([0-9a-f]{1,10})-([0-9a-f]{32})")


@dataclass(frozen=True)
class RelayLink:
    """Where a relay is and what it trusts: for coordinators, whose owners got it from the relay's."""

    host: str
    port: int
    secret: str

    @property
    def address(self) -> str:
        return address(self.host, self.port)

    @property
    def place(self) -> Address:
        return self.host, self.port

    def __str__(self) -> str:
        return f"{SCHEME}{self.address}/{self.secret}"

    @classmethod
    def parse(cls, text: str) -> RelayLink:
        """Raises LinkError."""
        where, _, secret = text.strip().removeprefix(SCHEME).partition("/")
        if not text.strip().startswith(SCHEME) or not SECRET.fullmatch(secret):
            what = "a relay's link has the form pmr://HOST:PORT/SECRET"
            raise LinkError("relay_link", what, "copy the whole link again from what `pmtrain relay` printed")
        return cls(*parse_address(where), secret)


def kept_secret(folder: Path) -> str:
    """A relay's own, from its folder; the first time it is made."""
    path = folder / SECRET_FILE
    if not path.exists():
        write_whole(path, f"{secrets.token_urlsafe(24)}\n".encode(), 0o600)
    secret = path.read_text().strip()
    if not SECRET.fullmatch(secret):
        what = f"{path}: holds no secret of a relay (22 to 64 letters, digits, - and _)"
        raise UserError(what, "delete the file: a new one is made, and coordinators need the new link", "relay_secret")
    return secret


def relay_links(texts: Iterable[str]) -> list[RelayLink]:
    """Of relays, each given as its link or as a file that has such links, one a line. Raises LinkError."""
    found: list[RelayLink] = []
    for text in texts:
        is_file = not text.startswith(SCHEME) and Path(text).is_file()
        lines = Path(text).read_text().split() if is_file else [text]
        found += map(RelayLink.parse, lines)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Ticket:
    run: str  # letters and digits, as all of these
    meeting: str  # of two peers of the run: theirs have it in common, and nothing else
    peer: str
    expires: int  # seconds since 1970

    def signed(self, secret: str, role: str) -> str:
        """`role`: dial or accept, which nobody else may take with it."""
        words = self.run, self.meeting, self.peer
        assert all(map(_PART.fullmatch, words)), words
        said = "-".join([*words, f"{self.expires:x}"])
        return f"{said}-{_code(secret, said, role)}"


def read_ticket(text: str, secret: str, role: str, now: float) -> Ticket | None:
    """None: it was not made with this secret, or for the other role, or has expired."""
    match = _TICKET.fullmatch(text)
    if match is None or not hmac.compare_digest(_code(secret, text.rpartition("-")[0], role), match[5]):
        return None
    ticket = Ticket(match[1], match[2], match[3], int(match[4], 16))
    return ticket if now < ticket.expires else None


def _code(secret: str, said: str, role: str) -> str:
    return hmac.new(secret.encode(), f"pmtrain relay {role} {said}".encode(), hashlib.sha256).hexdigest()[:32]
