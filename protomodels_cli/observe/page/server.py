"""The page's web server: a handful of things to read, for whoever may, and nothing that takes anything.

Every request goes through `_answer`. Whatever is no GET or HEAD, or no path of ours, ends there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from protomodels_cli.observe.page.address import Where
from protomodels_cli.observe.page.contents import Contents, as_json
from protomodels_cli.observe.page.keys import Keys, of_this_machine
from protomodels_cli.observe.page.viewers import Viewers
from protomodels_cli.wire.channels import is_loopback

MOST_CONNECTIONS, MOST_VIEWERS = 600, 500
FIRST_SECONDS = 10.0  # for a connection's first request
LAST_SECONDS = 1.0  # for viewers to be told the end
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Server": "pmtrain",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
COOKIE_SECONDS = 30 * 86400
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Parts:
    """What the page is made of."""

    contents: Contents
    keys: Keys
    join_line: Callable[[], str] = field(repr=False)  # for the owner alone
    metrics: Callable[[int], bytes]  # for Prometheus, with the number of viewers


class PageServer(web.Server):
    """Bounds what strangers can hold open: connections, and the time until they ask for something."""

    def __init__(self, handler: Callable[[web.BaseRequest], Any]):
        super().__init__(handler, access_log=None, keepalive_timeout=15.0, lingering_time=0.5)
        self._silent: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._silent[transport] = asyncio.get_running_loop().call_later(FIRST_SECONDS, self._cut, transport)

    def _cut(self, transport: asyncio.Transport) -> None:
        self._silent.pop(transport, None)
        transport.abort()

    def spoke(self, transport: asyncio.BaseTransport | None) -> None:
        if transport is not None and (timer := self._silent.pop(transport, None)) is not None:
            timer.cancel()


class Page:
    def __init__(self, where: Where, parts: Parts):
        self._where, self._parts = where, parts
        self.viewers = Viewers(parts.contents)
        self._server: PageServer | None = None
        self._listening: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = PageServer(self._answer)
        self._listening = await asyncio.get_running_loop().create_server(self._server, sock=self._where.socket)

    async def close(self) -> None:
        """Tell whoever is here how it ended, and let them go."""
        if self._server is None or self._listening is None:
            self._where.socket.close()
            return
        self._listening.close()
        await self.viewers.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                while len(self.viewers):
                    await asyncio.sleep(0.02)
        await self._server.shutdown(0.1)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._server is not None
        self._server.spoke(request.transport)
        if request.method not in ("GET", "HEAD"):
            return _said(405, "This page can only be read.\n", Allow="GET, HEAD")
        if not self._where.asked and not of_this_machine(request.host):
            return _said(421, "This page answers only to localhost. To show it to others, use --page HOST:PORT.\n")
        keys, shown = self._parts.keys, self._shown(request)
        if (key := request.query.get("key")) and keys.may_look(key):
            return self._let_in(key)
        if self._where.asked and not keys.may_look(shown):
            text = "This page needs the link that the run's owner was given, with the viewing key in it.\n"
            return _said(401, text, **{"WWW-Authenticate": "Bearer"})
        match request.path:
            case "/events":
                return await self._stream(request)
            case "/metrics":
                return _reply(200, self._parts.metrics(len(self.viewers)), METRICS_TYPE)
            case "/state.json":
                contents = self._parts.contents
                return _reply(200, as_json(contents.state()), "application/json")
            case "/owner.json":
                line = await asyncio.to_thread(self._parts.join_line) if self._is_owner(request, shown) else ""
                return _reply(200, as_json({"join": line} if line else {}), "application/json")
            case path if path in FILES:
                name, kind = FILES[path]
                return _reply(200, await asyncio.to_thread(_file, name), f"{kind}; charset=utf-8")
        return _said(404, "There is no such page.\n")

    def _shown(self, request: web.BaseRequest) -> str:
        """The key that comes with a request: a browser's cookie, or what Prometheus was configured with."""
        word, _, bearer = request.headers.get("Authorization", "").partition(" ")
        return bearer.strip() if word.lower() == "bearer" else request.cookies.get(self._parts.keys.cookie, "")

    def _let_in(self, key: str) -> web.Response:
        """The key moves from the address, which people copy and browsers keep, into a cookie."""
        reply = _said(303, "", Location="/")
        reply.set_cookie(
            self._parts.keys.cookie, key, max_age=COOKIE_SECONDS, path="/", httponly=True, samesite="Strict"
        )
        return reply

    def _is_owner(self, request: web.BaseRequest, shown: str) -> bool:
        """The join line crosses no network: it goes to a browser on this machine alone."""
        peer = request.transport.get_extra_info("peername") if request.transport else None
        here = peer is not None and is_loopback(peer[0]) and of_this_machine(request.host)
        return here and self._parts.keys.is_owner(shown)

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        if len(self.viewers) >= MOST_VIEWERS:
            return _said(503, "Too many are watching. Try again in a minute.\n", **{"Retry-After": "60"})
        reply = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        if request.method == "GET":
            with contextlib.suppress(ConnectionError):  # the viewer has gone
                await reply.write(b"retry: 1000\n\n")
                if not await self.viewers.serve(reply.write) and request.transport is not None:
                    request.transport.abort()  # what it has not read yet it will not read now
        return reply


@cache
def _file(name: str) -> bytes:
    return (files(__package__) / "files" / name).read_bytes()


def _said(status: int, text: str, **headers: str) -> web.Response:
    return _reply(status, text.encode(), "text/plain; charset=utf-8", headers)


def _reply(status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, headers={**HEADERS, "Content-Type": kind, **(headers or {})})
