"""A run that starts from a checkpoint begins with the model that transformers made, and trains as its reference."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import save, starting_from
from conftest import corpus_of
from pool import Pool, wait_for_link
from safetensors.torch import load_file
from starting import pmtrain
from told import events

from protomodels_cli.codecs import Carrier
from protomodels_cli.data.batches import held_out_windows
from protomodels_cli.errors import EXIT_OUTSIDE
from protomodels_cli.huggingface.checkpoint import Checkpoint
from protomodels_cli.model.reference import Reference
from protomodels_cli.spec import RunSpec

CLOSE = 1e-5
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"kind": "qwen3", "head_dim": 16},
    "tied": {"tie_word_embeddings": True, "rope_theta": 500.0, "rms_norm_eps": 1e-3},
    "bf16": {"dtype": "bfloat16"},
    "f16": {"kind": "qwen3", "head_dim": 8, "dtype": "float16"},
    "sharded": {"shard": "20KB", "dtype": "bfloat16", "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each kind once."""
    folders: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = save(tmp_path_factory.mktemp(kind), **KINDS[kind])
        return folders[kind]

    return of


@torch.no_grad()
def loss_of_transformers(folder: Path, spec: RunSpec) -> float:
    """On the held-out windows."""
    import transformers

    dtype = getattr(torch, spec.compute.stored)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    total, tokens = 0.0, 0
    for windows in held_out_windows(corpus_of(spec).held_out, spec):
        batch = torch.from_numpy(windows)
        logits = model(batch[:, :-1]).logits
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
        tokens += batch[:, 1:].numel()
    return total / tokens


def reference_of(spec: RunSpec) -> Reference:
    return Reference(spec, corpus_of(spec), Carrier(spec))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_evaluation_is_the_loss_of_transformers(made, kind):
    spec = starting_from(made(kind))
    right = loss_of_transformers(made(kind), spec)
    assert abs(right - 5.55) > 0.05, "something that no other weights would have"
    assert reference_of(spec).evaluate() == pytest.approx(right, abs=CLOSE)


def test_a_run_in_float64_starts_from_the_same_numbers(made):
    spec = starting_from(made("bf16"), compute={"dtype": "float64"})
    assert reference_of(spec).evaluate() == pytest.approx(loss_of_transformers(made("bf16"), spec), abs=1e-6)


def test_the_references_first_row_is_what_the_checkpoint_was_worth(made):
    reference = reference_of(starting_from(made("llama")))
    worth = reference.evaluate()
    rows = list(reference.train(1))
    assert (rows[0]["event"], rows[0]["step"], rows[0]["loss"]) == ("eval", 0, worth)
    assert [row["event"] for row in rows[1:]] == ["step", "eval"]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "wire", "steps"), [("qwen3", "int8", 20), ("sharded", "fp32", 100)])
def test_many_steps_of_the_pipeline_are_the_references(pool: Pool, made, kind, wire, steps):
    stages = [1, 2] if kind == "sharded" else 3
    spec = starting_from(made(kind), steps=steps, stages=stages, wire={"forward": wire, "backward": wire})
    led, peers = pool.run(spec, len(stages) if isinstance(stages, list) else stages)
    assert led["exit"] == 0, led
    assert [p["exit"] for p in peers] == [0] * len(peers)
    reference = reference_of(spec)
    rows = list(reference.train())
    assert led["summary"]["weights_sha256"] == reference.weights_sha256()
    metrics = [json.loads(line) for line in (led["run_dir"] / "metrics.jsonl").read_text().splitlines()]
    theirs = [(row["step"], row["loss"]) for row in metrics if row["event"] == "eval"]
    assert theirs == [(row["step"], row["loss"]) for row in rows if row["event"] == "eval"]
    assert theirs[0][0] == 0
    if wire == "fp32":
        assert theirs[0][1] == pytest.approx(loss_of_transformers(made(kind), spec), abs=CLOSE)
    with Checkpoint(made(kind), spec) as checkpoint:
        source = checkpoint.sha256()
    [cut] = events(led["run_dir"], "checkpoint_cut")
    assert (cut["sha256"], cut["tied"]) == (source, kind == "sharded")
    assert led["summary"]["checkpoint_sha256"] == source


def test_where_the_peers_decide_the_cut_each_gets_its_stage_and_no_other(pool: Pool, made):
    spec = starting_from(made("llama"), steps=3, stages="auto", min_peers=2)
    led, peers = pool.run(spec, 2)
    assert led["exit"] == 0, led
    assert [p["exit"] for p in peers] == [0, 0]
    layers = led["summary"]["layers_per_stage"]
    reference = reference_of(spec.model_copy(update={"stages": layers}))
    list(reference.train())
    assert led["summary"]["weights_sha256"] == reference.weights_sha256()
    first = led["run_dir"] / "snapshots" / "0000-00000000"
    parts = [load_file(first / f"stage-{i}.safetensors") for i in range(len(layers))]
    for stage, part in zip(reference_of(spec.model_copy(update={"stages": layers})).stages, parts, strict=True):
        assert {name for name in part if name.startswith("weights/")} == {
            f"weights/{name}" for name, _ in stage.named_parameters()
        }
        for name, parameter in stage.named_parameters():
            assert torch.equal(part[f"weights/{name}"], parameter)
    here = [[p.name for p in (led["run_dir"] / f"p{i}").rglob("0000-00000000-stage-*.safetensors")] for i in range(2)]
    assert sorted(map(len, here)) == [len(layers) - 1, 1]
    names = [name.partition(".")[0] for name in sorted([*here[0], *here[1]])]
    assert names == [f"0000-00000000-stage-{i}" for i in range(len(layers))]


def test_a_checkpoint_that_goes_away_ends_the_coordinator_until_it_is_back(pool: Pool, made, tmp_path):
    folder = shutil.copytree(made("llama"), tmp_path / "start")
    spec, run_dir = starting_from(folder, steps=3), tmp_path / "run"
    lead = {"kind": "coordinator", "spec": spec.model_dump(mode="json"), "run_dir": str(run_dir)}
    pool.coordinator.start(**lead)
    link = wait_for_link(run_dir)
    (folder / "model.safetensors").rename(tmp_path / "away")
    for i in range(2):
        pool.peers[i].start(kind="join", link=link, name=f"peer-{i}", dir=str(run_dir / f"p{i}"))
    led = pool.coordinator.result()
    assert (led["exit"], led["reason"]) == (EXIT_OUTSIDE, "checkpoint_no_weights")
    assert [e["reason"] for e in events(run_dir, "ended")] == ["checkpoint_no_weights"]
    assert list((run_dir / "snapshots").iterdir()) == []
    (tmp_path / "away").rename(folder / "model.safetensors")
    pool.coordinator.kill()  # whose lock on the run directory may outlive the error
    pool.coordinator.start(**lead)
    ended = [process.result() for process in (pool.coordinator, *pool.peers[:2])]
    assert [result["exit"] for result in ended] == [0, 0, 0], ended


def test_a_start_from_what_is_no_checkpoint_leaves_no_run_behind(made, tmp_path):
    folder = shutil.copytree(made("llama"), tmp_path / "start")
    spec = starting_from(folder)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    os.truncate(folder / "model.safetensors", 1000)
    done = pmtrain("coordinator", "run.yaml", "--host", "127.0.0.1", "--port", 0, "--run-dir", "run", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (EXIT_OUTSIDE, 2)
    assert not (tmp_path / "run" / "journal.sqlite").exists()
