"""A step of the pipeline, played through on paper: who computes when, what waits for which line. Pure.

The same rules as the real thing: `next_work` decides what a stage does next, a peer's two links share its uplink and
its downlink. Simpler than the real thing: a credit comes back by itself as soon as a message is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from protomodels_cli.cost.line import Line
from protomodels_cli.protocol.messages import Leg
from protomodels_cli.protocol.schedule import View, next_work


@dataclass(frozen=True)
class StageCost:
    forward: float  # seconds a microbatch; on the last stage forward and backward are one piece of work
    backward: float
    limit: int = 1  # microbatches in flight


@dataclass(frozen=True)
class Wires:
    forward_bytes: float  # of a microbatch's message, on the line
    backward_bytes: float
    bits_per_second: float = math.inf  # of each peer, each way
    stream_bits_per_second: float = math.inf  # of one connection, each way
    latency: float = 0.0


@dataclass
class Played:
    seconds: float  # until every stage has done all of its microbatches
    busy: list[float]  # seconds of computing, by stage


@dataclass
class _Stage:
    inputs: int = 0  # forward messages here
    gradients: int = 0
    in_flight: int = 0
    on_the_way: int = 0
    job: Literal["forward", "backward"] | None = None
    busy: float = 0.0


def play(stages: Sequence[StageCost], microbatches: int, wires: Wires, cores: float = math.inf) -> Played:
    """`cores`: how many stages can compute at one time at full speed, where they share a machine. All that compute are
    equally fast then, so a clock of work done tells when each of them is ready, whoever joins in or drops out."""
    last = len(stages) - 1
    there = [_Stage() for _ in stages]
    there[0].inputs = microbatches  # token ids come ahead of their turn
    up = [Line(wires.bits_per_second) for _ in stages]
    down = [Line(wires.bits_per_second) for _ in stages]
    streams: dict[tuple[int, int], Line] = {}
    events: list[tuple[float, int, str, int]] = []  # when, order, what, stage
    jobs: list[tuple[float, int]] = []  # what the clock of work says when one is done, stage
    order, now, work, missing = count(), 0.0, 0.0, microbatches * len(stages)

    def at(when: float, what: str, stage: int) -> None:
        heapq.heappush(events, (when, next(order), what, stage))

    def send(leg: Leg, source: int, target: int) -> None:
        size = wires.forward_bytes if leg == "forward" else wires.backward_bytes
        stream = streams.setdefault((source, target), Line(wires.stream_bits_per_second))
        at(max(up[source].leave(now, size), stream.leave(now, size)) + wires.latency, f"reach {leg}", target)

    def choose(i: int) -> None:
        stage, cost = there[i], stages[i]
        if stage.job is not None:
            return
        view = View(stage.gradients > 0, stage.inputs > 0, stage.in_flight, stage.on_the_way, cost.limit)
        stage.job = next_work(view)
        if stage.job is None:
            return
        seconds = cost.backward if stage.job == "backward" else cost.forward
        heapq.heappush(jobs, (work + seconds, i))
        stage.busy += seconds
        if stage.job == "backward":
            stage.gradients -= 1
        else:
            stage.inputs -= 1
            if i > 0:
                at(now + wires.latency, "credit", i - 1)

    def finish(i: int) -> None:
        nonlocal missing
        stage = there[i]
        job, stage.job = stage.job, None
        if job == "forward" and i < last:
            stage.in_flight += 1
            stage.on_the_way += 1
            send("forward", i, i + 1)
        else:
            stage.in_flight -= i < last
            missing -= 1
            if i > 0:
                send("backward", i, i - 1)

    def happen(what: str, i: int) -> None:
        match what:
            case "credit":
                there[i].on_the_way -= 1
            case "reach forward" | "reach backward":
                size = wires.forward_bytes if what == "reach forward" else wires.backward_bytes
                at(down[i].arrive(now, size), what.removeprefix("reach "), i)
            case "forward":
                there[i].inputs += 1
            case "backward":
                there[i].gradients += 1
            case _:
                raise AssertionError(what)

    news = set(range(len(stages)))  # stages that may have something to do
    while missing:
        for i in sorted(news):
            choose(i)
        news.clear()
        speed = min(1.0, cores / len(jobs)) if jobs else 1.0
        soonest = now + (jobs[0][0] - work) / speed if jobs else math.inf
        soon = events[0][0] if events else math.inf
        assert min(soonest, soon) < math.inf, "nothing is under way"
        now, work = (soonest, jobs[0][0]) if soonest <= soon else (soon, work + (soon - now) * speed)
        while jobs and jobs[0][0] <= work + 1e-12:
            _, i = heapq.heappop(jobs)
            finish(i)
            news.add(i)
        while events and events[0][0] <= now + 1e-12:
            _, _, what, i = heapq.heappop(events)
            happen(what, i)
            news.add(i)
    return Played(now, [stage.busy for stage in there])
