"""Finds the system's network tools. They are in /usr/sbin on most systems, which is not on every user's PATH."""

from __future__ import annotations

import os
import shutil

from protomodels_cli.errors import UserError

ADMIN_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "sysctl": "procps",
    "iptables": "iptables",
    "iptables-restore": "iptables",
    "ip6tables-restore": "iptables",
}


def system_tool(name: str) -> str:
    """Return the tool's full path. Raise a UserError that names its package if it is not installed."""
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), *ADMIN_FOLDERS])
    if (found := shutil.which(name, path=folders)) is None:
        what = f"emulated hosts need the command {name}, which is not installed"
        raise UserError(what, f"install {PACKAGES[name]}", "hosts_tool")
    return found
