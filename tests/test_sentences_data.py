"""What is said of data that cannot be read: word for word."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import zstandard

from protomodels_cli.data import compressed, encoding, hub, sources
from protomodels_cli.data.errors import DataError, unreadable
from protomodels_cli.data.sources import Input, pieces
from protomodels_cli.data.tokenizers import Json, make_tokenizer
from protomodels_cli.spec.corpus import DataSpec, TokenizerSpec


def said(error: DataError, folder: Path = Path("FOLDER")) -> tuple[str, ...]:
    return tuple(str(error).replace(str(folder), "FOLDER").split("\n    fix:  "))


def told_of(kind: str, path: Path) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        list(pieces(DataSpec(), [Input(kind, path)]))
    return said(caught.value, path.parent)


def test_a_file_that_cannot_be_read_now():
    for number, fix in (
        (errno.ENOENT, "check that the file exists and is readable"),
        (errno.EIO, "check the disk or the network share that the file is on, and start again"),
    ):
        why = os.strerror(number)
        assert said(unreadable(Path("a.txt"), OSError(number, why))) == (f"a.txt cannot be read: {why}", fix)
    told = said(unreadable(Path("a.txt"), OSError("corrupt page")))
    assert told == ("a.txt cannot be read: corrupt page", "check that the file exists and is readable")


def test_a_long_json_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE", 1024)
    (tmp_path / "d.jsonl").write_text(" " * 1025)
    assert told_of("jsonl", tmp_path / "d.jsonl") == (
        "FOLDER/d.jsonl:1 is longer than 1 KiB, the most for a JSON line",
        "write one JSON object a line and divide long texts, or read the file with data.source text",
    )


def test_a_zst_that_takes_much_memory(tmp_path, monkeypatch):
    long = zstandard.ZstdCompressionParameters(window_log=31)
    packing = zstandard.ZstdCompressor(compression_params=long).compressobj()
    (tmp_path / "d.txt.zst").write_bytes(packing.compress(b"text") + packing.flush())
    monkeypatch.setattr(compressed, "_memory", lambda: 4 << 30)
    assert told_of("text", tmp_path / "d.txt.zst") == (
        "FOLDER/d.txt.zst takes 2 GiB of memory to decompress (zstd --long), and this machine has 1 GiB for that: a "
        "quarter of its memory",
        "compress the file again without --long, or start on a machine with more memory",
    )


def test_a_tokenizer_that_is_none(tmp_path):
    (tmp_path / "t.json").write_bytes(b"\xff")
    for make, what in (
        (
            lambda: Json(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str()),
            "tokenizer.json has an empty vocabulary",
        ),
        (
            lambda: make_tokenizer(TokenizerSpec(kind="file", file="t.json"), tmp_path, ()),
            "FOLDER/t.json is not a tokenizer.json: the text is not UTF-8",
        ),
    ):
        with pytest.raises(DataError) as caught:
            make()
        assert said(caught.value, tmp_path) == (what, "write the file with Hugging Face's tokenizers")


def test_datasets_of_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__version__="3.6.0"))
    with pytest.raises(DataError) as caught:
        list(hub.documents(DataSpec(source="hf", dataset="set"), Path("set"), "train"))
    assert said(caught.value) == (
        "data.source hf needs the package datasets 4 or newer, and 3.6.0 is installed: older ones run code that a "
        "dataset brings along",
        f"{sys.executable} -m pip install 'datasets>=4'",
    )


@pytest.mark.parametrize(
    ("program", "what", "fix"),
    [
        (
            "raise MemoryError('no room')",
            "a process that tokenises the text ended with exit code 1: MemoryError: no room",
            "mend what the message names and start again; what was tokenised is kept",
        ),
        (
            "import sys; sys.exit(9)",
            "a process that tokenises the text ended with exit code 9: it did not say why",
            "mend what the message names and start again; what was tokenised is kept",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            "the process that tokenises the text was killed, perhaps because memory ran out",
            "free memory, or copy the token cache (data.cache_dir) from a larger machine",
        ),
    ],
)
def test_a_process_that_ends(program, what, fix):
    command = [sys.executable, "-S", "-c", program]
    with encoding._Process(command) as process, pytest.raises(DataError) as caught:
        process.take()
    assert said(caught.value) == (what, fix)
