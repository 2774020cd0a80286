"""`coordinator --notify`: which events make a message, and that it arrives or fails without harm, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import make_spec
from door_tools import in_loop
from machine_bench import Bench, to_step
from starting import begin
from test_run import ends, wait_for_line
from told import events
from waiting import wait_for

from protomodels_cli import timeouts
from protomodels_cli.coordinator import notices as n
from protomodels_cli.coordinator import reasons
from protomodels_cli.coordinator.alarms import LongWait, alarm_of
from protomodels_cli.errors import EXIT_SPEC, OptionError
from protomodels_cli.observe.notify import Notifier, parse_target, send

SECRET = "topic-that-nobody-guesses"


class Server(ThreadingHTTPServer):
    """Takes messages, after it has refused so many."""

    def __init__(self, refuses: int = 0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.came: list[tuple[str, dict[str, str], str]] = []
        self.asked, self.refuses = 0, refuses

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked += 1
        if self.server.asked > self.server.refuses:
            self.server.came.append((self.path, dict(self.headers), body))
        self.send_response(200 if self.server.asked > self.server.refuses else 503)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def server(refuses: int = 0) -> Iterator[Server]:
    with Server(refuses) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield serving
        finally:
            serving.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("https://ntfy.sh/friends", "ntfy"),
        ("http://192.168.1.5:8080/friends", "ntfy"),
        ("https://discord.com/api/webhooks/1/a", "discord"),
        ("exec:echo told", "command"),
    ],
)
def test_targets(text, kind):
    target = parse_target(text)
    assert target.kind == kind
    assert "friends" not in target.shown
    assert "webhooks" not in target.shown


@pytest.mark.parametrize(
    "text",
    [
        "ntfy.sh/x",
        "https://",
        "https://ntfy.sh",
        "ftp://a/b",
        "http://example.org/x",
        "exec:",
        "exec:no-such-one",
        "exec:'",
    ],
)
def test_what_is_no_target_is_refused_and_never_shown(text):
    with pytest.raises(OptionError) as refused:
        parse_target(text)
    assert (refused.value.kind, refused.value.exit_code) == ("notify", EXIT_SPEC)
    assert "/x" not in str(refused.value)


def test_a_message_as_each_of_them_takes_it(tmp_path: Path):
    with server() as serving:
        send(parse_target(serving.url("/friends")), "my run", "spare: ü")
        send(parse_target(serving.url("/api/webhooks/1/a")), "my run", "done")
    (path, headers, body), (_, _, webhook) = serving.came
    assert (path, headers["Title"], body) == ("/friends", "my run", "spare: ü")
    assert "done" in json.loads(webhook)["content"]
    script = tmp_path / "script"
    script.write_text(f'#!/bin/sh\nprintf %s "$1" > {tmp_path}/said\n')
    script.chmod(0o755)
    send(parse_target(f"exec:{script}"), "my run", "it's; $(here)")
    assert (tmp_path / "said").read_text() == "my run: it's; $(here)", "no shell reads it"


@pytest.mark.parametrize("fails", ["refused", "closed", "command"])
def test_what_fails_is_an_error_without_the_url(fails):
    with server(refuses=9) as serving:
        url = serving.url(f"/{SECRET}")
        if fails == "refused":
            with pytest.raises(OSError, match="503") as failed:
                send(parse_target(url), "run", "text")
    if fails == "closed":
        with pytest.raises(OSError, match="refused") as failed:
            send(parse_target(url), "run", "text")
    if fails == "command":
        with pytest.raises(OSError, match="1") as failed:
            send(parse_target("exec:false"), "run", "text")
    assert SECRET not in str(failed.value)


@in_loop
async def test_a_message_is_tried_a_few_times_and_a_failure_is_told_once(monkeypatch):
    monkeypatch.setattr(timeouts, "NOTIFY_AGAIN", (0.0, 0.0))
    told: list[tuple[str, str]] = []
    with server(refuses=2) as serving:
        notifier = Notifier(parse_target(serving.url(f"/{SECRET}")), "run", lambda *why: told.append(why))
        notifier("one")
        notifier("two")
        await notifier.close()
    assert [body for *_, body in serving.came] == ["one", "two"]
    assert told == []
    with server(refuses=99) as serving:
        notifier = Notifier(parse_target(serving.url(f"/{SECRET}")), "run", lambda *why: told.append(why))
        for text in ("one", "two", "three"):
            notifier(text)
        await notifier.close()
    assert serving.asked == 9
    [(shown, why)] = told
    assert SECRET not in shown + why


@in_loop
async def test_a_target_that_hangs_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(timeouts, "NOTIFY_LAST", 0.2)
    notifier = Notifier(parse_target("exec:sleep 2"), "run", lambda *why: None)
    began = asyncio.get_running_loop().time()
    notifier("text")
    await notifier.close()
    assert asyncio.get_running_loop().time() - began < 1.5


# What makes a message


@pytest.mark.parametrize(
    ("notice", "is_alarm"),
    [
        (n.NoSpareLeft(), True),
        (n.RunDone(9), True),
        (n.RunStopped(9, "run"), True),
        (n.Interrupted(9, "run"), True),
        (n.Ended("disk", "full"), True),
        (n.Paused(reasons.NonFinite(3, 9, 1e-3), "run"), True),
        (n.Paused(reasons.ByOwner(), "run"), False),
        (n.PeerJoined("p1", "desk", "cpu"), False),
        (n.PeerLeft("p1", "desk", 0), False),
        (n.NotifyFailed("here", "no"), False),
    ],
)
def test_what_the_owner_is_told_of_elsewhere(notice, is_alarm):
    assert (alarm_of(notice) is not None) == is_alarm


def test_a_long_wait_is_told_once_and_so_is_its_end():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1, 2)
    to_step(b, 3)
    wait, now = LongWait(), 1000.0
    look = lambda after: wait.look(b.state, now + after)  # noqa: E731
    assert look(0) is None
    b.lose(b.state.history.holders[0])
    b.lose(b.state.history.holders[0])
    b.lose("p2")
    assert not b.state.placed
    assert look(1) is None
    assert look(timeouts.NOTIFY_WAIT) is None
    assert look(timeouts.NOTIFY_WAIT + 2) is not None
    assert look(2 * timeouts.NOTIFY_WAIT) is None
    b.join(3, 4)
    to_step(b, 4)
    assert look(3 * timeouts.NOTIFY_WAIT) is not None
    assert look(4 * timeouts.NOTIFY_WAIT) is None
    b.lose(b.state.history.holders[0])
    assert look(5 * timeouts.NOTIFY_WAIT) is None


@pytest.mark.parametrize("reached", [True, False])
def test_a_real_run_tells_of_its_end_and_a_dead_target_changes_nothing(tmp_path: Path, reached: bool):
    spec = make_spec(name="friends", stages=1, steps=2)
    (tmp_path / "run.yaml").write_text(json.dumps(spec.model_dump(mode="json")))
    with server() as serving:
        url = serving.url(f"/{SECRET}")
        if not reached:
            url = url.replace("127.0.0.1", "127.0.0.2").replace(str(serving.server_address[1]), "1")
        options = "--host", "127.0.0.1", "--port", 0, "--run-dir", "run", "--no-page", "--notify", url, "-v"
        leader = begin("coordinator", "run.yaml", *options, cwd=tmp_path)
        peer = begin("join", wait_for_line(leader, r"pmtrain join '(pm://\S+)'"), "--dir", tmp_path / "p", cwd=tmp_path)
        for process in (peer, leader):
            code, said = ends(process)
            assert code == 0, said
        if reached:
            wait_for(lambda: serving.came)
            (path, headers, _), *_ = serving.came
            assert (path, headers["Title"]) == (f"/{SECRET}", "friends")
    assert len(events(tmp_path / "run", "notify_failed")) == (not reached)
    assert SECRET not in said
    assert SECRET not in (tmp_path / "run" / "coordinator.log").read_text()
    assert (tmp_path / "run" / "notify").stat().st_mode & 0o077 == 0
