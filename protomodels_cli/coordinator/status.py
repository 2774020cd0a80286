"""What a run is doing, as one message: for `status`, `peers`, the live view and the summary. Pure, but for the board,
which remembers what it has shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from protomodels_cli.coordinator import path_reasons, reasons
from protomodels_cli.coordinator.candidates import may_be_direct
from protomodels_cli.coordinator.contributions import Contributions
from protomodels_cli.coordinator.next_task import waiting_for
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.reasons import TaskKind
from protomodels_cli.coordinator.sentences import not_direct, pause, sentence, waiting
from protomodels_cli.coordinator.state import State
from protomodels_cli.protocol.throughput import seconds_left, tokens_per_s
from protomodels_cli.spec.cut import spans
from protomodels_cli.wire.path import PUNCHED, is_relayed
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.usage import Usage, at_rest

DOING: dict[TaskKind, pb.StageStatus.State] = {
    "build": pb.StageStatus.BUILDING,
    "link": pb.StageStatus.LINKING,
    "step": pb.StageStatus.TRAINING,
    "sync": pb.StageStatus.CHECKING,
    "evaluation": pb.StageStatus.EVALUATING,
    "finish": pb.StageStatus.FINISHING,
}


FRESH = 0.2  # seconds that a status may be old: however many ask, it is made five times a second at most


class Board:
    """The status of a run, for whoever asks. What it says of a peer is made again only when that has changed: of a
    thousand peers, few do."""

    def __init__(self, started: float):
        self._started = started
        self._rows: dict[str, tuple[Peer, pb.PeerStatus]] = {}
        self._made: tuple[float, pb.RunStatus] | None = None

    def show(
        self, state: State, now: float, refused: int, began: float | None, contributions: Contributions
    ) -> pb.RunStatus:
        """`began`: when the first step was granted, seconds since 1970."""
        made = self._made
        if made is None or not 0 <= now - made[0] < FRESH or made[1].phase != phase_of(state):
            self._rows = {id_: self._row(state, peer, now) for id_, peer in state.peers.items()}
            rows = [row for _, row in self._rows.values()]
            status = describe(state, now, self._started, refused, rows)
            add_work(status, began, contributions)
            self._made = made = now, status
        return made[1]

    def _row(self, state: State, peer: Peer, now: float) -> tuple[Peer, pb.PeerStatus]:
        known, row = self._rows.get(peer.id, (None, pb.PeerStatus()))
        if known is not peer:
            row = _peer(peer)
        _update(row, state, peer, now)
        return peer, row


def describe(
    state: State, now: float, started: float, refused: int, peers: Sequence[pb.PeerStatus] | None = None
) -> pb.RunStatus:
    """`peers`: where they are known already."""
    history, spec, waits, phase = state.history, state.spec, waiting_for(state, now), phase_of(state)
    a_step = spec.batch.size * spec.model.context
    status = pb.RunStatus(
        name=spec.name,
        phase=phase,
        waiting_for="" if waits is None else waiting(waits),
        waiting_kind="" if waits is None else waits.kind,
        step=history.step,
        steps=spec.steps,
        tokens_per_s=tokens_per_s(state.measured.decided_at, a_step) if phase == pb.RunStatus.RUNNING else 0.0,
        generation=history.generation,
        basis_version=history.basis_version,
        spec_sha256=spec.sha256(),
        checkpoint=Path(spec.model.init or "").name,  # not where the owner keeps it
        checkpoint_sha256=history.snapshots[0].source,
        reason=pause(history.paused.why, state.called) if history.paused else "",
        reason_kind=history.paused.why.kind if history.paused else "",
        lineage=history.lineage,
        snapshot_step=history.newest.step,
        steps_redone=history.redone,
        rollbacks=history.rollbacks,
        uptime_s=now - started,
        tokens=history.step * a_step,
        tokens_total=spec.steps * a_step,
        refused_connections=refused,
        waiting_s=max(0.0, now - state.task.started) if state.task else 0.0,
        trouble="" if state.trouble is None else sentence(state.trouble),
        trouble_kind="" if state.trouble is None else _kind(state.trouble.reason),
        stages=_stages(state, phase),
        peers=_peers(state, now) if peers is None else peers,
        gone=_gone(state, now),
        no_spare=state.replaceable is False and not (state.stands_still or history.over),
    )
    if history.decision is not None:
        status.loss = history.decision.loss
    if history.eval_loss is not None:
        status.eval_loss = history.eval_loss
    if (left := seconds_left(spec.steps - history.step, a_step, status.tokens_per_s)) is not None:
        status.eta_s = left
    if state.measured.step_seconds and not history.over:
        status.crash_redo_s = (history.step - history.newest.step) * statistics.median(state.measured.step_seconds)
        if (seconds := _restore_seconds(state)) is not None:
            status.crash_restore_s = seconds
    return status


def add_work(status: pb.RunStatus, began: float | None, contributions: Contributions) -> None:
    """What the machine does not keep: when the run began, and who did how much of it."""
    status.started = began or 0.0
    for name, c in contributions.sums().items():
        status.contributions.add(name=name, steps=c.steps, tokens=c.tokens, seconds=c.seconds, sent_bytes=c.sent_bytes)


def _restore_seconds(state: State) -> float | None:
    """As the last time that a part had to be fetched; where there was none, what an upload took, for the fetch, and
    building a stage, as far as that was measured."""
    pace = state.saving.pace
    if not state.history.newest.parts:
        return pace.build
    if pace.restore is not None:
        return pace.restore
    return None if pace.upload is None else pace.upload + (pace.build or 0.0)


def _kind(reason: reasons.Complaint | reasons.PartUnreadable) -> str:
    return reason.trouble.kind if isinstance(reason, reasons.PeerReport) else reason.kind


def phase_of(state: State) -> pb.RunStatus.Phase:
    if state.history.ended:
        return pb.RunStatus.DONE
    if state.stands_still:
        return pb.RunStatus.WAITING if state.history.step else pb.RunStatus.WAITING_FOR_PEERS
    if state.task is not None and state.task.kind in ("build", "link"):
        return pb.RunStatus.ASSIGNING
    if state.seats.handover is not None and state.task is None:
        return pb.RunStatus.ASSIGNING
    return pb.RunStatus.PAUSED if state.history.paused and state.task is None else pb.RunStatus.RUNNING


def _stages(state: State, phase: pb.RunStatus.Phase) -> list[pb.StageStatus]:
    """Where no step is under way, what the last one took is not shown: it would pass for what happens now."""
    history, tokens = state.history, state.spec.batch.size * state.spec.model.context
    rows = []
    for i, (holder, span) in enumerate(zip(history.holders, spans(history.layers), strict=True)):
        used = state.measured.usage.get(i, Usage())
        if phase != pb.RunStatus.RUNNING:
            used = at_rest(used)
        whole = used.compute_s + used.wait_s + used.wire_s or 1.0
        forward, backward = used.forward_bytes / tokens, used.backward_bytes / tokens
        legs = (forward > 0) + (backward > 0)
        rows.append(
            pb.StageStatus(
                stage=i,
                first_layer=span.start,
                end_layer=span.stop,
                holders=[pb.Holder(peer=holder, name=state.name_of(holder), presence=_presence(state, holder))],
                state=_doing(state, i),
                compute_share=used.compute_s / whole,
                wait_share=used.wait_s / whole,
                wire_share=used.wire_s / whole,
                forward_bytes_per_token=forward,
                backward_bytes_per_token=backward,
                ratio_bf16=legs * 2 * state.spec.model.width / (forward + backward) if legs else 0.0,
                most_in_flight=used.most_in_flight,
                peak_memory=used.peak_memory,
                process_memory=used.peak_memory > 0 and not used.reserved_memory,
                forecast_memory=used.forecast_memory,
                celsius=used.celsius,
                watts=used.watts,
                round_trip_s=used.round_trip_s,
                path=used.path,
                path_s=used.path_s,
                path_kind=why.kind if (why := _why_not_direct(state, i)) else "",
                path_why=not_direct(why) if why else "",
                punch=used.punch,
            )
        )
    return rows


def _why_not_direct(state: State, stage: int) -> path_reasons.NotDirect | None:
    """Why the link from this stage to the next is relayed, or punched; None: it is neither."""
    used = state.measured.usage.get(stage, Usage())
    if used.path == PUNCHED:
        return path_reasons.Punched()
    if not is_relayed(used.path) or stage + 1 >= state.stages:
        return None
    a, b = (state.peers.get(peer) for peer in state.history.holders[stage : stage + 2])
    if a is None or b is None or not may_be_direct(a, b, state.home):
        return path_reasons.NobodyLetIn(stage, used.punch)
    return path_reasons.NoDirectAnswer(stage, used.punch)


def _doing(state: State, stage: int) -> pb.StageStatus.State:
    if state.history.holders[stage] not in state.peers:
        return pb.StageStatus.LOST
    if state.task is None or stage in state.heard or state.stands_still:
        return pb.StageStatus.WAITING
    return DOING[state.task.kind]


def _presence(state: State, peer: str) -> pb.Presence:
    if peer in state.peers:
        return pb.HERE
    if peer in state.seats.absent:
        return pb.AWAY
    departed = state.departed.get(peer)
    return pb.LOST if departed is None else pb.Presence.Value(departed.how.upper())


def _gone(state: State, now: float) -> list[pb.GonePeer]:
    """The last first; without those that are back under their name as other peers."""
    here = {peer.name for peer in state.peers.values()}
    return [
        pb.GonePeer(peer=id_, name=d.name, how=_presence(state, id_), gone_s=max(0.0, now - d.at))
        for id_, d in reversed(list(state.departed.items()))
        if d.name not in here
    ]


def _peers(state: State, now: float) -> list[pb.PeerStatus]:
    rows = [_peer(peer) for peer in state.peers.values()]
    for row, peer in zip(rows, state.peers.values(), strict=True):
        _update(row, state, peer, now)
    return rows


def _peer(peer: Peer) -> pb.PeerStatus:
    """What stays the same while it is connected."""
    return pb.PeerStatus(
        peer=peer.id,
        name=peer.name,
        device=peer.device,
        memory=peer.memory,
        flops=peer.flops,
        address=peer.address,
        reachable=bool(peer.reached),
        token=peer.token,
        person=peer.person,
        upload=0.0 if math.isinf(peer.upload) else peer.upload,
        download=0.0 if math.isinf(peer.download) else peer.download,
        rests_by_itself=peer.rest is not None and peer.rest.own,
        rests_until=0.0 if peer.rest is None else peer.rest.until,
    )


def _update(row: pb.PeerStatus, state: State, peer: Peer, now: float) -> None:
    row.joined_s, row.outsized = now - peer.since, state.conduct.outsized.get(peer.id, 0)
    if (stage := state.stage_at(peer.id)) is None:
        row.ClearField("stage")
    else:
        row.stage = stage
    match state.standing(peer.id):
        case "holder":
            row.state = pb.PeerStatus.HOLDING
        case "leaving":
            row.state = pb.PeerStatus.LEAVING
        case "resting":
            row.state = pb.PeerStatus.RESTING
        case _:
            row.state = pb.PeerStatus.SPARE if state.history.holders else pb.PeerStatus.UNPLACED
