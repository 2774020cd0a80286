"""Data: sources, tokenizers, shards and batches, with real files."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import make_spec
from heavy import heavy
from hypothesis import given, settings
from hypothesis import strategies as st

from protomodels_cli.data import shards
from protomodels_cli.data.batches import Batches, NotRevisited, held_out_windows, permuted
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.prepare import prepare
from protomodels_cli.data.shards import hash_of
from protomodels_cli.data.sources import PIECE, Input, pieces
from protomodels_cli.data.tokenizers import Bytes, Json, train_bpe
from protomodels_cli.spec.corpus import DataSpec

TEXT = "".join(f"Line {i}: the quick brown fox jumps over the lazy dog {i * i} times.\n" for i in range(4000))


def file_spec(spec, folder: Path, source: str, files: list[str], **more):
    data = {
        "source": source,
        "files": files,
        "max_bytes": None,
        "cache_dir": str(folder / "cache"),
        **more.pop("data", {}),
    }
    return spec(data=data, **more)


def all_tokens(stream) -> np.ndarray:
    return stream.read(0, len(stream))


def test_a_codec_that_needs_samples_again_is_refused_where_none_come_back():
    few = {"max_bytes": 1000, "val_fraction": 0.1}
    spec = make_spec(steps=14, data=few, wire={"forward": "int4+aqsgd"})  # 56 samples
    with pytest.raises(NotRevisited, match=r"int4\+aqsgd") as refused:
        Batches(prepare(spec).train, spec)
    assert (refused.value.kind, refused.value.exit_code) == ("not_revisited", 2)
    spec = make_spec(steps=15, data=few, wire={"forward": "int4+aqsgd"})
    Batches(prepare(spec).train, spec)


def test_text_becomes_train_and_held_out_tokens_without_loss(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    corpus = prepare(file_spec(spec, tmp_path, "text", ["*.txt"]), tmp_path)
    train, held_out = (Bytes().decode(all_tokens(s).tolist()) for s in (corpus.train, corpus.held_out))
    lines = sorted(train.replace("\0", "").splitlines() + held_out.replace("\0", "").splitlines())
    assert lines == sorted(TEXT.splitlines()), "every line is in exactly one of the two"
    assert 0 < len(held_out) < len(train) / 2


def test_held_out_text_does_not_depend_on_the_seed(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    found = [prepare(file_spec(spec, tmp_path, "text", ["a.txt"], seed=s), tmp_path).sha256 for s in (0, 1)]
    assert found[0] == found[1]


def test_val_files_are_held_out_whole(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("held-out " * 50)
    s = file_spec(spec, tmp_path, "text", ["a.txt"], data={"val_files": ["b.txt"]})
    corpus = prepare(s, tmp_path)
    assert Bytes().decode(all_tokens(corpus.held_out).tolist()) == "held-out " * 50 + "\0"
    assert len(corpus.train) == len(TEXT) + 1
    with pytest.raises(DataError, match=r"b\.txt") as refused:
        prepare(file_spec(spec, tmp_path, "text", ["*.txt"], data={"val_files": ["b.txt"]}), tmp_path)
    assert refused.value.kind == "overlap"


def test_a_file_that_two_patterns_match_is_read_once(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("another " * 5000)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    once = prepare(file_spec(spec, tmp_path, "text", ["a.txt", "b.txt"]), tmp_path)
    twice = prepare(file_spec(spec, tmp_path, "text", ["a.txt", "*.txt", "./b.txt"]), tmp_path)
    assert once.sha256 == twice.sha256


def test_a_small_text_has_its_share_held_out(spec, tmp_path):
    for size in (2_000, 20_000, 60_000):
        (tmp_path / "a.txt").write_text(TEXT[:size])
        corpus = prepare(file_spec(spec, tmp_path, "text", ["a.txt"], data={"val_fraction": 0.05}), tmp_path)
        assert 0.02 * size < len(corpus.held_out) < 0.4 * size
        both = [Bytes().decode(all_tokens(s).tolist()) for s in (corpus.train, corpus.held_out)]
        assert sorted("".join(both).replace("\0", "")) == sorted(TEXT[:size])
        assert (
            prepare(file_spec(spec, tmp_path, "text", ["a.txt"], data={"val_fraction": 0.05}), tmp_path).folder
            == corpus.folder
        )


def test_half_an_emoji_does_not_stop_a_run(spec, tmp_path):
    lines = [json.dumps({"text": line}) for line in TEXT.splitlines()] + ['{"text": "cut \\ud83d here"}']
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    for kind in ({"kind": "bytes"}, {"kind": "bpe", "vocab_size": 300}):
        assert len(prepare(file_spec(spec, tmp_path, "jsonl", ["d.jsonl"], tokenizer=kind), tmp_path).train)


def test_a_tokenizer_files_settings_for_serving_are_not_obeyed(tmp_path):
    made = train_bpe([TEXT], 400)
    made._inner.enable_truncation(8)
    made._inner.enable_padding(length=8)
    long, short = Json(made._inner.to_str()).encode([TEXT[:1000], "hi"])
    assert len(long) > 100
    assert len(short) < 8


def documents_in_jsonl(folder: Path) -> list[str]:
    documents = TEXT.splitlines(keepends=True)
    (folder / "d.jsonl").write_text("\n".join(json.dumps({"body": d}) for d in documents) + "\n\n")
    return documents


def test_jsonl_gives_the_tokens_that_text_gives(spec, tmp_path):
    documents = documents_in_jsonl(tmp_path)
    corpus = prepare(file_spec(spec, tmp_path, "jsonl", ["d.jsonl"], data={"field": "body"}), tmp_path)
    text = Bytes().decode(all_tokens(corpus.train).tolist())
    assert set(text.split("\0")) < set(documents) | {""}


def test_parquet_gives_the_tokens_that_jsonl_gives(spec, tmp_path):
    pyarrow, parquet = heavy("pyarrow"), heavy("pyarrow.parquet")
    table = pyarrow.table({"body": documents_in_jsonl(tmp_path), "x": list(range(4000))})
    parquet.write_table(table, tmp_path / "d.parquet")
    specs = (file_spec(spec, tmp_path, kind, [f"d.{kind}"], data={"field": "body"}) for kind in ("jsonl", "parquet"))
    jsonl, parquet = (prepare(s, tmp_path).sha256 for s in specs)
    assert jsonl == parquet


def write_bin(path: Path, ids: np.ndarray, header: bool) -> None:
    head = np.zeros(256, dtype="<i4")
    head[:3] = 20240520, 1, len(ids)
    path.write_bytes((head.tobytes() if header else b"") + ids.astype("<u2").tobytes())


@pytest.mark.parametrize("header", [False, True])
def test_token_shards_of_nanogpt_and_modded_nanogpt_are_used_where_they_lie(spec, tmp_path, header):
    ids = np.arange(1000) % 300
    write_bin(tmp_path / "t_0.bin", ids[:600], header)
    write_bin(tmp_path / "t_1.bin", ids[600:], header)
    s = file_spec(spec, tmp_path, "bin", ["t_*.bin"], tokenizer={"kind": "none", "vocab_size": 300})
    corpus = prepare(s, tmp_path)
    assert len(corpus.held_out) == 100
    assert np.concatenate([all_tokens(corpus.train), all_tokens(corpus.held_out)]).tolist() == ids.tolist()
    assert not list((tmp_path / "cache").rglob("*.bin")), "nothing is copied"
    assert corpus.tokenizer() is None
    with pytest.raises(DataError, match=r"\.bin .*299") as refused:
        prepare(file_spec(spec, tmp_path, "bin", ["t_*.bin"], tokenizer={"kind": "none", "vocab_size": 299}), tmp_path)
    assert refused.value.kind == "vocabulary"


def test_a_truncated_token_shard_is_refused(spec, tmp_path):
    write_bin(tmp_path / "t.bin", np.arange(500) % 9, header=True)
    (tmp_path / "t.bin").write_bytes((tmp_path / "t.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"t\.bin.*500") as refused:
        prepare(file_spec(spec, tmp_path, "bin", ["t.bin"], tokenizer={"kind": "none", "vocab_size": 9}), tmp_path)
    assert refused.value.kind == "shard_header"


@pytest.mark.parametrize(
    ("source", "content", "kind", "named"),
    [
        ("text", None, "no_file", r"'d\.text'"),
        ("text", "short", "too_short", "17"),
        ("jsonl", '{"text": "a"}\n{"txt": "b"}\n', "jsonl", r"d\.jsonl:2 "),
        ("jsonl", "nonsense\n", "jsonl", r"d\.jsonl:1 "),
        ("jsonl", '{"text": 5}\n', "jsonl", r"d\.jsonl:1 "),
        ("parquet", "nonsense", "parquet", r"d\.parquet"),
    ],
)
def test_bad_data_is_explained(spec, tmp_path, source, content, kind, named):
    if source == "parquet":
        heavy("pyarrow")
    if content is not None:
        (tmp_path / f"d.{source}").write_text(content)
    with pytest.raises(DataError, match=named) as caught:
        prepare(file_spec(spec, tmp_path, source, [f"d.{source}"]), tmp_path)
    assert caught.value.kind == kind
    assert "\n    fix:  " in str(caught.value)


def test_tokenised_once_and_made_again_only_when_damaged_or_changed(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    s = file_spec(spec, tmp_path, "text", ["a.txt"])
    first = prepare(s, tmp_path)
    manifest = first.folder / "manifest.json"
    stamp = manifest.stat().st_mtime_ns
    assert prepare(s, tmp_path).folder == first.folder
    assert manifest.stat().st_mtime_ns == stamp
    shard = first.folder / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    again = prepare(s, tmp_path)
    assert again.sha256 == first.sha256
    assert manifest.stat().st_mtime_ns != stamp
    for damage in ("{}", "[]", "nonsense", '{"train": 5}'):
        manifest.write_text(damage)
        assert prepare(s, tmp_path).sha256 == first.sha256
    (tmp_path / "a.txt").write_text(TEXT + "more\n")
    assert prepare(s, tmp_path).folder != first.folder
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".making")]


def test_a_corpus_is_hashed_once_and_again_only_if_a_file_was_written(spec, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    s, hashed = file_spec(spec, tmp_path, "text", ["a.txt"]), []
    first = prepare(s, tmp_path)
    monkeypatch.setattr(
        "protomodels_cli.data.prepare.hash_of", lambda path, shard: hashed.append(path.name) or hash_of(path, shard)
    )
    assert prepare(s, tmp_path).sha256 == first.sha256
    assert hashed == []
    shard = first.folder / "train-00000.bin"
    before = shard.stat()
    shard.write_bytes(shard.read_bytes()[::-1])
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened
    assert prepare(s, tmp_path).sha256 == first.sha256
    assert shard.name in hashed


def test_a_cache_that_cannot_be_written_is_explained(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(DataError, match=str(tmp_path / "cache")) as refused:
        prepare(file_spec(spec, tmp_path, "text", ["a.txt"]), tmp_path)
    assert refused.value.kind == "cache_unwritable"


def test_bpe_round_trip_and_determinism(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT + "naïve 日本語\n")
    s = file_spec(spec, tmp_path, "text", ["a.txt"], tokenizer={"kind": "bpe", "vocab_size": 400})
    corpus = prepare(s, tmp_path)
    tokenizer = corpus.tokenizer()
    sample = "Line 7: unseen wörds and 日本語\n"
    [ids] = tokenizer.encode([sample])
    assert tokenizer.decode(ids.tolist()) == sample
    assert len(corpus.train) < 0.6 * len(TEXT)
    assert max(all_tokens(corpus.train)) < 400
    assert train_bpe([TEXT], 400).sha256() == train_bpe([TEXT], 400).sha256()


def test_a_tokenizer_file(spec, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    train_bpe([TEXT], 400).save(tmp_path)
    s = file_spec(
        spec, tmp_path, "text", ["a.txt"], tokenizer={"kind": "file", "file": "tokenizer.json", "vocab_size": 400}
    )
    trained = file_spec(spec, tmp_path, "text", ["a.txt"], tokenizer={"kind": "bpe", "vocab_size": 400})
    assert prepare(s, tmp_path).sha256 == prepare(trained, tmp_path).sha256
    small = file_spec(
        spec, tmp_path, "text", ["a.txt"], tokenizer={"kind": "file", "file": "tokenizer.json", "vocab_size": 300}
    )
    with pytest.raises(DataError, match="400") as refused:
        prepare(small, tmp_path)
    assert refused.value.kind == "vocabulary"


@pytest.mark.full
def test_memory_stays_flat_while_large_files_stream(spec, tmp_path):
    peaks = []
    for megabytes in (4, 24):
        folder = tmp_path / str(megabytes)
        folder.mkdir()
        with (folder / "big.txt").open("w") as f:
            for _ in range(megabytes * 1_000_000 // len(TEXT) + 1):
                f.write(TEXT)
        s = file_spec(spec, folder, "text", ["big.txt"])
        tracemalloc.start()
        corpus = prepare(s, folder)
        corpus.train.read(len(corpus.train) - 100, 100)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0], peaks
    assert peaks[1] < 24_000_000


def test_max_bytes_and_pieces(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT + "x" * 50_000)
    found = list(pieces(DataSpec(source="text", files=["a"]), [Input("text", path)]))
    assert "".join(p.text for p in found) == TEXT + "x" * 50_000
    assert all(len(p.text) <= PIECE for p in found)
    assert [p.ends for p in found] == [False] * (len(found) - 1) + [True]
    assert all(p.text.endswith("\n") for p in found[:10])
    cut = list(pieces(DataSpec(source="text", files=["a"], max_bytes=20_001), [Input("text", path)]))
    assert "".join(p.text for p in cut) == TEXT[:20_001]


def test_streams_read_across_shard_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 7)
    writer = shards.ShardWriter(tmp_path, "t", "<u2")
    for part in np.array_split(np.arange(50), 6):
        writer.write(part)
    made = writer.close()
    assert [s.tokens for s in made] == [7] * 7 + [1]
    stream = shards.TokenStream(made, tmp_path)
    for start in range(50):
        for count in range(1, 51 - start):
            assert stream.read(start, count).tolist() == list(range(start, start + count))
    with pytest.raises(IndexError):
        stream.read(49, 2)
    for tail in range(51):
        front, back = shards.split_tail(made, tail)
        ids = [i for part in (front, back) if part for i in all_tokens(shards.TokenStream(part, tmp_path))]
        assert ids == list(range(50))
        assert sum(s.tokens for s in back) == tail


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_permuted_is_a_permutation(size, key):
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_permutations_differ_by_key_and_look_random():
    a, b = ([permuted(i, 1000, key) for i in range(1000)] for key in (1, 2))
    assert a != b
    assert abs(np.corrcoef(a, range(1000))[0, 1]) < 0.1
    assert sum(x == y for x, y in zip(a, b, strict=True)) < 10
    assert permuted(5, 10**12, 3) < 10**12


def counting(tmp_path: Path, tokens: int, spec, **sections) -> Batches:
    """Batches over the stream 0, 1, 2, …"""
    writer = shards.ShardWriter(tmp_path, "t", "<u4")
    writer.write(np.arange(tokens))
    return Batches(shards.TokenStream(writer.close(), tmp_path), spec(**sections))


def test_an_epoch_has_every_window_once_and_every_token_as_target_once(spec, tmp_path):
    b = counting(tmp_path, 16 * 20 + 1, spec)  # 20 windows of 16 tokens, batches of 4
    assert b.windows == 20
    for epoch in range(3):
        seen = [b.microbatch(epoch * 5 + step, m) for step in range(1, 6) for m in range(2)]
        windows = [row.tolist() for batch in seen for row in batch]
        assert sorted(windows) == [list(range(i * 16, i * 16 + 17)) for i in range(20)]
        targets = np.concatenate([batch[:, 1:].ravel() for batch in seen])
        assert sorted(targets.tolist()) == list(range(1, 321))
        assert {batch.shape for batch in seen} == {(2, 17)}
    orders = [[b.microbatch(e * 5 + s, m)[:, 0].tolist() for s in range(1, 6) for m in range(2)] for e in range(2)]
    assert orders[0] != orders[1], "epochs have orders of their own"


@pytest.mark.parametrize("sampling", ["epochs", "random"])
def test_a_batch_is_a_pure_function_of_seed_step_and_microbatch(spec, tmp_path, sampling):
    make = lambda seed: counting(tmp_path, 5000, spec, seed=seed, data={"sampling": sampling})  # noqa: E731
    a, b = make(0), make(0)
    order = [(9, 1), (1, 0), (400, 1), (9, 0)]
    forward = {at: a.microbatch(*at).tolist() for at in order}
    backward = {at: b.microbatch(*at).tolist() for at in reversed(order)}
    assert forward == backward
    assert make(1).microbatch(9, 1).tolist() != forward[9, 1]


def test_microbatches_only_divide_a_batch(spec, tmp_path):
    whole = counting(tmp_path, 5000, spec, batch={"size": 8, "microbatches": 1}).microbatch(3, 0)
    parts = [counting(tmp_path, 5000, spec, batch={"size": 8, "microbatches": 4}).microbatch(3, m) for m in range(4)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_random_windows_start_anywhere(spec, tmp_path):
    b = counting(tmp_path, 60, spec, data={"sampling": "random"})
    starts = {int(row[0]) for step in range(1, 300) for row in b.microbatch(step, 0)}
    assert starts == set(range(60 - 16))


def test_held_out_windows_are_spread_and_fixed(spec, tmp_path):
    b = counting(tmp_path, 16 * 100 + 1, spec)
    s = spec(eval={"windows": 5})
    windows = np.concatenate(list(held_out_windows(b.stream, s)))
    assert windows[:, 0].tolist() == [0, 320, 640, 960, 1280]
    few = spec(eval={"windows": 1000})
    assert len(np.concatenate(list(held_out_windows(b.stream, few)))) == 100


def test_environment_names_the_cache(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("PMTRAIN_CACHE", str(tmp_path / "elsewhere"))
    assert prepare(spec()).folder.parent == tmp_path / "elsewhere"
    assert os.listdir(tmp_path / "elsewhere")
