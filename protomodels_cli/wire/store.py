"""One HTTP request to a store by a pre-signed URL: bytes out, or bytes in, piece by piece.

All of it blocks, none of it for longer than the limits here: call it in a thread. It must not know what the bytes are
of, and has no credentials: whoever has the URL may do this one thing.
"""

from __future__ import annotations

import base64
import fcntl
import http.client
import socket
import sys
import termios
from types import TracebackType
from urllib.parse import urlsplit

from protomodels_cli.wire.channels import PIECE

CONNECT_SECONDS, STALL_SECONDS = 10.0, 60.0
CHECKSUM = "x-amz-checksum-sha256"  # signed into the URL of a PUT: the store takes no other bytes


class StoreUnreachable(Exception):
    """There is no connection to the store from here."""


class StoreBroken(Exception):
    """The store has refused the request, or it broke off: another try, with another URL, may help."""


class StoreRefused(StoreBroken):
    def __init__(self, status: int, reason: str):
        super().__init__(f"refused with {status} {reason}")
        self.status = status


def checksum(sha256: str) -> str:
    """A hash as S3 writes it."""
    return base64.b64encode(bytes.fromhex(sha256)).decode()


class StoreRequest:
    """Closes with its `with` block. Raises StoreUnreachable at first and StoreBroken later."""

    def __init__(self, url: str):
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            parts = urlsplit(url)
            self.host, self._target = parts.netloc, f"{parts.path}?{parts.query}"
            self._http = kinds[parts.scheme](parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)
        except (KeyError, ValueError, http.client.InvalidURL):
            raise StoreUnreachable("not a URL of a web server") from None
        self._reply: http.client.HTTPResponse | None = None

    def __enter__(self) -> StoreRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def begin_put(self, size: int, sha256: str) -> None:
        self._begin("PUT", {"Content-Length": str(size), CHECKSUM: checksum(sha256)})

    def send(self, piece: bytes) -> bool:
        """False: the store wants no more, and `end_put` says why."""
        try:
            self._http.send(piece)
        except ConnectionError:
            return False
        except OSError as e:
            raise StoreBroken(e.strerror or str(e)) from None
        return True

    @property
    def unconfirmed(self) -> int:
        """Bytes that were sent and that the store's machine has not confirmed, where this system can tell; TLS's own
        are among them."""
        try:
            return int.from_bytes(fcntl.ioctl(self._http.sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return 0

    def end_put(self) -> None:
        """Returns once the store has all of it, with the right bytes."""
        reply = self._answer()
        if reply.status != 200:
            raise _refused(reply)

    def begin_get(self, offset: int, buffer: int | None = None) -> None:
        """`buffer`: bytes that may wait to be received, about; that many at most are on their way."""
        self._begin("GET", {"Range": f"bytes={offset}-"} if offset else {}, buffer)
        reply = self._answer()
        if reply.status == 416:  # there are no bytes from there on
            reply.read()
        elif reply.status != (206 if offset else 200):
            raise _refused(reply)

    def receive(self, size: int = PIECE) -> bytes:
        """At most so many bytes. Empty: that was all."""
        assert self._reply is not None
        try:
            piece = self._reply.read(size)
        except (OSError, http.client.HTTPException) as e:
            raise StoreBroken(_words(e)) from None
        if not piece and self._reply.length:
            raise StoreBroken(f"the connection broke {self._reply.length:,} bytes before the end")
        return piece

    def _begin(self, verb: str, headers: dict[str, str], buffer: int | None = None) -> None:
        try:
            self._http.connect()
            if buffer is not None:
                self._http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        except OSError as e:
            raise StoreUnreachable(_words(e)) from None
        self._http.sock.settimeout(STALL_SECONDS)
        try:
            self._http.putrequest(verb, self._target, skip_accept_encoding=True)
            for name, value in headers.items():
                self._http.putheader(name, value)
            self._http.endheaders()
        except (OSError, http.client.HTTPException) as e:
            raise StoreBroken(_words(e)) from None

    def _answer(self) -> http.client.HTTPResponse:
        try:
            self._reply = self._http.getresponse()
        except (OSError, http.client.HTTPException) as e:
            raise StoreBroken(_words(e)) from None
        return self._reply


def _refused(reply: http.client.HTTPResponse) -> StoreRefused:
    return StoreRefused(reply.status, reply.reason)


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
