"""Between the machine's words and protobuf's. Pure; limits on what comes from outside are held here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, assert_never

from protomodels_cli.coordinator import events, message_fields, sentences
from protomodels_cli.coordinator.history import Decided, History, Mark
from protomodels_cli.coordinator.peers import Holding, Peer, Rest
from protomodels_cli.coordinator.reasons import Pause, PeerReport
from protomodels_cli.coordinator.routes import MOST_RELAYS
from protomodels_cli.coordinator.snapshots.failures import NotWritten
from protomodels_cli.coordinator.tokens import OWN
from protomodels_cli.coordinator.work import Hashes, Report
from protomodels_cli.cost.activations import Computation
from protomodels_cli.protocol.audit import Compared, Recorded
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire import troubles
from protomodels_cli.wire.addresses import MOST_OWN, is_address
from protomodels_cli.wire.frames import LEG_NUMBERS
from protomodels_cli.wire.parts import part_message, part_of
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.usage import Usage

MOST_PARAMETERS = 100_000
MOST_PARTS = 10_000
MOST_CARDS = 64
MOST_TEXT = 400  # characters of anything that a peer says for people to read


def clean(text: str) -> str:
    """One printable line, and not a long one."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT]).strip()


def report_of(done: pb.Done, spec: RunSpec) -> Report:
    """Raises ValueError on what no honest stage says."""
    if len(done.norms) > spec.model.layers + 2 or len(done.parameters) > MOST_PARAMETERS:
        raise ValueError("a report with more parts than the model has")
    return Report(
        hashes=Hashes(done.basis_version, done.basis_sha256, done.t_fixed_version, done.t_fixed_sha256)
        if done.basis_sha256
        else None,
        norms=tuple((n.unit, n.squared) for n in done.norms),
        loss_sum=done.loss_sum,
        tokens=done.tokens,
        parameters=tuple((p.name, p.sha256) for p in done.parameters),
        usage=Usage.from_message(done.usage),
        recorded=_recorded_of(done.recorded, spec) if done.HasField("recorded") else None,
    )


def _recorded_of(recorded: pb.Recorded, spec: RunSpec) -> Recorded:
    said = [recorded.forward_in, recorded.forward_out, recorded.backward_in, recorded.backward_out]
    if any(len(hashes) > spec.batch.microbatches for hashes in said):
        raise ValueError("hashes of messages that no step has")
    return Recorded(recorded.step, *(tuple(hashes) for hashes in said))


def verdict_of(peer: str, verdict: pb.Verdict) -> events.Verdict:
    names = {number: leg for leg, number in LEG_NUMBERS.items()}
    if len(verdict.compared) > 2 or any(c.wild > c.numbers for c in verdict.compared):
        raise ValueError("a verdict on messages that no stage sends")
    compared = tuple(Compared(names[c.leg], c.numbers, c.wild) for c in verdict.compared)
    return events.Verdict(peer, verdict.audit, compared, clean(verdict.failed))


def event_of(peer: str, message: pb.PeerMessage, spec: RunSpec) -> events.Event | events.Aside | None:
    """What a peer says; None: that it is still there. Raises ValueError on what no honest peer says."""
    message_fields.check(message, spec)
    match message.WhichOneof("body"):
        case "done":
            done = message.done
            return events.Done(peer, done.generation, done.task, report_of(done, spec))
        case "basis_taken":
            taken = message.basis_taken
            return events.BasisTaken(peer, taken.generation, taken.version, taken.sha256)
        case "leaving":
            return events.Leaving(peer)
        case "rest":
            return events.Rests(peer, rest_of(message.rest))
        case "trouble":
            trouble = troubles.from_message(message.trouble, clean(message.trouble.detail))
            about = trouble.stage if isinstance(trouble, troubles.WithNeighbour) else None
            return events.Trouble(peer, PeerReport(trouble), about, message.trouble.generation)
        case "part_failed":
            failed = message.part_failed
            return events.PartFailed(peer, failed.lineage, failed.step, failed.stage, NotWritten(clean(failed.why)))
        case "snapshot_lost":
            lost = message.snapshot_lost
            return events.SnapshotLost(peer, lost.generation, lost.lineage, lost.step, clean(lost.why))
        case "prefetched":
            return events.Prefetched(peer, part_of(message.prefetched))
        case "lacking":
            return events.Lacking(peer, part_of(message.lacking))
        case "proof":
            answer = message.proof
            return events.Proof(peer, part_of(answer.part), answer.nonce, answer.sha256)
        case "verdict":
            return verdict_of(peer, message.verdict)
        case "ready":
            return events.Ready(peer, part_of(message.ready))
        case _:
            return None


def owners_event(request: pb.ControlRequest) -> events.FromOwner | None:
    """None: an action that this version does not have, or no action at all."""
    match request.action:
        case pb.ControlRequest.PAUSE:
            return events.PauseRun()
        case pb.ControlRequest.RESUME:
            return events.ResumeRun()
        case pb.ControlRequest.STOP:
            return events.StopRun()
        case _:
            return None


def port_at(host: str, said: pb.ReachabilityRequest | pb.Register) -> int:
    """At which a peer is dialled at this address: its router's may lead there from another."""
    return said.outside_port or said.port if host == said.outside_host else said.port


def ports_of(said: pb.ReachabilityRequest | pb.Register) -> tuple[int, int, str]:
    """All that says where a peer is dialled, beside its addresses."""
    return said.port, said.outside_port, said.outside_host


def rest_of(rest: pb.Rest) -> Rest | None:
    return None if rest.over else Rest(rest.until, own=not rest.by_owner)


def peer_of(
    peer_id: str,
    register: pb.Register,
    address: str,
    reached: Collection[str],
    now: float,
    token: str = OWN,
    person: str = "",
) -> Peer:
    """`reached`: addresses at which we have dialled it ourselves. It does not choose what strangers dial. `token`: the
    id of what it joined with, and the person whom that was made for."""
    if len(register.parts) > MOST_PARTS:
        raise ValueError("more parts of snapshots than a peer can have")
    return Peer(
        id=peer_id,
        name=clean(register.name)[:64] or peer_id,
        device=clean(register.device)[:64],
        memory=register.memory,
        host_memory=register.host_memory if register.HasField("host_memory") else None,
        flops=register.flops,
        address=address,
        port=register.port,
        outside_port=register.outside_port,
        outside_host=register.outside_host if is_address(register.outside_host) else "",
        since=now,
        token=token,
        person=person,
        rest=rest_of(register.rest) if register.HasField("rest") else None,
        upload=register.upload or math.inf,
        download=register.download or math.inf,
        holding=_holding_of(register),
        parts=frozenset(map(part_of, register.parts)),
        computation=_computation_of(register),
        cards=_cards_of(register),
        card_memory=register.card_memory,
        reached=tuple(sorted(reached, key=lambda host: host != address)),
        addresses=tuple(host for host in register.addresses[:MOST_OWN] if is_address(host)),
        machine=clean(register.machine)[:64],
        relay_trips=tuple((t.relay, t.seconds) for t in register.relay_trips[:MOST_RELAYS] if 0 <= t.seconds < 60),
    )


def _cards_of(register: pb.Register) -> tuple[str, ...]:
    cards = (card[:64] for card in clean(register.card).split(",") if card)
    return tuple(dict.fromkeys(cards))[:MOST_CARDS]


def _computation_of(register: pb.Register) -> Computation | None:
    gpu = register.HasField("host_memory")
    for dtype in ("bf16", "float32", "float64"):
        if register.dtype == dtype:
            return Computation(dtype, register.compiled, gpu)
    return None


def _holding_of(register: pb.Register) -> Holding | None:
    if not register.HasField("holding"):
        return None
    h = register.holding
    if h.stage >= len(h.layers_per_stage):
        raise ValueError("a stage that its own cut does not have")
    return Holding(h.lineage, h.stage, tuple(h.layers_per_stage), h.applied, h.prepared, h.generation)


def decision_message(d: Decided) -> pb.Decision:
    return pb.Decision(step=d.step, apply=d.apply, lr=d.lr, clip=d.clip, loss=d.loss)


def keep_message(history: History) -> pb.Keep:
    def names(marks: Iterable[Mark]) -> list[pb.SnapshotName]:
        return [pb.SnapshotName(lineage=m.lineage, step=m.step) for m in marks]

    keep = pb.Keep(complete=names(history.snapshots), begun=names(history.pending))
    keep.newest.extend(part_message(part) for part in history.newest.as_parts())
    return keep


def assignment_message(command: events.AssignStage) -> pb.Assignment:
    """Without the ways to its neighbours, and without a basis."""
    assignment = pb.Assignment(
        task=command.task,
        generation=command.lane.generation,
        stage=command.stage,
        layers_per_stage=command.layers,
        lineage=command.lineage,
        step=command.step,
        reuse=command.reuse,
        owed=command.owed,
        memory=command.memory,
    )
    if command.decision is not None:
        assignment.decision.CopyFrom(decision_message(command.decision))
    if command.restore is not None:
        assignment.restore.CopyFrom(_restore_message(command.restore))
    return assignment


def preparation_message(command: events.PrepareStage) -> pb.Assignment:
    """Without a basis."""
    part = command.part
    prepare = pb.Assignment(stage=part.stage, layers_per_stage=command.layers, step=part.step, memory=command.memory)
    if part.sha256:
        prepare.restore.CopyFrom(_restore_message(part))
    return prepare


def _restore_message(part: Part) -> pb.Restore:
    return pb.Restore(lineage=part.lineage, step=part.step, sha256=part.sha256)


def explanation(command: events.MakeSpare | events.Wait | events.Dismiss) -> dict[str, Any]:
    """The message's body. The peer's program reads the kind, people the sentence."""
    match command:
        case events.MakeSpare(_, spare):
            return {"spare": pb.Spare(why=sentences.spare(spare), kind=spare.kind)}
        case events.Wait(_, missing):
            return {"wait": pb.Wait(why=sentences.spare(missing), kind=missing.kind)}
        case events.Dismiss(_, reason, exit_code):
            why, fix = sentences.dismissal(reason)
            return {"dismissal": pb.Dismissal(why=why, fix=fix, exit_code=exit_code, kind=reason.kind)}
        case _:
            assert_never(command)


def paused_message(why: Pause | None, called: str) -> pb.Paused:
    """Without a reason where the run goes on. `called`: the name under which the owner's commands find it."""
    return pb.Paused() if why is None else pb.Paused(why=sentences.pause_for_peers(why, called), kind=why.kind)


def turn_message(command: events.SendTurn | events.GoOn, microbatches: int, evaluated: int, t_fixed: str) -> pb.Turn:
    """`microbatches`: of a step, and of an evaluation. `t_fixed`: its hash."""
    turn, task = pb.Turn(generation=command.lane.generation, save=command.save), command.task
    if command.decision is not None:
        turn.decision.CopyFrom(decision_message(command.decision))
    if task is None:
        return turn
    turn.task = task.number
    version, sha256 = command.basis
    match task.kind:
        case "link":
            turn.connect.SetInParent()
        case "step":
            turn.step.CopyFrom(pb.Step(step=task.step, microbatches=microbatches, basis_version=version))
            turn.step.record = task.recorded
        case "evaluation":
            turn.evaluation.CopyFrom(pb.Evaluation(step=task.step, microbatches=evaluated, basis_version=version))
        case "sync":
            turn.sync.CopyFrom(
                pb.Sync(step=task.step, basis_version=version, basis_sha256=sha256, t_fixed_sha256=t_fixed)
            )
        case "finish":
            turn.finish.step = task.step
        case "build":
            raise AssertionError("an assignment is sent to each peer by itself")
    return turn
