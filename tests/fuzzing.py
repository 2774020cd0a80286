"""Every decoder of bytes that others send, against valid messages with bytes changed: it returns, or refuses with what
it says it refuses with, at once, and keeps nothing.

    python tests/fuzzing.py 10_000_000       # executions, over all decoders and cores; as scripts/fuzz.sh

An execution is a function of decoder and number: a failure is found again by `python tests/fuzzing.py NAME NUMBER`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from boundary import CPU, WIRES, slot_of, wire_spec
from conftest import make_spec
from google.protobuf.message import DecodeError

from protomodels_cli.codecs import End
from protomodels_cli.codecs.packing import pack_ids, unpack_ids
from protomodels_cli.coordinator import messages
from protomodels_cli.coordinator.as_json import as_json
from protomodels_cli.coordinator.candidates import candidates_for
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.seal import NotWhole, OtherKey, StoreKey
from protomodels_cli.coordinator.snapshots import manifest
from protomodels_cli.coordinator.snapshots.manifest import File, Manifest
from protomodels_cli.observe.event_rows import parse as event_row
from protomodels_cli.protocol.messages import BadMessage, MessageKey
from protomodels_cli.safetensors_file import SafetensorsError, header_of
from protomodels_cli.spec import SpecError, spec_from
from protomodels_cli.wire import port_mapping, upnp
from protomodels_cli.wire.frames import Assembler, Frame, Message, frames_of
from protomodels_cli.wire.join_link import JoinLink, LinkError
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.port_mapping import NoMapping
from protomodels_cli.wire.relay import RELAY
from protomodels_cli.wire.seen import read_seen
from protomodels_cli.wire.tickets import Ticket, read_ticket

SLOW = 2.0  # seconds that an execution may take
KEPT = 64 << 20  # bytes that a process may grow by
ROUND = 20_000  # executions of a decoder in a process at a time
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)


@dataclass(frozen=True)
class Decoder:
    valid: tuple[bytes, ...]
    decode: Callable[[bytes], Any]
    refuses: tuple[type[Exception], ...]


def changed(valid: tuple[bytes, ...], draw: random.Random) -> bytes:
    """One of them with a few changes: bits, bytes, numbers, pieces left out, repeated, put in or taken from another."""
    content = bytearray(draw.choice(valid))
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(content) + 1)
        end = min(len(content), at + draw.choice((1, 2, 4, 8, 32)))
        match draw.randrange(8):
            case 0 if at < len(content):
                content[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(content):
                content[at] = draw.choice(EXTREMES)
            case 2:
                content[at:end] = bytes(draw.choice(EXTREMES) for _ in range(end - at))
            case 3:
                del content[at:end]
            case 4:
                content[at:at] = content[at:end] * draw.choice((1, 2, 50))
            case 5:
                content[at:at] = draw.randbytes(draw.choice((1, 3, 9, 200)))
            case 6:
                del content[at:]
            case _:
                other = draw.choice(valid)
                content[at:] = other[draw.randrange(len(other) + 1) :]
    return bytes(content)


def execute(name: str, number: int) -> None:
    """Raises what the decoder must not."""
    decoder = decoders()[name]
    content = changed(decoder.valid, random.Random(f"{name} {number}"))
    began = time.process_time()
    try:
        decoder.decode(content)
    except decoder.refuses:
        pass
    except Exception as e:
        raise AssertionError(f"{name} {number}: {type(e).__name__}: {e}") from e
    if (took := time.process_time() - began) > SLOW:
        raise AssertionError(f"{name} {number}: took {took:.1f} s of the processor")


# The decoders


TICKET = Ticket("run1", "meeting1", "p1", 2**31).signed("s" * 32, "dial").encode()
SPEC = make_spec(stages=2)
PART = pb.Part(lineage=1, step=6, stage=1, sha256="ab" * 32)


def _two_pieces() -> bytes:
    """A message in two frames, each behind its length in a byte."""
    sent = {"leg": pb.Frame.FORWARD, "generation": 2, "step": 3, "microbatch": 1, "size": 40}
    frames = [Frame(pb.Frame(**sent, ids=b"ids"), bytes(30)), Frame(pb.Frame(**sent, taken=1), bytes(10))]
    return b"".join(bytes([len(content)]) + content for content in (frame.to_bytes() for frame in frames))


def _assemble(content: bytes) -> None:
    assembler = Assembler(1 << 16, ("forward", "evaluation"))
    while content:
        end = 1 + content[0]
        assembler.add(Frame.from_bytes(content[1:end]))
        content = content[end:]


UPNP = (
    b'<root xmlns="urn:schemas-upnp-org:device-1-0"><service><serviceType>urn:schemas-upnp-org:service:'
    b"WANIPConnection:1</serviceType><controlURL>/ctl</controlURL></service></root>"
)


def _from_router(content: bytes) -> None:
    """All that a router may answer, or whoever says it is one."""
    if (where := upnp.location_of(content)) is not None:
        upnp.place_of(where, "192.168.1.1")
    elif content.startswith(b"<"):
        upnp.place_of(f"http://192.168.1.1{upnp.service_of(content)[1]}", "192.168.1.1")
        upnp.value_of(content, "NewExternalIPAddress")
    elif content[1:2] == b"\x80":
        port_mapping.read_address(content)
    else:
        port_mapping.read_port(content, 7421)


def _part_headers() -> bytes:
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"step": "6"}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(24)


def _header(content: bytes) -> Any:
    return header_of(lambda start, end, _: memoryview(content)[start:end], len(content))


def peers_words() -> Iterator[bytes]:
    usage = pb.Usage(compute_s=0.1, wait_s=0.2, forward_bytes=1000, peak_memory=1 << 30)
    norms = [pb.UnitNorm(unit=f"layer.{i}", squared=0.5) for i in range(4)]
    for body in (
        {"done": pb.Done(task=3, generation=2, norms=norms, loss_sum=9.0, tokens=64, usage=usage)},
        {"basis_taken": pb.BasisTaken(version=1, sha256="cd" * 32, generation=2)},
        {"trouble": pb.Trouble(generation=2, detail="no route", kind="link_not_opened", about=1)},
        {"part_failed": pb.PartFailed(lineage=1, step=6, stage=1, why="disk full")},
        {"snapshot_lost": pb.SnapshotLost(generation=2, lineage=1, step=6, why="damaged")},
        {"prefetched": PART},
        {"proof": pb.Proof(part=PART, nonce=b"nonce", sha256="ef" * 32)},
        {"ready": PART},
        {"verdict": pb.Verdict(audit=7, compared=[pb.Comparison(leg=pb.Frame.FORWARD, numbers=2048, wild=3)])},
        {"done": pb.Done(task=4, generation=2, recorded=pb.Recorded(step=6, forward_in=[bytes(32)] * 2))},
    ):
        yield pb.PeerMessage(**body).SerializeToString()


def registered() -> bytes:
    holding = pb.Holding(lineage=1, stage=1, layers_per_stage=[2, 2], applied=5, generation=2)
    asked = pb.Register(
        name="attic", device="cpu", memory=1 << 33, flops=1e12, port=4000, holding=holding, parts=[PART]
    )
    asked.addresses.extend(["192.168.1.10", "fd00::7"])
    asked.machine = "ab" * 16
    asked.relay_trips.add(relay="r.example:7430", seconds=0.02)
    return asked.SerializeToString()


def _from_peer(content: bytes) -> Any:
    return messages.event_of("p", pb.PeerMessage.FromString(content), SPEC)


def _register(content: bytes) -> Any:
    peer = messages.peer_of("p", pb.Register.FromString(content), "192.0.2.7", ("192.0.2.7",), 0.0)
    return candidates_for(replace(peer, address="192.0.2.8"), peer, "192.0.2.1")


def _payloads(forward: str, backward: str) -> dict[str, Decoder]:
    """What crosses a boundary with these codecs, one decoder for each leg: the end that reads it."""
    message = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    down = replace(slot_of(message, MessageKey(1, 0, 0, "forward")), samples=("a", "b"))
    up = replace(down, key=MessageKey(1, 0, 0, "backward"))
    spec = wire_spec(forward, backward)
    before, behind = End(spec), End(spec)
    activations = before.pack(message, down)
    behind.unpack(activations, down, CPU)
    gradients = behind.pack(message, up)
    assert activations is not None
    assert gradients is not None
    sender = End(spec)

    def backward_leg(content: bytes) -> torch.Tensor:
        sender.decide(apply=False)
        if sender.codecs["backward"].uses_positions:  # which the forward message left at the end that sent it
            sender.pack(message, down)
        return sender.unpack(content, up, CPU)

    return {
        f"{forward}|{backward}": Decoder(
            (bytes(activations),), lambda content: End(spec).unpack(content, down, CPU), (BadMessage,)
        ),
        f"{forward}|{backward} backward": Decoder((bytes(gradients),), backward_leg, (BadMessage,)),
    }


KEY = StoreKey(bytes(32))
LINK = JoinLink("203.0.113.7", 7420, "w" * 22, "A" * 43, (("2001:db8::7", 7420),))


@cache
def decoders() -> dict[str, Decoder]:
    sent = Message("forward", 3, 1, 0, b"ids", bytes(range(256)))
    frames = [frame.to_bytes() for frame in frames_of(sent, 2)]
    ids = pack_ids(np.arange(34), 2)
    row = {"kind": "peer_joined", "at": 1.5, "text": "p joined", "peer": "p"}
    mark = Mark(1, 6, basis_version=1, basis_sha256="ab" * 32, parts=("cd" * 32,), layers=(2, 2))
    kept = Manifest(RunIdentity("ab", "cd"), mark, (0, "ef" * 32), {"stage-0.safetensors": File(1000, "cd" * 32)})
    found = {
        "frame": Decoder(tuple(frames), Frame.from_bytes, (BadMessage,)),
        "frames": Decoder((_two_pieces(), _two_pieces() * 2), _assemble, (BadMessage,)),
        "ids": Decoder((ids,), lambda content: unpack_ids(content, 2, 17, 300), (BadMessage,)),
        "link": Decoder(
            (str(LINK).encode(),), lambda content: JoinLink.parse(content.decode(errors="replace")), (LinkError,)
        ),
        "ticket": Decoder(
            (TICKET,), lambda content: read_ticket(content.decode(), "s" * 32, "dial", 0.0), (ValueError,)
        ),
        "relay": Decoder((b"PMTRAIN 1 RELAY " + b"a" * 32 + b" dial\n",), RELAY.fullmatch, ()),
        "seen": Decoder((b"SEEN 198.51.100.7 40123\n", b"SEEN 2001:db8::7 1\n"), read_seen, ()),
        "nat_pmp": Decoder(
            (
                bytes([0, 130, 0, 0, 0, 0, 0, 9, 28, 253, 28, 253, 0, 0, 14, 16]),
                bytes([0, 128, 0, 0, 0, 0, 0, 9, 198, 51, 100, 7]),
            ),
            _from_router,
            (NoMapping,),
        ),
        "upnp": Decoder(
            (b"HTTP/1.1 200 OK\r\nLOCATION: http://192.168.1.1:80/root.xml\r\n\r\n", UPNP), _from_router, (NoMapping,)
        ),
        "header": Decoder((_part_headers(),), _header, (SafetensorsError,)),
        "manifest": Decoder((as_json(kept),), manifest.parse, (ValueError,)),
        "event": Decoder((json.dumps(row).encode(),), lambda c: event_row(c.decode(errors="replace")), ()),
        "peer": Decoder(tuple(peers_words()), _from_peer, (DecodeError, ValueError)),
        "register": Decoder((registered(),), _register, (DecodeError, ValueError)),
        "sealed": Decoder((KEY.seal("x", b"content"),), lambda c: KEY.open("x", c), (NotWhole, OtherKey)),
        "spec": Decoder(
            (SPEC.model_dump_json().encode(),),
            lambda content: spec_from(json.loads(content)),
            (SpecError, ValueError, RecursionError),
        ),
    }
    for wire in WIRES:
        found |= _payloads(*wire)
    return found


def _some(name: str, first: int, count: int) -> tuple[str, int, int]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, first + count):
        execute(name, number)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return name, count, grown


def main(arguments: list[str]) -> int:
    if len(arguments) == 2:
        execute(arguments[0], int(arguments[1]))
        return 0
    total, names = int(arguments[0].replace("_", "")), list(decoders())
    each, began, done = -(-total // len(names)), time.monotonic(), 0
    rounds = [(name, at, min(ROUND, each - at)) for at in range(0, each, ROUND) for name in names]
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, count, grown in pool.map(_some, *zip(*rounds, strict=True)):
            done += count
            print(f"{done:>12,} {name}: {count:,}, grew by {grown >> 20} MiB", flush=True)
            if grown > KEPT and done > len(names) * ROUND:
                print(f"{name} keeps memory")
                return 1
    print(f"{done:,} executions over {len(names)} decoders in {time.monotonic() - began:.0f} s: nothing to report")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
