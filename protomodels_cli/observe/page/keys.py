"""Who may look on, and who is the owner. Both keys follow from the owner's secret in the run directory, so a link to
the page is good as long as the run is; neither tells anything of that secret or of the token in the join link."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from protomodels_cli.wire.channels import is_loopback

COOKIE = "pmtrain"


@dataclass(frozen=True)
class Keys:
    viewing: str
    owner: str

    @classmethod
    def of(cls, owner_secret: str) -> Keys:
        return cls(*(_derived(owner_secret, purpose) for purpose in ("page viewing", "page owner")))

    @property
    def cookie(self) -> str:
        """Its name: of several runs on one host, whatever their ports, a browser keeps one each."""
        return f"{COOKIE}-{hashlib.sha256(self.viewing.encode()).hexdigest()[:8]}"

    def may_look(self, shown: str) -> bool:
        return self.is_owner(shown) | _same(shown, self.viewing)

    def is_owner(self, shown: str) -> bool:
        return _same(shown, self.owner)


def _derived(secret: str, purpose: str) -> str:
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()[:32]


def _same(shown: str, right: str) -> bool:
    """In a time that says nothing of where they differ."""
    return hmac.compare_digest(shown.encode(errors="replace"), right.encode())


def of_this_machine(host: str) -> bool:
    """Whether a request's Host header names loopback. A page of somebody else's whose name was made to lead here (DNS
    rebinding) has its own name there."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name.lower())
