"""Who does not get in, and why: one sentence each, the documented exit code, and a coordinator that keeps running."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path

import grpc
import pytest
from conftest import make_spec
from pool import Pool, Process
from rich.console import Console
from test_pipeline import reference_of
from told import events, peer_events, wait_for_event

from protomodels_cli import PROTOCOL
from protomodels_cli.coordinator.reasons import AllStagesHeld
from protomodels_cli.observe.view import peer_table, picture
from protomodels_cli.wire.client import coordinator_channel
from protomodels_cli.wire.join_link import JoinLink, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_key, public_key_of

pytestmark = pytest.mark.waiting


def wrong_token(link: str) -> str:
    return link.replace(JoinLink.parse(link).token, "A" * 22)


def wrong_fingerprint(link: str) -> str:
    return link.split("#")[0] + "#" + "A" * 43


REFUSED = [  # by the coordinator, or by the peer itself before it asks for a stage
    ("token", 5, "wrong_token"),
    ("other_protocol", 5, "other_protocol"),
    ("fingerprint", 5, "fingerprint_mismatch"),
    ("other_defaults", 5, "spec_read_differently"),
    ("wrong_clock", 5, "clock_skew"),
    ("little_memory", 3, "device_too_small"),
    ("disk", 3, "folder_not_writable"),
]
BUILD = 15.0  # seconds: on a busy machine honest peers take some
DISMISSED = [
    ("other_table", 5, {"kind": "hash_mismatch", "what": "T_fixed"}),
    ("other_basis", 5, {"kind": "hash_mismatch", "what": "U"}),
    ("never_ready", 3, {"kind": "too_slow", "stage": 0, "doing": "build", "seconds": BUILD}),
]


def test_bad_peers_get_one_sentence_and_the_run_goes_on(pool: Pool, tmp_path: Path):
    """One coordinator; every kind of bad peer in turn; then a good one, which finishes the run."""
    spec = make_spec(stages=1, steps=3, limits={"build_seconds": BUILD})
    run_dir = pool.start(spec, [])
    link = (run_dir / "link").read_text().strip()
    (tmp_path / "file").write_text("")
    for kind, code, why in [*REFUSED, *DISMISSED]:
        job = {"link": link, "name": "bad", "dir": str(tmp_path / "bad")}
        match kind:
            case "token":
                job["link"] = wrong_token(link)
            case "fingerprint":
                job["link"] = wrong_fingerprint(link)
            case "disk":
                job["dir"] = str(tmp_path / "file" / "below")
            case _:
                job["fault"] = {"kind": kind}
        log = pool.folder / "peer-0.log"
        before = log.stat().st_size
        pool.peers[0].start(kind="join", **job)
        result = pool.peers[0].result()
        said = result.get("error", "") + log.read_text()[before:]
        assert result["exit"] == code, (kind, result, said)
        if (kind, code, why) in REFUSED:
            assert result["reason"] == why, (kind, result)
        else:
            assert result["reason"] == "dismissed", (kind, result)
            assert events(run_dir, "peer_dismissed")[-1]["reason"] == why, kind
            assert peer_events(tmp_path / "bad", "ended")[-1]["reason"] == "dismissed"
        assert "fix:" in said
        assert "Traceback" not in said
    pool.peers[0].start(kind="join", link=link, name="good", dir=str(tmp_path / "good"))
    assert pool.peers[0].result()["exit"] == 0
    assert pool.coordinator.result()["exit"] == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 3


def test_the_coordinator_checks_the_spec_hash_too_and_strangers_get_nothing(pool: Pool):
    run_dir = pool.start(make_spec(stages=1, steps=2), [])
    link = JoinLink.parse((run_dir / "link").read_text())

    async def calls() -> list[grpc.aio.AioRpcError]:
        errors = []
        async with coordinator_channel(link, await fetch_authority(link)) as channel:
            stub = rpc.PeeringStub(channel)
            key, token = public_key_of(new_key()), (("token", link.token),)
            reply = await stub.Enrol(pb.EnrolRequest(protocol=PROTOCOL, public_key_pem=key), metadata=token)

            async def register(**fields: str):
                yield pb.PeerMessage(register=pb.Register(**fields))

            mine = (("peer", reply.peer), ("secret", reply.secret))
            for metadata, messages in (
                (mine, register(spec_sha256="0" * 64)),
                ((("peer", reply.peer), ("secret", "guess")), register(spec_sha256=reply.spec_sha256)),
                ((), register(spec_sha256=reply.spec_sha256)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.Session(messages, metadata=metadata):
                        pass
                errors.append(caught.value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Enrol(pb.EnrolRequest(protocol=PROTOCOL, public_key_pem=b"junk"), metadata=token)
            errors.append(caught.value)
            unasked = pb.UploadHeader(kind=pb.UploadHeader.BASIS, generation=1, step=1, size=1 << 29, moved=True)
            again = await stub.Enrol(pb.EnrolRequest(protocol=PROTOCOL, public_key_pem=key), metadata=token)
            upload = stub.Upload(metadata=(("peer", again.peer), ("secret", again.secret)))
            await upload.write(pb.UploadChunk(header=unasked))  # is answered without waiting for the rest
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await upload.read()
            errors.append(caught.value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Fetch(iter([pb.FetchRequest()]), metadata=mine):
                    pass
            errors.append(caught.value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc.OperatorStub(channel).Status(pb.StatusRequest(), metadata=(("token", "guess"),))
            errors.append(caught.value)
        return errors

    found = asyncio.run(calls())
    kinds = [dict(error.trailing_metadata() or ()).get("kind") for error in found]
    assert kinds == [
        "other_spec",
        "not_enrolled",
        "not_enrolled",
        "invalid_key",
        "not_holder",
        "no_session",
        "wrong_token",
    ]
    unasked = found[4]
    assert unasked.code() == grpc.StatusCode.INVALID_ARGUMENT, "an upload that nobody asked for"
    pool.peers[0].start(kind="join", link=str(link), name="good", dir=str(run_dir / "p"))
    assert pool.peers[0].result()["exit"] == 0
    assert pool.coordinator.result()["exit"] == 0


def test_a_peer_does_not_choose_what_others_dial(pool: Pool):
    """It claims a port at which it was never reached: its links are relayed."""
    run_dir = pool.start(make_spec(stages=1, steps=2), [])
    link = JoinLink.parse((run_dir / "link").read_text())

    async def claim() -> pb.PeerStatus:
        async with coordinator_channel(link, await fetch_authority(link)) as channel:
            stub = rpc.PeeringStub(channel)
            request = pb.EnrolRequest(protocol=PROTOCOL, public_key_pem=public_key_of(new_key()))
            reply = await stub.Enrol(request, metadata=(("token", link.token),))
            said = asyncio.Event()

            async def words():
                register = pb.Register(spec_sha256=reply.spec_sha256, port=22, name="[/b]liar", memory=1, flops=1.0)
                yield pb.PeerMessage(register=register)
                await said.wait()

            metadata = (("peer", reply.peer), ("secret", reply.secret))
            session = stub.Session(words(), metadata=metadata)
            await session.read()
            second = stub.Session(words(), metadata=metadata)
            await second.read()
            while await session.read() is not grpc.aio.EOF:  # whoever calls again is the one that counts
                pass
            status = await rpc.OperatorStub(channel).Status(pb.StatusRequest(), metadata=(("token", link.token),))
            said.set()
            return status.peers[0], status

    peer, status = asyncio.run(claim())
    assert not peer.reachable
    Console(file=io.StringIO()).print(picture(status), peer_table(status))  # no markup of a peer's choosing
    pool.peers[0].start(kind="join", link=str(link), name="good", dir=str(run_dir / "p"))
    assert pool.peers[0].result()["exit"] == 0
    assert pool.coordinator.result()["exit"] == 0


def test_extra_peers_wait_as_spares_and_say_so(pool: Pool):
    led, peers = pool.run(make_spec(stages=2, steps=4), 3)
    assert led["exit"] == 0
    assert [p["exit"] for p in peers] == [0, 0, 0]
    holders = {h["peer"] for e in events(led["run_dir"], "stages_assigned") for h in e["holders"]}
    everyone = {e["peer"] for e in events(led["run_dir"], "peer_joined")}
    assert (len(everyone), len(everyone - holders)) == (3, 1)
    told = [peer_events(led["run_dir"] / f"p{i}", "spare", reason=AllStagesHeld.kind) for i in range(3)]
    assert sorted(map(len, told)) == [0, 0, 1]


def test_a_holder_that_never_becomes_ready_is_replaced(pool: Pool):
    spec = make_spec(stages=2, steps=3, limits={"build_seconds": BUILD})
    run_dir = pool.start(spec, [{"fault": {"kind": "never_ready"}}, {}])
    wait_for_event(run_dir, "stages_assigned", generation=1)  # both hold a stage
    link = (run_dir / "link").read_text().strip()
    pool.peers[2].start(kind="join", link=link, name="late", dir=str(run_dir / "late"))
    assert [p.result()["exit"] for p in pool.peers[:3]] == [3, 0, 0]
    led = pool.coordinator.result()
    assert led["exit"] == 0
    assert events(run_dir, "stages_assigned", generation=2)


@pytest.mark.full
def test_a_holder_lost_in_the_first_step_is_replaced_and_nothing_old_leaks_in(pool: Pool, tmp_path: Path):
    """Killed in the middle of step 1: the others work on for a generation that is void. The weights are right."""
    batch = {"size": 64, "microbatches": 64, "in_flight": 4}
    spec = make_spec(stages=3, steps=3, model={"context": 64}, batch=batch, limits={"build_seconds": 60.0})
    victim = Process(tmp_path / "victim.log")
    run_dir = pool.start(spec, [{}, {}])
    link = (run_dir / "link").read_text().strip()
    slow = {"kind": "slow", "seconds": 0.1}
    victim.start(kind="join", link=link, name="victim", dir=str(tmp_path / "victim"), fault=slow)
    wait_for_event(run_dir, "stages_linked")
    pool.peers[2].start(kind="join", link=link, name="spare", dir=str(tmp_path / "spare"))
    wait_for_event(run_dir, "peer_joined", name="spare")
    assert victim.at_work
    victim.close()
    results = [p.result() for p in pool.peers[:3]]
    led = pool.coordinator.result()
    assert led["exit"] == 0, led
    assert [r["exit"] for r in results] == [0, 0, 0], results
    assert events(run_dir, "stages_assigned", generation=2)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == reference_of(spec)[0].weights_sha256()


@pytest.mark.full
def test_survivors_of_the_first_step_wait_for_the_next_joiner(pool: Pool, tmp_path: Path):
    batch = {"size": 64, "microbatches": 64, "in_flight": 4}
    spec = make_spec(stages=2, steps=2, model={"context": 64}, batch=batch)
    victim = Process(tmp_path / "victim.log")
    run_dir = pool.start(spec, [{}])
    link = (run_dir / "link").read_text().strip()
    slow = {"kind": "slow", "seconds": 0.1}
    victim.start(kind="join", link=link, name="victim", dir=str(tmp_path / "victim"), fault=slow)
    wait_for_event(run_dir, "stages_linked")
    assert victim.at_work
    victim.close()
    lost = wait_for_event(run_dir, "peer_lost", name="victim")
    assert lost["reason"]["kind"] == "connection_closed"
    time.sleep(2)  # twice as long as this peer waits for an explanation why its neighbour hung up
    pool.peers[1].start(kind="join", link=link, name="late", dir=str(tmp_path / "late"))
    assert [p.result()["exit"] for p in pool.peers[:2]] == [0, 0]
    assert pool.coordinator.result()["exit"] == 0
    assert events(run_dir, "stages_assigned", generation=2)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == reference_of(spec)[0].weights_sha256()
