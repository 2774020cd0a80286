"""Where the page is: its address and port, bound before the run is touched, so that a mistake costs nothing."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from protomodels_cli.errors import OptionError, UserError
from protomodels_cli.wire.join_link import LinkError, address, parse_address

DEFAULT_PORT, MORE_PORTS = 7421, 20  # tried one after another, where nobody has asked for one
LOOPBACK = "127.0.0.1"
BACKLOG = 128


@dataclass(frozen=True)
class Where:
    """A socket that listens. `asked`: by --page; then whoever looks on needs the viewing token."""

    socket: socket.socket
    host: str
    port: int
    asked: bool

    @property
    def url(self) -> str:
        anywhere = self.host in ("0.0.0.0", "::")
        return f"http://{address(LOOPBACK if anywhere else self.host, self.port)}/"


def default_place() -> Where:
    """On loopback, at the first free port."""
    for port in (*range(DEFAULT_PORT, DEFAULT_PORT + MORE_PORTS), 0):
        try:
            return _listen(LOOPBACK, port, asked=False)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise cannot_listen(LOOPBACK, port, e, "--no-page") from None
    raise AssertionError("unreachable")


def asked_place(text: str) -> Where:
    """There, and nowhere else."""
    host, port = parse_place(text, "--page")
    try:
        return _listen(host, port, asked=True)
    except OSError as e:
        raise cannot_listen(host, port, e, "--page") from None


def parse_place(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT; port 0 is any free one."""
    any_port = text.endswith(":0")
    try:
        host, port = parse_address(f"{text[:-1]}1" if any_port else text)
    except LinkError:
        fix = f"write for example {option} 0.0.0.0:{DEFAULT_PORT}, and an IPv6 address in brackets"
        raise OptionError(f"{option} {text}: must be HOST:PORT", fix, "page_address") from None
    return host, 0 if any_port else port


def _listen(host: str, port: int, asked: bool) -> Where:
    [(family, kind, protocol, _, place), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return Where(bound, host, int(bound.getsockname()[1]), asked)


def cannot_listen(host: str, port: int, error: OSError, option: str) -> UserError:
    where = f"cannot listen on {address(host, port)} for {option}"
    if error.errno == errno.EADDRINUSE:
        fix = f"stop the other program, or choose another port, for example {option} {address(host, port + 1)}"
        return UserError(f"{where}: another program uses port {port}", fix, kind="page_port_taken")
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        fix = f"use one of this machine's addresses, or all of them: {option} 0.0.0.0:{port}"
        return UserError(f"{where}: this machine has no address {host}", fix, kind="page_no_such_address")
    if error.errno in (errno.EACCES, errno.EPERM):
        fix = f"choose a port of 1024 or more: {option} {address(host, DEFAULT_PORT)}"
        return UserError(f"{where}: port {port} is reserved for the system", fix, kind="page_port_reserved")
    return UserError(f"{where}: {error.strerror or error}", "choose another address or port", kind="page_cannot_listen")
