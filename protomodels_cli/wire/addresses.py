"""Addresses of machines: which mean the same everywhere, and which this one has. Sends nothing."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import ipaddress
import platform
import socket
import struct
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

# Of homes, companies, virtual networks (100.64/10 is a provider's NAT as well) and links.
PRIVATE = [
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "169.254.0.0/16",
        "127.0.0.0/8",
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
]
MOST_OWN = 8  # addresses that a machine tells of
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STACK = Path("/proc/self/ns/net")


def is_private(host: str) -> bool:
    """Whether it means another machine, or none, elsewhere. What is no address (a name) is not."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_unspecified or any(ip in network for network in PRIVATE)


def is_address(host: str) -> bool:
    """One that could be dialled: no name, and no address that needs to be told an interface."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not (ip.is_unspecified or ip.is_multicast or ip.is_link_local or "%" in host)


def network_of(host: str) -> str:
    """What belongs together: one IPv4 address, or one IPv6 /64, in which a household has addresses without end."""
    return str(ipaddress.ip_network(f"{host}/64", strict=False)) if ":" in host else host


def own_addresses() -> list[str]:
    """Of this machine's interfaces, without loopback's and those that hold on one cable only."""
    found = (host for host in _all() if is_address(host) and not ipaddress.ip_address(host).is_loopback)
    return sorted(dict.fromkeys(found))[:MOST_OWN]


def machine_id(run: str) -> str:
    """The same for all processes that share a loopback interface, until the machine starts anew; another one in every
    run. Containers have a loopback interface each."""
    try:
        what = f"{BOOT_ID.read_text()} {STACK.stat().st_ino}"
    except OSError:  # no Linux
        what = f"{uuid.getnode()} {platform.node()}"
    return hashlib.sha256(f"{run} {what}".encode()).hexdigest()[:32]


class _Address(ctypes.Structure):
    """struct ifaddrs, as far as it is the same on Linux and macOS."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _all() -> Iterator[str]:
    libc = ctypes.CDLL(ctypes.util.find_library("c") or None)
    first = ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(first)):
        return
    try:
        at = first
        while at:
            if at.contents.address:
                yield from _in_words(at.contents.address)
            at = at.contents.next
    finally:
        libc.freeifaddrs(first)


def _in_words(at: int) -> Iterator[str]:
    """A sockaddr, of which no more is read than its family has. macOS has the length in the first byte."""
    [family] = struct.unpack("=H", ctypes.string_at(at, 2))
    family = family >> 8 if sys.platform == "darwin" else family
    if family == socket.AF_INET:
        yield socket.inet_ntop(socket.AF_INET, ctypes.string_at(at + 4, 4))
    elif family == socket.AF_INET6:
        yield socket.inet_ntop(socket.AF_INET6, ctypes.string_at(at + 8, 16))
