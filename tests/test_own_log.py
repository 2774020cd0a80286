"""Each peer has its own log and events, also where several share a folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from protomodels_cli.cli.on_disk import peers_in
from protomodels_cli.observe.metrics import JsonLines
from protomodels_cli.worker.own_log import own_log, own_logs


def names(folder: Path, *peers: str) -> list[str]:
    """The logs of these peers, all at work at once."""
    with contextlib.ExitStack() as held:
        return [held.enter_context(own_log(folder, peer)).log.name for peer in peers]


def test_a_peer_alone_has_the_plain_names(tmp_path: Path):
    with own_log(tmp_path, "alpha") as own:
        assert (own.log, own.events) == (tmp_path / "peer.log", tmp_path / "events.jsonl")


def test_others_in_the_folder_have_files_with_their_names(tmp_path: Path):
    assert names(tmp_path, "alpha", "beta", "gamma") == ["peer.log", "peer-beta.log", "peer-gamma.log"]


def test_a_peer_that_comes_again_goes_on_in_its_own_files(tmp_path: Path):
    before = names(tmp_path, "alpha", "beta")
    assert names(tmp_path, "beta") + names(tmp_path, "alpha") == [before[1], before[0]]


def test_two_of_one_name_and_two_names_that_look_alike_on_disk(tmp_path: Path):
    found = names(tmp_path, "alpha", "a/b", "a:b", "a/b", "alpha")
    assert len(set(found)) == 5
    assert all(Path(name).name == name for name in found)


def test_logs_are_found_by_name(tmp_path: Path):
    for peer in ("alpha", "beta", "../x"):
        with own_log(tmp_path, peer) as own:
            own.log.write_text(peer)
    found = peers_in(tmp_path)
    assert {peer: own.log.read_text() for peer, own in found.items()} == {p: p for p in ("alpha", "beta", "../x")}
    assert all(own.log.parent == tmp_path for own in found.values())


def test_a_folder_from_before_names_its_peer_by_its_events(tmp_path: Path):
    with JsonLines(tmp_path / "events.jsonl") as rows:
        rows.write({"kind": "joined", "name": "desk"})
    assert list(peers_in(tmp_path)) == ["desk"]
    assert own_logs(tmp_path / "nothing")[0].log.name == "peer.log"
