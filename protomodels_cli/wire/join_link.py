"""The join link that people pass around, and the first thing done with it: fetch the CA and compare.

Knows what the link says and how to ask a door for its CA. It must not know gRPC, nor ever send the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass, field

from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED, EXIT_SPEC, UserError
from protomodels_cli.wire.tls import MAX_PEM, fingerprint_of, one_certificate

LOOKS_LIKE = "pm://HOST:PORT/TOKEN#FINGERPRINT"
ASK_AUTHORITY = b"PMTRAIN 1 CA\n"
MAX_LINK = 512
TOKEN_LENGTH, FINGERPRINT_LENGTH = 22, 43  # 16 and 32 bytes in base64url
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
PASTED_AROUND = " \t\r\n'\"`<>“”‘’"  # what chats, mails and shells leave around a link


class LinkError(UserError):
    """A join link that cannot be right: says which part."""

    exit_code = EXIT_SPEC

    def __init__(self, what: str, fix: str = "copy the whole link again from the coordinator's output"):
        super().__init__(f"join link: {what}", f"{fix}; it looks like {LOOKS_LIKE}")


class FingerprintError(UserError):
    """Whoever answers is not the coordinator that the link was made by."""

    exit_code = EXIT_REFUSED


class UnreachableError(UserError):
    """Nobody there, or not a coordinator."""

    exit_code = EXIT_OUTSIDE


@dataclass(frozen=True)
class JoinLink:
    """Where the coordinator is, the right to join, and how to know the coordinator. Always well-formed."""

    host: str
    port: int
    token: str = field(repr=False)  # a secret: not in logs and tracebacks
    fingerprint: str

    def __post_init__(self) -> None:
        _check_host(self.host)
        if not 1 <= self.port <= 65535:
            raise LinkError(f"the port is {self.port}, not between 1 and 65535")
        _check_code("token", self.token, TOKEN_LENGTH)
        _check_code("fingerprint", self.fingerprint, FINGERPRINT_LENGTH)

    def __str__(self) -> str:
        return f"pm://{address(self.host, self.port)}/{self.token}#{self.fingerprint}"

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        text = text.strip(PASTED_AROUND)
        if not text:
            raise LinkError("it is empty")
        if len(text) > MAX_LINK:
            raise LinkError(f"it has {len(text)} characters, far too many")
        if re.search(r"\s", text):
            raise LinkError("there is a space or a line break in it", "paste it in one piece, on one line")
        if not text.startswith("pm://"):
            raise LinkError(f"it begins with {text[:5]!r}, not with pm://")
        before, hash_mark, fingerprint = text.removeprefix("pm://").partition("#")
        where, _, token = before.partition("/")
        host, port = _host_and_port(where)
        if not token:
            raise LinkError("the token is missing, and with it all that follows the port")
        if not hash_mark or not fingerprint:
            fix = "put the link in quotes, because a shell may take # for the start of a comment, and copy all of it"
            raise LinkError("the fingerprint is missing: there is nothing from the # on", fix)
        return cls(host, port, token, fingerprint)


def new_token() -> str:
    return secrets.token_urlsafe(16)


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def fetch_authority(link: JoinLink, timeout: float = 10.0) -> bytes:
    """The CA certificate of the run, asked of its door and held against the link's fingerprint."""
    where = address(link.host, link.port)
    answer = await _ask_authority(link, timeout)
    try:
        authority_pem = one_certificate(answer)
    except ValueError:
        what = f"{where} hung up without a word" if not answer else f"{where} answers, but is no pmtrain coordinator"
        fix = "check host and port; if they are right, it may have too many connections: try again in a minute"
        raise UnreachableError(what, fix) from None
    found = fingerprint_of(authority_pem)
    if not hmac.compare_digest(found, link.fingerprint):
        raise FingerprintError(
            f"{where} is not the coordinator this link was made by: its fingerprint is {found}, not {link.fingerprint}",
            "ask for a fresh link (the run may have been set up anew); if it is the same, someone sits in between: "
            "do not join. The token was not sent",
        )
    return authority_pem


async def _ask_authority(link: JoinLink, timeout: float) -> bytes:
    where = address(link.host, link.port)
    writer = None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(link.host, link.port)
            writer.write(ASK_AUTHORITY)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # a rude way to hang up
                # One byte too many is kept, so that a long answer is refused and not cut to something that fits.
                while len(answer) <= MAX_PEM and (chunk := await reader.read(MAX_PEM + 1 - len(answer))):
                    answer += chunk
            return answer
    except TimeoutError:
        what, fix = f"no answer from {where} within {timeout:g} s", "check that a firewall or router lets the port in"
    except socket.gaierror:
        what, fix = f"there is no host {link.host!r}", "check the host's spelling and your own connection"
    except ConnectionRefusedError:
        what, fix = f"nothing listens at {where}", "check that the coordinator runs and that the port is right"
    except OSError as error:
        what, fix = f"cannot reach {where}: {error.strerror or error}", "check host and port, and your own connection"
    finally:
        if writer is not None:
            writer.transport.abort()
    raise UnreachableError(what, fix)


def _host_and_port(where: str) -> tuple[str, int]:
    if where.startswith("["):
        host, bracket, rest = where[1:].partition("]")
        if not bracket:
            raise LinkError(f"the host {where!r} opens a bracket and does not close it")
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = where.rpartition(":") if ":" in where else (where, "", "")
        if ":" in host:
            raise LinkError(f"the host {where!r} has several colons", "write an IPv6 address in brackets")
    if not host:
        raise LinkError("the host is missing")
    if colon != ":" or not port:
        raise LinkError(f"the port is missing after the host {host!r}")
    if not re.fullmatch(r"[0-9]{1,5}", port):
        raise LinkError(f"the port is {port[:20]!r}, not a number")
    return host, int(port)


def _check_host(host: str) -> None:
    if ":" in host:
        try:
            zone = ipaddress.IPv6Address(host).scope_id
        except ValueError:
            raise LinkError(f"the host {host[:60]!r} is not an IPv6 address") from None
        if zone is not None:
            raise LinkError(f"the host {host[:60]!r} names a network card, which others do not have")
    elif not HOST.fullmatch(host):
        raise LinkError(f"the host {host[:60]!r} is not a name or an address")


def _check_code(part: str, code: str, length: int) -> None:
    """The code itself is never shown: it may be a good token."""
    if not re.fullmatch(r"[A-Za-z0-9_-]*", code):
        raise LinkError(f"the {part} has a character other than letters, digits, - and _")
    if len(code) != length:
        raise LinkError(f"the {part} has {len(code)} characters instead of {length}")
