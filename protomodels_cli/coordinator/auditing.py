"""Audits, in parallel to the machine: which stages are recomputed, and who shows what crossed their boundaries.

Drawn in secret once a step is over and the snapshot before it is whole; both neighbours of a stage have then committed
to what they sent it and got from it. Who recomputes it, and what follows, is in judging.py. It must not know tensors.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from protomodels_cli.codecs import parse_codec
from protomodels_cli.coordinator import audit_notices as told
from protomodels_cli.coordinator import bad_requests, events
from protomodels_cli.coordinator.audit_reasons import MessagesDiffer
from protomodels_cli.coordinator.bad_requests import BadRequest
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.judging import Hearing, Judge
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.run import Run
from protomodels_cli.coordinator.snapshots.uploads import Chunks, bytes_of
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.voices import are_independent, voice_of
from protomodels_cli.observe import logs
from protomodels_cli.protocol.audit import Recorded, digest, disputed, drawn, noise_between
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

SHOW_SECONDS = 300.0  # for a neighbour to upload two messages
VERDICT_SECONDS = 1200.0  # for a spare to fetch a part, build the stage and compute with it
T = TypeVar("T")


@dataclass
class Witnessed:
    """A step that all stages recorded, or are recording."""

    lineage: int
    step: int
    generation: int
    layers: tuple[int, ...]
    holders: tuple[str, ...]
    recorded: dict[int, Recorded] = field(default_factory=dict)
    peers: dict[int, Peer] = field(default_factory=dict)  # the holders, as they were when they reported it

    @property
    def is_whole(self) -> bool:
        return len(self.recorded) == len(self.holders)


class Audits:
    def __init__(
        self,
        run: Run,
        spec: RunSpec,
        feed: Feed,
        draw: random.Random | None = None,
    ):
        self._run, self._feed, self._draw = run, feed, draw or random.SystemRandom()
        self._witnessed: Witnessed | None = None  # the last step that was recorded
        self._recorded = (0, 0)  # generation and number of its task
        self._before = 0  # the step of the snapshot that was considered last
        self._judge = Judge()
        self._busy = self._began = False
        self._given_up: set[tuple[int, told.WhyNot]] = set()  # of stages, since they were audited last
        self._shown: dict[tuple[int, str], asyncio.Future[bytes | None]] = {}
        self._verdicts: dict[tuple[int, str], asyncio.Future[events.Verdict | None]] = {}
        self._asked: dict[tuple[int, str], Part] = {}  # audit and spare → the part that it builds the stage from
        self._frames: dict[int, bytes] = {}  # of audits that are under way
        tokens = spec.batch.size // spec.batch.microbatches * (spec.model.context + 1)
        self._most_bytes = 2 * (2048 + tokens * (8 * spec.boundary_width + 8))  # of a crossing

    # What the machine has heard

    def hear(self, event: events.Event) -> None:
        """A bug here must not end the run: no step depends on an audit."""
        if self._run.state.spec.audit:
            try:
                self._hear(event)
            except Exception as e:
                logs.bug(e)

    def _hear(self, event: events.Event) -> None:
        match event:
            case events.Done(peer, generation, task, report) if report.recorded is not None:
                if (generation, task) == self._recorded:  # with any other a liar would have this one forgotten
                    self._note(peer, generation, report.recorded)
            case events.Left(peer_id) | events.Joined(Peer(id=peer_id)):  # what it was sent before may be lost
                for waiting in (self._verdicts, self._shown):
                    _answer_none(waiting, peer_id)
        self._say_who_audits()
        self._consider()
        state = self._run.state
        if state.task is not None and state.task.recorded:
            self._recorded = (state.history.generation, state.task.number)

    def _say_who_audits(self) -> None:
        """Once, when the run has begun: without a spare the owner would hear of it after the first snapshot."""
        state = self._run.state
        if self._began or not state.history.holders:
            return
        self._began = True
        holders = [known for peer in state.history.holders if (known := state.peers.get(peer)) is not None]
        spares = [peer for peer in state.peers.values() if peer not in holders]
        if not any(are_independent(spare, holder) for spare in spares for holder in holders):
            self._run.tell(told.NobodyAudits(state.spec.audit, "no_independent" if spares else "no_spare"))

    def _note(self, peer: str, generation: int, recorded: Recorded) -> None:
        state, history = self._run.state, self._run.state.history
        stage, known = state.stage_of(peer), self._witnessed
        reporter = state.peers.get(peer)
        if stage is None or generation != history.generation or reporter is None:
            return
        if known is None or (known.generation, known.step) != (generation, recorded.step):
            known = Witnessed(history.lineage, recorded.step, generation, history.layers, history.holders)
            self._witnessed = known
        known.recorded.setdefault(stage, recorded)
        known.peers.setdefault(stage, reporter)
        if known.is_whole:
            for boundary in disputed([known.recorded[i] for i in range(len(known.holders))]):
                why = MessagesDiffer(known.step, boundary)
                self._run.submit(events.Trouble(known.holders[boundary], why, boundary + 1, generation))
                self._witnessed = None

    def _consider(self) -> None:
        """Draw stages, once a step was recorded and the snapshot before it is whole."""
        known, newest = self._witnessed, self._run.state.history.newest
        if self._busy or known is None or (newest.lineage, newest.step) != (known.lineage, known.step - 1):
            return
        if not known.is_whole or not newest.parts:
            return
        self._witnessed, steps, self._before = None, newest.step - self._before, newest.step
        stages = drawn(self._run.state.spec.audit, max(1, steps), len(known.holders), self._draw)
        others = [i for i in range(len(known.holders)) if i not in stages]
        stages += [i for i in others if self._judge.wants(self._run.state, _hearing(known, i), self._draw)]
        self._draw.shuffle(stages)
        if stages:
            self._busy = True
            self._run.spawn(self._audit_all(known, newest, stages))

    async def _audit_all(self, known: Witnessed, mark: Mark, stages: Sequence[int]) -> None:
        """What they recorded is collected at once: they do not keep it for long."""
        microbatch = self._microbatch()
        try:
            stages = [stage for stage in stages if self._can_audit(known, stage)]
            crossings = await self._collect(known, stages, microbatch)
            for stage in stages:
                frames = self._frames_of(known, stage, microbatch, crossings)
                if frames is None:
                    self._give_up(known, stage, "not_shown")
                else:
                    await self._audit(known, mark, stage, microbatch, frames)
        except Exception as e:
            logs.bug(e)
        finally:
            self._busy = False

    # One audit

    async def _audit(self, known: Witnessed, mark: Mark, stage: int, microbatch: int, frames: bytes) -> None:
        """One auditor after another is asked, until it is settled who lies, or nobody is left."""
        number, hearing = self._new_number(), _hearing(known, stage)
        self._frames[number] = frames
        try:
            while not self._judge.is_over(self._run.state, hearing):
                auditor = next(self._judge.auditors(self._run.state, hearing, self._draw), None)
                if auditor is None:
                    break
                hearing.asked.append(auditor)
                verdict = await self._ask(auditor, known, mark, stage, number, microbatch)
                if verdict is None or verdict.failed or not verdict.compared:
                    logs.COORDINATOR.info("%s has no verdict on stage %d: %s", auditor.name, stage, verdict)
                    self._judge.no_result(auditor)
                    continue
                for notice in self._judge.take(hearing, auditor, verdict.compared):
                    self._run.tell(notice)
                if hearing.accusers:
                    self._run.submit(events.Accused(stage, frozenset(map(voice_of, hearing.accusers))))
        finally:
            del self._frames[number]
        if not hearing.accusers and not hearing.clearers:
            self._give_up(known, stage, "no_verdict")
            return
        self._given_up = {one for one in self._given_up if one[0] != stage}
        notices, dismissed = self._judge.conclude(self._run.state, hearing)
        for notice in notices:
            self._run.tell(notice)
        for trouble in dismissed:
            self._run.submit(trouble)

    def _can_audit(self, known: Witnessed, stage: int) -> bool:
        state, hearing = self._run.state, _hearing(known, stage)
        if any(self._judge.auditors(state, hearing, self._draw)):
            return True
        self._give_up(known, stage, self._judge.why_nobody(state, hearing))
        return False

    def _give_up(self, known: Witnessed, stage: int, why: told.WhyNot) -> None:
        """Told once, until the stage is audited."""
        if (stage, why) not in self._given_up:
            self._given_up.add((stage, why))
            self._run.tell(told.AuditGivenUp(stage, known.step, why))

    def _new_number(self) -> int:
        return secrets.randbits(62) + 1

    def _microbatch(self) -> int:
        """One of them is enough. A codec that remembers is as the snapshot has it in the first one only."""
        spec = self._run.state.spec
        remembers = any(parse_codec(wire).codec.remembers for wire in (spec.wire.forward, spec.wire.backward))
        return 0 if remembers else self._draw.randrange(spec.batch.microbatches)

    async def _collect(self, known: Witnessed, stages: Sequence[int], microbatch: int) -> dict[int, pb.Crossing]:
        """What crossed the boundaries of these stages, as far as somebody shows it. From either end, which makes no
        difference: both have said which bytes they were, before anybody knew that they would be asked."""
        last = len(known.holders) - 1
        boundaries = sorted({i for stage in stages for i in (stage - 1, stage) if 0 <= i < last})
        found = await asyncio.gather(*(self._show(known, microbatch, boundary) for boundary in boundaries))
        return {i: crossing for i, crossing in zip(boundaries, found, strict=True) if crossing is not None}

    async def _show(self, known: Witnessed, microbatch: int, boundary: int) -> pb.Crossing | None:
        ends = [boundary, boundary + 1]
        self._draw.shuffle(ends)
        said = known.recorded[boundary]
        for end in ends:
            peer, number = known.holders[end], self._new_number()
            show = pb.Show(audit=number, generation=known.generation, step=known.step, microbatch=microbatch)
            show.boundary = boundary
            content = await self._answer(self._shown, (number, peer), SHOW_SECONDS, peer, show=show)
            if content is None:
                continue
            crossing = pb.Crossing.FromString(content)
            if await asyncio.to_thread(_digests, crossing, known.step, microbatch) == (
                said.forward_out[microbatch : microbatch + 1],
                said.backward_in[microbatch : microbatch + 1],
            ):
                return crossing
        return None

    def _frames_of(
        self, known: Witnessed, stage: int, microbatch: int, crossings: Mapping[int, pb.Crossing]
    ) -> bytes | None:
        """What went into the stage and came out of it; None: not all of it was shown."""
        frames = pb.Audited()
        if stage == 0:
            frames.ids = [*self._feed.step(known.step)][microbatch].ids
        for side, boundary in ((frames.before, stage - 1), (frames.behind, stage)):
            if 0 <= boundary < len(known.holders) - 1:
                if boundary not in crossings:
                    return None
                side.CopyFrom(crossings[boundary])
        return frames.SerializeToString()

    async def _ask(
        self, auditor: Peer, known: Witnessed, mark: Mark, stage: int, number: int, microbatch: int
    ) -> events.Verdict | None:
        state, frames, suspect = self._run.state, self._frames[number], self._run.state.peers.get(known.holders[stage])
        noise = noise_between(_arithmetic(state, suspect), _arithmetic(state, auditor))
        audit = pb.Audit(audit=number, step=known.step, microbatch=microbatch, noise=noise, size=len(frames))
        audit.sha256 = (await asyncio.to_thread(hashlib.sha256, frames)).hexdigest()
        restore = pb.Restore(lineage=mark.lineage, step=mark.step, sha256=mark.parts[stage])
        audit.stage.CopyFrom(pb.Assignment(stage=stage, layers_per_stage=known.layers, step=mark.step, restore=restore))
        key = number, auditor.id
        self._asked[key] = Part(mark.lineage, mark.step, stage, mark.parts[stage])
        try:
            return await self._answer(self._verdicts, key, VERDICT_SECONDS, auditor.id, audit=audit)
        finally:
            del self._asked[key]

    async def _answer(
        self,
        waiting: dict[tuple[int, str], asyncio.Future[T | None]],
        key: tuple[int, str],
        seconds: float,
        peer: str,
        **body: Any,
    ) -> T | None:
        if peer not in self._run.state.peers:
            return None  # it left before it could be asked
        answer = waiting[key] = asyncio.get_running_loop().create_future()
        self._run.send(peer, **body)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return None
        finally:
            del waiting[key]

    # What peers send

    def look_at(self, event: events.Event | events.Aside) -> Coroutine[Any, Any, None] | None:
        return self._take(event) if isinstance(event, events.Verdict) else None

    async def _take(self, verdict: events.Verdict) -> None:
        """Who has nothing to show says so with a verdict that failed."""
        key = verdict.audit, verdict.peer
        if (answer := self._verdicts.get(key)) is not None and not answer.done():
            answer.set_result(verdict)
        if (shown := self._shown.get(key)) is not None and not shown.done():
            shown.set_result(None)

    async def receive(self, peer: str, header: pb.UploadHeader, chunks: Chunks) -> None:
        """Raises BadRequest."""
        answer = self._shown.get((header.audit, peer))
        if answer is None or answer.done() or header.size > self._most_bytes:
            raise BadRequest(bad_requests.FramesNotRequested())
        content = await bytes_of(chunks, header)
        try:
            pb.Crossing.FromString(content)
        except DecodeError:
            raise BadRequest(bad_requests.OtherBytes()) from None
        if not answer.done():
            answer.set_result(content)

    def is_asked(self, peer: str, audit: int) -> bool:
        """Whether this peer was asked for this audit, and owes its verdict."""
        return (audit, peer) in self._asked

    def parts_of(self, peer: str) -> list[Part]:
        """The parts that this peer needs for audits which it was asked for."""
        return [part for (_, asked), part in self._asked.items() if asked == peer]

    async def read(self, first: pb.FetchRequest, others: AsyncIterator[pb.FetchRequest]) -> AsyncIterator[bytes]:
        """The frames of an audit. Raises FileNotFoundError."""
        request: pb.FetchRequest | None = first
        while request is not None:
            if (frames := self._frames.get(first.audit)) is None:
                raise FileNotFoundError("the coordinator has no frames of such an audit")
            yield frames[request.offset :][: min(request.size, PIECE)]
            request = await anext(others, None)


def _answer_none(waiting: Mapping[tuple[int, str], asyncio.Future[Any]], peer: str) -> None:
    """It is gone."""
    for (_, asked), answer in waiting.items():
        if asked == peer and not answer.done():
            answer.set_result(None)


def _hearing(known: Witnessed, stage: int) -> Hearing:
    return Hearing(stage, known.step, known.layers, known.holders, known.peers[stage])


def _arithmetic(state: State, peer: Peer | None) -> str:
    if peer is None or peer.computation is None:
        return ""
    dtype = peer.computation.dtype
    return "tf32" if state.spec.compute.dtype == "tf32" and peer.computation.gpu else dtype


def _digests(crossing: pb.Crossing, step: int, microbatch: int) -> tuple[tuple[bytes], tuple[bytes]]:
    """Of both legs."""

    def of(leg: str, carried: pb.Carried) -> tuple[bytes]:
        payload = None if carried.poison else carried.payload
        return (digest(leg, step, microbatch, carried.basis_version, carried.ids, payload),)

    return of("forward", crossing.forward), of("backward", crossing.backward)
