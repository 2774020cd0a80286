"""The one place that checks how errors read: of data, of runs that stop, of processes, of plug-ins. Everywhere else the
type, the exit code, the kind and the named values are checked."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_reference, make_spec
from heavy import heavy

from protomodels_cli.bench import torch_pipelining, torch_rank, wanlab
from protomodels_cli.coordinator.coordinator import cannot_write
from protomodels_cli.data.batches import Batches
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.hub import _explained
from protomodels_cli.data.prepare import prepare
from protomodels_cli.data.tokenizers import Json, train_bpe
from protomodels_cli.errors import UserError
from protomodels_cli.lab.bench import Bench
from protomodels_cli.launch import hosts, local
from protomodels_cli.model.snapshot import write_snapshot
from protomodels_cli.observe.metrics import JsonLines
from protomodels_cli.plugins import Registry
from protomodels_cli.spec.corpus import DataSpec
from protomodels_cli.spec.schema import LinkSpec, RunSpec

ROOT = Path(__file__).parent.parent
TEXT = "".join(f"Line {i}: the quick brown fox.\n" for i in range(400))
DENSE = {"subspace": {"form": "dense"}, "optimizer": {"name": "adamw"}}


def raised(work: Callable[[], object], folder: Path) -> tuple[str, str]:
    """What the error says and its fix, with FOLDER for the test's own."""
    with pytest.raises(UserError) as caught:
        work()
    assert caught.value.kind
    what, fix = str(caught.value).replace(str(folder), "FOLDER").split("\n    fix:  ")
    return what, fix


# Data: what is in the folder, the spec's sections, what is said.


def from_files(folder: Path, source: str, *files: str, **more: Any) -> RunSpec:
    data = {"source": source, "files": list(files), "max_bytes": None, "cache_dir": str(folder / "cache")}
    return make_spec(data=data | more.pop("data", {}), **more)


def ids(folder: Path, name: str, count: int, vocab_size: int = 9, cut: int = 0, header: bool = False) -> RunSpec:
    content = (np.arange(count) % 300).astype("<u2").tobytes()
    if header:
        content = np.array([20240520, 1, count] + [0] * 253, dtype="<i4").tobytes() + content
    (folder / name).write_bytes(content[: len(content) - cut])
    return from_files(folder, "bin", name, tokenizer={"kind": "none", "vocab_size": vocab_size})


def text(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)


def tokenizer_of(folder: Path, vocab_size: int) -> RunSpec:
    text(folder, "a.txt", TEXT)
    train_bpe([TEXT], 400).save(folder)
    chosen = {"kind": "file", "file": "tokenizer.json", "vocab_size": vocab_size}
    return from_files(folder, "text", "a.txt", tokenizer=chosen)


def no_cache(folder: Path) -> RunSpec:
    text(folder, "a.txt", TEXT)
    text(folder, "cache", "a file where a folder should be")
    return from_files(folder, "text", "a.txt")


def lines(folder: Path, source: str, content: str) -> RunSpec:
    text(folder, f"d.{source}", content)
    return from_files(folder, source, f"d.{source}")


def overlapping(folder: Path) -> RunSpec:
    text(folder, "a.txt", TEXT)
    return from_files(folder, "text", "*.txt", data={"val_files": ["a.txt"]})


def folder_of(folder: Path, source: str, content: bytes) -> RunSpec:
    (folder / "mine").mkdir()
    (folder / "mine" / "d.txt.gz").write_bytes(content)
    return from_files(folder, source, "mine")


DATA: list[tuple[Callable[[Path], RunSpec], str, str]] = [
    (
        lambda folder: folder_of(folder, "text", b""),
        "data.files: 'mine' is a folder, and data.source text reads files",
        "set data.source to files, or write `mine/*`",
    ),
    (
        lambda folder: folder_of(folder, "files", gzip.compress(b"\0")),
        "data.files: 'mine' matches only binary files below FOLDER",
        "name files or folders of text",
    ),
    (
        lambda folder: folder_of(folder, "files", gzip.compress(b"text")[:-9]),
        "FOLDER/mine/d.txt.gz is damaged, or is not a .gz file: Compressed file ended before the end-of-stream marker "
        "was reached",
        "compress the file again",
    ),
    (
        lambda folder: from_files(folder, "text", "none.txt"),
        "data.files: 'none.txt' matches no file below FOLDER",
        "check the pattern; paths are relative to the spec file",
    ),
    (
        lambda folder: lines(folder, "text", "short"),
        "the training text has 6 tokens, and one window needs 17",
        "add text, lower data.val_fraction, or lower model.context",
    ),
    (
        lambda folder: lines(folder, "jsonl", '{"text": "a"}\n{"txt": "b"}\n'),
        "FOLDER/d.jsonl:2 is not a JSON object with the text field 'text'",
        "correct the line, or set data.field to the name of the text field",
    ),
    (
        lambda folder: lines(folder, "parquet", "nonsense"),
        "FOLDER/d.parquet is not a parquet file",
        "check data.source and data.files",
    ),
    (
        overlapping,
        "data.val_files: FOLDER/a.txt is also in data.files",
        "remove the file from one of the two lists: training and held-out text must be disjoint",
    ),
    (
        no_cache,
        "the token cache FOLDER/cache cannot be written: File exists",
        "free space there, or set data.cache_dir to another folder",
    ),
    (
        lambda folder: ids(folder, "t.bin", 500, vocab_size=299),
        "FOLDER/t.bin has token id 299, and tokenizer.vocab_size is 299",
        "set tokenizer.vocab_size to 300 or more",
    ),
    (
        lambda folder: ids(folder, "t.bin", 500, header=True, cut=2),
        "FOLDER/t.bin: the header says version 1 and 500 tokens, and the file has 2022 bytes",
        "write the shard again, with version 1 and 1024 + 2 × tokens bytes",
    ),
    (
        lambda folder: ids(folder, "t.bin", 500, cut=1),
        "FOLDER/t.bin has 999 bytes, which is not a whole number of 2-byte tokens",
        "write the tokens as uint16",
    ),
    (
        lambda folder: tokenizer_of(folder, 300),
        "the tokenizer has 400 ids, and tokenizer.vocab_size is 300",
        "set tokenizer.vocab_size to 400, or remove the field",
    ),
]


@pytest.mark.parametrize(("make", "what", "fix"), DATA, ids=range(len(DATA)))
def test_data(make: Callable[[Path], RunSpec], what: str, fix: str, tmp_path: Path):
    spec = make(tmp_path)
    if spec.data.source == "parquet":
        heavy("pyarrow")
    assert raised(lambda: prepare(spec, tmp_path), tmp_path) == (what, fix)


def test_a_table_without_the_column(tmp_path: Path):
    pyarrow, parquet = heavy("pyarrow"), heavy("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"title": ["a"], "body": ["b"]}), tmp_path / "d.parquet")
    spec = from_files(tmp_path, "parquet", "d.parquet")
    assert raised(lambda: prepare(spec, tmp_path), tmp_path) == (
        "FOLDER/d.parquet has no column 'text', only title, body",
        "set data.field to the name of the text column",
    )


def test_data_in_other_ways(tmp_path: Path):
    what, fix = raised(lambda: Json("{}", "t.json"), tmp_path)
    assert what.startswith("t.json is not a tokenizer.json: ")
    assert fix == "write the file with Hugging Face's tokenizers"
    with pytest.raises(DataError) as caught, _explained(DataSpec(source="hf", dataset="me/mine")):
        raise ConnectionError("no route")
    assert str(caught.value).splitlines()[0] == "the dataset me/mine cannot be read: no route"
    few = make_spec(steps=14, data={"max_bytes": 1000, "val_fraction": 0.1}, wire={"forward": "int4+aqsgd"})
    assert raised(lambda: Batches(prepare(few).train, few), tmp_path) == (
        "wire.forward = int4+aqsgd: AQ-SGD sends how a sample's activations have changed since the last epoch, and 14 "
        "steps of 4 samples are less than one epoch (56 samples)",
        "train for more than 14 steps, on less data, or with another codec",
    )


# Runs that stop, processes that fail, machines that cannot.


def diverge() -> None:
    list(make_reference(optimizer={"lr": 1e30, "clip": 0}, limits={"nonfinite_steps": 2}).train())


def wrong_basis() -> None:
    reference = make_reference(subspace={"sync_interval": 1})
    reference.stages[2].t_fixed.signs[77, 1] ^= 1
    list(reference.train())


def full_disk(folder: Path) -> None:
    reference = make_reference(stages=1)
    reference.run_step()
    (folder / "snapshots").mkdir()
    text(folder / "snapshots", "00000001", "in the way")
    write_snapshot(folder / "snapshots", 1, reference.trainers, reference.carry, keep=1)


def failed(folder: Path, said: str, *rows: dict[str, str]) -> None:
    (folder / "logs").mkdir()
    text(folder / "logs", "peer-1.log", said)
    own = folder / "peers" / "1" / "tiny-12345678"
    own.mkdir(parents=True)
    with JsonLines(own / "events.jsonl") as events:
        for row in rows:
            events.write(row)
    raise local._failure(folder, "peer-1", 3)


def as_user(monkeypatch: pytest.MonkeyPatch, user: int, which: str | None = "/bin/ip") -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name, path: which)
    hosts.require()


def not_a_result(folder: Path) -> None:
    text(folder, "kept.jsonl", "nonsense\n{}\n")
    Bench(1, folder / "kept.jsonl")


def torch_check(**sections: Any) -> None:
    torch_rank.check(make_spec(**DENSE | sections))


SUDO = "run the command with sudo, or in a container with --privileged"
OTHERS: list[tuple[Callable[[Path, pytest.MonkeyPatch], object], str, str]] = [
    (
        lambda folder, _: list(
            make_reference(optimizer={"lr": 1e30, "clip": 0}, limits={"nonfinite_steps": 2}).train()
        ),
        "2 steps in a row, up to step 3, had a non-finite loss or gradient",
        "lower optimizer.lr (1e+30), or raise optimizer.schedule.warmup_steps",
    ),
    (
        lambda folder, _: wrong_basis(),
        "stage 2 uses a different U or T_fixed (hash mismatch at step 1)",
        "start again; if the mismatch comes back, test this machine's memory",
    ),
    (
        lambda folder, _: full_disk(folder),
        "the snapshot of step 1 cannot be written to FOLDER/snapshots: Not a directory",
        "free space there, and start again; earlier snapshots are intact",
    ),
    (
        lambda folder, _: failed(folder, "x\ny\n", {"kind": "joined"}, {"kind": "ended", "detail": "no GPU here"}),
        "peer-1 ended with exit code 3: no GPU here",
        "look into FOLDER/logs/peer-1.log",
    ),
    (
        lambda folder, _: failed(folder, "starting\nno GPU here\n    fix:  use another\n"),
        "peer-1 ended with exit code 3: no GPU here / fix:  use another",
        "look into FOLDER/logs/peer-1.log",
    ),
    (
        lambda folder, _: failed(folder, "killed\n", {"kind": "ended", "detail": "before"}, {"kind": "joined"}),
        "peer-1 ended with exit code 3: killed",
        "look into FOLDER/logs/peer-1.log",
    ),
    (
        lambda folder, _: failed(folder, ""),
        "peer-1 ended with exit code 3",
        "look into FOLDER/logs/peer-1.log",
    ),
    (
        lambda folder, patch: as_user(patch, 1000),
        "emulated hosts need root (user id 0), and this is user id 1000",
        SUDO,
    ),
    (
        lambda folder, patch: as_user(patch, 0, None),
        "emulated hosts need the command ip, which is not installed",
        "install iproute2",
    ),
    (
        lambda folder, patch: (patch.setattr(hosts, "TUN", folder / "tun"), as_user(patch, 0)),
        "emulated hosts need FOLDER/tun, which cannot be opened: No such file or directory",
        "run `modprobe tun`, or give the container --device /dev/net/tun",
    ),
    (
        lambda folder, _: hosts.Hosts(0, LinkSpec()),
        f"0 hosts: must be between 1 and {hosts.MOST_HOSTS}",
        "choose another number of hosts",
    ),
    (
        lambda folder, _: wanlab._check_peers(make_spec(), 1),
        "--hosts 2: leaves 1 hosts for peers, and run needs 4",
        "use --hosts 5: one for the coordinator and one for each stage",
    ),
    (
        lambda folder, _: not_a_result(folder),
        "FOLDER/kept.jsonl:1 is not a result of this experiment",
        "name another file with --keep",
    ),
    (
        lambda folder, _: torch_check(subspace={"form": "reparam"}),
        "subspace.form is reparam, and torch has no subspace",
        "set subspace.form to dense",
    ),
    (
        lambda folder, _: torch_check(optimizer={"name": "muon"}),
        "optimizer.name is muon, and both sides must use the same optimizer",
        "set optimizer.name to adamw",
    ),
    (
        lambda folder, _: torch_check(compute={"dtype": "float64"}),
        "compute.dtype is float64, and torch's side uses float32",
        "set compute.dtype to float32",
    ),
    (
        lambda folder, _: torch_check(stages=4, batch={"size": 4, "microbatches": 2}),
        "4 stages and 2 microbatches: 1F1B needs at least 2 stages and no fewer microbatches",
        "raise stages or batch.microbatches",
    ),
    (
        lambda folder, _: torch_pipelining.run(
            make_spec(**DENSE, batch={"size": 4, "microbatches": 4}), "fp32", 2, folder
        ),
        "2 steps, of which the first 2 are not measured",
        "use at least 3 steps",
    ),
]


@pytest.mark.parametrize(("work", "what", "fix"), OTHERS, ids=range(len(OTHERS)))
def test_others(work: Any, what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert raised(lambda: work(tmp_path, monkeypatch), tmp_path) == (what, fix)


# Packages that add techniques.

TOY = "'toy' of a-toy 1 (entry point {} in pmtrain.tests)"
REPAIR = "repair a-toy, or remove it with: pip uninstall a-toy"
PLUGINS = {
    "toy = nowhere:Toy": (TOY + " cannot be loaded: ModuleNotFoundError(\"No module named 'nowhere'\")", REPAIR),
    "toy = os:sep": (TOY + " loads '/', which is not a pmtrain.tests plug-in of that name", REPAIR),
    "own = os:sep": (
        TOY.replace("toy'", "own'") + " has the same name as one of pmtrain's own",
        "uninstall one of the packages, or rename the entry point: a name must mean the same to every peer",
    ),
}


@pytest.mark.parametrize(("line", "said"), PLUGINS.items())
def test_plugins(line: str, said: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "a_toy-1.dist-info"
    package.mkdir()
    text(package, "METADATA", "Metadata-Version: 2.1\nName: a-toy\nVersion: 1\n")
    text(package, "entry_points.txt", f"[pmtrain.tests]\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[Any] = Registry("pmtrain.tests", lambda found: isinstance(found, type), {"own": object})
    what, fix = said
    assert raised(lambda: registry.get("toy"), tmp_path) == (what.format(line.partition(" = ")[2]), fix)


AGAIN = "start the coordinator again with the same command: the journal has every decision"
DISK = [
    (
        FileExistsError(errno.EEXIST, "File exists", "runs/home/events.jsonl"),
        "runs/home/events.jsonl is there already, and belongs to no run that has begun",
        "move it away, or choose another run directory than runs/home",
    ),
    (
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        "cannot write to runs/home: Disk quota exceeded",
        f"free some space and {AGAIN}",
    ),
    (
        PermissionError(errno.EACCES, "Permission denied"),
        "cannot write to runs/home: Permission denied",
        f"check the disk and the permissions of runs/home, then {AGAIN}",
    ),
]


@pytest.mark.parametrize(("error", "what", "fix"), DISK)
def test_a_run_directory_that_cannot_be_written(error: OSError, what: str, fix: str):
    assert str(cannot_write(Path("runs/home"), error)) == f"{what}\n    fix:  {fix}"
