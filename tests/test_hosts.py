"""Emulated hosts: real TCP between network namespaces against what the link promises, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from starting import begin_logged
from waiting import PATIENCE, wait_for

from protomodels_cli.bench import wanlab
from protomodels_cli.bench.loopback import pipeline, small
from protomodels_cli.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, EXIT_SPEC, UserError
from protomodels_cli.launch import hosts as hosts_module
from protomodels_cli.launch import system_tools
from protomodels_cli.launch.hosts import Hosts, require
from protomodels_cli.launch.router import VNET_HEADER, Router, wire_bytes
from protomodels_cli.spec.link import parse_link
from protomodels_cli.spec.schema import LinkSpec

MBIT, LATENCY = 20, 0.01
WIRE = 1514 / 1448  # a full segment on Ethernet over what a program gets of it

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
connection, _ = server.accept()
first = last = None
total = 0
while piece := connection.recv(1 << 16):
    last = time.monotonic()  # one clock for all hosts
    first = first or last
    total += len(piece)
print(first, last, total)
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
connection.sendall(bytes(int(sys.argv[3])))
"""
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
while piece := connection.recv(64):
    connection.sendall(piece)
"""
PING = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
for _ in range(10):
    began = time.monotonic()
    connection.sendall(b"x")
    connection.recv(1)
    print(time.monotonic() - began)
"""


def needs(require: Callable[[], None]) -> pytest.MarkDecorator:
    """Skips a test where this raises, with its reason."""
    why = ""
    try:
        require()
    except UserError as e:
        why = str(e).splitlines()[0]
    return pytest.mark.skipif(bool(why), reason=why)


needs_root = needs(require)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(4, LinkSpec(bandwidth=f"{MBIT}mbit", latency=f"{LATENCY * 1000:g}ms")) as hosts:
        yield hosts


def on(hosts: Hosts, host: int, program: str, *arguments: object) -> subprocess.Popen[str]:
    command = hosts.command(host, [sys.executable, "-IS", "-c", program, *map(str, arguments)])
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve(hosts: Hosts, host: int, program: str, *arguments: object) -> subprocess.Popen[str]:
    return ready(on(hosts, host, program, hosts.address(host), *arguments))


def ready(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@needs_root
@pytest.mark.parametrize(
    ("flows", "lines"),
    [
        ([(0, 1)], 1),
        ([(0, 1), (0, 2)], 1),  # share an uplink
        ([(1, 0), (2, 0)], 1),  # share a downlink
        ([(0, 1), (1, 2)], 2),  # each way of a host has its own
    ],
)
def test_flows_get_the_rate_of_the_lines_they_use(hosts: Hosts, flows: list[tuple[int, int]], lines: int) -> None:
    """The fastest of up to five tries: a busy machine reads late, and nothing makes a line faster."""
    rates: list[float] = []
    while len(rates) < 5 and (not rates or max(rates) < 0.9 * MBIT * lines):
        rates.append(rate_of(hosts, flows, 2_500_000 * lines // len(flows)))
    assert 0.7 < max(rates) / (MBIT * lines) < 1.1, "one line for both would be half"


def rate_of(hosts: Hosts, flows: list[tuple[int, int]], each: int) -> float:
    """Mbit/s of all flows together, on the wire."""
    receivers = [serve(hosts, b, RECEIVE, 6000 + i) for i, (_, b) in enumerate(flows)]
    senders = [ready(on(hosts, a, SEND, hosts.address(b), 6000 + i, each)) for i, (a, b) in enumerate(flows)]
    for sender in senders:  # all are connected: how long a busy machine takes to start a program does not count
        assert sender.stdin is not None
        sender.stdin.close()
    assert [process.wait(PATIENCE) for process in senders] == [0] * len(flows)
    said = [[float(word) for word in process.communicate(timeout=PATIENCE)[0].split()] for process in receivers]
    assert [total for *_, total in said] == [each] * len(flows)
    seconds = max(last for _, last, _ in said) - min(first for first, *_ in said)
    return 8e-6 * each * len(flows) * WIRE / seconds


@needs_root
def test_a_round_trip_is_twice_the_latency(hosts: Hosts) -> None:
    echo = serve(hosts, 3, ECHO)
    trips = [float(line) for line in on(hosts, 2, PING, hosts.address(3)).communicate(timeout=PATIENCE)[0].split()]
    assert echo.wait(PATIENCE) == 0
    assert 2 * LATENCY <= min(trips) <= 2 * LATENCY + 0.01


@needs_root
def test_hosts_reach_one_another_only_and_are_counted(hosts: Hosts) -> None:
    time.sleep(5 * LATENCY)  # the last packets of the test before
    before = hosts.stats()["hosts"]
    echo = serve(hosts, 1, ECHO)
    assert on(hosts, 0, PING, hosts.address(1)).wait(PATIENCE) == 0
    assert echo.wait(PATIENCE) == 0
    time.sleep(5 * LATENCY)
    after = hosts.stats()["hosts"]
    assert after[0]["up"] - before[0]["up"] == after[1]["down"] - before[1]["down"] > 10 * (14 + 52 + 1)
    assert after[3] == before[3]
    outside = subprocess.run(hosts.command(0, ["ip", "route", "get", "192.0.2.1"]), capture_output=True, text=True)
    assert "unreachable" in outside.stderr


def namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split())


def left_of(owner: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"pmtrain-{owner}-")]


def runs(pid: int) -> bool:
    """A zombie that its parent has not asked about does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@needs_root
def test_nothing_is_left_after_an_exception() -> None:
    hosts = Hosts(2, LinkSpec())
    programs = []

    def fail() -> None:
        with hosts:
            programs.append(subprocess.Popen(hosts.command(1, ["sleep", "600"])))
            programs.append(serve(hosts, 0, ECHO))
            assert set(hosts.names) <= namespaces()
            assert hosts._router is not None
            programs.append(hosts._router)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [program.wait(PATIENCE) for program in programs] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert not set(hosts.names) & namespaces()


@needs_root
def test_nothing_is_left_when_it_cannot_be_set_up() -> None:
    hosts = Hosts(2, LinkSpec())
    subprocess.run(["ip", "netns", "add", hosts.names[1]], check=True)  # the second is in the way
    with pytest.raises(UserError, match=hosts.names[1]) as failed:
        hosts.__enter__()
    assert failed.value.kind == "hosts_setup"
    assert not set(hosts.names) & namespaces()


@needs_root
@pytest.mark.parametrize(("end", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, EXIT_INTERRUPTED)])
def test_nothing_is_left_when_the_owner_is_ended(end: signal.Signals, code: int) -> None:
    command = ["--hosts", "2", "--link", "none", "--", "sh", "-c", 'echo $$ "$PMTRAIN_HOSTS"; exec sleep 600']
    lab = subprocess.Popen(
        [sys.executable, "-m", "protomodels_cli.bench.wanlab", *command], stdout=subprocess.PIPE, text=True
    )
    assert lab.stdout is not None
    sleeper, *addresses = lab.stdout.readline().split()
    assert addresses == ["198.18.0.1", "198.18.0.2"]
    assert len(left_of(lab.pid)) == 2
    lab.send_signal(end)
    assert lab.wait(PATIENCE) == code
    wait_for(lambda: not runs(int(sleeper)), "its program still runs")
    wait_for(lambda: not left_of(lab.pid), "its hosts are still there")


@needs_root
def test_wanlab_passes_the_exit_code_on() -> None:
    assert wanlab.main(["--hosts", "1", "--", "sh", "-c", "exit 7"]) == 7


def test_without_root_it_is_one_clear_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert wanlab.main(["--hosts", "2", "--link", "80mbit,25ms", "--", "true"]) == EXIT_OUTSIDE
    what, fix = capsys.readouterr().err.splitlines()
    assert "1000" in what
    assert fix.startswith("    fix:  ")


def test_without_the_device_it_is_one_clear_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts_module, "system_tool", lambda name: name)
    monkeypatch.setattr(hosts_module, "TUN", tmp_path / "tun")
    assert wanlab.main(["--hosts", "2", "--link", "80mbit,25ms", "--", "true"]) == EXIT_OUTSIDE
    what, fix = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "tun") in what
    assert os.strerror(errno.ENOENT) in what
    assert fix.startswith("    fix:  ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--hosts", "2", "--link", "80", "--", "true"], "'80'"),
        (["--hosts", "2", "--link", "none"], "--run"),
        (["--hosts", "2", "--run", "spec.yaml", "--", "true"], "--run"),
    ],
)
def test_a_bad_command_line_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert wanlab.main(arguments) == EXIT_SPEC
    what, fix = capsys.readouterr().err.splitlines()
    assert named in what
    assert fix.startswith("    fix:  ")


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("none", LinkSpec()),
        ("80mbit,25ms", LinkSpec(bandwidth="80mbit", latency="25ms")),
        ("none, 5ms", LinkSpec(latency="5ms")),
        ("1gbit,25ms,2ms,0.01", LinkSpec(bandwidth="1gbit", latency="25ms", jitter="2ms", loss=0.01)),
    ],
)
def test_a_link_in_one_word(text: str, link: LinkSpec) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "80", "0mbit", "80mbit,25", "1mbit,1ms,1ms,1", "1mbit,1ms,1ms,x", "1mbit,,,,"])
def test_a_bad_link_names_value_and_fix(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_link(text)
    assert repr(text) in str(error.value)
    assert (error.value.kind, error.value.exit_code) == ("link", EXIT_SPEC)


def packet(to: int, payload: int, part: int = 0) -> bytes:
    """TCP over IPv4 to a host, as the kernel hands it over; cut in parts of this size, if any."""
    note = struct.pack("=BBHHHH", 1, 1 if part else 0, 0, part, 20, 16)
    ip = struct.pack(">BxH8x4s4s", 0x45, 40 + payload, bytes(4), bytes((198, 18, 0, to + 1)))
    return note + ip + bytes(12) + b"\x50" + bytes(7) + bytes(payload)


def test_a_long_segment_costs_the_headers_of_its_parts() -> None:
    assert wire_bytes(packet(1, 1000)) == 14 + 40 + 1000
    assert wire_bytes(packet(1, 1460 * 3 + 1, part=1460)) == 1460 * 3 + 1 + 4 * (14 + 40)
    assert len(packet(1, 0)) == VNET_HEADER + 40


def test_the_clocks_of_the_lines() -> None:
    """Against the times by hand: 946 bytes with 54 of headers are 1000 on the wire, 1 ms at 8 Mbit/s."""
    ends = [os.pipe2(os.O_NONBLOCK) for _ in range(3)]
    router = Router([write for _, write in ends], 8e6, latency=0.010, jitter=0.0, loss=0.0)

    def arrived(at: float) -> int:
        router.give(at)
        try:
            return len(os.read(ends[2][0], 1 << 20)) // len(packet(2, 946))
        except BlockingIOError:
            return 0

    for source in (0, 0, 1):
        router.take(source, packet(2, 946), now=100.0)
    # 1 ms on the uplink and 10 ms on the way: the first of each at 100.011, one of them after the other's millisecond
    assert [arrived(t) for t in (100.0109, 100.0111, 100.0119, 100.0121, 100.0129, 100.0131)] == [0, 1, 0, 1, 0, 1]
    for _ in range(1000):
        router.take(0, packet(2, 946), now=200.0)
    assert 1000 - router.moved[0]["dropped"] in (263, 264)  # 256 KiB of 1000 bytes each, give or take a rounding
    for read, write in ends:
        os.close(read)
        os.close(write)


def test_jitter_keeps_order_and_loss_is_a_share() -> None:
    router = Router([-1, -1], float("inf"), latency=0.010, jitter=0.004, loss=0.1)
    for i in range(5000):
        router.take(0, packet(1, 1), now=i * 0.01)
    arrivals = sorted((number, due) for due, number, *_ in router.heap)
    assert 400 < router.moved[0]["lost"] == 5000 - len(arrivals) < 600
    delays = [due % 0.01 for _, due in arrivals]
    assert max(delays) - min(delays) > 0.0079
    for _ in range(500):
        router.take(0, packet(1, 1), now=100.0)  # all at once: each has its own jitter, none overtakes
    burst = [due for _, due in sorted((number, due) for due, number, *_ in router.heap) if due > 100]
    assert burst == sorted(burst)
    assert len(set(burst)) > 1


@needs_root
@pytest.mark.full
def test_a_whole_run_across_hosts(tmp_path, capfd):
    spec = small(steps=2, stages=2, model={"layers": 2, "width": 32, "context": 16}, batch={"size": 4})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    arguments = ["--link", "80mbit,5ms", "--run", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")]
    assert wanlab.main(["--hosts", "3", *arguments]) == 0
    said = capfd.readouterr().out
    assert "198.18.0.1" in said, "the coordinator speaks, and its link leads to a host"
    assert (tmp_path / "run" / "summary.json").exists()
    assert wanlab.main(["--hosts", "4", *arguments]) == EXIT_SPEC


@needs_root
@pytest.mark.full
def test_the_emulated_link_takes_the_time_that_real_tcp_takes(monkeypatch: pytest.MonkeyPatch):
    """A pipeline that the link holds up, over `wire.link` and between hosts: each one's fastest step.

    Whatever else the machine does makes a step longer, never shorter; if it does so all the time, they run once more.
    """
    text = "10mbit,25ms"
    sizes = {
        "steps": 4,
        "stages": 3,
        "model": {"layers": 3, "width": 64, "heads": 4, "context": 64},
        "subspace": {"form": "dense"},
        "data": {"max_bytes": 200_000},
        "tokenizer": {"vocab_size": 512},
        "batch": {"size": 64, "microbatches": 16, "in_flight": 4},  # a line that is full both ways slows TCP down
    }
    link = parse_link(text)
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr("protomodels_cli.launch.local.start", begin_logged)
            _, emulated = pipeline(small(**sizes, wire={"link": link.model_dump()}))
        with Hosts(4, link) as hosts:
            _, real = pipeline(small(**sizes), hosts=hosts)
        ratio = min(emulated[1:]) / min(real[1:])
        print(f"steps took {emulated} emulated and {real} between hosts: {ratio:.3f}")
        assert min(real[1:]) > 1.5, "the link is what holds it up"
        if 0.85 < ratio < 1.15:
            return
    pytest.fail("not in any of three times")


def test_tools_are_found_where_administrators_have_them(tmp_path, monkeypatch):
    tool = tmp_path / "sysctl"
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(system_tools, "ADMIN_FOLDERS", (str(tmp_path),))
    assert system_tools.system_tool("sysctl") == str(tool)
    with pytest.raises(UserError) as refused:
        system_tools.system_tool("tc")
    assert refused.value.kind == "hosts_tool"
