"""The page over plain HTTP: what it shows to whom, that nothing it is asked changes anything, and that nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_spec
from starting import begin, pmtrain
from test_run import coordinator, ends
from waiting import PATIENCE, until, wait_for

from protomodels_cli.observe.page import viewers as viewing
from protomodels_cli.observe.page.address import Where, asked_place, default_place
from protomodels_cli.observe.page.contents import Beside, Contents, Sources, state
from protomodels_cli.observe.page.curves import Curve
from protomodels_cli.observe.page.keys import Keys, of_this_machine
from protomodels_cli.observe.page.server import FILES, Page, Parts
from protomodels_cli.observe.page.veil import HIDDEN, Veil
from protomodels_cli.observe.page.viewers import Viewers
from protomodels_cli.observe.prometheus import OfStatus, text_of
from protomodels_cli.observe.tail import Tail
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

PATHS = (*FILES, "/state.json", "/owner.json", "/metrics")
HOME = "198.51.100.23"


def a_status() -> pb.RunStatus:
    stages = [
        pb.StageStatus(stage=i, holders=[pb.Holder(peer=f"p{i}", name=f"n{i}")], state=pb.StageStatus.TRAINING)
        for i in range(2)
    ]
    stages[0].forward_bytes_per_token, stages[1].backward_bytes_per_token = 66.0, 64.0
    stages[0].round_trip_s, stages[0].path, stages[0].path_why = 0.05, f"relay {HOME}:7430", "WHY"
    peers = [pb.PeerStatus(peer=f"p{i}", name=f"n{i}", address=f"{HOME}:42707", device="cpu") for i in range(3)]
    peers[2].state = pb.PeerStatus.SPARE
    return pb.RunStatus(
        name="home", phase=pb.RunStatus.RUNNING, step=3, steps=9, tokens_per_s=100.0, stages=stages, peers=peers
    )


# What strangers may read


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"ipv4:{HOME}:42707 refused", f"ipv4:{HIDDEN} refused"),
        ("to [2001:db8::7]:7420.", f"to {HIDDEN}."),
        ("fe80::1%eth0", HIDDEN),
        ("at 12:34:56 step 1.2", "at 12:34:56 step 1.2"),
        ("4 stages of 1+1, 3.9.1", "4 stages of 1+1, 3.9.1"),
        ("TOKEN in /srv/alice/runs/tiny/link", f"{HIDDEN} in tiny/link"),
    ],
)
def test_secrets_addresses_and_folders_are_hidden(text, shown):
    assert Veil(["TOKEN"], [Path("/srv/alice/runs/tiny"), Path("/srv/alice")])(text) == shown


def test_the_state_has_rates_of_links_and_no_address():
    found = state(a_status(), Beside(), Veil())
    [link] = found["links"]
    assert (link["forward_per_s"], link["backward_per_s"]) == (6600.0, 6400.0)
    assert (link["relayed"], link["path"], link["why"]) == (True, "relay", "WHY")
    assert link["round_trip_s"] == pytest.approx(0.05)
    assert [p["name"] for p in found["spares"]] == ["n2"]
    assert HOME not in json.dumps(found)


def test_metrics_are_prometheus_text_without_addresses():
    text = text_of(OfStatus(a_status, 7)).decode()
    assert HOME not in text
    assert re.search(r"^pmtrain_page_viewers 7\.0$", text, re.MULTILINE)
    assert re.search(r'^pmtrain_phase\{phase="running"\} 1\.0$', text, re.MULTILINE)
    assert "pmtrain_loss" not in text, "there is none yet"


def test_a_curve_stays_small_and_forgets_what_was_redone():
    curve = Curve(most=8)
    for step in range(1, 101):
        curve.add(step, float(step))
    points = curve.points()
    assert len(points) <= 8
    assert points[-1][0] == 100
    assert curve.news()["whole"]
    curve.add(50, 1.0)
    assert curve.points()[-1][0] == 50
    assert curve.news()["whole"]
    curve.add(51, 3.0)
    assert curve.news()["points"] == [[51, 2.0, 2]], "the mean of the stretch so far, and of how many"


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1:7421", True),
        ("localhost", True),
        ("[::1]:7421", True),
        ("LOCALHOST:1", True),
        ("evil.example:7421", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("", False),
        ("192.0.2.1", False),
    ],
)
def test_names_of_this_machine(host, here):
    assert of_this_machine(host) == here


# Who waits for whom


class Slow:
    """A viewer that takes its time for each event."""

    def __init__(self, seconds: float):
        self.seconds, self.got = seconds, list[dict[str, Any]]()

    async def write(self, event: bytes) -> None:
        await asyncio.sleep(self.seconds)
        self.got.append(json.loads(event.removeprefix(b"data: ")))


class Behind:
    """A viewer that takes as long for each event as another one for four."""

    def __init__(self, other: Slow):
        self.other, self.hurry, self.got = other, False, list[dict[str, Any]]()

    async def write(self, event: bytes) -> None:
        seen = len(self.other.got)
        await until(lambda: self.hurry or len(self.other.got) >= seen + 4)
        self.got.append(json.loads(event.removeprefix(b"data: ")))


def contents(folder: Path, status: Callable[[], pb.RunStatus] = a_status, **more: Any) -> Contents:
    beside = Beside(now=3601.0)
    return Contents(Sources(status, lambda: beside, folder / "metrics.jsonl", folder / "events.jsonl", **more), Veil())


def test_the_event_loop_reads_no_file_for_viewers(tmp_path, monkeypatch):
    monkeypatch.setattr(viewing, "EVERY", 0.02)
    lines, in_loop = Tail.lines, list[bool]()

    def noted(self: Tail) -> Iterator[bytes]:
        with contextlib.suppress(RuntimeError):  # in threads there is no loop
            asyncio.get_running_loop()
            in_loop.append(True)
        return lines(self)

    monkeypatch.setattr(Tail, "lines", noted)

    async def watch() -> None:
        shown, viewer = Viewers(contents(tmp_path)), Slow(0)
        watching = asyncio.create_task(shown.serve(viewer.write))
        await until(lambda: viewer.got)
        (tmp_path / "events.jsonl").write_text('{"kind": "x", "text": "news"}\n')
        await until(lambda: any(got["events"] for got in viewer.got), "nothing new was shown")
        await shown.close()
        await watching

    asyncio.run(watch())
    assert not in_loop


def test_a_slow_viewer_holds_up_nobody_and_skips_to_what_is_now(tmp_path, monkeypatch):
    monkeypatch.setattr(viewing, "EVERY", 0.02)
    rows = (tmp_path / "events.jsonl").open("w")

    async def watch() -> tuple[Slow, Behind, bool]:
        viewers, quick, stuck = Viewers(contents(tmp_path)), Slow(0.0), Slow(3600.0)
        slow = Behind(quick)
        monkeypatch.setattr(viewing, "PATIENCE", 0.5)
        is_read = await viewers.serve(stuck.write)
        monkeypatch.setattr(viewing, "PATIENCE", PATIENCE)
        watching = [asyncio.create_task(viewers.serve(v.write)) for v in (quick, slow)]
        for i in range(30):
            print(json.dumps({"kind": "k", "at": 1.0, "text": f"event {i}"}), file=rows, flush=True)
            await asyncio.sleep(0.02)
        await until(lambda: any(e["n"] == 30 for got in quick.got for e in got["events"]))
        slow.hurry = True
        await until(lambda: any(e["n"] == 30 for got in slow.got for e in got["events"]))
        await viewers.close()
        await asyncio.wait_for(asyncio.gather(*watching), PATIENCE)
        return quick, slow, is_read

    quick, slow, is_read = asyncio.run(watch())
    assert not is_read, "whoever reads nothing is let go"
    assert len(quick.got) > 2 * len(slow.got)
    assert sum("whole" in got for got in quick.got) == 1
    assert sum("whole" in got for got in slow.got) > 1
    seen = [e["n"] for got in quick.got for e in got["events"]]
    assert sorted(set(seen)) == list(range(1, 31)), "none is missing"


# The server


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        stream = answer.headers.get("Content-Type", "").startswith("text/event-stream")
        return answer.status, dict(answer.headers), b"" if stream else answer.read()


@contextlib.contextmanager
def page_at(where: Where, folder: Path, status: Callable[[], pb.RunStatus] = a_status) -> Iterator[Keys]:
    """In a thread of its own: the test asks like anybody else."""
    import threading

    keys, loop = Keys.of("OWNER"), asyncio.new_event_loop()
    parts = Parts(contents(folder, status), keys, lambda: "JOIN LINE", lambda n: text_of(OfStatus(status, n)))
    page = Page(where, parts)
    loop.run_until_complete(page.open())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield keys
    finally:
        asyncio.run_coroutine_threadsafe(page.close(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_who_may_look_on_and_who_is_the_owner(tmp_path):
    where = default_place()
    with page_at(where, tmp_path) as keys:
        assert ask(where.port)[0] == 200
        assert ask(where.port, Host="evil.example")[0] == 421
        assert json.loads(ask(where.port, "/owner.json")[2]) == {}
        for key in (keys.viewing, keys.owner):
            status, headers, _ = ask(where.port, f"/?key={key}")
            assert (status, headers["Location"]) == (303, "/")
            assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in headers["Set-Cookie"].split(";")}
            answer = json.loads(ask(where.port, "/owner.json", Cookie=f"{keys.cookie}={key}")[2])
            assert answer == ({"join": "JOIN LINE"} if key == keys.owner else {})
        assert "Set-Cookie" not in ask(where.port, "/?key=wrong")[1]


def test_a_page_that_was_asked_for_wants_a_key_from_everybody(tmp_path):
    where = asked_place("127.0.0.1:0")
    with page_at(where, tmp_path) as keys:
        for path in (*PATHS, "/events", "/nothing"):
            for shown in ({}, {"Cookie": f"{keys.cookie}=wrong"}, {"Authorization": "Bearer wrong"}):
                assert ask(where.port, path, **shown)[0] == 401
        seen = {"Cookie": f"{keys.cookie}={keys.viewing}", "Host": "runs.example"}
        assert {ask(where.port, path, **seen)[0] for path in (*PATHS, "/events")} == {200}
        assert ask(where.port, "/metrics", Authorization=f"Bearer {keys.viewing}")[0] == 200
        owner = {"Cookie": f"{keys.cookie}={keys.owner}"}
        assert json.loads(ask(where.port, "/owner.json", **owner)[2])["join"]
        assert json.loads(ask(where.port, "/owner.json", Host="runs.example", **owner)[2]) == {}, "not over a network"


def test_the_page_is_small_and_from_nowhere_else(tmp_path):
    where = default_place()
    with page_at(where, tmp_path):
        bodies = {path: ask(where.port, path)[2] for path in FILES}
        policy = ask(where.port)[1]["Content-Security-Policy"]
    assert sum(map(len, bodies.values())) < 60_000, "with the first event, below 100 kB"
    assert "default-src 'none'" in policy
    assert not re.findall(rb"(?:src|href|url)\W{1,2}(?:https?:)?//", b"".join(bodies.values()))


# A real run


METHODS = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "LOCK")
STRANGE = ("/pause", "/stop", "/control", "/..%2fprivate.json", "//private.json", "/files/", "/page.css/x", "/run.yaml")


def test_every_method_and_path_of_a_real_run_changes_nothing_and_tells_no_secret(tmp_path):
    spec = make_spec(stages=2, steps=12, eval={"interval": 4}, snapshots={"interval": 4})
    with coordinator(spec, tmp_path) as (leader, link):
        words = ("join", link, "--metrics", "127.0.0.1:0")
        taken = pmtrain("coordinator", "run.yaml", "--run-dir", "other", "--page", page_of(tmp_path), cwd=tmp_path)
        assert taken.returncode == 3
        assert len(taken.stderr.splitlines()) == 2
        assert not (tmp_path / "other").exists(), "nothing was begun"
        host, port = page_of(tmp_path).split(":")
        assert host == "127.0.0.1"
        peers = [begin(*words, "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        answers = [ask(int(port), path, method) for method in METHODS for path in (*PATHS, "/events", *STRANGE)]
        assert {status for status, _, _ in answers} == {405}
        strange = [ask(int(port), path) for path in STRANGE]
        assert {status for status, _, _ in strange} == {404}
        stream = socket.create_connection((host, int(port)), timeout=60)
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers += strange + [ask(int(port), path, method) for method in ("GET", "HEAD") for path in PATHS]
        for process in (*peers, leader):
            code, told = ends(process)
            assert code == 0, told
        heard = b"".join(iter(lambda: stream.recv(1 << 16), b""))
    private = json.loads((tmp_path / "run" / "private.json").read_text())
    key = (tmp_path / "run" / "page").read_text().partition("key=")[2].strip()
    secrets = [private["token"], private["owner"], private["peers_key"], key, link.partition("#")[2]]
    said = b"".join([heard, *(body + repr(headers).encode() for _, headers, body in answers)]).decode()
    assert not [secret for secret in secrets if secret in said]
    assert "127.0.0.1" not in said.replace("join 127.0.0.1", "")
    assert '"ended":"done"' in said, "viewers are told the end"
    assert '"kind":"run_done"' in said


def page_of(folder: Path) -> str:
    """HOST:PORT of a run's page."""
    text = wait_for(lambda: (folder / "run" / "page").exists() and (folder / "run" / "page").read_text(), "no page")
    return text.removeprefix("http://").partition("/")[0]


def test_no_page(tmp_path):
    import yaml

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(make_spec(stages=2).model_dump(mode="json")))
    refused = pmtrain("coordinator", "run.yaml", "--no-page", "--page", "127.0.0.1:0", cwd=tmp_path)
    assert refused.returncode == 2
    refused = pmtrain("coordinator", "run.yaml", "--page", "7421", cwd=tmp_path)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 2
    process = begin(
        *("coordinator", "run.yaml", "--host", "127.0.0.1", "--port", 0, "--run-dir", "run", "--no-page"), cwd=tmp_path
    )
    try:
        wait_for((tmp_path / "run" / "link").exists, "no link")
        time.sleep(0.1)
        assert not (tmp_path / "run" / "page").exists()
    finally:
        process.kill()
        process.wait(PATIENCE)
