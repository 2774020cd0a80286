"""Every rpc of a live coordinator and of a live peer's port, against valid messages with bytes changed, sent as they
are: it answers with a status that somebody chose, at once, goes on working, and keeps nothing.

    python tests/fuzzing_rpcs.py 20_000      # calls; as scripts/fuzz.sh rpcs 20_000
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import psutil
from conftest import make_spec
from fuzzing import changed, peers_words, registered
from google.protobuf.message import DecodeError
from pool import Pool
from told import events, wait_for_event

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.coordinator.run_dir import owner_secret
from protomodels_cli.wire.channels import CHANNEL_OPTIONS
from protomodels_cli.wire.client import coordinator_channel
from protomodels_cli.wire.frames import Frame, Message, frames_of
from protomodels_cli.wire.join_link import JoinLink, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_authority, new_key, peer_name, public_key_of
from protomodels_cli.worker.links import LINK, Link
from protomodels_cli.worker.listener import Listener

SECONDS = 20.0  # in which a call must have ended
KEPT = 48 << 20  # bytes that a process may grow by
ENDED = "Internal error from Core"  # in this process: the call ended while it wrote
STOPS = pb.ControlRequest.STOP, pb.ControlRequest.PAUSE  # which the owner may, and the run must go on


@dataclass(frozen=True)
class Rpc:
    path: str
    streams: bool  # requests
    streamed: bool  # answers
    valid: tuple[bytes, ...]


@cache
def rpcs() -> dict[str, Rpc]:
    """All that the proto has, but for peers' own: one that is added needs valid messages here."""
    part = pb.UploadHeader(lineage=1, step=5, stage=0, size=100, sha256="ab" * 32, direct=True)
    basis = pb.UploadHeader(kind=pb.UploadHeader.BASIS, generation=1, step=4, row_json='{"drift": 0.1}', moved=True)
    frames = pb.UploadHeader(kind=pb.UploadHeader.FRAMES, audit=7, generation=1, step=6, size=9, sha256="ab" * 32)
    fetch = pb.FetchRequest(lineage=1, step=5, size=1000)
    key = public_key_of(new_key())
    messages: dict[str, list[Any]] = {
        "EnrolRequest": [pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=key)],
        "RenewRequest": [pb.RenewRequest(public_key_pem=key)],
        "ReachabilityRequest": [pb.ReachabilityRequest(port=9, hosts=["192.0.2.1"])],
        "PeerMessage": [pb.PeerMessage.FromString(word) for word in peers_words()]
        + [pb.PeerMessage(register=pb.Register.FromString(registered()))],
        "UploadHeader": [part, basis, frames],
        "UploadChunk": [
            *(pb.UploadChunk(header=header) for header in (part, basis, frames)),
            pb.UploadChunk(data=bytes(100)),
        ],
        "FetchRequest": [
            fetch,
            pb.FetchRequest(lineage=1, step=5, stage=1, offset=50, size=1000),
            pb.FetchRequest(audit=7),
        ],
        "MeasureRequest": [pb.MeasureRequest(padding=bytes(100), size=100)],
        "StatusRequest": [pb.StatusRequest()],
        "ControlRequest": [pb.ControlRequest(action=pb.ControlRequest.RESUME)],
        "CreateTokenRequest": [pb.CreateTokenRequest(uses=2, seconds=60)],
        "ListTokensRequest": [pb.ListTokensRequest()],
        "RevokeTokenRequest": [pb.RevokeTokenRequest(id="abc123")],
        "KickRequest": [pb.KickRequest(peer="p01234567")],
        "RestRequest": [pb.RestRequest(peer="p01234567")],
    }
    return {
        method.name: Rpc(
            f"/{service.full_name}/{method.name}",
            method.client_streaming,
            method.server_streaming,
            tuple(message.SerializeToString() for message in messages[method.input_type.name]),
        )
        for name, service in pb.DESCRIPTOR.services_by_name.items()
        if name != "Neighbour"
        for method in service.methods
    }


class Fuzzer:
    """A peer that joined, and sends what it likes. It joins again each time that it was sent away."""

    def __init__(self, channel: grpc.aio.Channel, run_dir: Path):
        self._channel, self._run_dir, self._owner = channel, run_dir, owner_secret(run_dir)
        self.codes: Counter[tuple[str, str]] = Counter()
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._spec = ""

    async def join(self) -> None:
        """With the token of now: to kick whoever it is replaces it. Not everybody may join at once."""
        key = public_key_of(new_key())
        request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=key)
        for seconds in (*range(10), None):
            token = JoinLink.parse((self._run_dir / "link").read_text()).token
            try:
                reply = await rpc.PeeringStub(self._channel).Enrol(request, metadata=(("token", token),), timeout=30)
                break
            except grpc.aio.AioRpcError:
                if seconds is None:
                    raise
                await asyncio.sleep(seconds)
        self._spec = reply.spec_sha256
        self._metadata = (
            ("peer", reply.peer),
            ("secret", reply.secret),
            ("token", token),
            ("owner", self._owner),
        )

    async def execute(self, name: str, number: int) -> None:
        """Raises where the coordinator does what it must not."""
        one, draw = rpcs()[name], random.Random(f"{name} {number}")
        count = draw.choice((1, 2, 4)) if one.streams else 1
        contents = [changed(one.valid, draw) for _ in range(count)]
        if name == "Control" and any(_stops(content) for content in contents):
            return
        if name == "Session" and draw.random() < 0.7:  # most are refused for the spec that they were made for
            register = pb.Register(spec_sha256=self._spec, device="cpu", memory=1 << 20, name="fuzzer")
            contents.insert(0, pb.PeerMessage(register=register).SerializeToString())
        code, details = await self._call(one, contents)
        self.codes[name, code.name] += 1
        chosen = code is not grpc.StatusCode.UNKNOWN
        if code is grpc.StatusCode.INTERNAL:
            chosen = details == ENDED
        assert chosen, f"{name} {number}: {code.name}: {details}"
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED, f"{name} {number}: no answer within {SECONDS:g} s"
        if code is grpc.StatusCode.PERMISSION_DENIED:
            await self.join()

    async def _call(self, one: Rpc, contents: list[bytes]) -> tuple[grpc.StatusCode, str]:
        kinds = {
            (False, False): self._channel.unary_unary,
            (False, True): self._channel.unary_stream,
            (True, False): self._channel.stream_unary,
            (True, True): self._channel.stream_stream,
        }
        method = kinds[one.streams, one.streamed](one.path)  # without serializers: bytes as they are

        async def all_of_them() -> AsyncIterator[bytes]:
            for content in contents:
                yield content

        requests: Any = all_of_them() if one.streams else contents[0]
        call = method(requests, metadata=self._metadata, timeout=SECONDS)
        try:
            if one.streamed:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as e:
            return e.code(), e.details() or ""
        return grpc.StatusCode.OK, ""


def _stops(content: bytes) -> bool:
    try:
        return pb.ControlRequest.FromString(content).action in STOPS
    except DecodeError:
        return False


@asynccontextmanager
async def fuzzer_at(run_dir: Path) -> AsyncIterator[Fuzzer]:
    link = JoinLink.parse((run_dir / "link").read_text())
    async with coordinator_channel(link, await fetch_authority(link)) as channel:
        fuzzer = Fuzzer(channel, run_dir)
        await fuzzer.join()
        yield fuzzer


async def against_coordinator(run_dir: Path, pid: int, calls: int) -> tuple[Counter[tuple[str, str]], int]:
    """The answers by rpc and code, and by how many bytes the process grew after the first quarter."""
    names, process, before = list(rpcs()), psutil.Process(pid), 0
    async with fuzzer_at(run_dir) as fuzzer:
        for number in range(calls):
            if number == calls // 4:
                before = process.memory_info().rss
            await fuzzer.execute(names[number % len(names)], number)
        return fuzzer.codes, process.memory_info().rss - before


async def against_peer(calls: int) -> Counter[str]:
    """A peer's port, by its neighbour: whom it must let in."""
    authority, codes = new_authority(), Counter[str]()
    listener = Listener(authority.issue_with_key(peer_name("b")))
    await listener.start("127.0.0.1", 0)
    a = authority.issue_with_key(peer_name("a"))
    credentials = grpc.ssl_channel_credentials(a.authority_pem, a.key_pem, a.certificate_pem)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer_name("b"))]
    valid = tuple(_frames())
    async with grpc.aio.secure_channel(f"127.0.0.1:{listener.port}", credentials, options) as channel:
        for number in range(calls):
            draw, got = random.Random(f"Link {number}"), list[Message]()
            link = Link(1, 0, "a", False, 4, 2, 1 << 16, got.append, lambda: None, lambda _: None)
            listener.forget()
            listener.expect(link)
            contents = [changed(valid, draw) for _ in range(draw.choice((1, 3)))]
            if draw.random() < 0.8:
                contents.insert(0, Frame(pb.Frame(generation=1)).to_bytes())

            async def all_of_them(sent: list[bytes] = contents) -> AsyncIterator[bytes]:
                for content in sent:
                    yield content

            metadata = (("generation", draw.choice(("1", "1", "1", "x"))), ("boundary", "0"))
            call = channel.stream_stream(LINK)(all_of_them(), metadata=metadata, timeout=SECONDS)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError:
                pass
            code, details = await call.code(), await call.details()
            codes[code.name] += 1
            assert code.name not in ("UNKNOWN", "DEADLINE_EXCEEDED"), f"Link {number}: {code.name}: {details}"
            link.close()
    await listener.stop()
    return codes


def _frames() -> Iterator[bytes]:
    for microbatch in range(2):
        yield from (f.to_bytes() for f in frames_of(Message("forward", 1, microbatch, 0, b"ids", bytes(200)), 1))
    yield from (frame.to_bytes() for frame in frames_of(Message("evaluation", 1, 0, 0, b"ids", None), 1))
    yield Frame(pb.Frame(generation=1, taken=0, asked=3)).to_bytes()


def a_run(pool: Pool) -> Path:
    """That trains meanwhile, for as long as it takes."""
    spec = make_spec(
        stages=1,
        steps=100_000,
        audit=0.01,
        snapshots={"interval": 50},
        limits={"connections_per_address": 100_000},  # or calls that fail would have it cut off
    )
    run_dir = pool.start(spec, [{}])
    wait_for_event(run_dir, "stages_linked")
    return run_dir


def main(arguments: list[str]) -> int:
    calls, began = int(arguments[0].replace("_", "")), time.monotonic()
    os.environ.setdefault("PMTRAIN_CACHE", tempfile.mkdtemp())
    pool = Pool(Path(tempfile.mkdtemp()))
    try:
        run_dir = a_run(pool)
        codes, grown = asyncio.run(against_coordinator(run_dir, pool.coordinator.pid, calls))
        for (name, code), times in sorted(codes.items()):
            print(f"{times:>9,} {name}: {code}")
        alive = not events(run_dir, "ended") and pool.coordinator.at_work
    finally:
        pool.close()
    for code, times in sorted(asyncio.run(against_peer(calls // 10)).items()):
        print(f"{times:>9,} Link: {code}")
    seconds = time.monotonic() - began
    print(f"{sum(codes.values()) + calls // 10:,} calls of {len(rpcs()) + 1} rpcs in {seconds:.0f} s, ", end="")
    print(f"the coordinator grew by {grown >> 20} MiB and {'leads on' if alive else 'is gone'}")
    return 0 if alive and grown < KEPT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
