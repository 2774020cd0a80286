"""The join link that people pass around, and the first use of it: fetch the run's CA and compare the fingerprint.

Knows the parts of a link and how to ask a coordinator's port for the CA. Must not know gRPC, nor ever send the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED, EXIT_SPEC, UserError
from protomodels_cli.quantities import duration
from protomodels_cli.wire.tls import MAX_PEM, fingerprint_of, one_certificate

LOOKS_LIKE = "pm://HOST:PORT/TOKEN#FINGERPRINT"
Address = tuple[str, int]  # host and port
ASK_AUTHORITY = b"PMTRAIN 1 CA\n"
REFUSED = b"PMTRAIN 1 REFUSED "
NO_ROOM = {  # why a coordinator's port refuses: what it has too many of, and the limit
    "too_many_connections": ("connections", "limits.connections"),
    "too_many_from_one_address": ("connections from this address", "limits.connections_per_address"),
}
MAX_LINK = 512
MOST_ADDRESSES = 8
TOKEN_LENGTH, FINGERPRINT_LENGTH = 22, 43  # 16 and 32 bytes in base64url
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
PASTED_AROUND = " \t\r\n'\"`<>“”‘’"  # what chats, mails and shells leave around a link


class LinkError(UserError):
    """A join link that cannot be right: names the part that is wrong, which is also its kind."""

    exit_code = EXIT_SPEC

    def __init__(self, kind: str, what: str, fix: str = "copy the whole link again from the coordinator's output"):
        super().__init__(f"join link: {what}", f"{fix}; a join link has the form {LOOKS_LIKE}", kind=f"link_{kind}")


class FingerprintError(UserError):
    """The server that answers is not the coordinator that made the link."""

    exit_code = EXIT_REFUSED


class UnreachableError(UserError):
    """Nobody there, or not a coordinator."""

    exit_code = EXIT_OUTSIDE


class CrowdedError(UnreachableError):
    """The run's coordinator answered and could not take this caller now. Trying again helps."""


@dataclass(frozen=True)
class JoinLink:
    """Where the coordinator is or may come to be, the right to join, and how to know the coordinator. Always
    well-formed."""

    host: str
    port: int
    token: str = field(repr=False)  # a secret: not in logs and tracebacks
    fingerprint: str
    others: tuple[Address, ...] = ()  # where to look next

    def __post_init__(self) -> None:
        for host, port in self.addresses:
            _check_host(host)
            _check_port(port)
        _check_code("token", self.token, TOKEN_LENGTH)
        _check_code("fingerprint", self.fingerprint, FINGERPRINT_LENGTH)
        if len(self.addresses) > MOST_ADDRESSES:
            what = f"the link names {len(self.addresses)} addresses, and may name {MOST_ADDRESSES} at most"
            raise LinkError("addresses", what, "name fewer")
        if len(set(self.addresses)) < len(self.addresses):
            raise LinkError("addresses", "the link names an address twice", "name each once")
        _check_length(str(self))

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (self.host, self.port), *self.others

    def beginning_with(self, first: Address) -> JoinLink:
        """The same link, with this one of its addresses first."""
        return replace(
            self, host=first[0], port=first[1], others=tuple(other for other in self.addresses if other != first)
        )

    def __str__(self) -> str:
        where = ",".join(address(*one) for one in self.addresses)
        return f"pm://{where}/{self.token}#{self.fingerprint}"

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        text = text.strip(PASTED_AROUND)
        if not text:
            raise LinkError("empty", "the link is empty")
        _check_length(text)
        if re.search(r"\s", text):
            raise LinkError("space", "the link has a space or a line break inside", "paste the link on one line")
        if not text.startswith("pm://"):
            raise LinkError("scheme", f"the link begins with {text[:5]!r}, and must begin with pm://")
        before, hash_mark, fingerprint = text.removeprefix("pm://").partition("#")
        where, _, token = before.partition("/")
        first, *others = map(_host_and_port, where.split(","))
        if not token:
            raise LinkError("token", "the token is missing after the port")
        if not hash_mark or not fingerprint:
            fix = "copy the whole link and put it in quotes, because a shell may take # for the start of a comment"
            raise LinkError("fingerprint", "the fingerprint is missing after the token", fix)
        return cls(*first, token, fingerprint, tuple(others))


def read_link(text: str) -> JoinLink:
    """Of a link, or of a file that holds one: what is on a command line anybody on the machine can read."""
    if "://" in text or not Path(text).is_file():
        return JoinLink.parse(text)
    try:
        return JoinLink.parse(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        reason = (e.strerror if isinstance(e, OSError) else None) or "not text"
        raise LinkError("file", f"cannot read {text}: {reason}", "name a file with a join link in it") from None


def new_token() -> str:
    return secrets.token_urlsafe(16)


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """HOST:PORT, an IPv6 address in brackets. Raises LinkError."""
    host, port = _host_and_port(text)
    _check_host(host)
    _check_port(port)
    return host, port


async def find_coordinator(link: JoinLink, timeout: float = 10.0) -> tuple[JoinLink, bytes]:
    """The first of the link's addresses at which the run's coordinator answers, as a link that begins with it, and the
    run's CA certificate. A machine that is to take over may have another program at its port until then, so a wrong
    answer there only counts where no address is without one."""
    errors = list[UserError]()
    for one in link.addresses:
        asked = link.beginning_with(one)
        try:
            return asked, await fetch_authority(asked, timeout)
        except (UnreachableError, FingerprintError) as e:
            errors.append(e)
    raise min(errors, key=lambda e: isinstance(e, FingerprintError))


async def fetch_authority(link: JoinLink, timeout: float = 10.0) -> bytes:
    """The run's CA certificate, fetched from the link's first address and compared with the link's fingerprint."""
    where = address(link.host, link.port)
    answer = await _ask_authority(link, timeout)
    if (kind := answer.removeprefix(REFUSED).strip().decode(errors="replace")) in NO_ROOM:
        many, limit = NO_ROOM[kind]
        fix = f"try again in a minute; the limit is {limit} in the spec"
        raise CrowdedError(f"{where} has as many {many} as the spec of the run allows", fix, kind=kind)
    try:
        authority_pem = one_certificate(answer)
    except ValueError:
        kind, what = "not_a_coordinator", "answers, but is not a pmtrain coordinator"
        if not answer:
            kind, what = "no_answer", "closed the connection without an answer"
        fix = "check the host and the port; if both are right, the coordinator may have too many connections: try again"
        raise UnreachableError(f"{where} {what}", f"{fix} in a minute", kind=kind) from None
    found = fingerprint_of(authority_pem)
    if not hmac.compare_digest(found, link.fingerprint):
        raise FingerprintError(
            f"{where} is not the coordinator that made this link: the fingerprint is {found}, and the link says "
            f"{link.fingerprint} (the token was not sent)",
            "ask the run's owner for a fresh join link; if the fresh link is the same as this one, someone intercepts "
            "the connection: do not join",
            kind="fingerprint_mismatch",
        )
    return authority_pem


def refusal(kind: str) -> bytes:
    """What a coordinator's port answers where there is no room."""
    return REFUSED + kind.encode() + b"\n"


async def _ask_authority(link: JoinLink, timeout: float) -> bytes:
    where = address(link.host, link.port)
    writer = None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(link.host, link.port)
            writer.write(ASK_AUTHORITY)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # one way to close a connection
                # One byte too many is kept, so that a long answer is refused and not cut to something that fits.
                while len(answer) <= MAX_PEM and (chunk := await reader.read(MAX_PEM + 1 - len(answer))):
                    answer += chunk
            return answer
    except TimeoutError:
        kind, what = "timeout", f"no answer from {where} within {duration(timeout)}"
        fix = "check that the coordinator's firewall and router let the port through"
    except socket.gaierror:
        kind, what = "unknown_host", f"cannot resolve the host {link.host!r}"
        fix = "check the spelling of the host, and this machine's connection"
    except ConnectionRefusedError:
        kind, what = "connection_refused", f"nothing listens at {where}"
        fix = "check that the coordinator runs, and that the port is right"
    except OSError as error:
        kind, what = "unreachable", f"cannot reach {where}: {error.strerror or error}"
        fix = "check the host and the port, and this machine's connection"
    finally:
        if writer is not None:
            writer.transport.abort()
    raise UnreachableError(what, fix, kind=kind)


def _host_and_port(where: str) -> tuple[str, int]:
    if where.startswith("["):
        host, bracket, rest = where[1:].partition("]")
        if not bracket:
            raise LinkError("host", f"the host {where!r} opens a bracket and does not close it")
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = where.rpartition(":") if ":" in where else (where, "", "")
        if ":" in host:
            raise LinkError("host", f"the host {where!r} has several colons", "write an IPv6 address in brackets")
    if not host:
        raise LinkError("host", "the host is missing after pm://")
    if colon != ":" or not port:
        raise LinkError("port", f"the port is missing after the host {host!r}")
    if not re.fullmatch(r"[0-9]{1,5}", port):
        raise LinkError("port", f"the port is {port[:20]!r}, and must be a number")
    return host, int(port)


def _check_length(text: str) -> None:
    if len(text) > MAX_LINK:
        raise LinkError("length", f"the link has {len(text)} characters, and may have {MAX_LINK} at most")


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise LinkError("port", f"the port is {port}, and must be between 1 and 65535")


def _check_host(host: str) -> None:
    if ":" in host:
        try:
            zone = ipaddress.IPv6Address(host).scope_id
        except ValueError:
            raise LinkError("host", f"the host {host[:60]!r} is not an IPv6 address") from None
        if zone is not None:
            raise LinkError("host", f"the host {host[:60]!r} names a network card, which other machines do not have")
    elif not HOST.fullmatch(host):
        raise LinkError("host", f"the host {host[:60]!r} is neither a name nor an address")


def _check_code(part: str, code: str, length: int) -> None:
    """The code itself is never shown: it may be a good token."""
    if not re.fullmatch(r"[A-Za-z0-9_-]*", code):
        raise LinkError(part, f"the {part} may have letters, digits, - and _ only")
    if len(code) != length:
        raise LinkError(part, f"the {part} has {len(code)} characters, and must have {length}")
