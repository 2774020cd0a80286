"""What peers say of parts of snapshots, looked into beside the machine: that one is unusable, or that they have it.

The machine believes at once that a peer has a part: whoever has one is asked first, and that cannot wait. It hears
later whose word was not true. That a spare has built a stage it hears only once the spare has proved that it has the
stage's part. It must not know what follows from that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from protomodels_cli import timeouts
from protomodels_cli.coordinator import events
from protomodels_cli.coordinator.failing import flaw_of, no_beginning
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.run import Run
from protomodels_cli.coordinator.snapshots.copies import OutOfReach
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep
from protomodels_cli.coordinator.snapshots.uploads import Uploads
from protomodels_cli.protocol.parts import Part
from protomodels_cli.protocol.possession import NONCE, proof
from protomodels_cli.wire.parts import part_message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

AGAIN = 6.0  # seconds between two looks into a store that cannot be reached


class Claims:
    def __init__(
        self,
        run: Run,
        snapshots: Snapshots,
        uploads: Uploads,
        upkeep: Upkeep,
    ):
        self._run, self._snapshots, self._uploads, self._upkeep = run, snapshots, uploads, upkeep
        self._looked: dict[str, tuple[int, int, float, int]] = {}  # what of a peer was last looked into
        self._looking: set[str] = set()  # at what these peers said
        self._asked: dict[tuple[str, Part], bytes] = {}  # what peers were asked to prove, with which nonce
        self._proved: set[tuple[str, Part]] = set()
        self._ready: set[tuple[str, Part]] = set()  # what peers have built, and not proved yet

    def look_at(self, event: events.Event | events.Aside) -> Coroutine[Any, Any, None] | None:
        """What looking into it takes, where it is of parts."""
        match event:
            case events.SnapshotLost():
                return self.look_into(event)
            case events.Proof():
                return self.check(event)
            case events.Ready():
                return self.hear_ready(event)
            case _:
                return None

    async def look_into(self, lost: events.SnapshotLost) -> None:
        """A peer cannot read its part of a snapshot, or build a stage from it. What is here decides: a peer's word
        costs nobody a snapshot, and is looked into once for each time that it is told to build a stage. What only the
        store could tell is asked until it answers."""
        state, history = self._run.state, self._run.state.history
        stage = state.stage_to_build(lost.peer, lost.generation)
        mark = next((m for m in history.snapshots if m.key == (lost.lineage, lost.step)), None)
        if stage is None or mark is None or not mark.parts:
            return
        told = state.seats.preparing.get(lost.peer)
        tries = (0.0, 0) if told is None else (told.asked, told.failed)
        which = history.generation, lost.step, *tries
        if self._looked.get(lost.peer) == which or lost.peer in self._looking:
            return
        self._looked[lost.peer] = which
        self._looking.add(lost.peer)
        try:
            await self._look(lost, mark, stage)
        finally:
            self._looking.discard(lost.peer)

    async def _look(self, lost: events.SnapshotLost, mark: Mark, stage: int) -> None:
        why = lost.why
        while (whole := await self._is_whole(lost, mark, stage)) is None:
            await asyncio.sleep(AGAIN)
            if self._run.state.stage_to_build(lost.peer, lost.generation) != stage or mark not in self._marks():
                return  # nobody waits for it any more
        if whole and (flaw := await flaw_of(self._uploads.unfit(mark, stage))):
            whole, why = False, flaw
        state = self._run.state
        if not whole and mark == state.history.snapshots[0]:
            self._run.fail(no_beginning(stage, state.spec.model.init or ""))
            return
        self._run.submit(replace(lost, whole_here=whole, why=why))

    async def _is_whole(self, lost: events.SnapshotLost, mark: Mark, stage: int) -> bool | None:
        """None: the store cannot be reached, and only that could tell."""
        try:
            return await self._upkeep.is_whole(mark, stage)
        except OutOfReach as e:
            self._run.submit(events.StoreAway(lost.peer, *mark.key, stage, str(e)))
            return None

    def hear(self, event: events.Event) -> None:
        """Have a peer prove what it says it has on its disk, as far as the run may need it."""
        match event:
            case events.Joined(joined):
                self._forget(joined.id)
                if (peer := self._run.state.peers.get(joined.id)) is not None:
                    self._ask(peer.id, peer.parts)
            case events.Left(peer_id):
                self._forget(peer_id)
            case events.Prefetched(peer_id, part):
                self._ask(peer_id, [part])

    async def hear_ready(self, ready: events.Ready) -> None:
        key, told = (ready.peer, ready.part), self._run.state.seats.preparing.get(ready.peer)
        due = told is not None and told.part == ready.part and self._mark(ready.part) is not None
        if not due or key in self._proved:  # the seed needs no proof, and what nobody asked for is passed over
            self._run.submit(ready)
            return
        self._ready.add(key)
        if key not in self._asked:
            self._ask(ready.peer, [ready.part])

    def _forget(self, peer: str) -> None:
        self._proved = {key for key in self._proved if key[0] != peer}
        self._ready = {key for key in self._ready if key[0] != peer}

    def _ask(self, peer: str, parts: Iterable[Part]) -> None:
        for part in parts:
            if self._mark(part) is not None:
                nonce = self._asked[peer, part] = secrets.token_bytes(NONCE)
                self._run.send(peer, prove=pb.Prove(part=part_message(part), nonce=nonce))
                asyncio.get_running_loop().call_later(timeouts.PART_PROOF, self._expire, peer, part, nonce)

    def _expire(self, peer: str, part: Part, nonce: bytes) -> None:
        if self._asked.get((peer, part)) == nonce:
            del self._asked[peer, part]
            self._disprove(peer, part)

    async def check(self, answer: events.Proof) -> None:
        key = answer.peer, answer.part
        if self._asked.get(key) != answer.nonce:
            return  # not what was asked, or asked again since
        del self._asked[key]
        right = await asyncio.to_thread(self._proof, answer.part, answer.nonce)
        if right is not None and right != answer.sha256:
            self._disprove(answer.peer, answer.part)
            return
        self._proved.add(key)
        if key in self._ready:
            self._ready.discard(key)
            self._run.submit(events.Ready(*key))

    def _disprove(self, peer: str, part: Part) -> None:
        self._ready.discard((peer, part))
        self._run.submit(events.Lacking(peer, part, disproved=True))

    def _mark(self, part: Part) -> Mark | None:
        """The complete snapshot that it is of."""
        return next((mark for mark in self._marks() if part in mark.as_parts()), None)

    def _marks(self) -> tuple[Mark, ...]:
        return self._run.state.history.snapshots

    def _proof(self, part: Part, nonce: bytes) -> str | None:
        """None: there is nothing here to compare with."""
        mark = self._mark(part)
        try:
            file = None if mark is None else self._snapshots.open_part(mark, part.stage)
            if file is None:
                return None
            with file:
                return proof(file, nonce)
        except OSError:
            return None
