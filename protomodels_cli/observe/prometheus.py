"""A run's status as Prometheus reads it. One family for each fact, named in base units; labels are few and bounded:
stages, legs, phases. The dashboard in configs/ is held against these names by a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protomodels_cli.wire.pb import pmtrain_pb2 as pb

GAUGES = {
    "step": "The last step that was decided.",
    "steps": "Steps of the whole run.",
    "loss": "Loss of the last step.",
    "eval_loss": "Held-out loss, when it was last measured.",
    "tokens_per_s": "Tokens trained on a second, over the last steps.",
    "eta_s": "Time to the last step at this speed.",
    "waiting_s": "How long the task under way has taken.",
    "snapshot_step": "Step of the newest complete snapshot.",
    "generation": "Generation: each set of holders, linked to each other, is one.",
    "crash_redo_s": "Time to redo what a crash now would lose.",
    "crash_restore_s": "Time to fetch a lost stage's part and build the stage.",
    "uptime_s": "Time since the coordinator started.",
}
COUNTERS = {
    "tokens": "Tokens trained on; a step that was redone counts once.",
    "steps_redone": "Steps that a rollback made void.",
    "rollbacks": "Rollbacks to a snapshot.",
    "refused_connections": "Connections that the coordinator's port refused.",
}
SHARES = ("compute", "wait", "wire")


def name_of(field: str) -> str:
    """tokens_per_s → pmtrain_tokens_per_second, eta_s → pmtrain_eta_seconds."""
    if field.endswith("_per_s"):
        return f"pmtrain_{field.removesuffix('_s')}_second"
    return f"pmtrain_{field.removesuffix('_s')}_seconds" if field.endswith("_s") else f"pmtrain_{field}"


class OfStatus(Collector):
    def __init__(self, status: Callable[[], pb.RunStatus], viewers: int):
        self._status, self._viewers = status, viewers

    def collect(self) -> Iterator[Metric]:
        s = self._status()
        for field, text in GAUGES.items():
            if not s.DESCRIPTOR.fields_by_name[field].has_presence or s.HasField(field):
                yield GaugeMetricFamily(name_of(field), text, value=getattr(s, field))
        for field, text in COUNTERS.items():
            yield CounterMetricFamily(name_of(field), text, value=getattr(s, field))
        phase = GaugeMetricFamily("pmtrain_phase", "1 for what the run as a whole is doing.", labels=["phase"])
        for name, number in pb.RunStatus.Phase.items():
            if number:
                phase.add_metric([name.lower()], float(s.phase == number))
        yield phase
        peers = GaugeMetricFamily("pmtrain_peers", "Peers that are connected.", labels=["state"])
        for name, number in pb.PeerStatus.State.items():
            if number:
                peers.add_metric([name.lower()], sum(p.state == number for p in s.peers))
        yield peers
        yield from _of_stages(s)
        yield GaugeMetricFamily("pmtrain_page_viewers", "Browsers that watch the page.", value=self._viewers)


def _of_stages(s: pb.RunStatus) -> Iterator[Metric]:
    def family(name: str, text: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"pmtrain_stage_{name}", text, labels=["stage", *more])

    up = family("up", "1 where a peer holds the stage and is connected.", "holder")
    share = family("time_share", "Share of the last step's time that went into this.", "what")
    sent = family("sent_bytes_per_token", "Bytes sent to the neighbour for each token.", "leg")
    memory = family("peak_memory_bytes", "The most memory that the stage has taken.")
    flying = family("most_in_flight", "Microbatches held at one time, at most.")
    for stage in s.stages:
        label = str(stage.stage)
        holder = stage.holders[0].name if stage.holders else ""
        up.add_metric([label, holder], float(stage.state != pb.StageStatus.LOST))
        for what in SHARES:
            share.add_metric([label, what], getattr(stage, f"{what}_share"))
        sent.add_metric([label, "forward"], stage.forward_bytes_per_token)
        sent.add_metric([label, "backward"], stage.backward_bytes_per_token)
        memory.add_metric([label], stage.peak_memory)
        flying.add_metric([label], stage.most_in_flight)
    yield from (up, share, sent, memory, flying)


def text_of(collector: Any) -> bytes:
    """The page that Prometheus fetches."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return bytes(generate_latest(registry))
