"""gRPC around the coordinator: who may call, what they say, and the streams over which they are answered.

Knows peers' identities and sessions. What an event means is the machine's to say; this hands it on.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import grpc
from cryptography import x509

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.door import Door
from protomodels_cli.coordinator.messages import clean, peer_of, report_of
from protomodels_cli.coordinator.run_dir import RunDir
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.channels import SERVER_OPTIONS
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import COORDINATOR_NAME, Identity, client_context, peer_name

DENIED, UNFIT = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION
MOST_ENROLLED = 10_000
SESSION_WITHIN = 600.0  # seconds after Enrol
REGISTER_SECONDS = 30.0
REACH_SECONDS = 4.0


@dataclass
class Enrolled:
    """A peer that showed the token."""

    secret: str
    since: float
    reached: tuple[str, int] | None = None  # where we have dialled it
    uploading: bool = False
    outbox: asyncio.Queue[pb.CoordinatorMessage | None] = field(default_factory=asyncio.Queue)
    in_session: bool = False


class Service(rpc.PeeringServicer, rpc.OperatorServicer):
    def __init__(
        self,
        spec: RunSpec,
        run_dir: RunDir,
        tell: Callable[[events.Event], None],
        upload: Callable[[str, pb.UploadHeader, Path | bytes], None],
        admit: Callable[[str, pb.UploadHeader], Path | None],
        status: Callable[[], pb.RunStatus],
    ):
        self._spec, self._run_dir = spec, run_dir
        self._tell, self._upload, self._admit, self._status = tell, upload, admit, status
        self._enrolled: dict[str, Enrolled] = {}
        self._identity: Identity = run_dir.authority.issue_with_key(COORDINATOR_NAME)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_PeeringServicer_to_server(self, self._server)
        rpc.add_OperatorServicer_to_server(self, self._server)
        self.door: Door | None = None

    async def open(self, host: str, port: int) -> int:
        credentials = grpc.ssl_server_credentials([(self._identity.key_pem, self._identity.certificate_pem)])
        inner = self._server.add_secure_port("127.0.0.1:0", credentials)
        await self._server.start()
        self.door = Door(self._identity.authority_pem, ("127.0.0.1", inner))
        return await self.door.open(host, port)

    async def close(self) -> None:
        """Let the last words out, then hang up."""
        for peer in self._enrolled.values():
            peer.outbox.put_nowait(None)
        await self._server.stop(grace=2)
        if self.door is not None:
            await self.door.close()

    def send(self, peer: str, **body: Any) -> None:
        if (enrolled := self._enrolled.get(peer)) is not None:
            enrolled.outbox.put_nowait(pb.CoordinatorMessage(**body))

    # Joining

    async def Enrol(self, request: pb.EnrolRequest, context: grpc.aio.ServicerContext) -> pb.EnrolReply:
        if not hmac.compare_digest(request.token.encode(), self._run_dir.token.encode()):
            await context.abort(DENIED, "the token is not this run's\nask the run's owner for a fresh join line")
        if request.protocol != PROTOCOL:
            await context.abort(
                UNFIT,
                f"this peer has pmtrain {clean(request.version)} (protocol {request.protocol}), and the coordinator "
                f"{__version__} (protocol {PROTOCOL})\ninstall pmtrain {__version__} on this peer",
            )
        self._forget_the_absent()
        if len(self._enrolled) >= MOST_ENROLLED:
            await context.abort(UNFIT, "too many peers have joined this run\nask its owner to start it again")
        peer = f"p{secrets.token_hex(4)}"
        try:
            certificate = self._run_dir.authority.issue(peer_name(peer), request.public_key_pem)
        except ValueError as e:
            await context.abort(UNFIT, f"the peer's key cannot be signed: {e}\ninstall pmtrain {__version__}")
        self._enrolled[peer] = Enrolled(secrets.token_urlsafe(16), time.monotonic())
        return pb.EnrolReply(
            peer=peer,
            secret=self._enrolled[peer].secret,
            certificate_pem=certificate,
            spec_json=json.dumps(self._spec.model_dump(mode="json")),
            spec_sha256=self._spec.sha256(),
            clock=time.time(),
        )

    def _forget_the_absent(self) -> None:
        """Whoever was admitted and never came."""
        long_ago = time.monotonic() - SESSION_WITHIN
        for peer in [p for p, e in self._enrolled.items() if not e.in_session and e.since < long_ago]:
            del self._enrolled[peer]

    async def _caller(self, context: grpc.aio.ServicerContext) -> str:
        """The enrolled peer that calls, or the call's end."""
        metadata = dict(context.invocation_metadata() or ())
        peer, secret = str(metadata.get("peer", "")), str(metadata.get("secret", ""))
        enrolled = self._enrolled.get(peer)
        if enrolled is None or not hmac.compare_digest(secret.encode(), enrolled.secret.encode()):
            await context.abort(DENIED, "this peer is not enrolled in this run\njoin again")
        return peer

    def _address(self, context: grpc.aio.ServicerContext) -> str:
        """Whence the caller really comes: gRPC sees the door's loopback connection only."""
        found = re.search(r":(\d+)$", context.peer())
        return (self.door.address_of(int(found[1])) if found and self.door else None) or ""

    async def CheckReachability(
        self, request: pb.ReachabilityRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReachabilityReply:
        peer, host = await self._caller(context), self._address(context)
        reason = await self._dial_back(peer, host, request.port)
        if not reason and peer in self._enrolled:
            self._enrolled[peer].reached = host, request.port
        return pb.ReachabilityReply(reachable=not reason, host=host, reason=reason)

    async def _dial_back(self, peer: str, host: str, port: int) -> str:
        """Shake hands with whoever answers there. Empty: it is that peer; otherwise what is wrong."""
        if not 1 <= port <= 65535 or not host:
            return "its address or port is not known"
        try:
            async with asyncio.timeout(REACH_SECONDS):
                _, writer = await asyncio.open_connection(host, port, ssl=client_context(self._identity))
        except TimeoutError:
            return f"no answer at {host}:{port}"
        except (OSError, ssl.SSLError) as e:
            return f"{host}:{port}: {getattr(e, 'strerror', None) or e}"
        try:
            der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            names = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.SubjectAlternativeName)
            right = peer_name(peer) in names.value.get_values_for_type(x509.DNSName)
            return "" if right else f"another peer answers at {host}:{port}"
        finally:
            writer.transport.abort()

    # The run

    async def Session(
        self, request_iterator: AsyncIterator[pb.PeerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.CoordinatorMessage]:
        peer, address = await self._caller(context), self._address(context)
        enrolled = self._enrolled[peer]
        if enrolled.in_session:
            await context.abort(UNFIT, "this peer has a session already\njoin again")
        enrolled.in_session = True
        register = await self._registration(request_iterator)
        if register is None or register.spec_sha256 != self._spec.sha256():
            del self._enrolled[peer]
            await context.abort(
                UNFIT, "the peer has another spec than this run's (their hashes differ)\njoin with this run's link"
            )
            return
        reached = enrolled.reached == (address, register.port)
        self._tell(events.Joined(peer_of(peer, register, address, reached, time.time())))
        reading = asyncio.create_task(self._listen(peer, request_iterator))
        try:
            while (message := await self._next_word(enrolled, reading)) is not None:
                yield message
        finally:
            reading.cancel()
            self._enrolled.pop(peer, None)
            self._tell(events.Left(peer, "its connection ended"))

    async def _registration(self, messages: AsyncIterator[pb.PeerMessage]) -> pb.Register | None:
        """A session's first message, if it is that and comes in time."""
        try:
            async with asyncio.timeout(REGISTER_SECONDS):
                first = await anext(aiter(messages), None)
        except TimeoutError:
            return None
        return first.register if first is not None and first.HasField("register") else None

    async def _next_word(self, enrolled: Enrolled, reading: asyncio.Task[None]) -> pb.CoordinatorMessage | None:
        """What to say to the peer next; None when there is nothing more, or nobody listens."""
        if not enrolled.outbox.empty():
            return enrolled.outbox.get_nowait()
        word = asyncio.ensure_future(enrolled.outbox.get())
        try:
            await asyncio.wait({word, reading}, return_when=asyncio.FIRST_COMPLETED)
            return word.result() if word.done() else None
        finally:
            word.cancel()

    async def _listen(self, peer: str, messages: AsyncIterator[pb.PeerMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("body"):
                case "done":
                    try:
                        self._tell(events.Done(peer, message.done.task, report_of(message.done, self._spec)))
                    except ValueError as e:
                        self._tell(events.Trouble(peer, str(e)))
                case "basis_taken":
                    taken = message.basis_taken
                    self._tell(events.BasisTaken(peer, taken.version, taken.sha256))
                case "leaving":
                    self._tell(events.Leaving(peer))
                case "trouble":
                    trouble = message.trouble
                    about = trouble.about if trouble.HasField("about") else None
                    self._tell(events.Trouble(peer, clean(trouble.what), about))

    async def Upload(
        self, request_iterator: AsyncIterator[pb.UploadChunk], context: grpc.aio.ServicerContext
    ) -> pb.UploadReply:
        peer = await self._caller(context)
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("header"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an upload begins with its header")
            return pb.UploadReply()
        enrolled = self._enrolled[peer]
        if enrolled.uploading:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "one upload at a time")
        enrolled.uploading = True
        try:
            await self._receive(peer, first.header, request_iterator)
        except ValueError as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        finally:
            enrolled.uploading = False
        return pb.UploadReply()

    async def _receive(self, peer: str, header: pb.UploadHeader, chunks: AsyncIterator[pb.UploadChunk]) -> None:
        """Raises ValueError on what nobody asked for. A failure of our own disk is not the peer's fault."""
        try:
            path = self._admit(peer, header)
            if path is None:
                self._upload(peer, header, await _receive_bytes(chunks, header))
            else:
                await _receive_file(chunks, header, path)
                self._upload(peer, header, path)
        except OSError as e:
            why = e.strerror or str(e)
            is_part = header.kind == pb.UploadHeader.SNAPSHOT_PART
            self._tell(events.SnapshotFailed(header.step, why) if is_part else events.DiskFailed(why))

    # Watching

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.RunStatus:
        token = str(dict(context.invocation_metadata() or ()).get("token", ""))
        if not hmac.compare_digest(token.encode(), self._run_dir.token.encode()):
            await context.abort(DENIED, "the token is not this run's\nask the run's owner for a fresh link")
        return self._status()


async def _receive_bytes(chunks: AsyncIterator[pb.UploadChunk], header: pb.UploadHeader) -> bytes:
    content = bytearray()
    async for chunk in chunks:
        content += chunk.data
        if len(content) > header.size:
            raise ValueError("more bytes than announced")
    _check(len(content), hashlib.sha256(content).hexdigest(), header)
    return bytes(content)


async def _receive_file(chunks: AsyncIterator[pb.UploadChunk], header: pb.UploadHeader, path: Path) -> None:
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        async for chunk in chunks:
            size += len(chunk.data)
            if size > header.size:
                raise ValueError("more bytes than announced")
            digest.update(chunk.data)
            await asyncio.to_thread(file.write, chunk.data)
        await asyncio.to_thread(_to_disk, file)
    _check(size, digest.hexdigest(), header)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check(size: int, sha256: str, header: pb.UploadHeader) -> None:
    if (size, sha256) != (header.size, header.sha256):
        raise ValueError("the bytes that arrived are not those announced")
