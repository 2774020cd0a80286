"""Where an export's weights are read from: run directories, also while they change, and copies in stores."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from exporting import save_reference, save_run, save_snapshot
from safetensors.torch import load_file

from protomodels_cli.coordinator.as_json import as_json, from_json
from protomodels_cli.coordinator.snapshots.copies import SPEC, Copies
from protomodels_cli.coordinator.snapshots.manifest import MANIFEST, Manifest, folder_name, part_name
from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_SPEC, UserError
from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import export
from protomodels_cli.model.plain import multiplied_out


def refusal(*arguments: Any) -> UserError:
    with pytest.raises(UserError) as refused, open_source(*arguments) as source:
        export(source, Path(source.place).parent / "out")
    assert len(str(refused.value).splitlines()) <= 3
    return refused.value


def exported_files(place: str | Path, out: Path, step: int | None = None) -> dict[str, bytes]:
    with open_source(place, step, out.parent) as source:
        export(source, out)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_the_newest_snapshot_or_that_of_a_step(tmp_path):
    r = save_run(tmp_path / "run", 2)
    with open_source(tmp_path / "run") as source:
        assert (source.lineage, source.step, source.facts.eval_loss) == (1, 2, 4.25)
    with open_source(tmp_path / "run", 1) as source:
        assert (source.lineage, source.step) == (1, 1)
    error = refusal(tmp_path / "run", 7)
    assert (error.kind, error.exit_code) == ("no_such_snapshot", EXIT_SPEC)
    assert "1, 2" in str(error)
    save_snapshot(tmp_path / "run", r, lineage=3)
    (tmp_path / "run" / "snapshots" / ".0004-00000009").mkdir()  # one that is being uploaded
    (tmp_path / "run" / "snapshots" / "0004-00000008.dropped").mkdir()
    with open_source(tmp_path / "run", 2) as source:
        assert (source.lineage, source.step) == (3, 2)


def test_the_references_own_directory(tmp_path):
    r = save_reference(tmp_path / "run", 3)
    with open_source(tmp_path / "run") as source:
        assert (source.lineage, source.step, source.spec) == (None, 3, r.spec)
    with open_source(tmp_path / "run", 2) as source:
        assert source.step == 2
    [part, *_] = (tmp_path / "run" / "snapshots" / "00000003").glob("stage-1*")
    part.write_bytes(part.read_bytes()[:-1])
    assert refusal(tmp_path / "run").kind == "snapshot_damaged"


def test_what_is_no_run(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for place in ("empty", "file", "absent", "absent/0001-00000001"):
        error = refusal(tmp_path / place)
        assert (error.kind, error.exit_code) == ("not_a_run_dir", EXIT_OUTSIDE)
        assert str(tmp_path / place) in str(error)


def test_a_run_that_has_saved_nothing(tmp_path):
    save_run(tmp_path / "run", 0)
    assert (refusal(tmp_path / "run").kind, refusal(tmp_path / "run").exit_code) == ("nothing_saved", EXIT_OUTSIDE)
    save_reference(tmp_path / "reference", 0)
    assert refusal(tmp_path / "reference", 5).kind == "nothing_saved"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "missing": Path.unlink,
    "a flipped bit": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "a folder": replace_by_folder,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("file", ["stage-2.safetensors", MANIFEST])
def test_damaged_and_missing_parts(tmp_path, file, damage):
    save_run(tmp_path / "run", 2)
    path = tmp_path / "run" / "snapshots" / "0001-00000002" / file
    damage(path)
    if file == MANIFEST and not path.exists():  # then it is not complete
        with open_source(tmp_path / "run") as source:
            assert source.step == 1
        return
    error = refusal(tmp_path / "run")
    assert (error.kind, error.exit_code) == ("snapshot_damaged", EXIT_OUTSIDE)
    assert str(path) in str(error)
    assert "--step 1" in str(error)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
    with open_source(tmp_path / "run", 1) as source:
        export(source, tmp_path / "out")


def test_another_runs_snapshot_is_not_taken_for_this_ones(tmp_path):
    save_run(tmp_path / "run", 1)
    save_run(tmp_path / "other", 2, seed=1)
    shutil.copytree(tmp_path / "other/snapshots/0001-00000002", tmp_path / "run/snapshots/0001-00000002")
    assert refusal(tmp_path / "run").kind == "snapshot_damaged"


def test_a_snapshot_that_is_dropped_while_it_is_read(tmp_path):
    save_run(tmp_path / "run", 1)
    right = exported_files(tmp_path / "run", tmp_path / "right")
    with open_source(tmp_path / "run") as source:
        shutil.rmtree(tmp_path / "run" / "snapshots")
        export(source, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == right


def test_a_coordinator_that_saves_and_drops_meanwhile(tmp_path):
    """As fast as it can, keeping one: opening the newest always succeeds."""
    save_run(tmp_path / "run", 1)
    snapshots = tmp_path / "run" / "snapshots"
    first = snapshots / folder_name(1, 1)
    described = from_json(Manifest, (first / MANIFEST).read_bytes())
    stages, stop, newest = len(described.mark.parts), threading.Event(), [1]

    def save_and_drop() -> None:
        before = first
        for step in range(2, 100_000):
            if stop.is_set():
                return
            work, named = snapshots / f".{folder_name(1, step)}", snapshots / folder_name(1, step)
            work.mkdir()
            for stage in range(stages):
                os.link(before / part_name(stage), work / part_name(stage))
            mark = replace(described.mark, step=step)
            (work / MANIFEST).write_bytes(as_json(replace(described, mark=mark)))
            os.rename(work, named)
            newest[0] = step
            os.rename(before, f"{before}.dropped")
            shutil.rmtree(f"{before}.dropped")
            before = named

    coordinator = threading.Thread(target=save_and_drop)
    coordinator.start()
    try:
        for _ in range(30):
            with open_source(tmp_path / "run") as source:
                for part in source.parts:
                    with part.open() as file:
                        assert file.tensors
    finally:
        stop.set()
        coordinator.join()
    assert newest[0] > 30


# Stores


@pytest.fixture
def copied(tmp_path):
    """A run, and the function that copies it to a store as a coordinator does."""
    r = save_run(tmp_path / "run", 2, tokenizer={"kind": "bpe", "vocab_size": 300})

    def copy(url: str, name: str = "run-1234") -> None:
        kept = {file: (tmp_path / "run" / file).read_bytes() for file in ("corpus.json", "tokenizer.json")}
        copies = Copies(url, name, lambda: {SPEC: as_json(r.spec.model_dump(mode="json")), **kept})
        snapshots = sorted((tmp_path / "run" / "snapshots").iterdir())
        copies.bring_up_to_date(snapshots, [], lambda folder: nullcontext(True))

    return copy


def test_a_stores_copy_is_as_good_as_the_run(tmp_path, copied):
    right = exported_files(tmp_path / "run", tmp_path / "right")
    memory = f"memory://{tmp_path.name}"
    for n, url in enumerate(((tmp_path / "store").as_uri(), memory)):
        copied(url)
        assert exported_files(url, tmp_path / f"{n}") == right
        assert exported_files(f"{url}/run-1234", tmp_path / f"{n}-run") == right
        assert exported_files(f"{url}/run-1234/0001-00000002/", tmp_path / f"{n}-snapshot") == right
        with open_source(url, 1, tmp_path) as source:
            assert source.step == 1
    assert exported_files(tmp_path / "store", tmp_path / "folder") == right
    assert not list(tmp_path.glob(".*")), "fetched parts are gone"
    with open_source(memory, None, tmp_path) as source:
        for part in source.parts:
            with part.open() as file:
                assert os.fstat(file._handle).st_nlink == 0
            assert file._handle < 0, "one at a time"


def test_what_a_kill_leaves_of_a_fetched_part(tmp_path, copied, monkeypatch):
    """The next export to the same place clears it away, and nothing of an export that is alive."""
    url, files = f"memory://{tmp_path.name}", fsspec.filesystem("memory")
    copied(url)
    get_file, seen = type(files).get_file, []

    def meanwhile(self, *arguments: Any) -> None:
        if not seen:
            (tmp_path / ".pmtrain-part-killed").write_text("half a part")
            exported_files(tmp_path / "run", tmp_path / "another")
            seen.extend(path.name for path in tmp_path.glob(".pmtrain-part-*"))
        get_file(self, *arguments)

    monkeypatch.setattr(type(files), "get_file", meanwhile)
    exported_files(url, tmp_path / "out")
    assert len(seen) == 1
    assert seen != [".pmtrain-part-killed"]
    assert not list(tmp_path.glob(".*"))


def test_a_store_with_several_runs_names_them(tmp_path, copied):
    url = (tmp_path / "store").as_uri()
    copied(url)
    copied(url, "run-5678")
    error = refusal(url)
    assert error.kind == "several_runs"
    assert "run-1234, run-5678" in str(error)


def test_what_a_store_lacks(tmp_path, copied):
    url = f"memory://{tmp_path.name}"
    assert refusal(url).kind == "not_a_run_dir"
    copied(url)
    files = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}/run-1234"
    files.rm(f"{root}/0001-00000002/{MANIFEST}")  # its upload is not done
    with open_source(url) as source:
        assert source.step == 1
    files.pipe_file(f"{root}/0001-00000001/stage-0.safetensors", b"12345678")
    assert refusal(url).kind == "snapshot_damaged"
    files.rm(f"{root}/0001-00000001/stage-0.safetensors")
    assert refusal(url).kind == "snapshot_damaged"
    files.pipe_file(f"{root}/{SPEC}", b"{")
    assert refusal(url).kind == "store_damaged"


def test_a_store_that_cannot_be_reached():
    for url, kind in (
        ("nosuch://bucket/runs", "store_unknown"),
        ("ftp://127.0.0.1:1/runs", "store_unreachable"),
    ):
        error = refusal(url)
        assert (error.kind, error.exit_code) == (kind, EXIT_OUTSIDE)


# The tokenizer


def test_older_runs_have_their_tokenizer_in_the_cache(tmp_path):
    r = save_run(tmp_path / "run", 1, tokenizer={"kind": "bpe", "vocab_size": 300})
    with open_source(tmp_path / "run") as source:
        right = source.tokenizer_files
    (tmp_path / "run" / "tokenizer.json").unlink()
    (tmp_path / "run" / "corpus.json").unlink()
    with open_source(tmp_path / "run") as source:
        assert source.tokenizer_files == right
        assert source.facts.corpus is None
        export(source, tmp_path / "out")
    assert multiplied_out(r.stages).keys() >= load_file(next((tmp_path / "out").glob("*-00001-*"))).keys()
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    assert refusal(tmp_path / "run").kind == "tokenizer_missing"


def test_the_run_directory_keeps_what_an_export_needs(tmp_path):
    r = save_run(tmp_path / "run", 1)
    kept = json.loads((tmp_path / "run" / "corpus.json").read_text())
    assert kept["sha256"] == r.corpus.sha256
    assert kept["train_tokens"] == len(r.corpus.train)
    assert not (tmp_path / "run" / "tokenizer.json").exists(), "bytes need no file"
