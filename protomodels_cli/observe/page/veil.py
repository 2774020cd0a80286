"""What strangers may not read, taken out of what they may: secrets, addresses of homes, folders of this machine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

HIDDEN = "[hidden]"
# IPv4 with or without a port; whatever might be IPv6 is asked whether it is one.
_V4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?![\w]|\.\d)")
_V6 = re.compile(r"\[?(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?:%\w+)?(?![\w:])\]?(?::\d{1,5})?")


class Veil:
    """`secrets` vanish; of `folders`, the longest first, only the last name is left."""

    def __init__(self, secrets: Iterable[str] = (), folders: Iterable[Path] = ()):
        self._secrets = [s for s in secrets if s]
        resolved = {str(path) for folder in folders for path in (folder, folder.resolve()) if path.is_absolute()}
        self._folders = [(text, Path(text).name) for text in sorted(resolved, key=len, reverse=True) if len(text) > 1]

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for folder, name in self._folders:
            text = text.replace(folder, name)
        return _V6.sub(_unless_no_address, _V4.sub(HIDDEN, text))


def _unless_no_address(found: re.Match[str]) -> str:
    """A time of day and the like have colons too."""
    host = found[0].partition("]")[0].lstrip("[").partition("%")[0]
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return found[0]
    return HIDDEN
