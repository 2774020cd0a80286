"""Registered peers that say anything: every field of every message at its edges, at wrong times, of other stages."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from machine_bench import Bench

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import machine, reasons
from protomodels_cli.coordinator.audit_reasons import AuditFailed, FalseVerdicts, MessagesDiffer
from protomodels_cli.coordinator.message_fields import EDGES, MOST, check
from protomodels_cli.coordinator.messages import event_of, peer_of
from protomodels_cli.coordinator.peers import Rest
from protomodels_cli.coordinator.snapshots.failures import NotWritten
from protomodels_cli.coordinator.status import describe
from protomodels_cli.observe.view import headline, peer_table, picture
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire import troubles
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

FLOATS = [0.0, -0.0, -1.0, 5e-324, -5e-324, 1e-300, 1e-9, 0.5, 1.0, 1e11, 1e300, 1.8e308]
FLOATS += [float("inf"), float("-inf"), float("nan"), *EDGES]
TEXTS = ["", "x", "a" * 64, "0" * 63, "\x00\n", "é" * 300, "bf16", "embed", "layers.0", *troubles.KINDS]
SECONDS = [0.0, 0.1, 1.0, 5e-324, 1e-300]  # of computing, as a report may state them
# A message that ends the liar's session is rare, or little else would be tried.
WEIGHTS = {"register": 1, "leaving": 0.1, "trouble": 1, "done": 8, "basis_taken": 4}
BODIES = [one.name for one in pb.PeerMessage.DESCRIPTOR.fields]


def integers(largest: int, near: list[int]) -> list[int]:
    around = [n + d for n in near for d in (-1, 0, 1) if 0 <= n + d <= largest]
    return [0, 1, 2, 3, 5, largest, largest // 2 + 1, min(largest, MOST), *around]


class Liar:
    """Makes messages of values near those of the run, and of the edges of every type."""

    def __init__(self, draw: random.Random, b: Bench):
        self._draw, self._b = draw, b

    def message(self, body: str | None = None) -> pb.PeerMessage:
        message = pb.PeerMessage()
        self._fill(message, only=body or self._draw.choices(BODIES, [WEIGHTS.get(name, 2) for name in BODIES])[0])
        return message

    def almost_right(self, stage: int) -> pb.PeerMessage:
        """The report that its stage owes, where one or two fields may be wrong."""
        state, right = self._b.state, self._b.report(stage)
        message, wrong = pb.PeerMessage(), pb.Done()
        done = message.done
        done.task, done.generation = state.task.number if state.task else 0, state.history.generation
        if right.hashes is not None:
            done.basis_version, done.basis_sha256 = right.hashes.basis_version, right.hashes.basis
            done.t_fixed_version, done.t_fixed_sha256 = right.hashes.t_fixed_version, right.hashes.t_fixed
        done.norms.extend(pb.UnitNorm(unit=unit, squared=squared) for unit, squared in right.norms)
        done.loss_sum, done.tokens, done.usage.compute_s = 64.0, 64, self._draw.choice(SECONDS)
        self._fill(wrong)
        for name in self._draw.sample(["loss_sum", "tokens", "usage", "recorded", "norms", "task"], 2):
            if self._draw.random() < 0.2:
                part = pb.Done()
                part.CopyFrom(wrong)
                for other in pb.Done.DESCRIPTOR.fields_by_name:
                    if other != name:
                        part.ClearField(other)
                done.ClearField(name)
                done.MergeFrom(part)
        return message

    def _fill(self, message: Message, only: str = "") -> None:
        for field in message.DESCRIPTOR.fields:
            if (only and field.name != only) or (not only and self._draw.random() < 0.15):
                continue
            many = self._draw.choice([0, 1, 2, 4]) if field.is_repeated else 1
            if field.message_type is not None:
                for _ in range(many):
                    inner = getattr(message, field.name)
                    inner = inner.add() if field.is_repeated else inner
                    inner.SetInParent()
                    self._fill(inner)
            elif field.is_repeated:
                getattr(message, field.name).extend(self._value(field) for _ in range(many))
            else:
                setattr(message, field.name, self._value(field))

    def _value(self, field: Any) -> Any:
        draw, history, task = self._draw, self._b.state.history, self._b.state.task
        near = [history.generation, history.step, history.lineage, len(history.layers), task.number if task else 0]
        if field.name == "generation" and draw.random() < 0.7:
            return history.generation
        if field.name == "task" and task is not None and draw.random() < 0.7:
            return task.number
        if field.name in ("sha256", "basis_sha256") and draw.random() < 0.5:
            return draw.choice([part.sha256 for part in history.newest.as_parts()] or ["u0"])
        match field.type:
            case FieldDescriptor.TYPE_DOUBLE:
                return draw.choice(FLOATS)
            case FieldDescriptor.TYPE_UINT32:
                return draw.choice(integers(2**32 - 1, near))
            case FieldDescriptor.TYPE_UINT64:
                return draw.choice(integers(2**64 - 1, near))
            case FieldDescriptor.TYPE_BOOL:
                return draw.random() < 0.5
            case FieldDescriptor.TYPE_ENUM:
                return draw.choice([0, 1, 2, 7])
            case FieldDescriptor.TYPE_BYTES:
                return draw.choice([b"", b"x", bytes(32), bytes(1000)])
            case FieldDescriptor.TYPE_STRING:
                return draw.choice(TEXTS)
        raise AssertionError(f"{field.full_name} has a type that no liar knows")


class Liars:
    """A machine with honest peers and liars. What liars say takes the way that messages from the network take."""

    def __init__(self, seed: int, spec: RunSpec, honest: int, liars: int):
        self.draw, self.b, self.events = random.Random(seed), Bench(spec), 0
        self.honest, self.liars = [f"p{i}" for i in range(honest)], [f"p{honest + i}" for i in range(liars)]
        self.liar = Liar(self.draw, self.b)
        self._return()

    def live(self, events: int) -> None:
        while self.events < events and not self.b.state.history.over and not self.b.state.stopped:
            self.b.now += self.draw.choice([0, 0, 0, 0.01, 1, 30])
            kinds = [self._honest, self._report, self._lie, self._internal, self._leave, self._return, self._owner]
            self.draw.choices([*kinds, self._crash], [30, 20, 30, 1, 2, 10, 2, 0.2])[0]()
            self.events += 1
            if self.events % 50 == 0:  # what the owner looks at
                status = describe(self.b.state, self.b.now, 0.0, 0)
                assert headline(status)
                assert picture(status)
                assert peer_table(status)

    def _honest(self) -> None:
        if self.draw.random() < 0.3:
            self.b.tell(ev.Tick())
        elif self.b.state.task is None or not self.b.state.placed:
            self.b.answer()

    def _report(self) -> None:
        """All reports on the task, of which a liar's may be wrong."""
        state = self.b.state
        for stage, holder in enumerate(state.history.holders):
            now = self.b.state
            if state.task is None or now.task != state.task or holder not in now.peers or stage in now.heard:
                continue
            if holder in self.liars:
                self._say(holder, self.liar.almost_right(stage))
            else:
                self.b.done(stage)

    def _lie(self) -> None:
        """Mostly while they are connected. What comes from others reaches the machine only where a session has just
        broken, and from somebody unknown it never does."""
        sender = self.draw.choice([*self.liars, "stranger"])
        if sender in self.b.state.peers or self.draw.random() < 0.1:
            self._say(sender, self.liar.message())

    def _say(self, sender: str, message: pb.PeerMessage) -> None:
        try:
            event = event_of(sender, message, self.b.state.spec)
        except ValueError as e:
            if self.draw.random() < 0.05:  # it is dismissed for each of these
                self.b.tell(ev.Trouble(sender, reasons.InvalidMessage(str(e))))
            return
        if event is not None and not isinstance(event, ev.Aside):
            self.b.tell(event)

    def _internal(self) -> None:
        """What the coordinator itself finds out about messages and parts, of peers that may be gone by then."""
        history, draw = self.b.state.history, self.draw
        if not history.holders:
            return
        stage, boundary = draw.randrange(len(history.holders)), draw.randrange(max(1, len(history.holders) - 1))
        holder, step, mark = history.holders[stage], history.step, draw.choice(history.snapshots)
        found: list[ev.Event] = [
            ev.Trouble(history.holders[boundary], MessagesDiffer(step, boundary), boundary + 1, history.generation),
            ev.Trouble(holder, AuditFailed(stage, step, "forward", 5, 10, ("name-9",))),
            ev.Trouble(draw.choice(self.honest), FalseVerdicts(2, 4)),
            ev.Accused(stage, frozenset({"network 127.0.0.1", "token x"})),
            ev.Trouble(holder, reasons.NotReading(5000)),
            ev.PartFailed(draw.choice([holder, None]), *mark.key, stage, NotWritten("no")),
            ev.SnapshotLost(holder, history.generation, *mark.key, "no", whole_here=draw.random() < 0.8),
            ev.StoreAway(holder, *mark.key, stage, "away"),
        ]
        self.b.tell(draw.choice(found))

    def _owner(self) -> None:
        rester, until = self.draw.choice(self.honest), self.b.now + self.draw.choice([10, 1000])
        kinds: list[ev.Event] = [ev.PauseRun(), ev.ResumeRun(), ev.ResumeRun()]
        kinds += [ev.Rests(rester, Rest(until)), ev.Rests(rester, None), ev.Trouble(rester, reasons.Kicked())]
        self.b.tell(self.draw.choice([*kinds, ev.StopRun()] if self.draw.random() < 0.05 else kinds))

    def _crash(self) -> None:
        """The coordinator is killed and started again: of what it knew, its journal is left."""
        state = self.b.state
        self.b.state = machine.resume(state.spec, state.t_fixed, state.history, self.b.now)

    def _leave(self) -> None:
        who = self.draw.choice([*self.liars, *self.liars, *self.honest])
        gone = self.draw.choice([reasons.ConnectionClosed(), reasons.NoHeartbeat(5.0)])
        self.b.tell(ev.Left(who, gone) if self.draw.random() < 0.8 else ev.Leaving(who))

    def _return(self) -> None:
        missing = [who for who in (*self.honest, *self.liars) if who not in self.b.state.peers]
        self.draw.shuffle(missing)
        for who in missing:
            register = self.liar.message("register").register
            try:
                check(register, self.b.state.spec)
                address, token = self.draw.choice(["127.0.0.1", "127.0.0.2"]), self.draw.choice(["", "guest"])
                said = peer_of(who, register, address, (), self.b.now, token)
            except ValueError:
                said = None
            if said is None or who in self.honest or self.draw.random() < 0.5:
                self.b.join(int(who[1:]))
            else:
                self.b.tell(ev.Joined(said))
