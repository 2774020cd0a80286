"""How neighbours find each other, as messages: candidates, relays by distance, and the tickets under which they meet
at a relay or at the door. Decides nothing about stages."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

from protomodels_cli.coordinator.candidates import candidates_for, dials, may_be_direct, nearest
from protomodels_cli.coordinator.door import Door
from protomodels_cli.coordinator.lanes import Lane
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.relay import Role
from protomodels_cli.wire.tickets import TICKET_SECONDS, RelayLink, Ticket

MOST_RELAYS = 8


class Routes:
    """`run`: by which relays know it."""

    def __init__(self, door: Callable[[], Door | None], run: str, relays: Sequence[RelayLink] = ()):
        self._door, self._run, self._relays = door, run, [(relay.address, relay) for relay in relays]
        self._tickets: list[str] = []  # for the door, by boundary
        self._meetings: list[str] = []  # at relays
        self._signed = 0.0
        self._moved: dict[int, Counter[Role]] = {}  # boundary → role → bytes under the tickets before these

    @property
    def relays(self) -> list[str]:
        return [where for where, _ in self._relays]

    @property
    def are_stale(self) -> bool:
        """Half of the time that tickets are good for is over."""
        return bool(self._relays) and time.time() - self._signed > TICKET_SECONDS / 2

    def renew(self, boundaries: int) -> None:
        """Of a new generation: nobody meets any more under what was said before."""
        door = self._door()
        assert door is not None
        for boundary, ticket in enumerate(self._tickets):
            self._moved.setdefault(boundary, Counter()).update(door.forbid(ticket))
        self._tickets = [secrets.token_urlsafe(16) for _ in range(boundaries)]
        self._meetings = [secrets.token_hex(8) for _ in range(boundaries)]
        self.sign_again()
        for ticket in self._tickets:
            door.allow(ticket)

    def sign_again(self) -> None:
        self._signed = time.time()

    def of(self, lane: Lane, stage: int) -> tuple[list[pb.Route], list[pb.Route]]:
        """To the holders of the stages before and after this one. One that is away has none for now."""

        def between(boundary: int, end: int) -> list[pb.Route]:
            if not 0 <= boundary < len(self._tickets):
                return []
            a, b = lane.here[boundary], lane.here[boundary + 1]
            return [] if a is None or b is None else [self._pair(boundary, a, b, lane.home)[end]]

        return between(stage - 1, 1), between(stage, 0)

    def _pair(self, boundary: int, previous: Peer, following: Peer, home: str) -> tuple[pb.Route, pb.Route]:
        """How the earlier stage reaches the later one, and the other way round."""
        earlier, unlikely = dials(previous, following, home), not may_be_direct(previous, following, home)
        there = self._route(boundary, previous, following, earlier, home)
        back = self._route(boundary, following, previous, not earlier, home)
        there.unlikely = back.unlikely = unlikely
        return there, back

    def _route(self, boundary: int, of: Peer, to: Peer, dials: bool, home: str) -> pb.Route:
        role = "dial" if dials else "accept"
        ticket = Ticket(self._run, self._meetings[boundary], of.id, int(self._signed + TICKET_SECONDS))
        return pb.Route(
            way=pb.Route.DIAL if dials else pb.Route.LISTEN,
            peer=to.id,
            ticket=self._tickets[boundary],
            candidates=[pb.Candidate(host=c.host, port=c.port, kind=c.kind) for c in candidates_for(of, to, home)],
            relays=[
                pb.Relay(host=relay.host, port=relay.port, ticket=ticket.signed(relay.secret, role))
                for relay in nearest(of, to, self._relays)
            ],
        )

    def relayed(self) -> list[dict[str, int]]:
        """Bytes that each boundary's links sent through the door, in all generations since this start of the
        coordinator: none where neighbours dial each other, or meet at another relay."""
        door = self._door()
        assert door is not None
        now = [Counter(door.relayed(ticket)) for ticket in self._tickets]
        moved = [self._moved.get(boundary, Counter()) + count for boundary, count in enumerate(now)]
        return [{"forward": m["dial"], "backward": m["accept"]} for m in moved]  # mostly the earlier stage dials
