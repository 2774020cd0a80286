"""What a package elsewhere adds through entry points is used like our own; one that is wrong is named."""

from __future__ import annotations

import json
import subprocess
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from conftest import make_spec
from safetensors.torch import load_file
from starting import begin, pmtrain
from test_run import ends, wait_for_line
from waiting import wait_for

TOY = Path(__file__).parent / "toy_package"
SPEC = make_spec(stages=2, steps=30, snapshots={"interval": 5}, limits={"lease_seconds": 2.0}).model_dump(mode="json")
# Slow enough that the run is still under way when it is killed.
WIRE = {"forward": "toydelta:0.001+zstd", "backward": "toydelta:1e-5", "link": {"latency": "25ms"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a spec that uses what the toy package adds, which every process that is started can see."""
    monkeypatch.setenv("PYTHONPATH", str(TOY))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**SPEC, "wire": WIRE}))
    return tmp_path


def test_both_descriptions_of_the_package_say_the_same():
    installed = ConfigParser(delimiters=["="])
    installed.read(TOY / "pmtrain_toy-0.1.dist-info" / "entry_points.txt")
    declared = tomllib.loads((TOY / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {group: dict(installed[group]) for group in installed.sections()} == declared


def test_a_spec_with_a_toy_codec_is_validated_and_planned(folder):
    done = pmtrain("validate", "run.yaml", "--format", "json", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = pmtrain("plan", "run.yaml", "--speed", "10gflops", "--format", "json", cwd=folder)
    assert done.returncode == 0, done.stderr
    numbers = 2 * 2 * 16 * 6 * 2  # microbatches, windows, tokens, coordinates, bytes each
    assert numbers < json.loads(done.stdout)["forecast"]["bytes_per_step"]["backward"] < 1.4 * numbers


def test_without_its_package_the_codec_is_no_codec(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**SPEC, "wire": WIRE}))
    done = pmtrain("validate", "run.yaml", "--format", "json", cwd=tmp_path)
    assert done.returncode == 2
    [found] = json.loads(done.stdout)["files"]
    assert {(p["field"], p["kind"]) for p in found["problems"]} == {
        ("wire.forward", "codec"),
        ("wire.backward", "codec"),
    }
    assert all("'toydelta'" in p["rule"] and "toydelta:GRID" not in p["fix"] for p in found["problems"])


def test_what_there_is_includes_what_was_added(folder):
    (folder / "run.yaml").write_text(yaml.safe_dump({**SPEC, "wire": {"forward": "int7"}}))
    done = pmtrain("validate", "run.yaml", cwd=folder)
    assert done.returncode == 2
    assert "toydelta:GRID" in done.stderr


@pytest.mark.full
def test_a_pipeline_that_is_killed_resumes_from_its_snapshot_and_equals_the_reference(folder):
    """With a toy codec on both legs, and in the toy form."""
    both = {"wire": WIRE, "subspace": {"form": "toysplit"}, "optimizer": {"name": "adamw"}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**SPEC, **both}))
    done = pmtrain("reference", "run.yaml", "--run-dir", "reference", cwd=folder)
    assert done.returncode == 0, done.stderr
    right = done.stdout.split()[-1]

    def lead() -> tuple[subprocess.Popen[str], str]:
        words = ("coordinator", "run.yaml", "--host", "127.0.0.1", "--port", 0, "--run-dir", "run")
        process = begin(*words, cwd=folder)
        return process, wait_for_line(process, r"pmtrain join '(pm://\S+)'")

    started = []
    try:
        leader, link = lead()
        started += [leader, *(begin("join", link, "--dir", folder / f"p{i}", cwd=folder) for i in range(2))]
        metrics = folder / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count('"event":"step"') > 12, "no steps")
        for process in started:  # nobody is left, and all that is left is the coordinator's newest snapshot
            process.kill()
            process.communicate()
        snapshots = sorted((folder / "run" / "snapshots").iterdir())
        assert snapshots
        part = load_file(snapshots[-1] / "stage-0.safetensors")
        assert part["weights/embed.weight"].shape == (256, 64), "the toy form's state is twice as wide"
        remembered = [name for name in part if name.startswith("codecs/")]
        assert sorted(remembered) == ["codecs/next/backward/last", "codecs/next/forward/last"]
        assert not (folder / "run" / "summary.json").exists()
        leader, link = lead()
        peers = [begin("join", link, "--dir", folder / f"q{i}", cwd=folder) for i in range(2)]
        started += [leader, *peers]
        for process in (*peers, leader):
            code, said = ends(process)
            assert code == 0, said
    finally:
        for process in started:
            process.kill()
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first = min(row["step"] for row in rows if row["event"] == "step" and row["lineage"] > 1)
    assert first - 1 in {int(snapshot.name.split("-")[1]) for snapshot in snapshots}
    assert json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"] == right
