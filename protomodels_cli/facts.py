"""Something known, as data with a kind: what notices, reasons and troubles have in common."""

from __future__ import annotations


class Fact:
    """Each kind is a frozen dataclass whose last field names it, so that a fact that went through JSON is known again:
    `kind: Literal["no_heartbeat"] = "no_heartbeat"`."""

    kind: str
