"""What is wrong with a machine and its line: facts in, findings out; and the real thing against a real coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from starting import pmtrain
from test_joining import wrong_fingerprint, wrong_token
from torch.utils._python_dispatch import TorchDispatchMode

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.cli import run_doctor
from protomodels_cli.coordinator import measuring
from protomodels_cli.coordinator.measuring import Measuring, NotNow
from protomodels_cli.doctor import contact as contacts
from protomodels_cli.doctor import machine as machines
from protomodels_cli.doctor.facts import Card, Contact, Driver, Failure, Folder, Machine, Need, Reach, StepTried, Torch
from protomodels_cli.doctor.findings import Finding, worst
from protomodels_cli.doctor.line_checks import CHECKS, line
from protomodels_cli.doctor.local_checks import local, one_step
from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED
from protomodels_cli.model import self_test
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

GIB = 1 << 30
CARD = Card("RTX", 11 * GIB, 12 * GIB)
HERE = Machine(
    "linux",
    (3, 12, 1),
    __version__,
    PROTOCOL,
    Torch("2.9", (12, 8), (CARD,)),
    Driver((12, 8), 1),
    32 * GIB,
    (Folder("peer", "/home/me/peers", 100 * GIB),),
    4096,
    4096,
    "ufw",
    "192.168.1.23",
    "192.168.1.1",
)
LINE = Contact(
    "203.0.113.7:7420",
    version=__version__,
    run="tiny",
    need=Need(GIB, GIB),
    ahead=0.1,
    round_trip=0.03,
    upload=2e7,
    download=8e7,
    reach=Reach("198.51.100.9", 4000, True),
)


def kinds(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(f.kind, f.severity) for f in findings if f.severity in ("warn", "fail")}


def test_a_good_machine_and_line_have_nothing_wrong():
    assert kinds(local(HERE, LINE.need)) == kinds(line(HERE, LINE)) == set()
    assert [f.severity for f in line(HERE, None)] == ["skipped"] * len(CHECKS)


NO_CARD = Torch("2.9", (12, 8), (), "no device")
LOCAL = [
    ({"python": (3, 10, 2)}, "old_python", "fail"),
    ({"torch": None}, "no_torch", "fail"),
    ({"torch": Torch("2.9", None, ())}, "cpu_only_torch", "warn"),
    ({"torch": NO_CARD, "driver": Driver((11, 4), 1)}, "old_driver", "fail"),
    ({"torch": NO_CARD}, "card_unusable", "fail"),
    ({"device": "cuda:3"}, "no_such_device", "fail"),
    ({"torch": Torch("2.9", (12, 8), (Card("RTX", GIB // 2, 12 * GIB),))}, "device_too_small", "fail"),
    ({"torch": Torch("2.9", (12, 8), (Card("RTX", 4 * GIB, 12 * GIB),))}, "card_in_use", "warn"),
    ({"memory": GIB // 2}, "memory_too_small", "fail"),
    ({"memory": 2 * GIB}, "little_memory", "warn"),
    ({"folders": (Folder("peer", "/x", GIB // 2),)}, "disk_too_small", "fail"),
    ({"folders": (Folder("peer", "/x", 2 * GIB),)}, "little_disk", "warn"),
    ({"folders": (Folder("cache", "/x", 0),)}, "disk_too_small", "fail"),
    ({"folders": (Folder("runs", "/x", GIB, "denied"),)}, "folder_not_writable", "fail"),
    ({"open_files": 64}, "few_open_files", "warn"),
]
FAR = [
    ({"ahead": 400.0}, "clock_skew", "fail"),
    ({"ahead": -400.0}, "clock_skew", "fail"),
    ({"ahead": -20.0}, "clock_off", "warn"),
    ({"round_trip": 0.9}, "far_away", "warn"),
    ({"upload": 1e6}, "slow_upload", "warn"),
    ({"download": 1e6}, "slow_download", "warn"),
    ({"reach": Reach("198.51.100.9", 4000, False, "x")}, "not_reachable", "warn"),
    ({"failure": Failure("timeout", "a", "b")}, "timeout", "fail"),
]


@pytest.mark.parametrize(("facts", "kind", "severity"), LOCAL, ids=[f"{row[1]}-{i}" for i, row in enumerate(LOCAL)])
def test_each_local_problem_is_found_and_has_fixes(facts, kind, severity):
    found = local(replace(HERE, **facts), LINE.need)
    assert kinds(found) == {(kind, severity)}
    assert all(f.problem and f.fixes for f in found if f.kind == kind)


@pytest.mark.parametrize(("facts", "kind", "severity"), FAR, ids=[f"{row[1]}-{i}" for i, row in enumerate(FAR)])
def test_each_problem_of_the_line_is_found_and_has_fixes(facts, kind, severity):
    found = line(HERE, replace(LINE, **facts))
    assert [f.check for f in found] == list(CHECKS)
    assert kinds(found) == {(kind, severity)}
    assert all(f.problem and f.fixes for f in found if f.kind == kind)


@pytest.mark.parametrize(
    ("system", "firewall", "lan", "named"),
    [
        ("linux", "ufw", "192.168.1.23", ["ufw allow 4000/tcp", "192.168.1.23", "192.168.1.1", "--port 4000"]),
        ("linux", "firewalld", "192.168.1.23", ["--add-port=4000/tcp", "192.168.1.23", "--port 4000"]),
        ("wsl", None, "172.20.0.5", ["connectport=4000", "172.20.0.5", "LocalPort 4000"]),
        ("linux", None, "198.51.100.9", ["ufw allow 4000/tcp", "--add-port=4000/tcp"]),
    ],
)
def test_opening_a_port_names_the_users_own_addresses(system, firewall, lan, named):
    here = replace(HERE, system=system, firewall=firewall, lan=lan)
    [finding] = [f for f in line(here, replace(LINE, reach=Reach("198.51.100.9", 4000, False, "x"))) if f.fixes]
    for words in named:
        assert any(words in fix for fix in finding.fixes), words
    assert any("router" in fix for fix in finding.fixes) == (lan != "198.51.100.9")


amounts = st.one_of(st.none(), st.integers(0, 1 << 45))


@given(
    st.builds(
        replace,
        st.just(HERE),
        system=st.sampled_from(["linux", "wsl", "macos", "other"]),
        torch=st.sampled_from([None, HERE.torch, NO_CARD, Torch("2.9", None, ())]),
        driver=st.sampled_from([None, Driver((0, 0), 0), Driver((11, 0), 2), Driver((13, 0), 1)]),
        memory=amounts,
        open_files=amounts,
        most_open_files=amounts,
        firewall=st.sampled_from([None, "ufw", "firewalld"]),
        gateway=st.sampled_from([None, "10.0.0.1"]),
        device=st.sampled_from(["auto", "cpu", "cuda:0", "cuda:1"]),
    ),
    st.builds(
        replace,
        st.just(LINE),
        ahead=st.one_of(st.none(), st.floats(-1e9, 1e9)),
        round_trip=st.one_of(st.none(), st.floats(0, 1e3)),
        upload=st.one_of(st.none(), st.floats(0, 1e12)),
        download=st.one_of(st.none(), st.floats(0, 1e12)),
        need=st.one_of(st.none(), st.builds(Need, st.integers(0, 1 << 45), st.integers(0, 1 << 45))),
        reach=st.one_of(
            st.none(), st.builds(Reach, st.sampled_from(["::1", "100.64.3.4", "h"]), st.just(9), st.booleans())
        ),
    ),
)
def test_whatever_the_facts_each_problem_has_a_figure_and_fixes(here, far):
    for finding in (*local(here, far.need), *line(here, far), *line(here, None)):
        assert finding.figure
        assert bool(finding.fixes) == bool(finding.problem)
        assert finding.problem or finding.severity in ("ok", "skipped")


def test_this_machine_is_looked_at(tmp_path: Path):
    (tmp_path / "file").write_text("")
    seen = machines.look({"peer": tmp_path / "a" / "b", "cache": tmp_path / "file" / "below"}, "cpu")
    fine, bad = seen.folders
    assert fine.free > 0
    assert (fine.detail == "", bad.detail == "") == (True, False)
    assert not (tmp_path / "a").exists(), "looking makes nothing"
    assert ("folder_not_writable", "fail") in kinds(local(seen))


def test_a_line_is_measured_and_refusals_are_told_apart(pool: Pool, tmp_path: Path):
    run_dir = pool.start(make_spec(stages=1, steps=2), [])
    link = (run_dir / "link").read_text().strip()
    for _ in range(5):  # on a busy machine too little may arrive within its seconds
        seen = asyncio.run(contacts.look(JoinLink.parse(link)))
        if seen.upload and seen.download:
            break
    assert seen.upload, "too little arrived in five tries"
    assert seen.download, "too little arrived in five tries"
    assert seen.failure is None
    assert seen.version == __version__
    assert abs(seen.ahead) < 5
    assert 0 < seen.round_trip < 5
    assert min(seen.upload, seen.download) > 1e5
    assert seen.reach.reachable
    assert seen.need.memory > seen.need.disk > 0
    # as a user meets it
    done = pmtrain("doctor", link, "--device", "cpu", "--no-measure", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"format", "severity", "findings", "facts"}
    assert {f["check"] for f in told["findings"]} >= set(CHECKS)
    assert JoinLink.parse(link).token not in done.stdout
    for wrong, kind, code in (
        (wrong_token(link), "wrong_token", EXIT_REFUSED),
        (wrong_fingerprint(link), "fingerprint_mismatch", EXIT_REFUSED),
    ):
        done = pmtrain("doctor", wrong, "--device", "cpu", "--format", "json", cwd=tmp_path)
        found = json.loads(done.stdout)["findings"]
        assert [f["kind"] for f in found if f["severity"] == "fail"] == [kind]
        assert done.returncode == code
    pool.peers[0].start(kind="join", link=link, name="good", dir=str(tmp_path / "good"))
    assert pool.peers[0].result()["exit"] == 0
    assert pool.coordinator.result()["exit"] == 0


def test_a_coordinator_that_is_not_there(tmp_path: Path, unused_port):
    link = f"pm://127.0.0.1:{unused_port}/{'A' * 22}#{'A' * 43}"
    done = pmtrain("doctor", link, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == EXIT_OUTSIDE
    assert f"127.0.0.1 {unused_port}" in done.stdout, "the fix names it"
    assert "Traceback" not in done.stdout + done.stderr


def test_without_a_link_only_this_machine_is_checked(tmp_path: Path):
    done = pmtrain("doctor", "--device", "cpu", "--format", "json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["facts"]["coordinator"] is None
    assert [f["severity"] for f in told["findings"] if f["check"] in CHECKS] == ["skipped"] * len(CHECKS)
    assert done.returncode == (EXIT_OUTSIDE if told["severity"] == "fail" else 0)


def test_a_named_device_takes_one_step_and_is_compared(tmp_path: Path):
    done = pmtrain("doctor", "--device", "cpu", "--format", "json", cwd=tmp_path)
    [found] = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "one step"]
    assert (found["kind"], found["severity"]) == ("ok", "ok")


def test_a_device_that_torch_does_not_have_fails_the_step():
    assert run_doctor._try_step("cuda:99").detail


def test_what_a_step_on_a_device_means():
    good = StepTried("cuda:0", "cuda", (("float32", 2e-7), ("bf16", 0.006)))
    assert one_step(good).severity == "ok"
    for kind in ("rocm", "mps"):
        assert one_step(replace(good, kind=kind)).figure != one_step(good).figure, "it is said that nobody tried"
    for bad in (replace(good, wrong=("bf16",)), replace(good, detail="no such operator")):
        found = one_step(bad)
        assert found.severity == "fail"
        assert found.problem
        assert found.fixes


class Wrong(TorchDispatchMode):
    """A device whose products of matrices are off by so much."""

    def __init__(self, by: float):
        super().__init__()
        self._by = by

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        found = operator(*arguments, **(named or {}))
        is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return found * (1 + self._by) if is_product and found.dtype == torch.float32 else found


@pytest.mark.parametrize(("by", "is_right"), [(0.01, False), (float("nan"), False)])
def test_a_device_that_computes_something_else_is_found_out(by: float, is_right: bool):
    with Wrong(by):
        [compared] = self_test.compare(torch.device("cpu"), "float32")
    assert compared.is_right == is_right
    assert compared.off >= 0


@pytest.mark.cuda
def test_a_gpu_computes_what_the_cpu_does():
    assert all(one.is_right for one in self_test.compare(torch.device("cuda:0"), "float32", "bf16"))


def test_a_peer_with_a_folder_that_cannot_be_written_stops_before_it_joins(pool: Pool, tmp_path: Path):
    run_dir = pool.start(make_spec(stages=1, steps=2), [])
    (tmp_path / "file").write_text("")
    words = ("join", (run_dir / "link").read_text().strip(), "--device", "cpu", "--dir", "file/below")
    done = pmtrain(*words, cwd=tmp_path)
    assert done.returncode == EXIT_OUTSIDE
    assert "--no-preflight" in done.stderr
    assert " 1. " in done.stderr
    skipped = pmtrain(*words, "--no-preflight", cwd=tmp_path)
    assert skipped.returncode == EXIT_OUTSIDE
    assert "--no-preflight" not in skipped.stderr
    assert "file/below" in skipped.stderr
    pool.coordinator.renew()


# The coordinator's side


async def _requests(size: int, up: bool, many: int) -> AsyncIterator[pb.MeasureRequest]:
    for _ in range(many):
        yield pb.MeasureRequest(padding=bytes(size)) if up else pb.MeasureRequest(size=size)


async def _spend(answering: Measuring, caller: str, up: bool = False) -> int:
    size = 1 << 20
    more = _requests(size, up, 1000)
    return size * len([1 async for _ in answering.answer(caller, await anext(more), more)])


@pytest.mark.parametrize("up", [True, False])
def test_measuring_is_bounded_in_bytes_by_call_by_network_and_by_all(up):
    now = 0.0

    async def story() -> None:
        nonlocal now
        answering = Measuring(lambda: now)
        total = await _spend(answering, "192.0.2.1", up)
        assert total == measuring.CALL_BYTES
        while True:
            try:
                total += await _spend(answering, "192.0.2.1", up)
            except NotNow:
                break
        assert total <= measuring.OF_NETWORK.burst
        for i in range(100):
            try:
                total += await _spend(answering, f"198.51.100.{i}", up)
            except NotNow:
                break
        assert total <= measuring.OF_ALL.burst
        now += 60.0
        more = 0
        for i in range(100):
            try:
                more += await _spend(answering, f"203.0.113.{i}", up)
            except NotNow:
                break
        assert 0 < more <= 60 * measuring.OF_ALL.per_second

    asyncio.run(story())


def test_one_measures_at_a_time_and_whoever_falls_silent_makes_room(monkeypatch):
    monkeypatch.setattr(measuring, "QUIET_SECONDS", 0.05)

    async def silent() -> AsyncIterator[pb.MeasureRequest]:
        await asyncio.sleep(3600)
        yield pb.MeasureRequest()

    async def story() -> None:
        answering = Measuring()
        first = answering.answer("192.0.2.1", pb.MeasureRequest(size=9), silent())
        assert len((await anext(first)).padding) == 9
        with pytest.raises(NotNow):
            await _spend(answering, "192.0.2.2")
        assert [reply async for reply in first] == []
        assert await _spend(answering, "192.0.2.2") > 0

    asyncio.run(story())


def test_a_request_gets_a_piece_at_most():
    async def story() -> None:
        answering = Measuring()
        async for reply in answering.answer("192.0.2.1", pb.MeasureRequest(size=1 << 31), _requests(0, True, 0)):
            assert len(reply.padding) == measuring.PIECE

    asyncio.run(story())


def test_the_worst_finding_counts():
    assert worst([Finding("a", "b", s, "c") for s in ("ok", "warn", "skipped")]) == "warn"
    assert worst([]) == "ok"
