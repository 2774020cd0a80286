"""The one place that checks how the errors of the wire, the run directory and the journal read. Each is triggered for
real; everywhere else kinds and named values are checked."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import socket
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import grpc
import pytest
from conftest import make_spec
from door_tools import HERE, QUICK, TICKET, a_door, a_server, link_to
from waiting import PATIENCE

from protomodels_cli import __version__
from protomodels_cli.coordinator import bad_requests as bad
from protomodels_cli.coordinator.door import Door, cannot_listen
from protomodels_cli.coordinator.history import Synced, beginning
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.journal import Journal, create, read
from protomodels_cli.coordinator.rebuild import rebuild
from protomodels_cli.coordinator.run_dir import open_run_dir, owner_secret, private_of
from protomodels_cli.coordinator.snapshots.copies import Copies
from protomodels_cli.coordinator.trust import believe
from protomodels_cli.errors import UserError
from protomodels_cli.wire import tls
from protomodels_cli.wire.client import in_words
from protomodels_cli.wire.join_link import JoinLink, fetch_authority, refusal
from protomodels_cli.wire.relay import RelayedAcceptor, dial_relay

GOOD = "pm://example.org:7070/" + "t" * 22 + "#" + "f" * 43
AGAIN = "copy the whole link again from the coordinator's output"
RUN = RunIdentity("r" * 43, "s" * 64)


def said(work: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(UserError) as error:
        work()
    what, _, fix = str(error.value).partition("\n    fix:  ")
    assert error.value.kind
    for text in (what, fix):
        assert not re.search(r"\b(it is|its|they|their|anew)\b", text), "name what is meant"
        assert not text.endswith(".")
    return what, fix


async def asaid(work: Awaitable[object]) -> tuple[str, str]:
    with pytest.raises(UserError) as error:
        await work
    return said(lambda: (_ for _ in ()).throw(error.value))


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("", "the link is empty", AGAIN),
        ("pm" + "x" * 600, "the link has 602 characters, and may have 512 at most", AGAIN),
        (GOOD[:30] + " " + GOOD[30:], "the link has a space or a line break inside", "paste the link on one line"),
        (GOOD.replace("pm:", "https:"), "the link begins with 'https', and must begin with pm://", AGAIN),
        (GOOD.replace("example.org", ""), "the host is missing after pm://", AGAIN),
        (GOOD.replace("example.org", "-o"), "the host '-o' is neither a name nor an address", AGAIN),
        (
            GOOD.replace("example.org", "2001:db8::1"),
            "the host '2001:db8::1:7070' has several colons",
            "write an IPv6 address in brackets",
        ),
        (
            GOOD.replace("example.org", "[2001:db8::1"),
            "the host '[2001:db8::1:7070' opens a bracket and does not close it",
            AGAIN,
        ),
        (GOOD.replace("example.org", "[1:::1]"), "the host '1:::1' is not an IPv6 address", AGAIN),
        (
            GOOD.replace("example.org", "[fe80::1%eth0]"),
            "the host 'fe80::1%eth0' names a network card, which other machines do not have",
            AGAIN,
        ),
        (GOOD.replace(":7070", ""), "the port is missing after the host 'example.org'", AGAIN),
        (GOOD.replace("7070", "http"), "the port is 'http', and must be a number", AGAIN),
        (GOOD.replace("7070", "70700"), "the port is 70700, and must be between 1 and 65535", AGAIN),
        ("pm://example.org:7070", "the token is missing after the port", AGAIN),
        (GOOD.replace("t" * 22, "t" * 12), "the token has 12 characters, and must have 22", AGAIN),
        (GOOD + ".", "the fingerprint may have letters, digits, - and _ only", AGAIN),
        (
            GOOD.partition("#")[0],
            "the fingerprint is missing after the token",
            "copy the whole link and put it in quotes, because a shell may take # for the start of a comment",
        ),
    ],
)
def test_a_join_link(text: str, what: str, fix: str):
    form = "a join link has the form pm://HOST:PORT/TOKEN#FINGERPRINT"
    assert said(lambda: JoinLink.parse(text)) == (f"join link: {what}", f"{fix}; {form}")


CHECK = "check the host and the port; if both are right, the coordinator may have too many connections: try again in a "
NO_ROOM = "try again in a minute; the limit is {} in the spec"


@pytest.mark.parametrize(
    ("answer", "what", "fix"),
    [
        (b"HTTP/1.1 400\r\n\r\n", "answers, but is not a pmtrain coordinator", f"{CHECK}minute"),
        (b"", "closed the connection without an answer", f"{CHECK}minute"),
        (
            refusal("too_many_connections"),
            "has as many connections as the spec of the run allows",
            NO_ROOM.format("limits.connections"),
        ),
        (
            refusal("too_many_from_one_address"),
            "has as many connections from this address as the spec of the run allows",
            NO_ROOM.format("limits.connections_per_address"),
        ),
    ],
)
def test_an_address_without_a_coordinator_or_without_room(authority: tls.Authority, answer: bytes, what: str, fix: str):
    async def story() -> None:
        async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(answer)

        async with a_server(other) as port:
            assert await asaid(fetch_authority(link_to(port, authority), 5)) == (f"127.0.0.1:{port} {what}", fix)

    asyncio.run(story())


def test_an_address_that_cannot_be_reached(authority: tls.Authority):
    async def story() -> None:
        with socket.create_server((HERE, 0)) as free:
            port = free.getsockname()[1]
        assert await asaid(fetch_authority(link_to(port, authority), 5)) == (
            f"nothing listens at 127.0.0.1:{port}",
            "check that the coordinator runs, and that the port is right",
        )
        assert await asaid(fetch_authority(link_to(port, authority, "no-such-host.invalid"), 5)) == (
            "cannot resolve the host 'no-such-host.invalid'",
            "check the spelling of the host, and this machine's connection",
        )

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(60)

        async with a_server(silent) as port:
            assert await asaid(fetch_authority(link_to(port, authority), 0.2)) == (
                f"no answer from 127.0.0.1:{port} within 200 ms",
                "check that the coordinator's firewall and router let the port through",
            )

    asyncio.run(story())


def test_another_coordinator_at_the_address(authority: tls.Authority):
    async def story() -> None:
        other = tls.new_authority()
        async with a_door(other) as (_, port):
            assert await asaid(fetch_authority(link_to(port, authority), 5)) == (
                f"127.0.0.1:{port} is not the coordinator that made this link: the fingerprint is {other.fingerprint}, "
                f"and the link says {authority.fingerprint} (the token was not sent)",
                "ask the run's owner for a fresh join link; if the fresh link is the same as this one, someone "
                "intercepts the connection: do not join",
            )

    asyncio.run(story())


def test_an_authority(authority: tls.Authority, tmp_path: Path):
    fix = "restore ca.pem and ca.key from a copy; without them the peers of this run cannot come back"
    begins = f"cannot use the run's CA in {tmp_path}:"
    assert said(lambda: tls.Authority.load(tmp_path)) == (f"{begins} ca.pem: No such file or directory", fix)
    authority.save(tmp_path)
    assert said(lambda: authority.save(tmp_path)) == (
        f"{tmp_path} already has the run's CA",
        "keep that CA: a new one would lock every peer out of the run",
    )
    (tmp_path / "ca.key").write_bytes(tls.new_key())
    assert said(lambda: tls.Authority.load(tmp_path)) == (f"{begins} ca.key is not the key of ca.pem", fix)
    (tmp_path / "ca.key").write_bytes(b"x")
    assert said(lambda: tls.Authority.load(tmp_path)) == (f"{begins} ca.key: not a private key in PEM form", fix)
    (tmp_path / "ca.key").write_bytes(b"x" * 99_999)
    what = f"{begins} ca.key: a private key has 16 KiB at most, and this file has more"
    assert said(lambda: tls.Authority.load(tmp_path)) == (what, fix)


def test_a_relay(authority: tls.Authority):
    async def story() -> None:
        async with a_door(authority) as (door, port):
            relay = f"relay 127.0.0.1:{port}:"
            unknown = f"{relay} the ticket is not valid, or was withdrawn", "join the run again"
            assert await asaid(dial_relay(HERE, port, TICKET, "dial")) == unknown
            door.allow(TICKET)
            missing = f"{relay} the other peer did not connect in time", "wait: pmtrain retries by itself"
            assert await asaid(dial_relay(HERE, port, TICKET, "dial")) == missing
        told: list[str | None] = []
        acceptor = RelayedAcceptor((HERE, port), TICKET, (HERE, 1), told.append)
        acceptor.start()
        async with asyncio.timeout(PATIENCE):
            while not told:
                await asyncio.sleep(0.01)
        await acceptor.close()
        assert re.fullmatch(rf"relay 127\.0\.0\.1:{port}: Connect call failed .*", told[0] or "")

        async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello\n")

        async with a_server(other) as port:
            assert await asaid(dial_relay(HERE, port, TICKET, "dial")) == (
                f"relay 127.0.0.1:{port}: closed the connection, or is not a relay of pmtrain",
                "check that the address is the coordinator's",
            )

    asyncio.run(story())


def test_a_port_that_cannot_be_used(authority: tls.Authority):
    async def story() -> None:
        async with a_door(authority) as (_, port):
            assert await asaid(Door(b"", (HERE, 1), QUICK).open(HERE, port)) == (
                f"cannot listen on 127.0.0.1:{port}: another program uses port {port}",
                "stop the other program, or choose another --port",
            )
        assert await asaid(Door(b"", (HERE, 1), QUICK).open("192.0.2.1", 7420)) == (
            "cannot listen on 192.0.2.1:7420: this machine has no address 192.0.2.1",
            "choose one of this machine's addresses, or 0.0.0.0 for all of them",
        )

    asyncio.run(story())
    for error, what, fix in (
        (OSError(errno.EACCES, "x"), "port 80 is reserved for the system", "choose a --port of 1024 or more"),
        (OSError(errno.ENOBUFS, "No buffer space"), "No buffer space", "choose another address or port"),
    ):
        failure = cannot_listen(error, "0.0.0.0", 80)
        assert str(failure) == f"cannot listen on 0.0.0.0:80: {what}\n    fix:  {fix}"
        assert failure.kind


def test_a_run_directory(tmp_path: Path):
    spec, path, other = make_spec(), tmp_path / "run", "choose another --dir"
    assert said(lambda: open_run_dir(tmp_path / "none", None, tmp_path)) == (
        f"{tmp_path / 'none'} holds no run",
        "name the directory of a run with --dir, or give the spec of a new run",
    )
    (tmp_path / "metrics.jsonl").touch()
    what = f"{tmp_path} holds the metrics of another run"
    assert said(lambda: open_run_dir(tmp_path, spec, tmp_path)) == (what, f"{other}; pmtrain overwrites no run")
    what, fix = f"{path} is not a run directory", "name the directory of a run that was begun on this machine"
    assert said(lambda: owner_secret(path)) == (what, fix)
    folder = open_run_dir(path, spec, tmp_path)
    assert said(lambda: open_run_dir(path, spec, tmp_path)) == (
        f"another coordinator is running in {path}",
        f"stop that coordinator first (`pmtrain stop {path}`), or {other}",
    )
    folder.lock.close()
    create(path / "journal.sqlite", folder.identity, beginning(""))
    assert said(lambda: open_run_dir(path, make_spec(steps=7), tmp_path)) == (
        f"{path} holds a run with another spec",
        f"{other}, or leave out the spec to continue the run that is there",
    )
    private = json.loads((path / "private.json").read_text())
    (path / "private.json").write_text(json.dumps({**private, "format": 1}))
    assert said(lambda: private_of(path)) == (
        f"the run directory {path} has format 1, and pmtrain {__version__} reads format 3",
        f"continue with the version of pmtrain that began the run, or begin a new run in another {other[15:]}",
    )
    (path / "private.json").write_text(json.dumps({name: private[name] for name in private if name != "owner"}))
    what = f"cannot read {path / 'private.json'}: damaged (owner: Field required)"
    assert said(lambda: owner_secret(path)) == (what, f"restore {path / 'private.json'} from a copy")
    (path / "private.json").unlink()
    (path / "private.json").mkdir()
    assert said(lambda: owner_secret(path)) == (
        f"cannot read {path / 'private.json'}, which only the run's owner can",
        "name the run's directory, as the user who started the coordinator",
    )
    (path / "private.json").rmdir()
    what = f"cannot read {path / 'private.json'}: No such file or directory"
    assert said(lambda: private_of(path)) == (what, f"restore {path / 'private.json'} from a copy")
    (tmp_path / "file").touch()
    what = f"cannot write to {tmp_path / 'file' / 'run'}: Not a directory"
    assert said(lambda: open_run_dir(tmp_path / "file" / "run", spec, tmp_path)) == (what, other)


def edited(*statements: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            for statement in statements:
                db.execute(statement)

    return edit


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (Path.unlink, "does not exist"),
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.write_bytes(b"text"), "is not an SQLite database"),
        (lambda p: p.write_bytes(b"SQLite format 3\0..."), "is damaged (SQLite: file is not a database)"),
        (edited("DELETE FROM records WHERE id = 1"), "is incomplete: row 1 is missing"),
        (edited("DELETE FROM records WHERE id = 2"), "is incomplete: the file ends with row 1, and row 2 was written"),
        (edited("UPDATE records SET at = 7 WHERE id = 2"), "was changed: hash mismatch in row 2"),
        (edited("UPDATE folded SET at = 7"), "was changed: hash mismatch in the folded history"),
        (edited("DELETE FROM head"), "has no newest row"),
        (
            edited("UPDATE identity SET body = replace(body, 'rrr', 'qqq')"),
            "belongs to another run (authority qqqqqqqq…, and this run has rrrrrrrr…)",
        ),
        (
            edited("UPDATE identity SET body = replace(body, 'sss', 'ttt')"),
            None,
        ),
        (
            edited("UPDATE identity SET body = replace(body, ':3', ':4')"),
            "has format 4, and this pmtrain reads format 3",
        ),
        (
            edited("UPDATE identity SET body = '{}'"),
            "has an identity that this pmtrain cannot read: Field required (run)",
        ),
    ],
)
def test_a_journal(tmp_path: Path, damage: Callable[[Path], None], what: str | None):
    path = tmp_path / "journal.sqlite"
    create(path, RUN, beginning(""))
    journal = Journal(path, RUN)
    journal.append([Synced(1)], 1.0)
    journal.append([Synced(2)], 2.0)
    journal.close()
    damage(path)
    found, fix = said(lambda: read(path, RUN))
    if what is not None:
        assert found == f"cannot use the journal: {path} {what}"
    else:
        assert re.search(r"was made with another spec \(hash \w{8}…, and this run has s{8}…\)$", found)
    assert fix == (
        f"restore the run's own journal from a copy, or run `pmtrain coordinator --rebuild --dir {tmp_path}`: "
        "a new journal is made from the newest complete snapshot (without one, the run starts over), and nothing "
        "is deleted"
    )


def test_a_journal_beside_newer_files_and_a_rebuild_without_need(tmp_path: Path):
    create(tmp_path / "journal.sqlite", RUN, beginning(""))
    assert said(lambda: rebuild(tmp_path, RUN, beginning(""), print)) == (
        f"nothing to rebuild: {tmp_path / 'journal.sqlite'} is complete, up to step 0",
        f"continue with `pmtrain coordinator --resume --dir {tmp_path}`",
    )
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "lineage": 1, "step": 4}\n')
    assert said(lambda: believe(tmp_path, RUN))[0] == (
        f"cannot use the journal: {tmp_path / 'journal.sqlite'} is older than {tmp_path / 'metrics.jsonl'}: the "
        "journal ends with step 0 of lineage 1, the metrics with step 4 of lineage 1"
    )
    (tmp_path / "snapshots" / "0001-00000003").mkdir(parents=True)
    assert said(lambda: believe(tmp_path, RUN))[0] == (
        f"cannot use the journal: {tmp_path / 'journal.sqlite'} is older than "
        f"{tmp_path / 'snapshots' / '0001-00000003'}, which the journal does not know"
    )


def test_a_store_that_is_not_known():
    what, fix = said(lambda: Copies("nosuch://bucket", "home"))
    assert what.startswith("cannot use snapshots.copy_to = nosuch://bucket: ")
    assert fix == "install the package for that kind of URL (s3fs for s3://), or choose another snapshots.copy_to"


BAD_REQUESTS: list[tuple[bad.Reason, str]] = [
    (bad.UnknownPart(3), "no snapshot of this run has a part with that hash for stage 3"),
    (bad.NotHolder(None), "this peer holds no stage in the current generation"),
    (bad.NotHolder(3), "this peer does not hold stage 3"),
    (bad.SnapshotGivenUp(6), "the snapshot at step 6 was given up: the upload is not needed any more"),
    (bad.TooManyBytes(5000), "the upload has more bytes than announced (5,000)"),
    (bad.OtherBytes(), "the upload does not have the size and hash that were announced (hash mismatch)"),
    (bad.BasisNotRequested(6), "the coordinator did not ask this stage for a basis after step 6"),
    (bad.BasisSize(1024, 2048), "a basis of this run has 2 KiB, not 1 KiB"),
    (bad.InvalidBasis("not finite"), "invalid basis: not finite"),
    (bad.InvalidMetrics(), "the metrics of a basis must be a JSON object of numbers"),
    (bad.NoHeader(), "an upload must begin with a header"),
    (bad.InvalidOffset(2**63), "the offset 9,223,372,036,854,775,808 is beyond the end of any file"),
    (bad.InvalidRegistration("too many parts"), "invalid registration: too many parts"),
    (bad.NotAMessage(20, 1000), "these bytes are not a message of this call"),
    (bad.NotAMessage(2048, 1024), "a message of this call has 1 KiB at most, not 2 KiB"),
    (bad.FramesNotRequested(), "the coordinator did not ask this peer for these messages, or asks no more"),
    (bad.UnknownAction(7), "a run can be paused, resumed or stopped, and action 7 is none of these"),
]


@pytest.mark.parametrize(("reason", "text"), BAD_REQUESTS, ids=lambda x: getattr(x, "kind", ""))
def test_a_bad_request(reason: bad.Reason, text: str):
    assert text == str(bad.BadRequest(reason))


def test_every_bad_request_is_in_the_table_and_has_a_kind_of_its_own():
    kinds = {type(reason): reason.kind for reason, _ in BAD_REQUESTS}
    assert (kinds.keys(), len(set(kinds.values()))) == (set(get_args(bad.Reason)), len(kinds))


@pytest.mark.parametrize(
    ("code", "details", "why"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", "the coordinator closed the connection"),
        (grpc.StatusCode.UNAVAILABLE, "Connection refused\nmore", "Connection refused"),
    ],
)
def test_a_call_that_failed(code: grpc.StatusCode, details: str, why: str):
    error = in_words(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))
    fix = "check this machine's connection, and that the coordinator still runs"
    assert said(lambda: (_ for _ in ()).throw(error)) == (f"cannot reach the coordinator: {why}", fix)
