"""Data that is hostile, huge or on a disk that gives way: refused in bounded memory, without losing work."""

from __future__ import annotations

import errno
import gzip
import os
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import zstandard
from test_data import TEXT, file_spec
from test_tokenise import BPE, write_corpus
from waiting import PATIENCE

from protomodels_cli.data import compressed, encoding, hub, sources, tokenise
from protomodels_cli.data.compressed import opened
from protomodels_cli.data.errors import DataError, Outage, unreadable
from protomodels_cli.data.prepare import prepare
from protomodels_cli.data.sources import Input, below, pieces, source_files
from protomodels_cli.data.tokenizers import Json
from protomodels_cli.data.work import in_silence, workshop
from protomodels_cli.spec.corpus import DataSpec


def test_a_little_zst_that_is_much_text_is_read_in_little_memory(tmp_path):
    (tmp_path / "d.zst").write_bytes(zstandard.ZstdCompressor(level=19).compress(bytes(96 << 20)))
    assert (tmp_path / "d.zst").stat().st_size < 4096
    tracemalloc.start()
    try:
        with opened(tmp_path / "d.zst") as (content, _):
            assert sum(len(part) for part in iter(lambda: content.read(1 << 14), b"")) == 96 << 20
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("memory", "refused"), [(1 << 30, True), (8 << 30, False)])
def test_a_zst_that_takes_much_memory_is_read_where_there_is_much(tmp_path, monkeypatch, memory, refused):
    long = zstandard.ZstdCompressionParameters(window_log=31)
    packing = zstandard.ZstdCompressor(compression_params=long).compressobj()
    (tmp_path / "d.txt.zst").write_bytes(packing.compress(b"text") + packing.flush())
    monkeypatch.setattr(compressed, "_memory", lambda: memory)
    inputs = [Input("text", tmp_path / "d.txt.zst")]
    if not refused:
        assert [p.text for p in pieces(DataSpec(), inputs)] == ["text"]
        return
    with pytest.raises(DataError, match=r"d\.txt\.zst.*2 GiB.*256 MiB") as caught:
        list(pieces(DataSpec(), inputs))
    assert (caught.value.kind, caught.value.exit_code) == ("window", 3)


@pytest.mark.parametrize("line", ['{"text": "' + "a" * 5000 + '"}', '{"text": ' + "[" * 200_000])
def test_a_json_line_that_is_too_long_or_too_deep_is_refused(tmp_path, monkeypatch, line):
    if "a" in line:
        monkeypatch.setattr(sources, "LONGEST_LINE", 5000)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n\n' + line)
    with pytest.raises(DataError, match=r"d\.jsonl:3 ") as caught:
        list(pieces(DataSpec(), [Input("jsonl", tmp_path / "d.jsonl")]))
    assert caught.value.kind == "jsonl"


def test_a_json_line_of_just_the_most_is_read(tmp_path, monkeypatch):
    line = b'{"text": "a"}\n'
    monkeypatch.setattr(sources, "LONGEST_LINE", len(line))
    (tmp_path / "d.jsonl").write_bytes(2 * line)
    assert len(list(pieces(DataSpec(), [Input("jsonl", tmp_path / "d.jsonl")]))) == 2


def test_a_tokenizer_without_ids_is_refused():
    with pytest.raises(DataError, match=r"t\.json") as caught:
        Json(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(), "t.json")
    assert caught.value.kind == "tokenizer_file"


def test_a_tokenizer_that_is_not_utf8_is_refused(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "t.json").write_bytes(b'{"\xff": 1}')
    named = {"kind": "file", "file": "t.json", "vocab_size": 300}
    with pytest.raises(DataError, match=r"t\.json") as caught:
        prepare(file_spec(spec, tmp_path, "text", ["a.txt"], tokenizer=named), tmp_path)
    assert caught.value.kind == "tokenizer_file"


def test_links_to_folders_are_not_followed_unless_they_are_named(tmp_path):
    for name in ("mine/a/x.txt", "other/y.txt", "other/deep/z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "mine" / "a" / "back").symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "a" / "again").symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "out").symlink_to(tmp_path / "other")
    (tmp_path / "mine" / "file.txt").symlink_to(tmp_path / "other" / "y.txt")
    assert [path.name for path in below(tmp_path / "mine")] == ["x.txt", "file.txt"]
    for pattern, names in {
        "mine": {"x.txt", "file.txt"},
        "mine/**": {"x.txt", "file.txt"},
        "mine/**/*": {"x.txt", "file.txt"},
        "**/*.txt": {"x.txt", "file.txt", "z.txt"},
        "mine/out": {"y.txt", "z.txt"},
        "mine/o*/**/z.txt": {"z.txt"},
    }.items():
        found = source_files(DataSpec(source="files", files=[pattern]), "files", tmp_path)
        assert {one.path.name for one in found} == names, pattern


def test_datasets_that_would_run_code_of_a_dataset_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__version__="3.6.0"))
    with pytest.raises(DataError, match=r"3\.6\.0") as caught:
        list(hub.documents(DataSpec(source="hf", dataset="set"), Path("set"), "train"))
    assert caught.value.kind == "old_package"


def test_one_at_a_time_makes_tokens_and_the_lock_is_a_file(tmp_path):
    order, waits = [], threading.Event()

    def other() -> None:
        with workshop(tmp_path / "cache" / "key", lambda *said: waits.set()):
            order.append("other")

    with workshop(tmp_path / "cache" / "key", in_silence) as work:
        thread = threading.Thread(target=other)
        thread.start()
        assert waits.wait(PATIENCE)
        assert os.listdir(work) == []
        order.append("first")
    thread.join(PATIENCE)
    assert order == ["first", "other"]
    assert [path.is_file() for path in (tmp_path / "cache" / "locks").iterdir()] == [True]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, Outage), (errno.ESTALE, Outage), (errno.EACCES, Outage), (None, DataError)],
)
def test_a_file_that_cannot_be_read_now_may_be_later(number, kind):
    error = OSError("corrupt") if number is None else OSError(number, os.strerror(number))
    assert type(unreadable(Path("a"), error)) is kind


def test_a_read_error_on_the_way_keeps_the_tokens(spec, tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    s = file_spec(spec, tmp_path, "files", ["text"], tokenizer=BPE)
    monkeypatch.setattr(tokenise, "KEPT_EVERY", 30_000)
    monkeypatch.setattr(encoding, "GROUP_CHARACTERS", 20_000)
    real, failing = sources._text, [False]

    def text(file):
        if failing[0] and file.name == "2.txt":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield from real(file)

    monkeypatch.setattr(sources, "_text", text)

    def show(what, done, total):
        failing[0] = what == "tokenising"

    with pytest.raises(Outage, match=r"2\.txt"):
        prepare(s, tmp_path, show=show)
    monkeypatch.undo()
    heard = []
    prepare(s, tmp_path, show=lambda what, done, total: heard.append((what, done)))
    assert "learning" not in dict(heard)
    assert next(done for what, done in heard if what == "tokenising") > 100_000


def test_equal_bytes_that_are_read_in_other_ways_are_not_the_same_tokens(spec, tmp_path):
    packed = gzip.compress(TEXT.encode())
    for name in ("packed.txt", "packed.txt.gz"):
        (tmp_path / name).write_bytes(packed)
    lines = "".join(f'{{"text": "{line}"}}\n' for line in TEXT.splitlines())
    for name in ("lines.txt", "lines.jsonl"):
        (tmp_path / name).write_text(lines)
    for source, names in {"text": ("packed.txt", "packed.txt.gz"), "files": ("lines.txt", "lines.jsonl")}.items():
        one, other = (prepare(file_spec(spec, tmp_path, source, [name]), tmp_path) for name in names)
        assert one.folder != other.folder
        assert one.sha256 != other.sha256


def test_a_vocabulary_is_learned_from_every_file_however_they_are_packed(tmp_path, monkeypatch):
    inputs = []
    for letter in "ab":
        (tmp_path / f"{letter}.gz").write_bytes(gzip.compress((letter * 99 + "\n").encode() * 3000))
        inputs.append(Input("text", tmp_path / f"{letter}.gz"))
    monkeypatch.setattr(tokenise, "BPE_SAMPLE_BYTES", 100_000)
    sample = list(tokenise._sample(DataSpec(source="text", files=["x"]), inputs))
    for letter in "ab":
        assert 40_000 < sum(len(p.text) for p in sample if p.text[0] == letter) < 70_000


@pytest.mark.parametrize(
    ("program", "kind", "named"),
    [
        ("raise MemoryError", "ended", "MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", "killed", None),
    ],
)
def test_what_ended_a_process_is_told(program, kind, named):
    command = [sys.executable, "-S", "-c", program]
    with encoding._Process(command) as process, pytest.raises(Outage, match=named) as caught:
        process.take()
    assert caught.value.kind == kind
