"""Ports mapped by a router that speaks UPnP (an Internet Gateway Device): found by a multicast, asked by SOAP.

Anybody in the LAN can answer, so only the gateway's own address is heard and called, over plain HTTP; what it sends is
bounded in size and time, and XML with a DTD is refused unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping as Fields
from urllib.parse import urljoin, urlsplit
from xml.etree import ElementTree

from protomodels_cli.wire.channels import own_address
from protomodels_cli.wire.join_link import Address
from protomodels_cli.wire.port_mapping import Mapping, NatPmp, NoMapping, Router, checked_host, gateway

MULTICAST = "239.255.255.250", 1900
SEARCH_SECONDS, CALL_SECONDS = 2.0, 3.0
MOST_BYTES = 64 << 10  # of a description, or of an answer
TAKEN, ONLY_PERMANENT = "718", "725"  # error codes: the port is another's; there are no mappings that end
OTHER_PORTS = 3  # that are tried where the port is another's
_LOCATION = re.compile(rb"^location:[ \t]*(\S{1,512})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_LENGTH = re.compile(rb"^content-length:[ \t]*([0-9]{1,9})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_SERVICE = re.compile(r"urn:schemas-upnp-org:service:WAN(IP|PPP)Connection:[12]")
_PATH = re.compile(r"/[!-~]{0,511}")
_SEARCH = (
    b'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
    b"ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n\r\n"
)


class SoapError(NoMapping):
    def __init__(self, code: str):
        super().__init__(f"the router refused: UPnP error {code}")
        self.code = code


def location_of(answer: bytes) -> str | None:
    """Where the description is, as an answer to the search says; None: it does not."""
    found = _LOCATION.search(answer[:4096])
    return found[1].decode("ascii", "replace") if answer.startswith(b"HTTP/1.1 200") and found else None


def place_of(url: str, gateway: str, base: str = "") -> tuple[int, str]:
    """Port and path of a URL, which may be relative to `base`, at the gateway's own address. Raises NoMapping."""
    try:
        parts = urlsplit(urljoin(base, url))
        port = parts.port or 80
    except ValueError:
        raise NoMapping("the router named a URL that is none") from None
    path = parts.path + (f"?{parts.query}" if parts.query else "") or "/"
    if parts.scheme != "http" or parts.hostname != gateway or not _PATH.fullmatch(path):
        raise NoMapping("the router named a URL that is not its own")
    return port, path


def tree_of(content: bytes) -> ElementTree.Element:
    """Raises NoMapping."""
    try:
        text = content.decode("utf-8")
        if re.search("<!(DOCTYPE|ENTITY)", text, re.IGNORECASE):
            raise NoMapping("the router sent XML with a DTD")
        return ElementTree.fromstring(text)
    except (ValueError, ElementTree.ParseError):
        raise NoMapping("the router sent no XML") from None


def service_of(description: bytes) -> tuple[str, str]:
    """The type and control URL of the service that maps ports. Raises NoMapping."""
    for service in tree_of(description).iter("{urn:schemas-upnp-org:device-1-0}service"):
        kind, url = (
            _text(service, "{urn:schemas-upnp-org:device-1-0}" + name) for name in ("serviceType", "controlURL")
        )
        if _SERVICE.fullmatch(kind) and url:
            return kind, url
    raise NoMapping("the router maps no ports by UPnP")


def value_of(answer: bytes, name: str) -> str:
    """Of a SOAP answer. Raises NoMapping, SoapError."""
    tree = tree_of(answer)
    if (code := _text(tree, ".//{urn:schemas-upnp-org:control-1-0}errorCode")) or "Fault" in "".join(
        child.tag for child in tree.iter()
    ):
        raise SoapError(re.sub(r"\D", "", code)[:4] or "unknown")
    return _text(tree, f".//{name}")


def _text(tree: ElementTree.Element, path: str) -> str:
    found = tree.find(path)
    return (found.text or "").strip() if found is not None else ""


class _Answers(asyncio.DatagramProtocol):
    def __init__(self, gateway: str):
        self._gateway = gateway
        self.found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: Address) -> None:
        if addr[0] == self._gateway and not self.found.done() and (where := location_of(data)):
            self.found.set_result(where)


class Upnp:
    """`client`: this machine's own address, to which the port leads."""

    def __init__(self, gateway: str, client: str, search: Address = MULTICAST):
        self._gateway, self._client, self._search = gateway, client, search
        self._service: tuple[str, int, str] | None = None  # its type, and where it is called

    async def look(self) -> str:
        self._service = await self._find()
        return "UPnP"

    async def add(self, port: int, outside: int, seconds: int) -> Mapping:
        host = checked_host(value_of(await self._call("GetExternalIPAddress", {}), "NewExternalIPAddress"))
        tries = [outside, *range(outside + 1, min(outside + 1 + OTHER_PORTS, 65536))]
        while True:
            fields = {
                "NewRemoteHost": "",
                "NewExternalPort": tries[0],
                "NewProtocol": "TCP",
                "NewInternalPort": port,
                "NewInternalClient": self._client,
                "NewEnabled": 1,
                "NewPortMappingDescription": "pmtrain",
                "NewLeaseDuration": seconds,
            }
            try:
                await self._call("AddPortMapping", fields)
                break
            except SoapError as error:
                if error.code == ONLY_PERMANENT and seconds:
                    seconds = 0
                elif error.code == TAKEN and len(tries) > 1:
                    tries.pop(0)
                else:
                    raise
        return Mapping(host, tries[0], seconds, "UPnP")

    async def remove(self, mapping: Mapping, port: int) -> None:
        fields = {"NewRemoteHost": "", "NewExternalPort": mapping.port, "NewProtocol": "TCP"}
        await self._call("DeletePortMapping", fields)

    async def _call(self, action: str, fields: Fields[str, object]) -> bytes:
        if self._service is None:
            self._service = await self._find()
        kind, port, path = self._service
        inside = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
        body = (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
            's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
            f'<u:{action} xmlns:u="{kind}">{inside}</u:{action}></s:Body></s:Envelope>'
        )
        headers = f'Content-Type: text/xml; charset="utf-8"\r\nSOAPAction: "{kind}#{action}"\r\n'
        answer = await self._http("POST", port, path, headers, body.encode())
        value_of(answer, action)  # raises what it refused
        return answer

    async def _find(self) -> tuple[str, int, str]:
        where = await self._location()
        port, path = place_of(where, self._gateway)
        kind, url = service_of(await self._http("GET", port, path))
        return kind, *place_of(url, self._gateway, where)

    async def _location(self) -> str:
        loop = asyncio.get_running_loop()
        try:
            transport, answers = await loop.create_datagram_endpoint(
                lambda: _Answers(self._gateway), local_addr=(self._client, 0)
            )
        except OSError as error:
            raise NoMapping(error.strerror or str(error)) from None
        try:
            for _ in range(2):  # datagrams get lost
                transport.sendto(_SEARCH, self._search)
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(asyncio.shield(answers.found), SEARCH_SECONDS / 2)
        finally:
            answers.found.cancel()
            transport.close()
        raise NoMapping("no answer to UPnP")

    async def _http(self, method: str, port: int, path: str, headers: str = "", body: bytes = b"") -> bytes:
        """The body of the answer, whatever its status."""
        head = f"{method} {path} HTTP/1.0\r\nHost: {self._gateway}:{port}\r\n{headers}"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer = None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                reader, writer = await asyncio.open_connection(self._gateway, port, limit=MOST_BYTES)
                writer.write(head.encode() + body)
                return await _body(reader)
        except TimeoutError:
            raise NoMapping("the router did not answer in time") from None
        except asyncio.IncompleteReadError:
            raise NoMapping("the router hung up before its answer was whole") from None
        except OSError as error:
            raise NoMapping(f"the router cannot be called: {error.strerror or error}") from None
        finally:
            if writer is not None:
                writer.transport.abort()


async def _body(reader: asyncio.StreamReader) -> bytes:
    """As long as its head says: not every router closes the connection after it. Raises NoMapping."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise NoMapping("the router said too much") from None
    length = _LENGTH.search(head)
    if length is not None and int(length[1]) <= MOST_BYTES:
        return await reader.readexactly(int(length[1]))
    came = b""
    while more := await reader.read(MOST_BYTES):
        came += more
        if len(came) > MOST_BYTES:
            raise NoMapping("the router said too much")
    return came


def routers() -> list[Router]:
    """What this machine's gateway may answer to, the simpler first; none: there is no gateway."""
    at = gateway()
    return [] if at is None else [NatPmp(at), Upnp(at, own_address())]
