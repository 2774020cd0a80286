"""Every call of the protocol × everybody who must not make it, against a real coordinator and a real peer's port.

The calls are those of the protocol's own list: a new one fails here until the table has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import make_spec
from given_tokens import link_for
from guest import Guest, a_guest
from pool import Pool
from told import wait_for_event
from waiting import PATIENCE, until

from protomodels_cli import PROTOCOL
from protomodels_cli.coordinator import gate
from protomodels_cli.coordinator.run_dir import open_run_dir, private_of
from protomodels_cli.spec import spec_from
from protomodels_cli.spec.load import for_peers
from protomodels_cli.wire.channels import CHANNEL_OPTIONS
from protomodels_cli.wire.client import Metadata, coordinator_channel, operator
from protomodels_cli.wire.join_link import JoinLink, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import Authority, Identity, new_authority, new_key, peer_name, public_key_of
from protomodels_cli.worker import listener
from protomodels_cli.worker.links import LINK, Link
from protomodels_cli.worker.listener import Listener

CALLS = {
    f"/{method.containing_service.full_name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
SHOWS = {  # what each call of the coordinator's must show; written out here, so that gate.py cannot agree with itself
    "/pmtrain.Peering/Enrol": "token",
    "/pmtrain.Peering/Renew": "peer",
    "/pmtrain.Peering/CheckReachability": "peer",
    "/pmtrain.Peering/Session": "peer",
    "/pmtrain.Peering/Offer": "peer",
    "/pmtrain.Peering/Upload": "peer",
    "/pmtrain.Peering/Fetch": "peer",
    "/pmtrain.Peering/Locate": "peer",
    "/pmtrain.Peering/Measure": "peer",
    "/pmtrain.Operator/Status": "any",
    "/pmtrain.Operator/Control": "owner",
    "/pmtrain.Operator/CreateToken": "owner",
    "/pmtrain.Operator/ListTokens": "owner",
    "/pmtrain.Operator/RevokeToken": "owner",
    "/pmtrain.Operator/Kick": "owner",
    "/pmtrain.Operator/Rest": "owner",
}
OTHERWISE = {"token": "wrong_token", "peer": "not_enrolled", "owner": "not_owner", "any": "wrong_token"}
SHOWS_A_PEER = OTHERWISE | {"any": "not_enrolled"}
REFUSED: dict[str, dict[str, str]] = {  # who calls: how the four kinds of calls are refused
    "nobody": OTHERWISE,
    "other run": SHOWS_A_PEER,
    "other peer": SHOWS_A_PEER,
    "revoked token": OTHERWISE | {"token": "token_ended", "any": "token_ended"},
    "expired token": OTHERWISE | {"token": "token_ended", "any": "token_ended"},
    "dismissed peer": OTHERWISE | {"peer": "was_dismissed", "any": "was_dismissed"},
    "kicked peer": OTHERWISE | {"peer": "was_kicked", "any": "was_kicked"},
}
DENIALS = {"wrong_token", "token_ended", "not_enrolled", "not_owner", "was_dismissed", "was_kicked"}


def test_every_call_of_the_protocol_is_in_the_table():
    assert CALLS.keys() == SHOWS.keys() | {LINK}
    assert {call: right.shows for call, right in gate.RIGHTS.items()} == SHOWS


@dataclass
class Run:
    link: JoinLink
    shown: dict[str, Metadata]  # by each of the callers
    right: dict[str, Metadata]  # by whoever may call, by what the call must show


async def story_of(folder: Path, link: JoinLink, elsewhere: Path) -> Run:
    owner: Metadata = (("owner", private_of(folder).owner),)
    other = open_run_dir(elsewhere, make_spec(), Path())
    async with contextlib.AsyncExitStack() as guests:
        [dismissed, kicked, one, another] = [await guests.enter_async_context(a_guest(link)) for _ in range(4)]
        channel = await guests.enter_async_context(coordinator_channel(link, await fetch_authority(link)))
        desk = rpc.OperatorStub(channel)
        call = dismissed.session()
        await call.write(dismissed.register())
        await call.write(pb.PeerMessage(trouble=pb.Trouble(kind="failed", detail="test")))
        assert [said.WhichOneof("body") for said in await dismissed.said_until_the_end(call)][-1] == "dismissal"
        revoked = await desk.CreateToken(pb.CreateTokenRequest(), metadata=owner)
        await desk.RevokeToken(pb.RevokeTokenRequest(id=revoked.id), metadata=owner)
        expired = await desk.CreateToken(pb.CreateTokenRequest(seconds=0.001), metadata=owner)
        reply = await desk.Kick(pb.KickRequest(peer=kicked.metadata[0][1]), metadata=owner)
    run = Run(
        link,
        {
            "nobody": (),
            "other run": (
                ("token", other.token),
                ("owner", other.owner),
                ("peer", one.metadata[0][1]),
                ("secret", other.secret_of(one.metadata[0][1], 1 << 33)),
            ),
            "other peer": (one.metadata[0], another.metadata[1]),
            "revoked token": (("token", revoked.token),),
            "expired token": (("token", expired.token),),
            "dismissed peer": dismissed.metadata,
            "kicked peer": kicked.metadata,
        },
        {"token": (("token", reply.token),), "peer": one.metadata, "owner": owner, "any": one.metadata},
    )
    assert reply.token != link.token, "or it would be back as another"
    other.lock.close()
    return run


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = pool.start(make_spec(stages=1, steps=2), [])
    link = JoinLink.parse((folder / "link").read_text())
    yield asyncio.run(story_of(folder, link, tmp_path_factory.mktemp("elsewhere") / "run"))
    pool.coordinator.renew()


async def kind_of(channel: grpc.aio.Channel, call: str, metadata: Metadata) -> str:
    """Of the refusal; empty where there was none."""
    stream: Any = channel.stream_stream(call)(iter([b""]), metadata=metadata, timeout=PATIENCE)
    try:
        await stream.read()
    except grpc.aio.AioRpcError as error:
        return str(dict(error.trailing_metadata() or ()).get("kind", error.code().name))
    stream.cancel()
    return ""


def test_every_call_is_refused_to_everybody_without_the_right(run: Run):
    """And to nobody who has it: or the table would show nothing."""

    async def story() -> dict[tuple[str, str], str]:
        found = {}
        async with coordinator_channel(run.link, await fetch_authority(run.link)) as channel:
            for call, shows in SHOWS.items():
                for who, metadata in run.shown.items():
                    found[call, who] = await kind_of(channel, call, metadata)
                found[call, "right"] = await kind_of(channel, call, run.right[shows])
        return found

    found = asyncio.run(story())
    assert len(found) == len(SHOWS) * (len(REFUSED) + 1)
    for (call, who), kind in found.items():
        if who == "right":
            assert kind not in DENIALS, (call, kind)
        else:
            assert kind == REFUSED[who][SHOWS[call]], (call, who)


def test_what_is_said_of_another_generation_counts_for_nothing(run: Run):
    """Messages that name a generation: an upload is refused, an offer not wanted, the rest ignored."""
    named = {method.input_type.name for method in CALLS.values() if "generation" in method.input_type.fields_by_name}
    assert named == {"UploadHeader", "Frame"}, "those that are looked at here and below, beside Session's"

    async def story() -> None:
        async with a_guest(JoinLink.parse(str(run.link).replace(run.link.token, run.right["token"][0][1]))) as guest:
            header = pb.UploadHeader(kind=pb.UploadHeader.BASIS, generation=99, step=1, size=8, moved=True)
            upload = guest.stub.Upload(metadata=guest.metadata)
            await upload.write(pb.UploadChunk(header=header))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await upload.read()
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert not (await guest.stub.Offer(header, metadata=guest.metadata)).wanted
            call = guest.session()
            await call.write(guest.register())
            for stale in (
                pb.PeerMessage(done=pb.Done(task=1, generation=99)),
                pb.PeerMessage(basis_taken=pb.BasisTaken(version=1, generation=99)),
            ):
                await call.write(stale)
            await call.write(pb.PeerMessage(leaving=pb.Leaving()))
            [*_, last] = await guest.said_until_the_end(call)
            assert last.dismissal.kind == "asked_to_leave", "it stayed until it left"

    asyncio.run(story())


# --- parts of snapshots -----------------------------------------------------------------------------------------------

PART_CALLS = "Fetch", "Locate"
EVERY_SECOND_STEP = {"interval": 2, "keep": 100}


async def answer_of(guest: Guest, call: str, metadata: Metadata, **request: int) -> str | bytes:
    """The kind of the refusal, or the first bytes of the part; of Locate, an empty URL."""
    asked = pb.FetchRequest(size=1000, **request)
    try:
        if call == "Locate":
            return (await guest.stub.Locate(asked, metadata=metadata, timeout=PATIENCE)).url
        stream = guest.stub.Fetch(iter([asked]), metadata=metadata, timeout=PATIENCE)
        return b"".join([piece.data async for piece in stream])
    except grpc.aio.AioRpcError as error:
        return str(dict(error.trailing_metadata() or ()).get("kind", error.code().name))


def shown_by(folder: Path, peer: str) -> Metadata:
    """What a real peer shows."""
    until = 1 << 33
    key = bytes.fromhex(private_of(folder).peers_key)
    secret = hmac.new(key, f"{peer} {until}".encode(), hashlib.sha256).hexdigest()
    return (("peer", peer), ("secret", f"{until}.{secret}"))


def a_long_run(pool: Pool, snapshots: dict[str, Any], **sections: Any) -> tuple[Path, tuple[int, int]]:
    """Two people who hold stages of a run that goes on, and lineage and step of a complete snapshot."""
    spec = make_spec(**{"stages": 2, "steps": 100_000, "snapshots": snapshots, **sections})
    folder = pool.start(spec, [], fault={"kind": "reseats_nobody"})
    for i, link in enumerate([link_for(folder, "Eve"), link_for(folder, "Max")]):
        pool.peers[i].start(kind="join", link=link, name=f"peer-{i}", dir=str(folder / f"p{i}"))
    saved = wait_for_event(folder, "snapshot_complete")
    return folder, (1, saved["step"])


@contextlib.asynccontextmanager
async def a_spare(link: JoinLink) -> AsyncIterator[tuple[Guest, asyncio.Queue[pb.CoordinatorMessage]]]:
    """With an open session, and what the coordinator says to it."""
    async with a_guest(link) as guest:
        call, said = guest.session(), asyncio.Queue[pb.CoordinatorMessage]()

        async def listen() -> None:
            while (message := await call.read()) is not grpc.aio.EOF:
                said.put_nowait(message)

        async def beat() -> None:
            while True:
                await asyncio.sleep(1)
                await call.write(pb.PeerMessage(heartbeat=pb.Heartbeat()))

        await call.write(guest.register())
        async with asyncio.TaskGroup() as tasks:
            at_work = [tasks.create_task(work()) for work in (listen, beat)]
            yield guest, said
            for task in at_work:
                task.cancel()


async def said_of(said: asyncio.Queue[pb.CoordinatorMessage], kind: str) -> Any:
    async with asyncio.timeout(PATIENCE):
        while (message := await said.get()).WhichOneof("body") != kind:
            pass
    return getattr(message, kind)


def test_a_part_is_given_to_the_holder_of_its_stage_and_to_nobody_else(pool: Pool):
    folder, (lineage, step) = a_long_run(pool, EVERY_SECOND_STEP)
    link = JoinLink.parse((folder / "link").read_text())

    async def story() -> dict[tuple[str, str, int], str | bytes]:
        found = {}
        async with a_spare(link) as (spare, said), a_guest(link) as enrolled:
            await said_of(said, "spare")
            async with operator(link) as looking_on:
                status = await looking_on.status()
            callers = {"enrolled": enrolled.metadata, "spare": spare.metadata}
            for stage in status.stages:
                callers[f"holder {stage.stage}"] = shown_by(folder, stage.holders[0].peer)
            for call in PART_CALLS:
                for who, metadata in callers.items():
                    for stage in (0, 1):
                        asked = {"lineage": lineage, "step": step, "stage": stage}
                        found[call, who, stage] = await answer_of(spare, call, metadata, **asked)
                    found[call, who, -1] = await answer_of(spare, call, metadata, audit=7)
            beyond = {"lineage": lineage, "step": step, "stage": 0, "offset": 2**64 - 1}
            assert await answer_of(spare, "Fetch", callers["holder 0"], **beyond) == "invalid_offset"
        return found

    found = asyncio.run(story())
    for (call, who, stage), answer in found.items():
        if stage == -1:
            assert answer == "audit_not_asked", (call, who)
        elif who == f"holder {stage}":
            assert (answer == "") if call == "Locate" else len(answer) == 1000, (call, who)
        else:
            right = "no_session" if who == "enrolled" else "part_not_assigned"
            assert answer == right, (call, who, stage)
    assert pool.coordinator.at_work
    pool.coordinator.renew()


def test_a_warm_spare_may_have_the_newest_snapshot_that_it_is_told_to_prefetch(pool: Pool):
    """And no older one."""
    folder, _ = a_long_run(pool, EVERY_SECOND_STEP | {"warm_spares": True, "interval": 20})
    link = JoinLink.parse((folder / "link").read_text())

    async def story() -> None:
        async with a_spare(link) as (spare, said):
            await said_of(said, "spare")
            told = await said_of(said, "keep")
            for part in told.newest:
                asked = {"lineage": part.lineage, "step": part.step, "stage": part.stage}
                answer = await answer_of(spare, "Fetch", spare.metadata, **asked)
                assert len(answer) == 1000 or answer == "part_not_assigned", "a newer one was complete meanwhile"
                given.append(answer)
            first = {"lineage": told.newest[0].lineage, "step": told.newest[0].step}
            newer = await said_of(said, "keep")
            while not newer.newest or newer.newest[0].step == first["step"]:
                newer = await said_of(said, "keep")
            assert await answer_of(spare, "Fetch", spare.metadata, **first, stage=0) == "part_not_assigned"

    given: list[str | bytes] = []
    asyncio.run(story())
    assert any(len(answer) == 1000 for answer in given)
    pool.coordinator.renew()


def test_what_an_audit_needs_is_given_to_the_spare_that_was_asked_and_to_nobody_else(pool: Pool):
    folder, _ = a_long_run(pool, {"interval": 5, "keep": 20}, audit=0.2)
    link = JoinLink.parse((folder / "link").read_text())
    friends = JoinLink.parse(link_for(folder, "Ann"))  # nobody audits with a token that the holder has too

    async def story() -> None:
        async with a_spare(friends) as (spare, said), a_guest(link) as enrolled:
            asked: pb.Audit = await said_of(said, "audit")
            restore, stage = asked.stage.restore, asked.stage.stage
            part = {"lineage": restore.lineage, "step": restore.step}
            for metadata, right in ((spare.metadata, None), (enrolled.metadata, "audit_not_asked")):
                frames = await answer_of(spare, "Fetch", metadata, audit=asked.audit)
                assert frames == right if right else len(frames) == min(1000, asked.size)
            assert len(await answer_of(spare, "Fetch", spare.metadata, **part, stage=stage)) == 1000
            assert await answer_of(spare, "Locate", spare.metadata, **part, stage=stage) == ""
            for call in PART_CALLS:
                other = await answer_of(spare, call, spare.metadata, **part, stage=1 - stage)
                assert other == "part_not_assigned"

    asyncio.run(story())
    pool.coordinator.renew()


# --- a peer's own port ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def a_listener(authority: Authority) -> AsyncIterator[Listener]:
    """Of a peer in generation 7 that expects `left` over boundary 1."""
    listener = Listener(authority.issue_with_key(peer_name("me")))
    await listener.start("127.0.0.1", 0)

    def nothing(*_: object) -> None:
        pass

    listener.expect(Link(7, 1, "left", False, 2, 1, 1000, nothing, nothing, nothing))
    try:
        yield listener
    finally:
        await listener.stop()


async def code_of(port: int, authority_pem: bytes, identity: Identity | None, generation: int) -> grpc.StatusCode:
    own = (identity.key_pem, identity.certificate_pem) if identity else (None, None)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer_name("me"))]
    credentials = grpc.ssl_channel_credentials(authority_pem, *own)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        metadata = (("generation", str(generation)), ("boundary", "1"))
        call = channel.stream_stream(LINK)(metadata=metadata, timeout=PATIENCE)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await call.initial_metadata()
        if call.done():
            return await call.code()
        call.cancel()
        return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("who", "generation", "code"),
    [
        ("left", 7, "OK"),
        ("nobody", 7, "UNAVAILABLE"),
        ("other run", 7, "UNAVAILABLE"),
        ("other peer", 7, "PERMISSION_DENIED"),
        ("coordinator", 7, "PERMISSION_DENIED"),
        ("left", 6, "PERMISSION_DENIED"),
        ("left", 8, "PERMISSION_DENIED"),
        ("dismissed", 7, "PERMISSION_DENIED"),
    ],
)
def test_a_peer_is_linked_with_the_neighbour_that_it_expects_and_nobody_else(
    authority: Authority, who: str, generation: int, code: str
):
    """A neighbour that was dismissed or kicked is not expected any more: its generation is over."""

    async def story() -> grpc.StatusCode:
        async with a_listener(authority) as listener:
            identity = {
                "nobody": None,
                "other run": new_authority().issue_with_key(peer_name("left")),
                "other peer": authority.issue_with_key(peer_name("right")),
                "coordinator": authority.issue_with_key("coordinator.pmtrain"),
            }.get(who, authority.issue_with_key(peer_name("left")))
            if who == "dismissed":
                listener.forget()
            return await code_of(listener.port, authority.certificate_pem, identity, generation)

    assert asyncio.run(story()).name == code


def test_strangers_cannot_take_all_files_of_a_peer(authority: Authority, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "MOST_INCOMING", 4)

    async def story() -> list[bool]:
        async with a_listener(authority) as listener:
            crowd = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(12)]
            open_yet = lambda: [not reader.at_eof() and reader.exception() is None for reader, _ in crowd]  # noqa: E731
            await until(lambda: sum(open_yet()) <= 4, "too many stay")
            await asyncio.sleep(0.2)  # in which no more of them are closed
            left = open_yet()
            for _, writer in crowd:
                writer.transport.abort()
            return left

    assert sum(asyncio.run(story())) == 4


# --- what peers learn ---------------------------------------------------------------------------------------------


def test_peers_are_told_no_path_bucket_or_secret_of_the_owners(pool: Pool, tmp_path: Path):
    (tmp_path / "private-texts").mkdir()
    (tmp_path / "private-texts" / "a.txt").write_text("to be or not to be " * 5000)
    store = tmp_path / "private-store"
    store.mkdir()
    data = {"source": "files", "files": [str(tmp_path / "private-texts" / "a.txt")], "max_bytes": None}
    spec = make_spec(stages=1, steps=2, data=data, snapshots={"copy_to": str(store)})
    folder = pool.start(spec, [{}])
    link = JoinLink.parse((folder / "link").read_text())

    async def story() -> tuple[pb.EnrolReply, pb.RunStatus]:
        async with coordinator_channel(link, await fetch_authority(link)) as channel:
            token = (("token", link.token),)
            request = pb.EnrolRequest(protocol=PROTOCOL, public_key_pem=public_key_of(new_key()))
            reply = await rpc.PeeringStub(channel).Enrol(request, metadata=token)
            return reply, await rpc.OperatorStub(channel).Status(pb.StatusRequest(), metadata=token)

    reply, status = asyncio.run(story())
    private = private_of(folder)
    told = str(reply) + str(status)
    for secret in ("private-texts", "private-store", str(tmp_path), private.owner, private.peers_key, private.token):
        assert secret not in told, secret
    assert spec_from(json.loads(reply.spec_json)).sha256() == reply.spec_sha256 != spec.sha256()
    assert pool.peers[0].result()["exit"] == 0, "what it is told is enough to train"
    assert pool.coordinator.result()["exit"] == 0


def test_of_a_store_peers_are_told_the_kind_alone():
    at = "s3://private-bucket/runs"
    spec = make_spec(snapshots={"copy_to": at}, data={"cache_dir": "/home/me"})
    told = for_peers(spec, Path("/"))
    assert told.snapshots.is_direct == spec.snapshots.is_direct
    text = json.dumps(told.model_dump(mode="json"))
    assert "private-bucket" not in text
    assert "/home/me" not in text
    assert for_peers(make_spec(), Path("/")) == make_spec(), "nothing else changes"
