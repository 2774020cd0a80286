"""What a peer has done, as figures for Prometheus (`pmtrain join --metrics HOST:PORT`). They hold no address and no
secret, and nothing is asked of the session for them: it puts them down as it goes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protomodels_cli.observe.page.address import cannot_listen, parse_place
from protomodels_cli.protocol.throughput import seconds_left, tokens_per_s, with_step
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker.notices import StepDecided

if TYPE_CHECKING:
    from prometheus_client.core import Metric

WHAT = ("compute", "wait", "wire")
LEGS = ("forward", "backward")


@dataclass(eq=False)
class Figures:
    stage: int | None = None  # None: a spare, or not assigned yet
    step: int = 0  # the last one decided, as far as this peer has heard
    loss: float | None = None
    tasks: int = 0  # steps, evaluations and the like that it has finished
    memory: int = 0  # bytes, at most
    warmth: tuple[float, float] | None = None  # degrees Celsius and watts of its first card
    seconds: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)  # bytes to neighbours, by leg
    steps: int = 0  # decided with this peer's stage in them; one that was redone counts again
    _began: float = 0.0
    _moments: tuple[float, ...] = ()  # when the last steps were decided

    def finished(self, done: pb.Done, stage: int) -> None:
        used = done.usage
        self.stage, self.tasks, self.memory = stage, self.tasks + 1, max(self.memory, used.peak_memory)
        for what in WHAT:
            self.seconds[what] += getattr(used, f"{what}_s")
        for leg in LEGS:
            self.sent[leg] += getattr(used, f"{leg}_bytes")

    def of_card(self) -> dict[str, float]:
        """As a task's usage has it."""
        if (warmth := self.warmth) is None:  # another thread puts it down
            return {}
        celsius, watts = warmth
        return {"celsius": max(0.0, celsius), "watts": max(0.0, watts)}

    def granted(self, now: float) -> None:
        if not self._moments:
            self._began = now

    def decided(self, decision: pb.Decision, now: float) -> None:
        self.step, self.loss, self.steps = decision.step, decision.loss, self.steps + 1
        self._moments = with_step(self._moments, self._began or now, now)

    def at_rest(self) -> None:
        """The run waits or is paused: how long says nothing about steps."""
        self._moments = ()

    def as_notice(self, decision: pb.Decision, steps: int, tokens: int) -> StepDecided:
        """`tokens`: of a step."""
        speed = tokens_per_s(self._moments, tokens)
        left = seconds_left(steps - decision.step, tokens, speed)
        sent = sum(self.sent.values())
        return StepDecided(decision.step, steps, decision.loss, decision.apply, speed, left, self.steps, sent)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        held = -1 if self.stage is None else self.stage
        yield GaugeMetricFamily("pmtrain_peer_stage", "The stage that this peer holds; -1: none.", value=held)
        yield GaugeMetricFamily("pmtrain_peer_step", "The last step that was decided.", value=self.step)
        if self.loss is not None:
            yield GaugeMetricFamily("pmtrain_peer_loss", "Loss of that step.", value=self.loss)
        text = "The most memory that the stage has taken."
        yield GaugeMetricFamily("pmtrain_peer_peak_memory_bytes", text, value=self.memory)
        if self.warmth is not None:
            degrees, watts = self.warmth
            yield GaugeMetricFamily(
                "pmtrain_peer_card_celsius", "Temperature of this peer's first card.", value=degrees
            )
            yield GaugeMetricFamily("pmtrain_peer_card_watts", "Power that this peer's first card draws.", value=watts)
        yield CounterMetricFamily("pmtrain_peer_tasks", "Tasks finished: steps, evaluations, syncs.", value=self.tasks)
        spent = CounterMetricFamily("pmtrain_peer_seconds", "Where the time of tasks went.", labels=["what"])
        for what in WHAT:
            spent.add_metric([what], self.seconds[what])
        sent = CounterMetricFamily("pmtrain_peer_sent_bytes", "Bytes of frames sent to neighbours.", labels=["leg"])
        for leg in LEGS:
            sent.add_metric([leg], self.sent[leg])
        yield from (spent, sent)


@contextlib.contextmanager
def shown_at(place: str | None, figures: Figures) -> Iterator[None]:
    """Prometheus finds them there (HOST:PORT), from a thread of its own."""
    if place is None:
        yield
        return
    from prometheus_client import CollectorRegistry, start_http_server

    host, port = parse_place(place, "--metrics")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(figures)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as e:
        raise cannot_listen(host, port, e, "--metrics") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
