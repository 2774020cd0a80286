"""A peer's session as the coordinator has it: one stream of messages each way, with bounds on both.

Knows no gRPC and no machine. What a peer says beyond its rate is not read any more, and what it does not read is not
kept for it without end: either is a reason to dismiss it, which is not decided here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protomodels_cli import timeouts
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.addresses import network_of
from protomodels_cli.wire.channels import HEARTBEATS
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.rates import Bucket, Rate

# Of a peer's messages, each of which costs a token and another for every so many bytes. What the coordinator says
# brings some: most of what an honest peer sends is an answer, however short the steps are. The rest are heartbeats.
FROM_PEER, TOKEN_BYTES, FOR_EACH_MESSAGE = Rate(per_second=20.0, burst=500.0), 4096, 2
OPENED = Rate(per_second=1 / 3, burst=20.0)  # sessions of one peer: each costs a row of events, and may relink all
COOLING_SECONDS = 60.0  # in which nobody joins with the token, and from where, a peer was sent away for sending more
MOST_UNTAKEN = 1000  # events of one peer that may wait for the machine; then nothing is read from it for a while
UNTAKEN_SECONDS = 0.05  # until the next look
FOR_OTHERS = 1000  # messages that may wait for a peer beside its token ids
FEEDS = 4  # times the token ids of a step, the next step and an evaluation: generations may follow each other quickly
QUIET = 1.5  # times a peer's own interval without a word to it: at the next look it is sent a heartbeat
TURNS = 50  # in which all streams are looked after


def most_waiting(spec: RunSpec) -> int:
    """Messages that may wait for one peer: no honest one is that far behind."""
    rows = spec.batch.size // spec.batch.microbatches
    return FOR_OTHERS + FEEDS * (2 * spec.batch.microbatches + -(-spec.eval.windows // rows))


@dataclass
class ControlStream:
    """The stream of one session, from the coordinator's side. A peer that reconnects opens another."""

    address: str = ""  # where the peer is
    port: int = 0  # of the door's loopback connection that carries it
    outbox: asyncio.Queue[pb.CoordinatorMessage | None] = field(default_factory=asyncio.Queue)  # None: the end
    sent: int = 0  # messages
    last_sent: float = 0.0
    last_received: float = field(default_factory=time.monotonic)
    serving: asyncio.Task[object] | None = None  # what ends with it
    refused: bool = False  # the machine was told that this peer says or leaves too much: it is heard no more

    def send(self, message: pb.CoordinatorMessage) -> None:
        self.sent += 1
        message.number, self.last_sent = self.sent, time.monotonic()
        self.outbox.put_nowait(message)

    def beat(self) -> None:
        """Unless something else waits to be sent, which says as much."""
        if self.outbox.empty():
            self.last_sent = time.monotonic()
            self.outbox.put_nowait(pb.CoordinatorMessage(number=self.sent, heartbeat=pb.Heartbeat()))

    def end(self) -> None:
        """After what waits to be sent."""
        self.outbox.put_nowait(None)

    def end_soon(self) -> None:
        """The same, whether or not the peer reads it."""
        self.end()
        if self.serving is not None:
            asyncio.get_running_loop().call_later(timeouts.SESSION_CLOSE, self.serving.cancel)


class CoolingOff:
    """Tokens with which nobody may join from a network for a while: a peer that is sent away could be back at once as
    another. Others from there, with tokens of their own, have done nothing."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def begin(self, token: str, ip: str, now: float) -> None:
        """`token`: its id."""
        self._until = {known: until for known, until in self._until.items() if until > now}
        self._until[token, network_of(ip)] = now + COOLING_SECONDS

    def seconds_left(self, token: str, ip: str, now: float) -> float:
        return max(0.0, self._until.get((token, network_of(ip)), now) - now) if ip else 0.0


@dataclass
class EnrolledPeer:
    """A peer that showed the token, to this coordinator or to the one before a restart."""

    since: float
    seen: tuple[str, tuple[int, int, str]] | None = None  # where it was, and its ports, when the coordinator dialled it
    reached: frozenset[str] = frozenset()  # addresses at which it answered then
    uploads: int = 0
    stream: ControlStream | None = None
    unannounced: int = 0  # streams of which the machine has not processed the Joined event yet
    untaken: int = 0  # events that the machine has not processed yet
    until: float = 0.0  # when what it shows ends, in seconds since 1970
    bucket: Bucket | None = None  # of its messages, on whichever stream; None: it has sent none
    opened: Bucket | None = None  # of its sessions

    def may_open(self, now: float) -> bool:
        """Another session."""
        left = (self.opened or Bucket.full(OPENED, now)).take(OPENED, 1, now)
        self.opened = left or self.opened
        return left is not None

    def was_sent(self) -> None:
        """A message: it may answer."""
        if self.bucket is not None:
            self.bucket = self.bucket.give(FROM_PEER, FOR_EACH_MESSAGE)

    def may_say(self, message: pb.PeerMessage, now: float) -> bool:
        bucket = self.bucket or Bucket.full(FROM_PEER, now)
        left = bucket.take(FROM_PEER, 1 + message.ByteSize() / TOKEN_BYTES, now)
        self.bucket = left or bucket
        return left is not None


async def watch(
    enrolled: Mapping[str, EnrolledPeer],
    lease: float,
    give_up: Callable[[str, ControlStream], None],
    clock: Callable[[], float],
) -> None:
    """Look after every stream five times a lease, a few at a time: a thousand heartbeats at once would keep a decision
    waiting. Whoever sent none for four fifths of a lease is given up: at the next look the whole lease may be over.
    So is whoever has not renewed, by `clock`, what it shows.
    Peers wait longer for the coordinator: it sends half as many as they do, and none to whoever it has just told
    something."""
    every = lease / HEARTBEATS
    began = before = time.monotonic()
    while True:
        peers = list(enrolled)
        for turn in range(TURNS):
            began += every / TURNS
            await asyncio.sleep(began - time.monotonic())
            now = time.monotonic()
            if now - before > every:  # this process was stopped: heartbeats have arrived and wait unread
                began = now
                for known in enrolled.values():
                    if known.stream is not None:
                        known.stream.last_received = now
            before = now
            for peer in peers[turn::TURNS]:
                if peer not in enrolled or (stream := enrolled[peer].stream) is None:
                    continue
                if now - stream.last_received > lease - every or clock() >= enrolled[peer].until:
                    give_up(peer, stream)
                elif now - stream.last_sent > QUIET * every:
                    stream.beat()
