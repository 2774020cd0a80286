"""The path of a link, in a word or two: how its two ends reach each other. The same in the worker, on the wire, in the
metrics and on the page."""

from __future__ import annotations

import re

_PATH = re.compile(r"loopback|lan|public|door|relay [\w.:\[\]-]{1,80}")


def checked_path(text: str) -> str:
    """As another machine says; empty where it is none of them."""
    return text if _PATH.fullmatch(text) else ""


def is_relayed(path: str) -> bool:
    """Through a relay, or through the coordinator's door."""
    return path == "door" or path.startswith("relay ")
