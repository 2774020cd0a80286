"""A mistake on a command line is answered at once: before torch is imported, with the value and a fix, nothing left."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_spec
from starting import ROOT
from test_cli import TINY, TYPER_ALONE
from tiers import first

from protomodels_cli.launch.local import local_coordinator

LINK = f"pm://127.0.0.1:1/{'t' * 22}#{'f' * 43}"
RELAY = "pmr://127.0.0.1:1"
# What is typed, with the exit code and what of it the answer names.
MISTAKES: list[tuple[list[str], int, str]] = [
    (["join", LINK, "--device", "toaster"], 2, "toaster"),
    (["join", LINK, "--device", "mps"], 2, "mps"),
    (["join", LINK.partition("#")[0]], 2, "pm://"),
    (["join", "http://127.0.0.1:7421"], 2, "'http:'"),
    (["join", "pm://127.0.0.1"], 2, "127.0.0.1"),
    (["join", "absent.link"], 2, "pm://"),
    (["join", LINK, "--devices", "0,x"], 2, "0,x"),
    (["join", LINK, "--device", "cpu", "--devices", "0,1"], 2, "0,1"),
    (["join", LINK, "--map-port", "--no-listen"], 2, "--map-port"),
    (["join", LINK, "--memory", "lots"], 2, "lots"),
    (["join", LINK, "--memory", "24gb"], 2, "24gb"),
    (["join", LINK, "--give-up-after", "soon"], 2, "soon"),
    (["join", LINK, "--port", "99999"], 2, "99999"),
    (["join"], 2, "LINK"),
    (["doctor", LINK, "--device", "toaster"], 2, "toaster"),
    (["doctor", "http://127.0.0.1:7421"], 2, "'http:'"),
    (["validate", "absent.yaml"], 2, "absent.yaml"),
    (["plan", "absent.yaml"], 2, "absent.yaml"),
    (["plan", "small.yaml", "--device", "toaster"], 2, "toaster"),
    (["plan", "small.yaml", "--memory", "x"], 2, "--memory x"),
    (["plan", "small.yaml", "--link", "slow", "--speed", "9tflops"], 2, "slow"),
    (["plan", "small.yaml", "--speed", "9"], 2, "--speed 9"),
    (["reference", "absent.yaml"], 2, "absent.yaml"),
    (["reference", "small.yaml", "--device", "toaster"], 2, "toaster"),
    (["reference", "small.yaml", "--steps", "0"], 2, "--steps"),
    (["coordinator"], 2, "SPEC"),
    (["coordinator", "absent.yaml"], 2, "absent.yaml"),
    (["coordinator", "small.yaml", "--page", "here"], 2, "here"),
    (["coordinator", "small.yaml", "--also-at", "there"], 2, "there"),
    (["coordinator", "small.yaml", "--relay", RELAY], 2, "pmr://"),
    (["coordinator", "small.yaml", "--port", "99999"], 2, "99999"),
    (["coordinator", "--resume", "--run-dir", "nowhere"], 3, "nowhere"),
    (["relay", "--peer-limit", "fast"], 2, "fast"),
    (["generate", "nothing"], 3, "nothing"),
    (["generate", "empty"], 3, "empty"),
    (["generate", LINK], 3, "join link"),
    (["eval", "nothing"], 3, "nothing"),
    (["eval", "run", "--device", "toaster"], 2, "toaster"),
    (["export", "nothing", "out"], 3, "nothing"),
    (["export", "empty", "out"], 3, "empty"),
    (["export", "run", "empty2"], 3, "empty2"),
    (["export", "a", "b", "c"], 2, "a b c"),
    (["export"], 2, "[RUN] OUT"),
    (["status", "nothing"], 3, "nothing"),
    (["status", "--json"], 2, "--format json"),
    (["top", "empty"], 3, "empty"),
    (["pause", LINK], 3, "join link"),
    (["pause", "run"], 3, "run"),
    (["kick"], 2, "[RUN] PEER"),
    (["kick", "run", "ann"], 2, "ann"),
    (["kick", "run", "ann", "--yes"], 3, "run"),
    (["token", "revoke"], 2, "[RUN] TOKEN"),
    (["token", "create", "run", "--lasts", "long"], 2, "long"),
    (["invite", "run", "--install-from", "pmtrain"], 2, "pmtrain"),
    (["invite", "run", "--for", ""], 2, "--for"),
    (["rm", "nothing", "--yes"], 3, "nothing"),
    (["rm", "empty", "--yes"], 3, "empty"),
    (["rm", "run"], 2, "run"),
    (["follow", "run"], 2, "--tensorboard"),
    (["events", "run", "--since", "yesterday"], 2, "yesterday"),
    (["logs", "run", "--last", "0"], 2, "--last"),
    (["statsu"], 2, "`pmtrain status`"),
    (["start"], 2, "`pmtrain coordinator` or `pmtrain join`"),
    (["delete"], 2, "`pmtrain rm`"),
]
BUILT_FOR_CPU = [
    (["join", LINK, "--device", "gpu"], 2, "gpu"),
    (["generate", "run", "--device", "cuda:1"], 2, "cuda:1"),
]
# Each in a process of its own, forked from one that has read the list of commands and nothing else.
ASK = """
import io, json, os, sys
from protomodels_cli.cli.main import main

for words in json.load(sys.stdin):
    read, write = os.pipe()
    if not os.fork():
        sys.argv, sys.stdin = ["pmtrain", *words], open(os.devnull)
        sys.stdout = sys.stderr = said = io.StringIO()
        before, code = os.times(), 0
        try:
            main()
        except SystemExit as e:
            code = e.code
        now = os.times()
        answer = {"code": code, "said": said.getvalue(), "torch": "torch" in sys.modules}
        answer["cpu"] = now.user + now.system - before.user - before.system
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        print(answer.read(), flush=True)
    os.wait()
"""


def cpu_seconds(code: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    now = os.times()
    return now.children_user + now.children_system - before.children_user - before.children_system


def test_there_are_many():
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("part", first(1, range(4)))
def test_mistakes_are_answered_at_once_before_torch_with_value_and_fix_and_leave_nothing(tmp_path: Path, part: int):
    (tmp_path / "small.yaml").write_text(TINY)
    for name in ("empty", "empty2", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty2" / "file").touch()
    (tmp_path / "run" / "run.yaml").write_text(TINY)
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "private.json").touch()
    (tmp_path / "run" / "journal.sqlite").touch()
    rows = [*MISTAKES, *(BUILT_FOR_CPU if importlib.metadata.version("torch").endswith("+cpu") else [])]
    if sys.platform == "darwin":
        rows = [row for row in rows if "mps" not in row[0]]
    rows = rows[part::4]
    there = sorted(tmp_path.rglob("*"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(tmp_path / "data"), "COLUMNS": "200"}
    asked = json.dumps([words for words, _, _ in rows])
    done = subprocess.run(
        [sys.executable, "-c", ASK], input=asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    alone = min(cpu_seconds(TYPER_ALONE) for _ in range(2))
    wrong = {}
    for (words, code, named), answer in zip(rows, answers, strict=True):
        what, _, fix = answer["said"].partition("\n    fix:  ")
        good = answer["code"] == code and named in answer["said"] and what.strip() and fix.strip()
        if not (good and "Traceback" not in what and not answer["torch"] and answer["cpu"] < max(1.0, 6 * alone)):
            wrong[" ".join(words)] = answer
    assert wrong == {}
    assert sorted(tmp_path.rglob("*")) == there


def test_a_link_that_lets_nobody_in_is_refused_before_torch_is_imported(tmp_path: Path):
    spec = make_spec(stages=2, steps=3)
    with local_coordinator(spec, tmp_path / "run") as running:
        link = running.link
        answers = {
            "token": (5, replace(link, token="t" * len(link.token))),
            "fingerprint": (5, replace(link, fingerprint="A" * len(link.fingerprint))),
            "port": (3, replace(link, port=1)),
        }
        for named, (code, wrong) in answers.items():
            command = [sys.executable, "-X", "importtime", "-m", "protomodels_cli", "join", str(wrong), "--dir", "peer"]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
            imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
            said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
            assert done.returncode == code, said
            assert "fix:" in said
            assert "grpc" in imported
            assert "torch" not in imported, named
