"""What a peer checks before it asks for a stage: that it has the run's packages, reads its spec alike, and has room."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from conftest import make_spec
from led import Led

from protomodels_cli import PROTOCOL
from protomodels_cli.codecs.registry import parse_codec, registry
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.service import Service
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.errors import EXIT_REFUSED
from protomodels_cli.forms import FORMS
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_key, public_key_of
from protomodels_cli.worker import join as joining
from protomodels_cli.worker import problems
from protomodels_cli.worker.telling import PeerError

TOY = Path(__file__).parent / "toy_package"
TOYS = {
    "subspace": {"form": "toysplit"},
    "optimizer": {"name": "adamw"},
    "wire": {"forward": "toydelta:0.001+zstd", "backward": "bf16"},
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path | None], None]]:
    """Has this process see the package in a folder, and none of those before."""

    def forget() -> None:
        parse_codec.cache_clear()
        for found in (FORMS, registry()):
            found.__dict__.pop("_installed", None)
            found._loaded = dict(found.builtin)

    def see(folder: Path | None) -> None:
        monkeypatch.undo()
        if folder is not None:
            monkeypatch.syspath_prepend(folder)
        forget()

    yield see
    monkeypatch.undo()
    forget()


def enrolled(spec: RunSpec, folder: Path) -> pb.EnrolReply:
    """What the real service answers."""

    async def story() -> pb.EnrolReply:
        run_dir, nothing = open_run_dir(folder, spec, Path()), None
        server = grpc.aio.server()
        service = Service(spec, run_dir, Led(), nothing, nothing)  # type: ignore[arg-type]
        rpc.add_PeeringServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        key = public_key_of(new_key())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = pb.EnrolRequest(protocol=PROTOCOL, public_key_pem=key)
            reply = await rpc.PeeringStub(channel).Enrol(request, metadata=(("token", run_dir.token),))
        await server.stop(None)
        return reply

    return asyncio.run(story())


def refused(reply: pb.EnrolReply) -> problems.Problem:
    with pytest.raises(PeerError) as caught:
        joining._check_spec(reply)
    assert caught.value.exit_code == EXIT_REFUSED
    return caught.value.problem


def test_a_package_that_a_peer_lacks_or_has_in_another_version_is_named(tmp_path: Path, install):
    install(TOY)
    spec = make_spec(**TOYS)
    reply = enrolled(spec, tmp_path / "run")
    points = ["pmtrain.codecs:toydelta", "pmtrain.forms:toysplit"]
    assert dict(reply.packages) == dict.fromkeys(points, "pmtrain-toy 0.1")
    assert joining._check_spec(reply) == spec

    install(None)
    assert refused(reply) == problems.OtherPackage(points[0], "pmtrain-toy 0.1", None)

    other = shutil.copytree(TOY, tmp_path / "other")
    about = other / "pmtrain_toy-0.1.dist-info" / "METADATA"
    about.write_text(about.read_text().replace("0.1", "0.2"))
    install(other)
    assert refused(reply) == problems.OtherPackage(points[0], "pmtrain-toy 0.1", "pmtrain-toy 0.2")


def test_a_run_of_what_is_built_in_needs_no_package(tmp_path: Path):
    assert not enrolled(make_spec(wire={"forward": "topk:0.1+ef21+zstd"}), tmp_path / "run").packages


def test_a_spec_that_cannot_be_read_is_told_apart_from_one_that_is_read_differently():
    spec = make_spec()
    fields = spec.model_dump(mode="json")
    newer = pb.EnrolReply(spec_json=json.dumps({**fields, "haste": 3}), spec_sha256=spec.sha256())
    found = refused(newer)
    assert isinstance(found, problems.SpecNotUnderstood)
    assert "haste" in found.detail
    assert isinstance(refused(pb.EnrolReply(spec_json="{")), problems.SpecNotUnderstood)
    differently = pb.EnrolReply(spec_json=json.dumps(fields), spec_sha256="0" * 64)
    assert refused(differently) == problems.SpecReadDifferently()


def test_the_disk_must_hold_a_snapshot_of_the_smallest_stage_and_no_more(tmp_path: Path, monkeypatch):
    spec = make_spec(stages=4)
    sizes = StageMemory(spec)
    need = min(sizes.saved(i, i + 1) for i in range(4))
    for free in (need, need - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        if free == need:
            assert joining._check_disk(spec, tmp_path) == tmp_path
        else:
            with pytest.raises(PeerError) as caught:
                joining._check_disk(spec, tmp_path)
            assert caught.value.problem == problems.DiskTooSmall(str(tmp_path), free, need)
