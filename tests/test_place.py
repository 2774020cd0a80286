"""Which run is meant: by its name, its folder, its link, or because there is no other."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomodels_cli.cli.place import LED, READABLE, place_of, run_and, trained
from protomodels_cli.errors import UserError

FINGERPRINTS = {"one": "A" * 43, "two": "B" * 43}


def link(name: str) -> str:
    return f"pm://127.0.0.1:1/{'t' * 22}#{FINGERPRINTS[name]}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PMTRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path / "runs" / "one", "journal.sqlite", "private.json", link=link("one"))
    return tmp_path


def make(folder: Path, *files: str, link: str = "") -> Path:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    if link:
        (folder / "link").write_text(f"{link}\n")
    return folder


def kind_of(text: str | None, kinds=READABLE) -> str:
    with pytest.raises(UserError) as error:
        place_of(text, kinds)
    assert "t" * 22 not in str(error.value), "the token lets anyone join"
    return error.value.kind


def test_the_only_run_needs_no_name(here: Path):
    for text in (None, "one", "runs/one", str(here / "runs" / "one"), link("one")):
        assert place_of(text, LED).folder.resolve() == here / "runs" / "one", text
        assert Path(trained(text)).resolve() == here / "runs" / "one", text
    assert place_of(link("two")).link == link("two"), "a link is enough to look on"
    assert kind_of(link("two"), LED) == "join_link"


def test_of_several_the_one_at_work_is_meant(here: Path):
    two = make(here / "runs" / "two", "journal.sqlite", "private.json", link=link("two"))
    assert kind_of(None) == "several_runs"
    assert Path(trained("two")) == Path("runs/two")
    with (two / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert place_of(None, LED).folder == Path("runs/two")


def test_whoever_leads_a_run_and_takes_part_means_the_run(here: Path):
    make(here / "data" / "pmtrain" / "peers" / "one-AAAAAAAA", "peer.log", link=link("one"))
    assert place_of("one", LED).folder == Path("runs/one")
    assert place_of("one").kind == "run"
    (here / "runs" / "one" / "private.json").unlink()
    (here / "runs" / "one" / "journal.sqlite").unlink()
    assert place_of("one").kind == "peer"
    assert place_of(None).kind == "peer"
    assert kind_of("one", LED) == "no_run"


def test_a_model_is_found_by_its_name_where_no_run_has_it(here: Path):
    make(here / "runs" / "one" / "model", "config.json", "model.safetensors")
    assert trained("model", models=True) == "runs/one/model"
    with pytest.raises(UserError):
        trained("model")
    assert trained("s3://bucket/runs") == "s3://bucket/runs"


@pytest.mark.parametrize(("words", "found"), [(["x"], (None, "x")), (["r", "x"], ("r", "x")), (["a", "b", "c"], None)])
def test_the_run_may_be_left_out_before_another_word(words: list[str], found: tuple | None):
    if found is None:
        with pytest.raises(UserError):
            run_and(words, "OUT")
    else:
        assert run_and(words, "OUT") == found


def test_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME", "PMTRAIN_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "empty"))
    assert kind_of(None) == "no_run"
