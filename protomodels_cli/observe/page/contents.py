"""What the page shows, as JSON that anybody may read: from the status that `pmtrain status` shows, the run's
metrics.jsonl and its events.jsonl. No address and no secret is in it; nothing here decides or changes anything."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protomodels_cli.observe.fields import fields
from protomodels_cli.observe.metrics import strict
from protomodels_cli.observe.page.curves import Curves
from protomodels_cli.observe.page.veil import Veil
from protomodels_cli.observe.tail import Tail, as_row
from protomodels_cli.wire.path import is_relayed
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

EVENTS = 120  # the last ones
SPARES = 40  # that are named; the others are counted
THINNED = 8 << 20  # bytes of metrics.jsonl above which not every step is read when the page is first opened
NAMES, GONE = 20, 8  # of those that did the most, and of those that went last
COUNTS = (
    "step",
    "steps",
    "generation",
    "tokens",
    "tokens_total",
    "lineage",
    "snapshot_step",
    "steps_redone",
    "rollbacks",
)
TIMES = ("tokens_per_s", "eta_s", "uptime_s", "waiting_s", "crash_redo_s", "crash_restore_s")
AS_THEY_ARE = (*COUNTS, *TIMES, "basis_version", "loss", "eval_loss", "name", "phase", "no_spare")


@dataclass(frozen=True)
class Beside:
    """What the coordinator knows and a status does not say."""

    kept: Sequence[tuple[int, int]] = ()  # complete snapshots: step, and parts
    pending: Sequence[tuple[int, int, int]] = ()  # begun ones: step, parts that are here, parts
    round_trips: Mapping[str, float] = field(default_factory=dict)  # peer → seconds to the coordinator and back
    run: str = ""  # which one it is: another coordinator may come to the same address
    now: float = 0.0  # seconds since 1970
    ended: str = ""  # "done" or "stopped": the coordinator's process ends now, as it should


@dataclass(frozen=True)
class Sources:
    status: Callable[[], pb.RunStatus]
    beside: Callable[[], Beside]
    metrics: Path
    events: Path
    grave: frozenset[str] = frozenset()  # kinds of events that are problems
    sample: Callable[[], Mapping[str, Any] | None] = lambda: None  # of text, where the owner wants one


def state(status: pb.RunStatus, beside: Beside, veil: Veil) -> dict[str, Any]:
    """The run now. Pure."""
    s = fields(status)
    peers = {p["peer"]: p for p in s["peers"]}
    found = {name: _number(s[name]) for name in AS_THEY_ARE if name in s}
    found["says"] = veil(s["reason"] or s["waiting_for"])
    found["says_why"] = s["reason_kind"] or s["waiting_kind"]
    found["trouble"] = veil(s["trouble"])
    found["checkpoint"] = Path(s["checkpoint"]).name
    found["run"], found["ended"] = beside.run, beside.ended
    found["stages"] = [_stage(stage, peers, beside, veil) for stage in s["stages"]]
    found["links"] = [
        _link(a, b, s["tokens_per_s"] if s["phase"] == "running" else 0.0, peers)
        for a, b in zip(s["stages"], s["stages"][1:], strict=False)
    ]
    holders = {holder["peer"] for stage in s["stages"] for holder in stage["holders"]}
    spares = [
        p for p in s["peers"] if p["peer"] not in holders and p["state"] != "resting"
    ]  # one that waits for another holder is none
    found["spares"] = [_peer(p, beside, veil) for p in spares[:SPARES]]
    found["more_spares"] = max(0, len(spares) - SPARES)
    found["peers"] = len(peers)
    found["kept"], found["pending"] = beside.kept, beside.pending
    found["running_s"] = max(0.0, beside.now - s["started"]) if s["started"] and beside.now else None
    found["gone"] = [
        {"name": veil(g["name"] or g["peer"]), "how": g["how"], "gone_s": g["gone_s"]} for g in s["gone"][:GONE]
    ]
    found["work"] = [{**c, "name": veil(c["name"])} for c in s["contributions"][:NAMES]]
    found["more_work"] = max(0, len(s["contributions"]) - NAMES)
    return found


def _number(value: Any) -> Any:
    """JSON of protobuf has large integers as text."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _peer(peer: Mapping[str, Any], beside: Beside, veil: Veil) -> dict[str, Any]:
    """Without its address."""
    return {
        "peer": peer["peer"],
        "name": veil(peer["name"]),
        "device": veil(peer["device"]),
        "memory": _number(peer["memory"]),
        "flops": peer["flops"],
        "state": peer["state"],
        "reachable": peer["reachable"],
        "round_trip_s": beside.round_trips.get(peer["peer"]),
    }


def _stage(stage: Mapping[str, Any], peers: Mapping[str, Any], beside: Beside, veil: Veil) -> dict[str, Any]:
    def holder(held_by: Mapping[str, Any]) -> dict[str, Any]:
        peer, presence = held_by["peer"], held_by["presence"]
        if peer in peers:
            return {**_peer(peers[peer], beside, veil), "presence": presence}
        return {"peer": peer, "name": veil(held_by["name"]), "state": "lost", "presence": presence}

    names = ("compute_share", "wait_share", "wire_share", "state", "process_memory", "celsius", "watts")
    sizes = ("stage", "first_layer", "end_layer", "most_in_flight", "peak_memory", "forecast_memory")
    return {
        "holders": [holder(h) for h in stage["holders"]],
        **{n: stage[n] for n in names},
        **{n: int(stage[n]) for n in sizes},
    }


def _link(a: Mapping[str, Any], b: Mapping[str, Any], tokens_per_s: float, peers: Mapping[str, Any]) -> dict[str, Any]:
    """Between two neighbouring stages."""
    ends = [h["peer"] for stage in (a, b) for h in stage["holders"][:1]]
    linked = all(end in peers for end in ends)
    return {
        "up": linked and all(stage["state"] not in ("lost", "building", "linking") for stage in (a, b)),
        "path": a["path"].partition(" ")[0],  # without a relay's address
        "relayed": linked and is_relayed(a["path"]),
        "why": a["path_why"],
        "round_trip_s": a["round_trip_s"] or None,
        "forward_per_token": a["forward_bytes_per_token"],
        "backward_per_token": b["backward_bytes_per_token"],
        "forward_per_s": a["forward_bytes_per_token"] * tokens_per_s,
        "backward_per_s": b["backward_bytes_per_token"] * tokens_per_s,
    }


@dataclass(frozen=True)
class Fresh:
    """Rows that have come since."""

    metrics: Sequence[dict[str, Any]]
    events: Sequence[dict[str, Any]]


class Contents:
    """`catch_up` takes in what the files have by now; `whole` and `news` are for who comes, and for who is here."""

    def __init__(self, sources: Sources, veil: Veil):
        self._sources, self._veil = sources, veil
        self._metrics, self._events = Tail(sources.metrics), Tail(sources.events)
        self._one_reader, self._read_by_now = threading.Lock(), deque[Fresh]()
        self._curves = Curves()
        self._told: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._new: list[dict[str, Any]] = []
        self._count = 0

    async def catch_up(self) -> None:
        """Threads read the files. A reading that is not waited for is taken in the next time."""
        await asyncio.to_thread(self._read)
        while self._read_by_now:
            self._take(self._read_by_now.popleft())

    def _read(self) -> None:
        with self._one_reader:
            every, count, rows = 1 + max(0, self._metrics.waiting) // THINNED, 0, []
            for line in self._metrics.lines():
                if line.startswith(b'{"event":"step"'):
                    count += 1
                    if count % every:
                        continue
                elif not line.startswith(b'{"event":"eval"'):
                    continue
                if (row := as_row(line)) is not None:
                    rows.append(row)
            self._read_by_now.append(Fresh(rows, list(self._events.rows())))

    def _take(self, fresh: Fresh) -> None:
        for row in fresh.metrics:
            self._curves.take(row)
        for row in fresh.events:
            self._count += 1  # by which a viewer knows what it has: an event may be in `whole` and in the next news
            text = self._veil(str(row.get("text", "")))
            kind = row.get("kind")
            grave = kind in self._sources.grave
            event = {"n": self._count, "at": row.get("at"), "kind": kind, "text": text, "grave": grave}
            self._told.append(event)
            self._new.append(event)
        del self._new[:-EVENTS]

    def state(self) -> dict[str, Any]:
        found = state(self._sources.status(), self._sources.beside(), self._veil)
        sample = self._sources.sample()
        return found if sample is None else {**found, "sample": {**sample, "why": self._veil(sample["why"])}}

    def news(self, now: Mapping[str, Any]) -> bytes:
        """Since the last time."""
        told, self._new = self._new, []
        return as_json({"state": now, "curves": self._curves.news(), "events": told})

    def whole(self, now: Mapping[str, Any]) -> bytes:
        told = list(self._told)
        return as_json({"state": now, "curves": self._curves.whole(), "events": told, "whole": True})


def as_json(value: Any) -> bytes:
    return json.dumps(strict(value), separators=(",", ":"), ensure_ascii=False).encode()
