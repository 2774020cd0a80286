"""Making tokens: in several processes, after a kill, and found again wherever the text lies."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_data import TEXT, file_spec

from protomodels_cli.data import encoding, tokenise
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.prepare import prepare
from protomodels_cli.data.sources import Input
from protomodels_cli.data.tokenizers import BPE_SAMPLE_BYTES
from protomodels_cli.observe import bytes_done
from protomodels_cli.spec.corpus import DataSpec

BPE = {"kind": "bpe", "vocab_size": 300}


def write_corpus(folder):
    """300 kB in six files."""
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"file {i}\n" + TEXT[i * 1000 : 70_000])
        documents = TEXT[: 30_000 * i].splitlines(keepends=True)
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))


def test_several_processes_give_the_tokens_of_one(spec, tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    monkeypatch.setattr(encoding, "ALONE", 100_000)
    monkeypatch.setattr(encoding, "GROUP_CHARACTERS", 20_000)
    started, real = [], encoding._Process
    monkeypatch.setattr(encoding, "_Process", lambda command: started.append(command) or real(command))

    def made(count: int) -> str:
        monkeypatch.setattr(tokenise, "processes", lambda: count)
        data = {"cache_dir": str(tmp_path / f"cache-{count}")}
        return prepare(file_spec(spec, tmp_path, "files", ["text"], data=data, tokenizer=BPE), tmp_path).sha256

    one = made(1)
    assert started == []
    assert made(3) == one
    assert len(started) == 3


def test_a_process_that_dies_is_explained_and_what_was_done_is_kept(spec, tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    s = file_spec(spec, tmp_path, "files", ["text"], tokenizer=BPE)
    monkeypatch.setattr(tokenise, "processes", lambda: 2)
    monkeypatch.setattr(encoding, "ALONE", 100_000)
    monkeypatch.setattr(encoding, "GROUP_CHARACTERS", 20_000)
    monkeypatch.setattr(tokenise, "KEPT_EVERY", 30_000)
    serve = "import os; os.kill(os.getpid(), 9)"
    real = encoding._Process
    monkeypatch.setattr(encoding, "_Process", lambda command: real([sys.executable, "-c", serve]))
    with pytest.raises(DataError) as refused:
        prepare(s, tmp_path)
    assert refused.value.kind == "killed"
    monkeypatch.setattr(encoding, "_Process", real)
    heard = []
    corpus = prepare(s, tmp_path, show=lambda what, done, total: heard.append((what, done)))
    assert "learning" not in [what for what, _ in heard]
    assert next(done for what, done in heard if what == "tokenising") > 100_000
    whole = file_spec(spec, tmp_path, "files", ["text"], tokenizer=BPE, data={"cache_dir": str(tmp_path / "other")})
    assert corpus.sha256 == prepare(whole, tmp_path).sha256


KILLED = """
import sys, time
from pathlib import Path
import yaml
from protomodels_cli.data import encoding, tokenise
from protomodels_cli.data.prepare import prepare
from protomodels_cli.spec import spec_from
tokenise.KEPT_EVERY = encoding.GROUP_CHARACTERS = 15_000
encoding.ALONE = 100_000
tokenise.processes = lambda: 2
def show(what, done, total):
    print(what, done, flush=True)
    time.sleep(0.05)
prepare(spec_from(yaml.safe_load(Path("run.yaml").read_text())), Path(), show=show)
"""


def test_killed_halfway_it_goes_on_where_it_got_to_and_ends_with_the_same_bytes(spec, tmp_path):
    import yaml

    write_corpus(tmp_path / "text")
    s = file_spec(spec, tmp_path, "files", ["text"], tokenizer=BPE)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(s.model_dump(mode="json")))
    reached = []
    for stop_after in (3, 9):  # one process; then with two others
        making = subprocess.Popen([sys.executable, "-c", KILLED], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        try:
            tokenising = (said for said in making.stdout if said.startswith("tokenising"))
            said = [next(tokenising) for _ in range(stop_after)]
            os.kill(making.pid, signal.SIGKILL)
        finally:
            making.kill()
            making.wait()
            making.stdout.close()
        reached.append([int(word.split()[1]) for word in said])
    assert reached[1][0] > reached[0][-2], "not from the beginning"
    corpus = prepare(s, tmp_path)
    whole = file_spec(spec, tmp_path, "files", ["text"], tokenizer=BPE, data={"cache_dir": str(tmp_path / "other")})
    assert corpus.sha256 == prepare(whole, tmp_path).sha256
    assert not list((tmp_path / "cache").glob(".making*"))


@pytest.mark.parametrize("damage", ["shard", "state", "tokenizer"])
def test_what_was_kept_and_is_damaged_is_made_again(spec, tmp_path, monkeypatch, damage):
    write_corpus(tmp_path / "text")
    s = file_spec(spec, tmp_path, "files", ["text"], tokenizer=BPE)
    monkeypatch.setattr(tokenise, "KEPT_EVERY", 30_000)
    monkeypatch.setattr(encoding, "GROUP_CHARACTERS", 20_000)

    class Stop(Exception):
        pass

    def show(what, done, total):
        if what == "tokenising" and done > 150_000:
            raise Stop

    with pytest.raises(Stop):
        prepare(s, tmp_path, show=show)
    [work] = (tmp_path / "cache").glob(".making*")
    name = {"shard": "train-00000.bin", "state": "reached.json", "tokenizer": "tokenizer.json"}[damage]
    data = bytearray((work / name).read_bytes())
    data[100] ^= 1
    (work / name).write_bytes(data)
    whole = file_spec(spec, tmp_path, "files", ["text"], tokenizer=BPE, data={"cache_dir": str(tmp_path / "other")})
    assert prepare(s, tmp_path).sha256 == prepare(whole, tmp_path).sha256


def test_two_at_once_make_one(spec, tmp_path):
    write_corpus(tmp_path / "text")
    s = file_spec(spec, tmp_path, "files", ["text"], tokenizer=BPE)
    heard, found = [], []

    def make() -> None:
        found.append(prepare(s, tmp_path, show=lambda what, done, total: heard.append(what)).sha256)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert heard.count("learning") == 1


def test_text_that_was_moved_or_copied_is_found_again(spec, tmp_path):
    write_corpus(tmp_path / "text")
    heard = []

    def show(what, done, total):
        heard.append(what)

    first = prepare(file_spec(spec, tmp_path, "files", ["text"]), tmp_path, show=show)
    assert "tokenising" in heard
    heard.clear()
    shutil.copytree(tmp_path / "text", tmp_path / "elsewhere" / "copy")
    (tmp_path / "text").rename(tmp_path / "moved")
    for base, name in ((tmp_path, "moved"), (tmp_path / "elsewhere", "copy")):
        again = prepare(file_spec(spec, tmp_path, "files", [name]), base, show=show)
        assert again.folder == first.folder
    assert "tokenising" not in heard
    heard.clear()
    prepare(file_spec(spec, tmp_path, "files", ["moved"]), tmp_path, show=show)
    assert heard == [], "nothing is read where nothing was written"
    (tmp_path / "moved" / "0.txt").write_text(TEXT[1000:])
    os.utime(tmp_path / "moved" / "0.txt", ns=(0, 0))
    assert prepare(file_spec(spec, tmp_path, "files", ["moved"]), tmp_path).folder != first.folder


def test_text_that_changes_while_it_is_read_is_not_taken_for_what_it_was(spec, tmp_path):
    write_corpus(tmp_path / "text")

    def show(what, done, total):
        if what == "tokenising":
            (tmp_path / "text" / "0.txt").write_text(TEXT)

    with pytest.raises(DataError, match=r"0\.txt") as refused:
        prepare(file_spec(spec, tmp_path, "files", ["text"]), tmp_path, show=show)
    assert refused.value.kind == "changed"
    assert not list((tmp_path / "cache").glob(".making*"))


def test_work_that_nobody_went_on_with_is_removed(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    for name, age in ((".making-old", 8), (".making-new", 6)):
        (tmp_path / "cache" / name).mkdir(parents=True)
        then = time.time() - age * 24 * 3600
        os.utime(tmp_path / "cache" / name, (then, then))
    prepare(file_spec(spec, tmp_path, "text", ["a.txt"]), tmp_path)
    assert [path.name for path in (tmp_path / "cache").glob(".making*")] == [".making-new"]


def test_a_vocabulary_is_learned_from_a_bounded_share_of_every_file(tmp_path, monkeypatch):
    inputs = []
    for i, size in enumerate((200_000, 50_000, 100, 400_000)):
        (tmp_path / str(i)).write_text((str(i) * 99 + "\n") * (size // 100))
        inputs.append(Input("text", tmp_path / str(i)))
    monkeypatch.setattr(tokenise, "BPE_SAMPLE_BYTES", 130_000)
    assert BPE_SAMPLE_BYTES > 130_000

    def shares(**more) -> list[int]:
        sample = list(tokenise._sample(DataSpec(source="text", files=["x"], **more), inputs))
        assert sample == list(tokenise._sample(DataSpec(source="text", files=["x"], **more), inputs))
        return [sum(len(p.text) for p in sample if p.text[0] == str(i)) for i in range(4)]

    first, second, third, fourth = shares()
    assert 32_000 < first < 64_000
    assert 0 < second < 20_000
    assert third == 0, "too small to have a piece of its own"
    assert 60_000 < fourth < 100_000
    assert shares(max_bytes=100_000) == [100_000, 0, 0, 0], "all of it"
    assert shares(max_bytes=220_000)[2:] == [0, 0], "which are not read"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_how_far_it_is_is_told_now_and_then(monkeypatch, stream):
    now, said = [100.0], stream()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(bytes_done.time, "monotonic", lambda: now[0])
    with bytes_done.BytesDone() as show:
        for second in range(60):
            now[0] = 100.0 + second
            show("tokenising", (second + 1) << 20, 60 << 20)
    lines = [line for line in said.getvalue().replace("\x1b[K", "").split("\r" if stream is Terminal else "\n") if line]
    assert len(lines) == (59 if stream is Terminal else 5)
    for fact in ("tokenising", "60 MiB", "1 MiB/s", "eta"):
        assert all(fact in line for line in lines)
    assert ("━" in lines[-1]) == (stream is Terminal)
