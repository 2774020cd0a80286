"""Certificates that end and are renewed in mid-run, by real processes with lives of seconds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from conftest import make_spec
from guest import Guest, a_guest
from pool import Pool
from scene import expected
from told import events, peer_events, wait_for_event, wait_for_peer_event
from waiting import PATIENCE, wait_for

from protomodels_cli.coordinator.run_dir import owner_secret
from protomodels_cli.spec import RunSpec
from protomodels_cli.spec.link import parse_link
from protomodels_cli.wire.channels import CHANNEL_OPTIONS
from protomodels_cli.wire.client import operator
from protomodels_cli.wire.frames import Frame
from protomodels_cli.wire.join_link import JoinLink
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.tls import Authority, Identity, life_of, new_key, peer_name, public_key_of
from protomodels_cli.worker import papers
from protomodels_cli.worker.links import LINK, Link
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.papers import Papers

pytestmark = pytest.mark.waiting

LIFE = 10.0  # seconds
SLOW = parse_link("100mbit,60ms").model_dump()  # so that a run lasts


def a_spec(**sections: Any) -> RunSpec:
    limits = {"certificate_seconds": LIFE, "lease_seconds": 2.0}
    return make_spec(**{"stages": 2, "limits": limits, "snapshots": {"interval": 10}, **sections})


def steps_of(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count('"event":"step"') if metrics.exists() else 0


@pytest.mark.full
def test_a_run_outlives_its_certificates_and_loses_no_step(pool: Pool):
    """Then a peer is killed: what the others open then, long after the end of their first certificates, opens."""
    spec = a_spec(steps=70, wire={"link": SLOW})
    run_dir = pool.start(spec, [{}, {}])
    wait_for_event(run_dir, "stages_assigned")
    link = (run_dir / "link").read_text().strip()
    pool.peers[2].start(kind="join", link=link, name="spare", dir=str(run_dir / "p2"))
    wait_for_event(run_dir, "peer_joined", name="spare")
    began = time.time()
    wait_for(lambda: time.time() > began + 1.6 * LIFE, "time stands still", 60)
    assert steps_of(run_dir) < spec.steps, "or it did not last"
    assert not events(run_dir, "peer_lost")
    assert len(events(run_dir, "stages_assigned")) == 1
    pool.peers[0].kill()
    wait_for_event(run_dir, "stages_assigned", generation=2)
    assert pool.coordinator.result()["exit"] == 0
    assert [pool.peers[i].result()["exit"] for i in (1, 2)] == [0, 0]
    assert not [e for i in (1, 2) for e in peer_events(run_dir / f"p{i}", "ended")]
    assert json.loads((run_dir / "summary.json").read_text())["weights_sha256"] == expected(spec)


async def stays(guest: Guest, seconds: float, renews: bool) -> str:
    """In session for so long, then another call of its: how that was refused, or the session's end."""
    call = guest.session()
    await call.write(guest.register())
    over = time.monotonic() + seconds

    async def say() -> None:
        while True:
            await call.write(pb.PeerMessage(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(0.3)

    talking = asyncio.create_task(say())
    try:
        while time.monotonic() < over:
            if renews and time.monotonic() > over - seconds / 2:
                renews = False
                request = pb.RenewRequest(public_key_pem=public_key_of(new_key()))
                reply = await guest.stub.Renew(request, metadata=guest.metadata)
                assert life_of(reply.certificate_pem) > LIFE - 2
                guest.metadata = (guest.metadata[0], ("secret", reply.secret))
            async with asyncio.timeout(PATIENCE):
                if await call.read() is grpc.aio.EOF:
                    break
        await guest.stub.CheckReachability(pb.ReachabilityRequest(), metadata=guest.metadata)
        return ""
    except grpc.aio.AioRpcError as e:
        return str(dict(e.trailing_metadata() or ()).get("kind", e.code().name))
    finally:
        talking.cancel()
        call.cancel()


def test_who_does_not_renew_is_out_and_who_does_stays(pool: Pool):
    run_dir = pool.start(a_spec(steps=2, stages=3), [])  # which waits for more peers
    link = JoinLink.parse((run_dir / "link").read_text())

    async def story() -> tuple[str, str, str]:
        async with a_guest(link) as lazy, a_guest(link) as eager:
            one, other = await asyncio.gather(stays(lazy, LIFE + 3, False), stays(eager, LIFE + 3, True))
            return one, other, dict(lazy.metadata)["peer"]

    *ends, lazy = asyncio.run(story())
    assert ends == ["certificate_expired", ""]
    [lost] = [e for e in events(run_dir, "peer_lost") if e["reason"]["kind"] == "not_renewed"]
    assert lost["peer"] == lazy
    pool.coordinator.renew()


def test_renewals_are_limited_and_keys_are_looked_at(pool: Pool):
    run_dir = pool.start(a_spec(steps=2, stages=3), [])
    link = JoinLink.parse((run_dir / "link").read_text())

    async def story() -> list[str]:
        async with a_guest(link) as guest:
            kinds = []
            for key in (b"no key", *[public_key_of(new_key())] * 10):
                try:
                    await guest.stub.Renew(pb.RenewRequest(public_key_pem=key), metadata=guest.metadata)
                    kinds.append("")
                except grpc.aio.AioRpcError as e:
                    kinds.append(str(dict(e.trailing_metadata() or ()).get("kind")))
            return kinds

    kinds = asyncio.run(story())
    assert kinds[:3] == ["invalid_key", "", ""]
    assert kinds[-1] == "too_many_renewals"
    pool.coordinator.renew()


@pytest.mark.parametrize("token_is_good", [True, False])
def test_a_peer_that_slept_for_longer_joins_again_if_its_token_is_good(pool: Pool, token_is_good: bool):
    run_dir = pool.start(a_spec(steps=5, stages=2), [{}])  # it waits for a second peer
    [joined] = [wait_for_event(run_dir, "peer_joined")]
    wait_for_peer_event(run_dir / "p0", "spare")
    os.kill(pool.peers[0].pid, signal.SIGSTOP)
    slept = time.time()
    if not token_is_good:

        async def revoke() -> None:
            async with operator(JoinLink.parse((run_dir / "link").read_text()), owner_secret(run_dir)) as desk:
                await desk.revoke_token("run")

        asyncio.run(revoke())
    wait_for(lambda: time.time() > slept + LIFE + 6, "time stands still", 60)  # a renewal may be on its way
    os.kill(pool.peers[0].pid, signal.SIGCONT)
    wait_for_peer_event(run_dir / "p0", "ended", reason="certificate_expired")
    if token_is_good:
        again = wait_for_event(run_dir, "peer_joined", since=slept)
        assert again["name"] == joined["name"]
    else:
        ended = pool.peers[0].result()
        assert (ended["exit"], ended["reason"]) == (5, "wrong_token")
        assert "Traceback" not in ended["error"]
    pool.coordinator.renew()


# --- a peer's own port -----------------------------------------------------------------------------------------


def issued(authority: Authority, name: str, seconds: float) -> Identity:
    key = new_key()
    certificate = authority.issue(peer_name(name), public_key_of(key), int(time.time() + seconds))
    return Identity(key, certificate, authority.certificate_pem)


def nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("wrong", [-20 * 3600, 0, 20 * 3600])
def test_a_peer_whose_clock_is_wrong_renews_at_half_its_certificates_life(
    authority: Authority, monkeypatch, wrong: int
):
    identity, own = issued(authority, "me", 8 * 3600), time.time() + wrong
    monkeypatch.setattr(papers, "time", SimpleNamespace(time=lambda: own))
    assert 3.5 * 3600 < Papers(identity, ()).renew_at - own < 4.5 * 3600


def test_a_port_shows_its_new_certificate_while_streams_go_on(authority: Authority):
    """And takes no expired one, nor is taken with one."""

    async def opens(listener: Listener, identity: Identity) -> Any:
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer_name("me"))]
        own = identity.authority_pem, identity.key_pem, identity.certificate_pem
        channel = grpc.aio.secure_channel(f"127.0.0.1:{listener.port}", grpc.ssl_channel_credentials(*own), options)
        call: Any = channel.stream_stream(LINK)(metadata=(("generation", "7"), ("boundary", "1")), timeout=PATIENCE)
        try:
            await call.write(link().opening())
            async with asyncio.timeout(PATIENCE):
                await call.initial_metadata()
                await call.read()
        except (grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError):
            await channel.close()
            return None
        return call

    def link() -> Link:
        return Link(7, 1, "left", False, 2, 1, 1000, nothing, nothing, nothing)

    async def story() -> None:
        short = 4.0
        listener = Listener(issued(authority, "me", short))
        await listener.start("127.0.0.1", 0)
        listener.expect(link())
        began, old = time.time(), issued(authority, "left", short)
        stream = await opens(listener, old)
        assert stream is not None
        await asyncio.sleep(short + 1.5 - (time.time() - began))
        assert await opens(listener, issued(authority, "left", 60)) is None, "the port's own has expired"
        listener.use(issued(authority, "me", 60))
        await stream.write(Frame(pb.Frame(generation=7, asked=5)).to_bytes())
        async with asyncio.timeout(PATIENCE):  # it was open before, and goes on; a word now and then is no answer
            while Frame.from_bytes(await stream.read()).fields.answered != 5:
                pass
        assert await opens(listener, old) is None, "the caller's has expired"
        assert await opens(listener, issued(authority, "left", 60)) is not None
        await listener.stop()

    asyncio.run(story())
