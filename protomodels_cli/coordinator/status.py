"""What a run is doing, as one message: for `status`, `peers`, the live view and the summary. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.plan import waiting_for
from protomodels_cli.coordinator.rebuild import believe
from protomodels_cli.coordinator.run_dir import identity_of
from protomodels_cli.coordinator.state import State
from protomodels_cli.spec.load import load_spec
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


def describe(state: State, now: float, started: float, refused: int) -> pb.RunStatus:
    history, spec = state.history, state.spec
    status = pb.RunStatus(
        name=spec.name,
        phase=phase_of(state),
        waiting_for=waiting_for(state, now),
        step=history.step,
        steps=spec.steps,
        tokens_per_s=tokens_per_s(state),
        generation=history.generation,
        basis_version=history.basis_version,
        spec_sha256=spec.sha256(),
        reason=history.paused.why if history.paused else "",
        lineage=history.lineage,
        snapshot_step=history.newest.step,
        steps_redone=history.redone,
        rollbacks=history.rollbacks,
        uptime_s=now - started,
        tokens=history.step * spec.batch.size * spec.model.context,
        refused_connections=refused,
        waiting_s=max(0.0, now - state.task.started) if state.task else 0.0,
        stages=_stages(state),
        peers=_peers(state, now),
    )
    if history.decision is not None:
        status.loss = history.decision.loss
    if history.eval_loss is not None:
        status.eval_loss = history.eval_loss
    if status.tokens_per_s:
        left = (spec.steps - history.step) * spec.batch.size * spec.model.context
        status.eta_s = left / status.tokens_per_s
    return status


def from_journal(run_dir: Path) -> pb.RunStatus:
    """What the journal knows, where no coordinator runs. Raises UserError where it cannot be believed."""
    history, last = believe(run_dir, identity_of(run_dir))
    spec = load_spec(run_dir / "run.yaml")
    status = describe(State(spec, (0, ""), history), last, last, 0)
    if not history.over:
        status.phase, status.waiting_for = "not running", "its coordinator to be started again"
    del status.stages[:]  # nobody holds them now
    return status


def phase_of(state: State) -> str:
    if state.history.ended:
        return "done"
    if not state.placed:
        return "waiting" if state.history.step else "gathering"
    if state.task is not None and state.task.kind in ("place", "link"):
        return "placing"
    return "paused" if state.history.paused and state.task is None else "running"


def tokens_per_s(state: State) -> float:
    """Over the last decisions; a step that was redone counts again."""
    if len(state.decided_at) < 2:
        return 0.0
    first, last = state.decided_at[0], state.decided_at[-1]
    tokens = (len(state.decided_at) - 1) * state.spec.batch.size * state.spec.model.context
    return tokens / (last - first) if last > first else 0.0


def _stages(state: State) -> list[pb.StageStatus]:
    history, tokens = state.history, state.spec.batch.size * state.spec.model.context
    ends = list(itertools.accumulate(history.layers))
    rows = []
    for i, holder in enumerate(history.holders):
        peer, used = state.peers.get(holder), dict(state.usage[i].usage) if i in state.usage else {}
        whole = sum(used.get(k, 0.0) for k in ("compute_s", "wait_s", "wire_s")) or 1.0
        forward, backward = used.get("forward_bytes", 0) / tokens, used.get("backward_bytes", 0) / tokens
        legs = (forward > 0) + (backward > 0)
        rows.append(
            pb.StageStatus(
                stage=i,
                first_layer=ends[i] - history.layers[i],
                end_layer=ends[i],
                holders=[pb.Holder(peer=holder, name=peer.name if peer else "gone")],
                state=_doing(state, i),
                compute_share=used.get("compute_s", 0.0) / whole,
                wait_share=used.get("wait_s", 0.0) / whole,
                wire_share=used.get("wire_s", 0.0) / whole,
                forward_bytes_per_token=forward,
                backward_bytes_per_token=backward,
                ratio_bf16=legs * 2 * state.spec.model.width / (forward + backward) if legs else 0.0,
                most_in_flight=int(used.get("most_in_flight", 0)),
                peak_memory=int(used.get("peak_memory", 0)),
            )
        )
    return rows


def _doing(state: State, stage: int) -> str:
    if state.history.holders[stage] not in state.peers:
        return "gone"
    if state.task is None or stage in state.heard:
        return "waiting"
    words = {"place": "building", "link": "linking", "step": "training", "sync": "checking", "evaluation": "evaluating"}
    return words.get(state.task.kind, "finishing")


def _peers(state: State, now: float) -> list[pb.PeerStatus]:
    def doing(peer: str) -> str:
        stage = state.stage_of(peer) if state.placed else None
        if stage is None:
            return "spare"
        return f"leaving stage {stage}" if peer in state.leaving else f"holds stage {stage}"

    return [
        pb.PeerStatus(
            peer=p.id,
            name=p.name,
            state=doing(p.id),
            device=p.device,
            memory=p.memory,
            flops=p.flops,
            address=p.address,
            reachable=bool(p.host),
            joined_s=now - p.since,
        )
        for p in state.peers.values()
    ]


class Totals:
    """Sums over the step rows since this process began, for the run's summary."""

    def __init__(self) -> None:
        self.steps = 0
        self.most_in_flight: list[int] = []
        self.peak_memory: list[int] = []
        self.cpu_s: list[float] = []

    def add(self, row: Mapping[str, Any]) -> None:
        stages: Sequence[Mapping[str, float]] = row["stages"]
        if self.steps == 0:
            self.most_in_flight = [0] * len(stages)
        self.steps += 1
        held = zip(self.most_in_flight, stages, strict=True)
        self.most_in_flight = [max(before, int(s["most_in_flight"])) for before, s in held]
        self.peak_memory = [int(s["peak_memory"]) for s in stages]
        self.cpu_s = [s["cpu_s"] for s in stages]


def bytes_summary(history: History, spec: RunSpec) -> dict[str, Any]:
    """Bytes a token over a boundary, each way, against a dense pipeline's. Headers count, evaluations do not, and of
    steps that were redone the last time counts."""
    crossings = history.step * spec.batch.size * spec.model.context * (len(history.layers) - 1)
    forward, backward = (b / crossings if crossings else 0.0 for b in (history.forward_bytes, history.backward_bytes))
    dense = 2.0 * spec.model.width
    ratio = 2 * dense / (forward + backward) if crossings else None
    return {
        "bytes_per_token": {"forward": forward, "backward": backward},
        "dense_bytes_per_token_bf16": dense,
        "ratio_bf16": ratio,
        "ratio_fp32": None if ratio is None else 2 * ratio,
        "bytes_sent": history.forward_bytes + history.backward_bytes,
        "dense_bytes_bf16": int(2 * dense * crossings),
    }
