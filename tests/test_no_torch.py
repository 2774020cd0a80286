"""A coordinator is a cheap server: it, and all that its owner asks, work where torch cannot be imported."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pins
import psutil
import pytest
import yaml
from checkpoints import save, starting_from
from conftest import CONFIGS, make_spec
from packaging.utils import canonicalize_name
from starting import ROOT, begin, begin_afresh, pmtrain
from test_pipeline import reference_of
from test_run import ends, wait_for_line

from protomodels_cli.bench.recovery import MEMORY_BOUND
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.snapshots.first import FirstSnapshot
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.data.errors import DataError
from protomodels_cli.data.prepare import Corpus, prepare
from protomodels_cli.observe.process import peak_memory_of

# What nobody should wait for who waits for a coordinator to come back, or for `--help`.
HEAVY = {
    *("torch", "transformers", "tokenizers", "safetensors", "zstandard", "psutil"),
    *("fsspec", "pyarrow", "pandas", "scipy", "matplotlib", "rich", "pygments"),
    *("multiprocessing", "numpy.random", "numpy.fft", "numpy.ma"),
}

# Not by name, but by what the list does not bring: whatever else is installed here cannot be imported either.
BLOCK = """
import sys
import threading


class OnlyTheList:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name + " is not on the coordinator's list", name=name)


sys.meta_path.insert(0, OnlyTheList())
"""


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with which a process has what the coordinator's list brings, and no torch."""
    _, listed = pins.read_list((ROOT / "requirements" / "coordinator.txt").read_text())
    there = {*listed, "pmtrain"}
    owners = importlib.metadata.packages_distributions()
    blocked = {top for top, names in owners.items() if not there & set(map(canonicalize_name, names))}
    assert {"torch", "safetensors", "transformers"} <= blocked
    folder = tmp_path_factory.mktemp("no-torch")
    (folder / "sitecustomize.py").write_text(BLOCK.replace("{blocked!r}", repr(sorted(blocked | {"torch"}))))
    return os.pathsep.join([str(folder), str(ROOT)])


def test_torch_cannot_be_imported_there(no_torch):
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env={**os.environ, "PYTHONPATH": no_torch}, capture_output=True
    )
    assert b"torch is not on the coordinator's list" in done.stderr


def test_specs_are_validated_and_planned_without_torch(no_torch, tmp_path):
    done = pmtrain("validate", *CONFIGS, cwd=tmp_path, PYTHONPATH=no_torch)
    assert done.returncode == 0, done.stderr
    for config in [path for path in CONFIGS if path.stem in ("tiny", "dense", "llama-8b")]:
        done = pmtrain(
            "plan", config, "--speed", "10gflops", "--link", "20mbit,25ms", cwd=tmp_path, PYTHONPATH=no_torch
        )
        assert done.returncode == 0, done.stderr


def samples(process: subprocess.Popen[str]) -> Iterator[int]:
    """The most memory that it has had, again and again until it ends: afterwards nobody knows."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.poll() is None:
            yield peak_memory_of(process.pid)
            time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize("form", ["reparam", "dense"])
def test_a_coordinator_without_torch_leads_a_run_to_the_references_weights(no_torch, tmp_path, form):
    update = {"interval": 4, "window": 2, "delay": 1} if form == "reparam" else {}
    spec = make_spec(
        stages=2,
        steps=24,
        subspace={"form": form, "update": update},
        snapshots={"interval": 5},
        wire={"forward": "int8", "backward": "bf16+zstd"},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    words = ("coordinator", "run.yaml", "--host", "127.0.0.1", "--port", 0, "--run-dir", "run")
    memory: list[int] = []

    def asked(*words: object) -> str:
        done = pmtrain(*words, cwd=tmp_path, PYTHONPATH=no_torch)
        assert done.returncode == 0, done.stderr
        return done.stdout

    leader, peers = begin_afresh(*words, cwd=tmp_path, PYTHONPATH=no_torch), []
    try:
        link = wait_for_line(leader, r"pmtrain join '(pm://\S+)'")
        watch = threading.Thread(target=lambda: memory.extend(samples(leader)))
        watch.start()
        asked("pause", "run")
        peers += [begin("join", link, "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        while len(json.loads(asked("peers", "run", "--format", "json"))["peers"]) < 2:
            assert leader.poll() is None
        assert json.loads(asked("status", "run", "--format", "json"))["step"] == 0
        asked("resume", "run")
        for peer in peers:
            code, said = ends(peer)
            assert code == 0, said
        code, said = ends(leader)
        watch.join()
    finally:
        for process in (leader, *peers):
            process.kill()
    assert code == 0, said
    assert reference_of(spec)[0].weights_sha256() in said
    assert 0 < max(memory) <= MEMORY_BOUND


@pytest.mark.full
def test_a_coordinator_without_torch_stops_and_resumes(no_torch, tmp_path):
    spec = make_spec(stages=2, steps=100)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([no_torch, str(ROOT)])}
    words = ["coordinator", "run.yaml", "--host", "127.0.0.1", "--run-dir", "run"]
    for more in ([], ["--resume"]):
        command = [sys.executable, "-m", "protomodels_cli", *words, "--port", str(free_port()), *more]
        leader = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        try:
            wait_for_line(leader, "pmtrain join")
            done = pmtrain("stop", "run", cwd=tmp_path, PYTHONPATH=no_torch)
            assert done.returncode == 0, done.stderr
            assert ends(leader)[0] == 0
        finally:
            leader.kill()


def imported(said: str) -> set[str]:
    """What a process with PYTHONPROFILEIMPORTTIME says that it imported."""
    lines = [line for line in said.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def free_port() -> int:
    """Not the one from before: by the time of a resume another process of the tests may have it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.full
def test_a_coordinator_of_a_large_model_needs_little_memory_and_resumes_without_heavy_modules(tmp_path):
    """T_fixed's bits alone are 62 MiB. Here all modules could be imported; the first start may want some for tokens.
    Its blocks are thin: where the tests run, the disk may have no room for snapshots of the whole model."""
    [config] = [path for path in CONFIGS if path.stem == "llama-8b"]
    data = {"source": "bin", "files": ["ids.bin"], "val_fraction": 0.5, "cache_dir": "cache"}
    tokenizer = {"kind": "none", "vocab_size": 128256}
    spec = {**yaml.safe_load(config.read_text()), "data": data, "tokenizer": tokenizer, "snapshots": {"keep": 1}}
    spec["model"] |= {"layers": 8, "segments": 8, "kv_heads": 1, "hidden": 64}
    spec["stages"] = 8
    spec["subspace"]["k"] = 64  # making a first basis of 512 columns takes 60 MB more, once
    spec["optimizer"] |= {"tables": "row_adamw", "moments": "bf16"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    (tmp_path / "ids.bin").write_bytes(bytes(4 * 5000))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    words = ["coordinator", "run.yaml", "--host", "127.0.0.1", "--run-dir", "run"]
    for more in ([], ["--resume"]):
        command = [sys.executable, "-m", "protomodels_cli", *words, "--port", str(free_port()), *more]
        with (tmp_path / "imports").open("w") as said:
            leader = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=said, text=True)
        try:
            wait_for_line(leader, "pmtrain join")
            memory = peak_memory_of(leader.pid)
        except AssertionError as e:
            lines = (tmp_path / "imports").read_text().splitlines()
            raise AssertionError([line for line in lines if not line.startswith("import time:")]) from e
        finally:
            leader.kill()
            leader.wait()
        assert 0 < memory <= MEMORY_BOUND
    found = imported((tmp_path / "imports").read_text())
    assert {"protomodels_cli.coordinator.machine", "numpy", "grpc"} <= found
    assert found & HEAVY == set()


def test_help_comes_without_heavy_modules(tmp_path):
    done = pmtrain("coordinator", "--help", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    found = imported(done.stderr)
    assert "protomodels_cli.cli.main" in found
    rendering = {"rich", "pygments"}
    assert found & {*HEAVY - rendering, "numpy", "grpc", "cryptography", "google.protobuf"} == set()


@pytest.mark.full
def test_a_checkpoint_is_cut_without_torch(no_torch, tmp_path):
    """In bfloat16, into the bytes that are cut where torch is."""
    spec = starting_from(save(tmp_path / "start", "qwen3", "bfloat16", "30KB", head_dim=16))
    first = FirstSnapshot(
        spec, tmp_path / "start", Snapshots(tmp_path / "here", RunIdentity("r", "s"), (0, ""), tmp_path)
    )
    program = """
import json, sys
from pathlib import Path
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.snapshots.first import FirstSnapshot
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.spec import load_spec
here = Path(sys.argv[1])
snapshots = Snapshots(here / "there", RunIdentity("r", "s"), (0, ""), here)
print(json.dumps(FirstSnapshot(load_spec(here / "run.yaml"), here / "start", snapshots).cut((1, 2)).parts))
"""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    env = {**os.environ, "PYTHONPATH": no_torch}
    done = subprocess.run([sys.executable, "-c", program, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tuple(json.loads(done.stdout)) == first.cut((1, 2)).parts


def test_tokens_made_in_a_process_of_their_own_are_the_same(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} has {i * i} more words\n" for i in range(2000)))

    def made(apart: bool, source: str = "text") -> Corpus:
        data = {"source": source, "files": ["text.txt"], "cache_dir": f"cache-{apart}"}
        spec = make_spec(data=data, tokenizer={"kind": "bpe", "vocab_size": 300})
        return prepare(spec, tmp_path, apart)

    assert made(True).sha256 == made(False).sha256
    with pytest.raises(DataError) as here:
        made(False, "jsonl")
    with pytest.raises(DataError) as apart:
        made(True, "jsonl")
    assert str(apart.value) == str(here.value)
    assert apart.value.exit_code == 3


def test_grpc_is_told_to_print_nothing_before_anything_imports_it():
    code = "import sys, os, protomodels_cli; print(os.environ['GRPC_VERBOSITY'], 'grpc' in sys.modules)"
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=False)
    assert done.stdout.split() == ["NONE", "False"], done.stderr
