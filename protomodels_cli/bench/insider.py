"""What somebody with a token can do to a run from within: attacks by name, each against a run of real processes.

A coordinator, honest peers and spares, each with a token of its own; an attacker with the run's, that comes back as
another peer each time that it is sent away (insider_peer.py); and from time to time an honest holder that leaves, since
only then a stage changes hands. The first run has no attacker: the longest pause of its honest replacements is what the
others are held against.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from protomodels_cli.bench.abuse import join_once
from protomodels_cli.bench.attack import READY
from protomodels_cli.bench.insider_peer import AUDITS, NAME, Order
from protomodels_cli.bench.loopback import small
from protomodels_cli.bench.phases import Row, wait_for_steps
from protomodels_cli.coordinator.run_dir import owner_secret
from protomodels_cli.errors import UserError
from protomodels_cli.files import hash_file
from protomodels_cli.launch.local import LocalRun, local_coordinator, peers_of, start
from protomodels_cli.quantities import duration
from protomodels_cli.spec.link import parse_link
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.client import operator
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

PAUSE_BOUND = 30.0  # seconds beyond the longest pause of an honest replacement
JOIN_BOUND = 30.0  # seconds until an honest newcomer is in, from the attacker's address
SLOWED_BOUND = 0.10  # a share: the median step while edges are sent, against the quiet before and after
REFERENCE = "leaves"  # no attack
# Events that name every peer, or nobody as the one at fault.
OF_ANYBODY = {"peer_joined", "peer_lost", "peer_left", "peer_returned", "stages_assigned", "stages_linked"}
BEGINS_SECONDS = 60.0  # in which an attacker that has a stage, or needs none, does something
SEATED_SECONDS = 120.0  # in which an attacker that computes must have got a stage
SAVED_SECONDS = 180.0  # in which a snapshot must be complete when an attack is over
INTERVAL = 10  # steps between two snapshots
TOKEN_USES, TOKEN_SECONDS = 1000, 7 * 86_400.0
STEP_SECONDS = 330.0  # for another step when an attack is over
LOOK = 0.2


@dataclass(frozen=True)
class Attack:
    seated: bool = False  # the attacker gets a stage before it counts
    named: bool = True  # events must name the attacker: what it does reaches the run
    crowds: bool = False  # honest newcomers are counted
    leaves: bool = False  # without a word: that it was lost is what events have to say


ATTACKS = {
    REFERENCE: Attack(named=False),
    "false-hashes": Attack(seated=True, leaves=True),
    "impossible-times": Attack(seated=True),
    "link-broken": Attack(seated=True),
    "stands-still": Attack(),
    "lies-about-parts": Attack(),
    "no-record": Attack(seated=True),
    "lying-auditor": Attack(),
    "reads-others": Attack(),
    "holds-calls": Attack(crowds=True),
    "edges": Attack(),
}


@dataclass(frozen=True)
class Setting:
    attacks: tuple[str, ...] = tuple(ATTACKS)
    seconds: float = 300.0  # of each
    leaves: float = 60.0  # seconds from one honest departure to the next
    messages: int = 0  # of `edges`: how many, however long that takes; 0: as many as there is time for
    per_second: float = 50.0  # of the same
    link: str = "100mbit,20ms"
    spares: int = 2  # honest ones
    forecast: float | None = None  # seconds that an honest replacement takes; None: a run without an attack shows it
    together: bool = False  # one attack after another in the same run, instead of a run each


def measure(setting: Setting, say: Callable[[str], None]) -> dict[str, Any]:
    attacks = setting.attacks
    if setting.forecast is None:
        attacks = (REFERENCE, *(name for name in attacks if name != REFERENCE))
    runs = [attacks] if setting.together else [(name,) for name in attacks]
    rows: list[Row] = []
    for names in runs:
        rows += _run(setting, names)
        for row in rows[-len(names) :]:
            judge(row, rows[0]["longest_pause_s"] if setting.forecast is None else setting.forecast)
            say(in_words(row))
    return {"setting": asdict(setting), "attacks": rows, "within": all(row["within"] for row in rows)}


def judge(row: Row, forecast: float) -> None:
    """Add whether the run held against this attack, and why not. `forecast`: of an honest replacement, in seconds."""
    attack, slowed = ATTACKS[row["attack"]], row["slowed"]
    row["forecast_s"], row["pause_bound_s"] = forecast, forecast + PAUSE_BOUND
    join, did = row["join_s"], row["attacker"]
    broken = {
        "coordinator_ended": not row["coordinator_up"],
        "honest_dismissed": row["honest_dismissed"],
        "paused": row["longest_pause_s"] > row["pause_bound_s"],
        "weights_differ": row["weights_right"] is False,
        "weights_not_compared": row["weights_right"] is None,
        "tracebacks": row["tracebacks"],
        "nothing_done": row["attack"] != REFERENCE and not any(v for k, v in did.items() if k not in ("failed", "ids")),
        "attacker_failed": did.get("failed"),
        "not_named": attack.named and not row["named_in"],
        "stolen": did.get("stolen bytes"),
        "locked_out": attack.crowds and (join is None or join > JOIN_BOUND),
        "slowed": row["attack"] == "edges" and slowed is not None and slowed > SLOWED_BOUND,
    }
    row["broken"] = [name for name, is_so in broken.items() if is_so]
    row["within"] = not row["broken"]


def _run(setting: Setting, names: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    spec = _spec(setting)
    with tempfile.TemporaryDirectory() as name, local_coordinator(spec, Path(name) / "run") as running:
        scene = _Scene(spec, running, Path(name), setting.spares)
        for attack in names:
            rows.append(scene.attacked(setting, attack))
        right = scene.weights_right() if rows[-1]["coordinator_up"] else None
        for row in rows:
            row["weights_right"] = right
    return rows


def _spec(setting: Setting) -> RunSpec:
    return small(
        name="insider",
        steps=1_000_000,
        stages=2,
        model={"layers": 2, "width": 32, "heads": 2, "kv_heads": 2, "context": 16},
        batch={"size": 4, "microbatches": 2},
        snapshots={"interval": INTERVAL, "keep": 1000},
        wire={"link": parse_link(setting.link).model_dump()},
        audit=0.1,
    )


class _Scene:
    """A run, and what its processes say of it."""

    def __init__(self, spec: RunSpec, running: LocalRun, folder: Path, spares: int):
        self._spec, self._running, self._folder = spec, running, folder
        self._honest = [f"peer-{number}" for number in range(1, peers_of(spec) + spares + 1)]

    # Honest peers

    def _come(self, names: Sequence[str]) -> None:
        running = self._running
        for name in names:
            folder = self._folder / "peers" / name
            arguments = ["join", "--device", "cpu", "--name", name, "--dir", str(folder)]
            link = replace(running.link, token=asyncio.run(_token_for(running, name)))
            running.commands[name] = partial(start, running.folder, name, arguments, link=str(link))
            running.start_again(name)

    def _leave(self, name: str) -> None:
        if self._running.peers[name].poll() is None:
            self._running.peers[name].send_signal(signal.SIGINT)

    def _holders(self) -> list[str]:
        status = asyncio.run(_status(self._running))
        holding = pb.PeerStatus.HOLDING
        return [peer.name for peer in status.peers if peer.state == holding] if status is not None else []

    # An attack

    def attacked(self, setting: Setting, name: str) -> Row:
        if not (self._running.peers or ATTACKS[name].seated):
            self._come(self._honest)
            wait_for_steps(self._running)
        quiet = min(30.0, setting.seconds / 3) if name == "edges" else 0.0
        phases = [self._phase(quiet)]
        messages = setting.messages if name == "edges" else 0
        since = time.time()
        with self._attacker(replace(self._order(name), messages=messages, per_second=setting.per_second)) as attacker:
            if ATTACKS[name].seated:
                self._seat()
            attacker.begins()
            began = time.time()
            joins = self._leaves_go_on(setting, attacker if messages else None, name)
            before = len(self._steps())
            self._wait(lambda: len(self._steps()) > before, STEP_SECONDS)  # or the last pause would be cut short
            ended = time.time()
            did = attacker.ended()
        phases.append(self._phase(quiet))
        rows = self._steps()
        steps = [row["at"] for row in rows if began <= row["at"] <= ended]
        still = [row["seconds"] for row in rows if any(a <= row["at"] <= b for a, b in phases)]
        while_attacked = [row["seconds"] for row in rows if began <= row["at"] <= ended]
        return {
            "attack": name,
            "seconds": ended - began,
            "steps": len(steps),
            "longest_pause_s": max(b - a for a, b in zip([began, *steps], [*steps, ended], strict=True)),
            "honest_dismissed": len(self._events(began, "peer_dismissed", "peer-")),
            "named_in": sorted(self._named_in(since) - _of_anybody(name)),
            "attacker": did,
            "join_s": None if None in joins or not joins else max(joined for joined in joins if joined is not None),
            "slowed": statistics.median(while_attacked) / statistics.median(still) - 1
            if still and while_attacked
            else None,
            "coordinator_up": self._running.coordinator.poll() is None,
            "tracebacks": self._tracebacks(),
        }

    def _order(self, name: str) -> Order:
        link = self._running.link
        if name in AUDITS:  # nobody asks a peer without a token of its own for an audit at the holder's address
            link = replace(link, token=asyncio.run(_token_for(self._running, NAME)))
        return Order(str(link), name, str(self._folder / f"attacker-{name}"))

    @contextlib.contextmanager
    def _attacker(self, order: Order) -> Iterator[_Attacker]:
        if order.attack == REFERENCE:
            yield _Attacker(None)
            return
        command = [sys.executable, "-m", "protomodels_cli.bench.insider_peer", json.dumps(asdict(order))]
        pipe = subprocess.PIPE
        with (self._running.folder / "logs" / f"attacker-{order.attack}.log").open("w") as log:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True)
        try:
            yield _Attacker(process)
        finally:
            process.kill()
            process.wait()

    def _seat(self) -> None:
        """The attacker gets a stage: it is there before all but one of the honest peers. In a run that is under way,
        the others go until it has one."""
        since = time.time()
        self._wait(lambda: self._events(since, "peer_joined", NAME), SEATED_SECONDS)
        if not self._running.peers:
            self._come(self._honest[: peers_of(self._spec) - 1])
        holders = [name for name in self._holders() if name in self._honest]
        gone = [name for name in self._running.peers if holders and name not in holders[1:]]
        for name in gone:
            self._leave(name)
        self._wait(lambda: any(name.startswith(NAME) for name in self._holders()), SEATED_SECONDS)
        self._come([name for name in self._honest if name not in self._running.peers])
        for name in gone:
            self._running.peers[name].wait()
            self._running.start_again(name)
        wait_for_steps(self._running)

    def _leaves_go_on(self, setting: Setting, attacker: _Attacker | None, name: str) -> list[float | None]:
        """Until the attack has lasted so long, or its messages are sent. Returns how long newcomers took to get in."""
        began, next_leave = time.monotonic(), setting.leaves / 2
        joins: list[float | None] = []
        while self._running.coordinator.poll() is None:
            passed = time.monotonic() - began
            if attacker.is_over if attacker is not None else passed >= setting.seconds:
                break
            if ATTACKS[name].crowds:
                joins.append(asyncio.run(join_once(self._running.link)))
            if setting.spares and passed >= next_leave:
                next_leave += setting.leaves
                honest = [holder for holder in self._holders() if holder.startswith("peer-")]
                for holder in honest[:1]:
                    self._leave(holder)
            for peer, process in self._running.peers.items():
                if process.poll() is not None:
                    self._running.start_again(peer)
            time.sleep(LOOK)
        return joins

    def _phase(self, seconds: float) -> tuple[float, float]:
        began = time.time()
        time.sleep(seconds)
        return began, time.time()

    def _wait(self, until: Callable[[], Any], seconds: float) -> bool:
        began = time.monotonic()
        while not (found := until()) and time.monotonic() - began < seconds:
            if self._running.coordinator.poll() is not None:
                return False
            time.sleep(LOOK)
        return bool(found)

    # What came of it

    def weights_right(self) -> bool | None:
        """Whether a snapshot from after the attack has the bytes that one process computes; None: there was none in
        time, or it is not to be found."""
        before = len(self._events(0.0, "snapshot_complete", ""))
        if not self._wait(lambda: len(self._events(0.0, "snapshot_complete", "")) > before + 1, SAVED_SECONDS):
            return None
        step = self._events(0.0, "snapshot_complete", "")[-2]["step"]  # the newest may still be put in its place
        here = _parts_at(self._running.folder / "snapshots", step)
        if len(here) != peers_of(self._spec):
            return None
        folder = self._folder / "reference"
        arguments = [
            str(self._running.folder / f"{self._spec.name}.yaml"),
            "--run-dir",
            str(folder),
            "--steps",
            str(step),
        ]
        process = start(self._running.folder, "reference", ["reference", *arguments])
        if process.wait():
            log = self._running.folder / "logs" / "reference.log"
            raise UserError("the reference did not end", log.read_text()[-500:], "process_failed")
        return here == _parts_at(folder / "snapshots", step)

    def _steps(self) -> list[Row]:
        rows = (json.loads(line) for line in (self._running.folder / "metrics.jsonl").read_text().splitlines())
        return [row for row in rows if row["event"] == "step"]

    def _named_in(self, since: float) -> set[str]:
        """Kinds of events that name the attacker, or the network of callers that have no name."""
        return {e["kind"] for e in [*self._events(since, "", NAME), *self._events(since, "turned_away", "")]}

    def _events(self, since: float, kind: str, name: str) -> list[Row]:
        """Of this kind, if it is given, of peers whose names begin so."""
        path = self._running.folder / "events.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        rows = [row for row in rows if row["at"] >= since and kind in ("", row["kind"])]
        return [row for row in rows if any(str(one).startswith(name) for one in _names_in(row))] if name else rows

    def _tracebacks(self) -> int:
        logs = [self._running.folder / "coordinator.log", self._running.folder / "logs" / "coordinator.log"]
        return sum(path.read_text(errors="replace").count("Traceback") for path in logs if path.exists())


class _Attacker:
    def __init__(self, process: subprocess.Popen[str] | None):
        self._process = process

    def begins(self) -> None:
        """Wait until it has done something, but not for long: where it cannot, the report says so."""
        if self._process is not None and self._process.stdout is not None:
            ready, _, _ = select.select([self._process.stdout], [], [], BEGINS_SECONDS)
            if ready:
                self._process.stdout.readline()

    @property
    def is_over(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def ended(self) -> Row:
        """What it did."""
        if self._process is None:
            return {}
        said, _ = self._process.communicate("\n", timeout=60)
        said = said.removeprefix(f"{READY}\n")
        return dict(json.loads(said)) if said else {"failed": f"exit code {self._process.returncode}"}


def _of_anybody(attack: str) -> set[str]:
    return OF_ANYBODY - {"peer_lost"} if ATTACKS[attack].leaves else OF_ANYBODY


def _names_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _names_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from _names_in(one)
    elif isinstance(value, str):
        yield value


def _parts_at(snapshots: Path, step: int) -> dict[str, str]:
    """The hashes of a snapshot's parts, by file; empty: it is not there."""
    complete = [folder for folder in snapshots.iterdir() if not folder.name.startswith(".")]  # others come and go
    of_step = [folder for folder in complete if int(folder.name.split("-")[-1]) == step]
    return {path.name: hash_file(path) for folder in sorted(of_step) for path in folder.glob("stage-*.safetensors")}


async def _token_for(running: LocalRun, person: str) -> str:
    """Each honest peer has one of its own, as owners give them out: the coordinator tells people apart by them."""
    async with operator(running.link, owner_secret(running.folder)) as owner:
        return (await owner.create_token(TOKEN_USES, TOKEN_SECONDS, person)).token


async def _status(running: LocalRun) -> pb.RunStatus | None:
    """None: the coordinator does not answer."""
    with contextlib.suppress(UserError):
        async with operator(running.link) as coordinator:
            return await coordinator.status()
    return None


def in_words(row: Row) -> str:
    join = "" if row["join_s"] is None else f", newcomers in within {duration(row['join_s'])}"
    slowed = "" if row["attack"] != "edges" or row["slowed"] is None else f", steps {row['slowed']:+.1%}"
    did = ", ".join(f"{number:,} {what}" for what, number in sorted(row["attacker"].items()) if what != "failed")
    return (
        f"{row['attack']}: {'held' if row['within'] else 'BROKEN: ' + ', '.join(row['broken'])}\n"
        f"  {row['steps']} steps in {duration(row['seconds'])}, longest pause {duration(row['longest_pause_s'])} "
        f"(bound {duration(row['pause_bound_s'])}), {row['honest_dismissed']} honest peers dismissed, "
        f"events about the attacker: {', '.join(row['named_in']) or 'none'}{join}{slowed}\n"
        f"  the attacker: {did or 'none'}"
    )
