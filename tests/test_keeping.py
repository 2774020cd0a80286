"""Where things are kept on a machine: by the XDG specification, and still found where earlier versions put them."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import make_spec
from starting import begin
from test_run import coordinator, ends

from protomodels_cli.cli import on_disk
from protomodels_cli.files import peer_home, peer_homes, user_cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PMTRAIN_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_without_any_variable(home: Path):
    assert user_cache() == home / ".cache/pmtrain"
    assert peer_home("abcdefgh") == home / ".local/share/pmtrain/peers"


def test_the_variables_are_followed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "d"))
    assert user_cache() == tmp_path / "c/pmtrain"
    assert peer_home("abcdefgh") == tmp_path / "d/pmtrain/peers"
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    assert peer_home("abcdefgh") == home / ".local/share/pmtrain/peers"
    monkeypatch.setenv("PMTRAIN_CACHE", str(tmp_path / "p"))
    assert user_cache() == tmp_path / "p"
    assert peer_home("abcdefgh") == tmp_path / "p/peers"


def test_a_cache_that_is_there_is_not_made_again_elsewhere(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (home / ".cache/pmtrain").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert user_cache() == home / ".cache/pmtrain"
    (tmp_path / "c/pmtrain").mkdir(parents=True)
    assert user_cache() == tmp_path / "c/pmtrain", "once there is one, it is that"


def test_a_peer_goes_on_in_the_folder_that_an_earlier_version_made(home: Path, tmp_path: Path):
    """… and a peer of another run begins in the new place; both are listed."""
    with coordinator(make_spec(name="home", stages=1, steps=2), tmp_path) as (leader, link):
        before = home / ".cache/pmtrain/peers" / f"home-{link.partition('#')[2][:8]}"
        before.mkdir(parents=True)
        assert peer_home("another1") == home / ".local/share/pmtrain/peers" == peer_homes()[0]
        peer = begin("join", link, "--device", "cpu", cwd=tmp_path)
        for process in (peer, leader):
            code, said = ends(process)
            assert code == 0, said
    assert (before / "events.jsonl").exists()
    assert not (home / ".local").exists()
    [found] = [one for one in on_disk.everything() if one.kind == "peer"]
    assert (found.path, found.name, found.state, found.step) == (before, "home", "done", 2)
    assert on_disk.named("home") == [before]
