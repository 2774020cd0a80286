"""Tokens of the owner's own making, and peers that are kicked: a table, and real processes over a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from conftest import make_spec
from pool import Pool
from starting import begin
from waiting import wait_for

from protomodels_cli.cli.json_formats import PRINTED
from protomodels_cli.cli.output import FORMAT
from protomodels_cli.coordinator import refusals
from protomodels_cli.coordinator.doorkeeper import Doorkeeper
from protomodels_cli.coordinator.run_dir import open_run_dir, owner_secret
from protomodels_cli.coordinator.tokens import MOST_TOKENS, GuestList, Token, hash_of
from protomodels_cli.errors import EXIT_SPEC, UserError
from protomodels_cli.launch.local import start
from protomodels_cli.wire.client import Operator, Refused, operator
from protomodels_cli.wire.join_link import JoinLink, LinkError, read_link
from protomodels_cli.worker.own_key import own_key

T = TypeVar("T")
A = Token("a", hash_of("x" * 22), made=0.0, expires=100.0, uses=2)


@pytest.mark.parametrize(
    ("token", "now", "end"),
    [
        (A, 99.0, None),
        (A, 100.0, "expired"),
        (replace(A, expires=None), 1e12, None),
        (replace(A, guests=(("k", "p1"),)), 1.0, None),
        (replace(A, guests=(("k", "p1"), ("l", "p2"))), 1.0, "used"),
        (replace(A, revoked=True), 1.0, "revoked"),
    ],
)
def test_how_a_token_ends(token: Token, now: float, end: str | None):
    assert token.end(now) == end


def test_a_guest_list():
    guests = GuestList((A,)).use("a", "k", "p1")
    assert guests.find("x" * 22) == guests.named("a") == guests.token_of("p1")
    assert guests.find("y" * 22) is None
    assert guests.token_of("p2") is None
    assert guests.named("a").peer_with("k") == "p1"  # type: ignore[union-attr]
    kicked = guests.kick("p1")
    assert kicked.kicked == ("p1",)
    assert kicked.named("a").revoked  # type: ignore[union-attr]
    assert kicked.kick("p1") == kicked
    full = GuestList(tuple(replace(A, id=str(i)) for i in range(MOST_TOKENS)))
    with pytest.raises(ValueError, match=str(MOST_TOKENS)):
        full.add(A, 1.0)
    assert full.add(A, 101.0).tokens == (A,), "those that have ended make room"


def test_a_doorkeeper_keeps_hashes_over_a_restart_and_the_run_its_own_token(tmp_path: Path):
    folder = open_run_dir(tmp_path / "run", make_spec(), tmp_path)
    folder.write_link("127.0.0.1", 7420)
    (tmp_path / "run" / "journal.sqlite").touch()  # which makes it a run to continue
    now = 1000.0
    keeper = Doorkeeper(folder, lambda: now)
    made, token = keeper.create(uses=1, seconds=60.0)
    first = keeper.admit(token, b"key 1")
    assert isinstance(first, str)
    assert keeper.admit(token, b"key 1") == first, "the same peer again"
    assert keeper.admit(token, b"key 2") == refusals.EndedToken("used")
    assert keeper.may_come(token) is None, "its peer may look on"
    of_the_run = keeper.admit(keeper.token, b"key 1")
    assert of_the_run != first
    assert keeper.joined_with(first) == (made.id, "")
    assert keeper.joined_with(str(of_the_run)) == ("run", "")
    secret, old = folder.secret_of(first, 2000), keeper.token
    assert keeper.may_call(first, secret) is None
    assert keeper.may_call(first, secret.replace("2000", "9999", 1)) == refusals.NotEnrolled(), "its end is signed too"
    for nonsense in ("", ".", "2000.", "x.y", "²." + secret, "1" * 5000):
        assert keeper.may_call(first, nonsense) == refusals.NotEnrolled()
    late = Doorkeeper(folder, lambda: 2000.0)
    assert late.may_call(first, secret) == refusals.CertificateExpired()
    assert late.may_call(first, folder.secret_of(first, 2001)) is None, "it was renewed"
    assert keeper.kick(first).id == "", "nobody could join with it any more anyway"
    folder.lock.close()
    content = (tmp_path / "run" / "private.json").read_text()
    assert token not in content
    assert hash_of(token) in content
    assert (tmp_path / "run" / "private.json").stat().st_mode & 0o777 == 0o600

    again = open_run_dir(tmp_path / "run", None, tmp_path)
    keeper = Doorkeeper(again, lambda: now)
    assert keeper.token == old
    assert keeper.may_call(first, secret) == refusals.Kicked()
    assert keeper.may_come(token) == refusals.EndedToken("revoked")
    now = 1061.0
    _, second = keeper.create(uses=5, seconds=None)
    assert keeper.may_come(second) is None
    replaced = keeper.revoke("run")
    assert replaced is not None
    assert keeper.may_come(old) == refusals.WrongToken()
    assert keeper.may_come(replaced.new) is None
    link = again.last_link()
    assert link is not None
    assert link.token == replaced.new
    assert keeper.revoke("nonsense") is None
    assert made.id in {one.id for one in keeper.guests.tokens}
    again.lock.close()


def pmtrain(*words: Any, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "protomodels_cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=60)


def link_in(text: str) -> str:
    return next(word.strip("'") for word in text.split() if "pm://" in word)


def test_tokens_and_kicks_from_the_command_line_over_a_restart(pool: Pool, tmp_path: Path):
    spec = make_spec(stages=2, steps=2)  # which waits for a second peer until the end
    run = pool.start(spec, [])
    own = JoinLink.parse((run / "link").read_text())
    created = pmtrain("token", "create", run, "--lasts", "1h", "--format", "json")
    assert created.returncode == 0, created.stderr
    made = json.loads(created.stdout)
    assert made.pop("format") == FORMAT
    PRINTED["token create"].model.model_validate(made)
    assert made["seconds"] == 3600
    link = link_in(made["join"])
    assert JoinLink.parse(link).token != own.token

    def joins(i: int, with_link: str, **job: Any) -> None:
        pool.peers[i].start(kind="join", link=with_link, name=f"peer-{i}", dir=str(tmp_path / f"p{i}"), **job)

    def ask(what: Callable[[Operator], Awaitable[T]]) -> T:
        async def story() -> T:
            async with operator(JoinLink.parse((run / "link").read_text()), owner_secret(run)) as desk:
                return await what(desk)

        return asyncio.run(story())

    def is_in(name: str) -> bool:
        return name in {peer.name for peer in ask(lambda desk: desk.status()).peers}

    def is_back() -> bool:
        with contextlib.suppress(UserError):
            return ask(lambda desk: desk.status()) is not None
        return False

    joins(0, link)
    wait_for(lambda: is_in("peer-0"), "it did not get in")
    joins(1, link)
    refused = pool.peers[1].result()
    assert (refused["exit"], refused["reason"]) == (5, "token_ended")
    listed = pmtrain("token", "list", run).stdout
    assert "1 of 1 peer" in listed
    assert JoinLink.parse(link).token not in listed
    for_programs = json.loads(pmtrain("token", "list", run, "--format", "json").stdout)
    assert for_programs.pop("format") == FORMAT
    PRINTED["token list"].model.model_validate_json(json.dumps(for_programs))
    [of_the_run, of_mine] = for_programs["tokens"]
    assert (of_the_run["id"], of_the_run["uses"]) == ("run", 0)
    assert (of_mine["uses"], of_mine["used"], of_mine["ended"]) == (1, 1, "used")
    assert of_mine["peers"] == [peer.peer for peer in ask(lambda desk: desk.status()).peers]
    pool.peers[0].kill()
    joins(0, link)  # from the same folder: the same peer
    wait_for(lambda: is_in("peer-0"), "it did not get in again")
    assert [token.used for token in ask(lambda desk: desk.list_tokens()).tokens] == [0, 1]

    kicked = pmtrain("kick", run, "peer-0", "--yes")
    assert kicked.returncode == 0, kicked.stderr
    assert "pm://" not in kicked.stdout, "the run's own link stays: it came with another"
    ended = pool.peers[0].result()
    assert ended["exit"] == 5 or ended["exit"] == 3, ended
    pool.coordinator.kill()
    pool.coordinator.start(kind="coordinator", spec=spec.model_dump(mode="json"), run_dir=str(run))
    wait_for(is_back, "it did not come back")
    joins(0, link)
    assert pool.peers[0].result()["reason"] == "token_ended"
    joins(2, str(own))
    wait_for(lambda: is_in("peer-2"), "the run's own link still lets peers join")
    with pytest.raises(Refused) as error:
        ask(lambda desk: desk.kick("nobody"))
    assert error.value.kind == "no_such_peer"
    with begin("top", run, "--format", "json", cwd=tmp_path) as watch:
        assert json.loads(next(watch.stdout))["name"]
        again = link_in(pmtrain("kick", run, "peer-2", "--yes").stdout)
        then = ask(lambda desk: desk.status()).uptime_s
        assert any(json.loads(line)["uptime_s"] > then for line in watch.stdout), "it goes on with the new link"
        watch.kill()
    assert JoinLink.parse(again).token != own.token
    pool.peers[2].result()
    joins(2, str(own))
    assert pool.peers[2].result()["reason"] == "wrong_token", "it has the old link"
    joins(1, again)
    wait_for(lambda: is_in("peer-1"), "the new link lets peers join")
    [folder] = (tmp_path / "p1").glob("*-*/")
    (folder / "link").write_text(f"{own}\n")  # as of a peer that joined before: its own right shows it what is going on
    assert pmtrain("status", folder, cwd=tmp_path).returncode == 0
    assert own.token not in (run / "private.json").read_text()
    json.loads((run / "private.json").read_text())


def test_a_link_can_be_read_from_a_file_or_the_environment(tmp_path: Path):
    link = JoinLink("127.0.0.1", 1, "t" * 22, "f" * 43)
    (tmp_path / "link").write_text(f"{link}\n")
    assert read_link(str(tmp_path / "link")) == read_link(str(link)) == link
    for wrong in (str(tmp_path), str(tmp_path / "nothing")):
        with pytest.raises(LinkError):
            read_link(wrong)
    (tmp_path / "link").write_bytes(b"\xff\xfe")
    with pytest.raises(LinkError) as error:
        read_link(str(tmp_path / "link"))
    assert error.value.kind == "link_file"
    done = pmtrain("join", PMTRAIN_LINK=f"pm://127.0.0.1:0/{link.token}#{link.fingerprint}")
    assert done.returncode == EXIT_SPEC
    assert "port" in done.stderr, "it was read"
    assert link.token not in done.stdout + done.stderr


def test_no_command_line_of_a_peer_has_the_link(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    secret = "pm://127.0.0.1:1/" + "s" * 22
    process = start(tmp_path, "peer", ["join"], link=secret)
    try:
        assert b"s" * 22 not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.kill()
        process.wait()


def test_a_key_is_kept_for_one_peer_of_a_folder(tmp_path: Path):
    with own_key(tmp_path / "a", "f" * 43) as first, own_key(tmp_path / "a", "f" * 43) as beside:
        assert beside != first
        [kept] = (tmp_path / "a").glob("*.key") or (tmp_path / "a").glob(".*.key")
        assert kept.stat().st_mode & 0o777 == 0o600
    with own_key(tmp_path / "a", "f" * 43) as again, own_key(tmp_path / "a", "g" * 43) as of_another_run:
        assert again == first
        assert of_another_run != first
    kept.write_text("damaged")
    with own_key(tmp_path / "a", "f" * 43) as new:
        assert new != first
