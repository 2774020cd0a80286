"""`scripts/wanlab nat`: a real run across homes behind routers (`launch/nat.py`), as JSON: which path each boundary
takes, and how long it took to find it.

scripts/wanlab nat                              two homes, two peers in one LAN, one by the coordinator, one public
scripts/wanlab nat --idle 5 --pause 60          routers that forget a connection after 5 s, and a pause of a minute
scripts/wanlab nat --relays 2 --kill-relay      two relays, one of which is killed in mid-run
scripts/wanlab nat --move lan_2:router_b        a machine is carried to another home in mid-run
scripts/wanlab nat --let-in home_a --steps 600  a router lets its machine's port in, in mid-run
scripts/wanlab nat --peers home_a,home_b --steps 400      both routers keep ports: relayed, then punched
scripts/wanlab nat --peers home_a,home_b --symmetric      they do not: relayed, with why
scripts/wanlab nat --peers home_a,home_b --ipv6 --steps 400
scripts/wanlab nat --throughput --mbit 80       bits a second of one connection: direct, punched, through a relay
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protomodels_cli.bench.loopback import small
from protomodels_cli.errors import EXIT_OUTSIDE, OptionError, UserError
from protomodels_cli.launch.local import LocalRun, local_run, start
from protomodels_cli.launch.nat import HOMES, SERVERS, Nat, require
from protomodels_cli.observe.tail import Tail
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.wire.path import PUNCHED, is_relayed
from protomodels_cli.wire.tickets import RelayLink, Ticket

PEERS = ("home_a", "home_b", "lan_1", "lan_2", "coordinator", "public")
RELAYS = ("relay", "relay_2")
PORT, RELAY_PORT = 7421, 7430
MOST_SECONDS = 600.0  # for a run
HAPPENS_AT = 10  # step
THROUGHPUT_BYTES, SKIPPED_BYTES = 24 << 20, 4 << 20  # the first fill buffers
TURNS = 3
TALK = """
import asyncio, sys, time
from protomodels_cli.wire.punch import open_together
from protomodels_cli.wire.relay import dial_relay
way, host, port, ticket, role, size, skip = sys.argv[1:]
async def connect():
    if way == "relay":
        return await dial_relay(host, int(port), ticket, role)
    if way == "punched":  # its router keeps the port; the ticket is the other end's address
        return await open_together(int(port), (ticket, int(port)), 30)
    if role == "dial":
        return await asyncio.open_connection(host, int(port))
    came = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: came.put_nowait(ends), "0.0.0.0", int(port))
    return await came.get()
async def main():
    reader, writer = await connect()
    if role == "dial":
        for _ in range(int(size) >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
        await reader.read()
        return
    total = 0
    while total < int(size):
        total += len(await reader.read(1 << 18))
        if total >= int(skip) and "began" not in globals():
            global began, first
            began, first = time.monotonic(), total
    print(8 * (total - first) / (time.monotonic() - began))
    writer.close()
asyncio.run(main())
"""


class _Places:
    """The hosts of a run by number: the coordinator's, then each peer's."""

    def __init__(self, net: Nat, peers: Sequence[str]):
        self._net, self._places = net, ["coordinator", *peers]

    def address(self, host: int, /) -> str:
        return self._net.address(self._places[host])

    def command(self, host: int, argv: Sequence[str], /) -> list[str]:
        return self._net.command(self._places[host], argv)


def main(words: Sequence[str]) -> int:
    options = _options(words)
    peers = options.peers.split(",")
    if len(peers) < 2 or not set(peers) <= set(PEERS) or len(set(peers)) < len(peers):
        raise OptionError(f"--peers {options.peers}: must be two or more of {', '.join(PEERS)}", "leave it out", "nat")
    require()
    if options.throughput:
        print(json.dumps(throughput(options.mbit), indent=2))
        return 0
    spec = spec_of(len(peers), options.steps)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(spec, options.run_dir or Path(folder) / "run", peers, options)
    print(json.dumps(found, indent=2))
    return int(found["exit_code"])


def throughput(mbit: float) -> dict[str, float]:
    """Bits a second from one home: to a public host, and to another home, punched and through a relay. The best of
    several turns: whatever else the machine does makes a turn slower."""
    with Nat(mbit) as net, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run" / "logs").mkdir(parents=True)
        straight = "direct", net.address("public"), "5000"
        direct = max(_talk(net, "public", straight, ("", "")) for _ in range(TURNS))
        homes = net.address("home_b"), net.address("home_a")
        ports = iter(range(5001, 5001 + TURNS))
        punched = max(_talk(net, "home_b", ("punched", "", str(next(ports))), homes) for _ in range(TURNS))
        with _relays(net, folder / "run", 1) as (_, [link]):
            relay = RelayLink.parse(link)
            ends = Ticket("run", "m", "a", int(time.time()) + 600), Ticket("run", "m", "b", int(time.time()) + 600)
            tickets = ends[0].signed(relay.secret, "dial"), ends[1].signed(relay.secret, "accept")
            where = "relay", relay.host, str(relay.port)
            relayed = max(_talk(net, "home_b", where, tickets) for _ in range(TURNS))
    found = {"direct": direct, "punched": punched, "relayed": relayed}
    ratios = {f"{name}_of_direct": found[name] / direct for name in ("punched", "relayed")}
    return {"mbit": mbit, **{f"{name}_bits_s": bits for name, bits in found.items()}, **ratios}


def _talk(net: Nat, to: str, where: Sequence[str], tickets: tuple[str, str]) -> float:
    sizes = str(THROUGHPUT_BYTES), str(SKIPPED_BYTES)

    def talk(host: str, ticket: str, role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TALK, *where, ticket, role, *sizes]
        return subprocess.Popen(net.command(host, command), stdout=subprocess.PIPE, text=True)

    receiver = talk(to, tickets[1], "accept")
    time.sleep(3)  # until it listens
    sender = talk("home_a", tickets[0], "dial")
    said, _ = receiver.communicate(timeout=120)
    sender.wait(30)
    return float(said)


def spec_of(stages: int, steps: int) -> RunSpec:
    sizes: dict[str, Any] = {
        "name": "nat",
        "steps": steps,
        "stages": stages,
        "model": {"layers": stages, "width": 32, "heads": 4, "kv_heads": 2, "context": 16},
        "batch": {"size": 4, "microbatches": 4},
        "data": {"max_bytes": 200_000},
        "tokenizer": {"kind": "bytes", "vocab_size": 256},
    }
    return small(**sizes)


def measure(spec: RunSpec, folder: Path, peers: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run it to its end, with what is to happen in the middle of it."""
    (folder / "logs").mkdir(parents=True)
    with (
        Nat(options.mbit, options.idle, options.symmetric, options.ipv6) as net,
        _relays(net, folder, options.relays) as (relays, links),
    ):
        words = [word for link in links for word in ("--relay", link)]
        where, lead = _Places(net, peers), ["--no-page", *words]

        def in_turn(number: int, link: JoinLink) -> JoinLink:
            """Peers that are alike are given stages in the order in which they joined."""
            before = 0 if options.at_once else number - 1
            _wait_for(lambda: len(_events(folder, "peer_joined")) >= before, f"peer {before} did not join")
            return link

        port = ("--port", str(PORT))
        with local_run(spec, folder, hosts=where, lead_options=lead, join_options=port, through=in_turn) as running:
            happened = _watch(net, running, relays, options, peers)
            return {**_report(folder, peers, running.coordinator.returncode), **happened}


@contextlib.contextmanager
def _relays(net: Nat, folder: Path, count: int) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[str]]]:
    """So many relays, each on a host of its own, and their links."""
    running: list[subprocess.Popen[bytes]] = []
    links = []
    try:
        for name in RELAYS[:count]:
            own = folder.parent / name

            def wrap(argv: Sequence[str], name: str = name) -> list[str]:
                return net.command(name, argv)

            words = ["relay", "--host", net.address(name), "--port", str(RELAY_PORT), "--dir", str(own)]
            running.append(start(folder, name, words, wrap=wrap))
            _wait_for(lambda own=own: (own / "link").exists(), f"{name} did not start")
            links.append((own / "link").read_text().strip())
        yield running, links
    finally:
        for process in running:
            process.kill()
            process.wait()


def _watch(
    net: Nat,
    running: LocalRun,
    relays: Sequence[subprocess.Popen[bytes]],
    options: argparse.Namespace,
    peers: Sequence[str],
) -> dict[str, Any]:
    """Until the run ends; in the middle of it, what was asked for happens."""
    tail, began, happened = Tail(running.folder / "metrics.jsonl"), time.monotonic(), {}
    waiting = any((options.pause, options.move, options.let_in, options.kill_relay))
    while running.coordinator.poll() is None:
        if time.monotonic() - began > MOST_SECONDS:
            raise UserError("the run did not end", f"look into {running.folder}/logs", "nat_late")
        for row in tail.rows():
            if waiting and row["event"] == "step" and row["step"] >= HAPPENS_AT:
                waiting = False
                happened = {"happened_after_step": row["step"], **_happen(net, running, relays, options, peers)}
        time.sleep(0.05)
    return happened


def _happen(
    net: Nat,
    running: LocalRun,
    relays: Sequence[subprocess.Popen[bytes]],
    options: argparse.Namespace,
    peers: Sequence[str],
) -> dict[str, Any]:
    found: dict[str, Any] = {"paths_before": [row["path"] for row in _boundaries(running.folder, peers)]}
    if options.move:
        machine, _, router = options.move.partition(":")
        net.rehome(machine, router)
        found["moved"] = options.move
    if options.let_in:
        net.let_in(options.let_in, PORT)
        found["let_in"] = options.let_in
    if options.kill_relay:
        places = [f"relay {net.address(name)}:{RELAY_PORT}" for name in RELAYS]
        victim = next((i for i, place in enumerate(places) if place in found["paths_before"]), 0)
        relays[victim].kill()
        found["killed"] = RELAYS[victim]
    if options.pause:
        _control(net, running, "pause")
        time.sleep(options.pause)
        _control(net, running, "resume")
        found["paused_s"] = options.pause
    return found


def _control(net: Nat, running: LocalRun, what: str) -> None:
    command = [sys.executable, "-m", "protomodels_cli", what, str(running.folder)]
    subprocess.run(net.command("coordinator", command), check=True, capture_output=True)


def _report(folder: Path, peers: Sequence[str], code: int) -> dict[str, Any]:
    rows = [row for row in Tail(folder / "metrics.jsonl").rows() if row["event"] == "step"]
    seconds = [row["seconds"] for row in rows]
    found: dict[str, Any] = {
        "exit_code": EXIT_OUTSIDE if code < 0 else code,
        "boundaries": _boundaries(folder, peers),
        "steps": len({row["step"] for row in rows}),
        "steps_redone": len(rows) - len({row["step"] for row in rows}),
        "generations": len(_events(folder, "stages_assigned")),
        "step_s": {"median": statistics.median(seconds), "longest": max(seconds)} if seconds else None,
    }
    if (folder / "summary.json").exists():
        found["relayed_bytes_door"] = json.loads((folder / "summary.json").read_text())["relayed_bytes"]
    return found


def _boundaries(folder: Path, peers: Sequence[str]) -> list[dict[str, Any]]:
    assigned = _events(folder, "stages_assigned")
    steps = [row for row in Tail(folder / "metrics.jsonl").rows() if row["event"] == "step"]
    if not assigned or not steps:
        return []
    holders = [peers[int(holder["name"].removeprefix("peer-")) - 1] for holder in assigned[-1]["holders"]]
    used = steps[-1]["stages"]
    return [
        {
            "boundary": i,
            "from": holders[i],
            "to": holders[i + 1],
            "path": used["path"][i],
            "path_s": round(used["path_s"][i], 3),
            "not_punched": used["punch"][i],
            **_punched(folder, assigned[-1]["holders"][i]["name"], i + 1, steps),
            "round_trip_ms": round(1000 * used["round_trip_s"][i], 2),
        }
        for i in range(len(holders) - 1)
    ]


def _punched(folder: Path, peer: str, stage: int, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds from when the link to this stage was relayed until it was punched, and the steps' median before and
    after; nothing: it was not."""
    [events] = (folder / "peers" / peer.removeprefix("peer-")).glob("*/events.jsonl")
    at = {row["kind"]: row["at"] for row in Tail(events).rows() if row.get("stage") == stage and row.get("path")}
    if "link_direct" not in at or steps[-1]["stages"]["path"][stage - 1] != PUNCHED:
        return {}
    found: dict[str, Any] = {"punched_s": round(at["link_direct"] - at["link_relayed"], 3)}
    for name, how in (("relayed", is_relayed), ("punched", PUNCHED.__eq__)):
        seconds = [row["seconds"] for row in steps if how(row["stages"]["path"][stage - 1])]
        found[f"step_s_{name}"] = statistics.median(seconds) if seconds else None
    return found


def _events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in Tail(folder / "events.jsonl").rows() if row["kind"] == kind]


def _wait_for(ready: Any, otherwise: str, seconds: float = 60.0) -> None:
    began = time.monotonic()
    while not ready():
        if time.monotonic() - began > seconds:
            raise UserError(otherwise, "look into the run's logs", "nat_late")
        time.sleep(0.05)


def _options(words: Sequence[str]) -> argparse.Namespace:
    homes = [name for _, machines in HOMES.values() for name in machines]
    parser = argparse.ArgumentParser(
        prog="scripts/wanlab nat",
        description="A real run across homes behind routers that masquerade and let nothing in, as JSON: the path of "
        "every boundary and what it took to find it.",
    )
    parser.add_argument("--peers", default=",".join(PEERS), help=f"default: {','.join(PEERS)}")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run directory; default: none is kept")
    parser.add_argument("--at-once", action="store_true", help="start all peers together, for stages in any order")
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--mbit", type=float, default=0, help=f"of every line but {', '.join(SERVERS)}'s, each way")
    parser.add_argument("--throughput", action="store_true", help="no run: what one connection carries, both ways")
    parser.add_argument("--idle", type=int, default=0, metavar="S", help="after which routers forget a connection")
    parser.add_argument("--symmetric", action="store_true", help="routers give every connection another port")
    parser.add_argument("--ipv6", action="store_true", help="without IPv4; routers let nothing in there either")
    parser.add_argument("--relays", type=int, default=0, choices=range(len(RELAYS) + 1))
    middle = f"after step {HAPPENS_AT}"
    parser.add_argument("--pause", type=float, default=0, metavar="S", help=f"{middle}, for so long")
    moves = [f"{machine}:{router}" for machine in homes for router in HOMES if machine not in HOMES[router][1]]
    to = f"{middle}, one of {', '.join(homes)} to one of {', '.join(HOMES)}"
    parser.add_argument("--move", metavar="MACHINE:ROUTER", choices=moves, help=to)
    parser.add_argument("--let-in", metavar="MACHINE", choices=homes, help=f"{middle}, its router forwards its port")
    parser.add_argument("--kill-relay", action="store_true", help=f"{middle}, one that is in use")
    return parser.parse_args(words)
