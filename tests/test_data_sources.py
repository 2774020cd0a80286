"""Sources: the text that comes with pmtrain, folders of mixed files, compressed files, datasets; with real files."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from heavy import heavy
from test_data import TEXT, all_tokens, file_spec

from protomodels_cli.data.compressed import opened
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.prepare import prepare
from protomodels_cli.data.sources import PIECE, SHIPPED, Input, Place, pieces, python_files, source_files
from protomodels_cli.data.tokenizers import Bytes
from protomodels_cli.spec.corpus import DataSpec
from protomodels_cli.spec.load import with_absolute_paths

ROOT = Path(__file__).parent.parent
PACKERS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
LINES = "".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines(keepends=True)).encode()


def texts(data: DataSpec, base: Path = Path()) -> list[str]:
    """The documents of a source."""
    documents = [""]
    for piece in pieces(data, source_files(data, "files", base)):
        documents[-1] += piece.text
        documents += [""] if piece.ends else []
    assert documents.pop() == "", "the last document ends"
    return documents


def test_the_builtin_text_is_that_of_its_note_and_one_document_an_address():
    data = DataSpec()
    found = texts(data)
    assert len(found) == 233
    assert found[0].startswith("Fellow-Citizens of the Senate and House of Representatives")
    with opened(SHIPPED) as (content, _):
        assert hashlib.sha256(content.read()).hexdigest() in (SHIPPED.parent / "README.md").read_text()
    assert SHIPPED.stat().st_size < 4_000_000


def test_a_little_of_the_builtin_text_is_read_without_the_rest():
    few = DataSpec(max_bytes=200_000)
    *_, last = pieces(few, source_files(few, "files", Path()))
    assert last.after.bytes == 200_000
    assert last.position < SHIPPED.stat().st_size / 10


def test_words_are_not_cut_where_a_line_is_long():
    found = list(pieces(DataSpec(max_bytes=500_000), [Input("lines", SHIPPED)]))
    cut = [p.text for p in found[:-1] if not p.ends]
    assert len(cut) > 10
    following = [found[i + 1].text for i, p in enumerate(found[:-1]) if not p.ends]
    assert all(len(text) <= PIECE and text[-1] != " " for text in cut)
    assert all(text[0] == " " for text in following)


def test_a_wheel_has_the_text(tmp_path):
    """As setuptools would put it into one."""
    program = "from setuptools import setup; setup()"
    command = [sys.executable, "-c", program, "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    there = {path.name for path in (tmp_path / "protomodels_cli" / "data" / "texts").iterdir()}
    assert there == {"sotu.txt.xz", "README.md"}
    assert (tmp_path / "protomodels_cli" / "cli" / "demo.yaml").exists()


def test_pythons_own_text_is_real_and_comes_with_python():
    files = python_files()
    assert files[0].name == "topics.py", "the language reference"
    assert {"typing.py", "base_events.py"} <= {p.name for p in files}, "single modules and packages"
    assert not [p for p in files if {"site-packages", "test", "tests"} & set(p.parts[-3:-1])]
    assert sum(p.stat().st_size for p in files) > 8_000_000
    assert source_files(DataSpec(source="python"), "files", Path())[0] == Input("text", files[0])


def mixed(folder: Path) -> list[str]:
    """A folder of everything; the names of its text files, in order."""
    content = {
        ".git/config": b"hidden",
        ".hidden.txt": b"hidden",
        "a.txt": b"one\ntwo\n",
        "b/c.md": b"# three\n",
        "b/d.py": b"print(4)\n",
        "b/empty.txt": b"",
        "b/picture.png": b"\x89PNG\0\0\0",
        "b/e.txt.gz": gzip.compress(b"five\n"),
        "b/binary.gz": gzip.compress(b"\0\1\2"),
        "f.jsonl": b'{"text": "six"}\n{"text": "seven"}\n',
        "g.jsonl.gz": gzip.compress(b'{"text": "eight"}\n'),
        "h.jsonl.zst": zstandard.compress(b'{"text": "nine"}\n'),
        "z.ndjson": b'{"text": "ten"}\n',
    }
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return ["a.txt", "b/c.md", "b/d.py", "b/e.txt.gz", "f.jsonl", "g.jsonl.gz", "h.jsonl.zst", "z.ndjson"]


def test_a_folder_is_all_text_below_it(tmp_path):
    names = mixed(tmp_path / "mine")
    found = texts(DataSpec(source="files", files=["mine"]), tmp_path)
    told = ["one\ntwo\n", "# three\n", "print(4)\n", "five\n", "six", "seven", "eight", "nine", "ten"]
    assert found == told
    assert texts(DataSpec(source="files", files=[f"mine/{name}" for name in names]), tmp_path) == told
    assert texts(DataSpec(source="files", files=["mine/b", "mine"]), tmp_path)[:2] == ["# three\n", "print(4)\n"]


def test_a_folder_gives_the_tokens_of_its_files_and_says_what_it_left_out(spec, tmp_path):
    names = mixed(tmp_path / "mine")
    (tmp_path / "mine" / "long.txt").write_text(TEXT)
    whole = prepare(file_spec(spec, tmp_path, "files", ["mine"]), tmp_path)
    one_by_one = [f"mine/{name}" for name in (*names[:-1], "long.txt", names[-1])]
    listed = prepare(file_spec(spec, tmp_path, "files", one_by_one), tmp_path)
    assert whole.sha256 == listed.sha256
    assert sorted(path.name for path in whole.skipped) == ["binary.gz", "picture.png"]
    assert listed.skipped == []


@pytest.mark.parametrize(("source", "name", "data"), [("text", "d.txt", TEXT.encode()), ("jsonl", "d.jsonl", LINES)])
def test_compressed_text_gives_the_same_tokens(spec, tmp_path, source, name, data):
    found = set()
    for ending, pack in PACKERS.items():
        (tmp_path / f"{name}{ending}").write_bytes(pack(data))
        for way in (source, "files"):
            found.add(prepare(file_spec(spec, tmp_path, way, [f"{name}{ending}"]), tmp_path).sha256)
    assert len(found) == 1


def test_frames_of_a_zst_file_are_read_to_the_last(tmp_path):
    one = zstandard.ZstdCompressor().compress
    (tmp_path / "d.txt.zst").write_bytes(one(TEXT[:1000].encode()) + one(b"") + one(TEXT[1000:].encode()))
    assert texts(DataSpec(source="text", files=["d.txt.zst"]), tmp_path) == [TEXT]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_refused_whatever_packed_it(tmp_path, ending, damage):
    packed = PACKERS[ending](TEXT.encode())
    (tmp_path / f"d.txt{ending}").write_bytes(packed[: len(packed) // 2] if damage == "cut" else b"no such file" * 99)
    with pytest.raises(DataError, match=rf"d\.txt\{ending}") as refused:
        texts(DataSpec(source="text", files=[f"d.txt{ending}"]), tmp_path)
    assert (refused.value.kind, refused.value.exit_code) == ("compressed", 3)


@pytest.mark.parametrize("source", ["text", "files"])
def test_a_folder_without_text_is_explained(tmp_path, source):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "picture.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(DataError, match=r"'mine'") as refused:
        source_files(DataSpec(source=source, files=["mine"]), "files", tmp_path)
    assert refused.value.kind == "no_file"


def test_reading_goes_on_from_any_place(tmp_path):
    mixed(tmp_path / "mine")
    (tmp_path / "mine" / "long.txt").write_text(TEXT[:50_000] + "é" * 9)
    for most in (None, 30_000, 50_002):
        data = DataSpec(source="files", files=["mine"], max_bytes=most)
        inputs = source_files(data, "files", tmp_path)
        whole = list(pieces(data, inputs))
        for i, piece in enumerate(whole):
            assert list(pieces(data, inputs, piece.after)) == whole[i + 1 :]
        assert list(pieces(data, inputs, Place())) == whole


def test_a_dataset_in_a_folder_gives_the_tokens_of_its_files(spec, tmp_path):
    datasets = heavy("datasets")
    rows = [json.loads(line) for line in LINES.splitlines()]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(LINES)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    wanted = prepare(file_spec(spec, tmp_path, "jsonl", ["set/train.jsonl"]), tmp_path)
    for folder in ("set", "saved"):
        found = prepare(file_spec(spec, tmp_path, "hf", [], data={"dataset": folder}), tmp_path)
        assert Bytes().decode(all_tokens(found.train).tolist()) == Bytes().decode(all_tokens(wanted.train).tolist())
        assert found.sha256 == wanted.sha256
    with pytest.raises(DataError, match=r"'body'.*text") as refused:
        prepare(file_spec(spec, tmp_path, "hf", [], data={"dataset": "set", "field": "body"}), tmp_path)
    assert refused.value.kind == "column"
    with pytest.raises(DataError, match="nowhere") as refused:
        prepare(file_spec(spec, tmp_path, "hf", [], data={"dataset": "set", "split": "nowhere"}), tmp_path)
    assert refused.value.kind == "dataset"


@pytest.mark.parametrize(
    ("package", "source", "data"),
    [("datasets", "hf", {"dataset": "set"}), ("zstandard", "text", {"files": ["set/d.txt.zst"]})],
)
def test_a_missing_package_is_named(spec, tmp_path, monkeypatch, package, source, data):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "d.txt.zst").write_bytes(PACKERS[".zst"](TEXT.encode()))
    with pytest.raises(DataError, match=package) as refused:
        prepare(file_spec(spec, tmp_path, source, [], data=data), tmp_path)
    assert refused.value.kind == "missing_package"


def test_a_spec_that_is_kept_elsewhere_names_a_datasets_folder_but_not_its_name_on_the_hub(spec, tmp_path):
    (tmp_path / "set").mkdir()
    for name, kept in (("set", str(tmp_path / "set")), ("someone/set", "someone/set")):
        s = file_spec(spec, tmp_path, "hf", [], data={"dataset": name})
        assert with_absolute_paths(s, tmp_path).data.dataset == kept
