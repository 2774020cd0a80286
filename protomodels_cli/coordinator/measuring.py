"""Answers to peers that measure their line, within bounds: padding for padding, so that nobody can make a weapon of it.

One call at a time, so much of it, and so many bytes a minute of one network and of all together: what is left of the
coordinator's line is for training. How fast a call goes is the caller's to say, who yields to whatever else is on the
line (worker/snapshots/pacing.py). Knows no run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable

from protomodels_cli.wire.addresses import network_of
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.rates import Bucket, Rate

CALL_BYTES, CALL_SECONDS = 16 << 20, 12.0  # of one call, both ways together
OF_NETWORK = Rate(per_second=float(1 << 18), burst=float(2 * CALL_BYTES))  # bytes
OF_ALL = Rate(per_second=float(1 << 20), burst=float(8 * CALL_BYTES))
QUIET_SECONDS = 3.0  # without a request
MOST_NETWORKS = 10_000


class NotNow(Exception):
    """The argument says why, and when to try again."""


class Measuring:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._busy = clock, False
        self._all: Bucket | None = None
        self._networks: dict[str, Bucket] = {}
        self._padding = os.urandom(PIECE)  # nothing on the way can make it smaller

    async def answer(
        self, caller: str, first: pb.MeasureRequest, more: AsyncIterator[pb.MeasureRequest]
    ) -> AsyncIterator[pb.MeasureReply]:
        """Ends early, without an error, where the call has had its share. Raises NotNow before it begins."""
        if self._busy:
            raise NotNow("another peer measures its line just now: try again in 10 s")
        network = network_of(caller) if caller else ""
        if not self._may(network, 0):
            raise NotNow("enough was measured for now: try again in 2 min")
        self._busy = True
        try:
            ends, left, request = self._clock() + CALL_SECONDS, CALL_BYTES, first
            while self._clock() < ends:
                size = min(request.size, PIECE)
                left -= size + len(request.padding)
                if left < 0 or not self._may(network, size + len(request.padding)):
                    return
                yield pb.MeasureReply(padding=self._padding[:size], clock=time.monotonic())
                try:
                    async with asyncio.timeout(QUIET_SECONDS):
                        request = await anext(more)
                except (StopAsyncIteration, TimeoutError):
                    return
        finally:
            self._busy = False

    def _may(self, network: str, size: int) -> bool:
        """Takes the bytes from what is left to this network and to all; 0: is anything left?"""
        now = self._clock()
        if len(self._networks) >= MOST_NETWORKS:
            self._networks = {}
        wanted = float(size or PIECE)
        own = self._networks.get(network, Bucket.full(OF_NETWORK, now)).take(OF_NETWORK, wanted, now)
        everyone = (self._all or Bucket.full(OF_ALL, now)).take(OF_ALL, wanted, now)
        if own is None or everyone is None:
            return False
        if size:
            self._networks[network], self._all = own, everyone
        return True
