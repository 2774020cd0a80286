"""What a peer shows: a certificate to its neighbours, its id and a secret to the coordinator. Renewed in mid-run, well
before they end; streams that are open go on, and whatever is opened after that shows the new ones.

Knows keys and one call. It must not know stages, links or the control stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from protomodels_cli.files import write_whole
from protomodels_cli.observe import logs
from protomodels_cli.retry import Backoff
from protomodels_cli.wire.client import Metadata, in_words
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import Identity, life_of, new_key, public_key_of
from protomodels_cli.worker import notices
from protomodels_cli.worker.telling import Tell

RENEW_AT = 0.45, 0.55  # of its life: not all peers of a run at once
LOOK_EVERY = 60.0  # seconds between two looks at the clock at most: a machine that slept has slept through a timer
AGAIN = 0.1, 0.02  # of a life between two tries that fail: at most, and at first
CALL_SECONDS = 30.0


class Papers:
    def __init__(self, identity: Identity, metadata: Metadata, kept: Path | None = None):
        """`kept`: a file for what this peer shows, so that commands on this machine may look on as well."""
        self.identity, self._kept = identity, kept
        self.metadata = [*metadata]  # of calls to the coordinator; changed in place: many have it
        self._note_life()
        self._keep()

    def _keep(self) -> None:
        if self._kept is not None:
            with contextlib.suppress(OSError):
                write_whole(self._kept, json.dumps(dict(self.metadata)).encode(), 0o600)

    def _note_life(self) -> None:
        """This machine's clock only counts what has passed since: it may be wrong by hours."""
        now, self._life = time.time(), max(1.0, life_of(self.identity.certificate_pem))
        self._end, self.renew_at = now + self._life, now + random.uniform(*RENEW_AT) * self._life

    async def keep_good(self, stub: rpc.PeeringStub, tell: Tell, use: Callable[[Identity], None]) -> None:
        """Renew them time and again. `use` gets every new certificate. Where that fails, the coordinator ends the
        session when they end, and says why."""
        longest, first = (share * self._life for share in AGAIN)
        backoff = Backoff(first, longest)
        while True:
            await asyncio.sleep(min(LOOK_EVERY, max(0.0, self.renew_at - time.time())))
            if time.time() < self.renew_at:
                continue
            try:
                await self._renew(stub)
            except grpc.aio.AioRpcError as e:
                wait = backoff.after_failure(time.monotonic())
                assert wait is not None, "it never gives up"
                self.renew_at = time.time() + wait
                if backoff.failures == 1:
                    left = max(0.0, self._end - time.time())
                    tell(notices.RenewalFailed(str(in_words(e)).splitlines()[0], left))
            else:
                backoff.reset()
                use(self.identity)

    async def _renew(self, stub: rpc.PeeringStub) -> None:
        """With a key of its own each time: one that leaked is of no use for longer than its certificate."""
        key = new_key()
        request = pb.RenewRequest(public_key_pem=public_key_of(key))
        reply = await stub.Renew(request, metadata=self.metadata, timeout=CALL_SECONDS)
        logs.hide(reply.secret)
        self.identity = Identity(key, reply.certificate_pem, self.identity.authority_pem)
        self.metadata[:] = [(name, reply.secret if name == "secret" else value) for name, value in self.metadata]
        self._note_life()
        await asyncio.to_thread(self._keep)
        logs.WIRE.info("this peer's certificate was renewed, for %.0f s", self._life)
