"""The run's first snapshot, cut from a checkpoint: when, by whom it is waited for, and what can go wrong with it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import starting_from
from led import Led
from machine_bench import Bench, peer, to_step, told
from safetensors.numpy import save_file
from test_checkpoint_spec import LLAMA, changed

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import notices, reasons
from protomodels_cli.coordinator.history import History, Initialised, Mark, Placed, beginning, fold
from protomodels_cli.coordinator.identity import RunIdentity
from protomodels_cli.coordinator.rebuild import history_from
from protomodels_cli.coordinator.snapshots.first import FirstSnapshot
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep
from protomodels_cli.coordinator.status import describe
from protomodels_cli.errors import EXIT_OUTSIDE, UserError
from protomodels_cli.files import hash_file
from protomodels_cli.huggingface.checkpoint import Checkpoint
from protomodels_cli.huggingface.names import hugging_face_name, modules
from protomodels_cli.spec import RunSpec

RUN = RunIdentity("f" * 64, "5" * 64)
TENSORS = {hugging_face_name(module): module for module in modules(range(3), 3, qk_norm=False)}


def shapes() -> dict[str, tuple[int, ...]]:
    ends = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    ends |= {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    ends |= {"embed_tokens": (256, 32), "lm_head": (256, 32)}
    return {name: ends.get(name.split(".")[-2], (32,)) for name in TENSORS}


def weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape).astype("f4") for name, shape in shapes().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint."""
    at = tmp_path / "start"
    at.mkdir()
    (at / "config.json").write_text(json.dumps(changed({"tie_word_embeddings": False})))
    save_file(weights(), at / "model.safetensors")
    return at


@pytest.fixture
def first(folder: Path, tmp_path: Path) -> FirstSnapshot:
    return FirstSnapshot(starting_from(folder), folder, Snapshots(tmp_path / "snapshots", RUN, (0, ""), tmp_path))


# When it is cut


def bench(folder: Path, **sections: Any) -> Bench:
    return Bench(starting_from(folder, **sections))


def cuts(b: Bench) -> list[tuple[int, ...]]:
    return [c.layers for c in b.commands if isinstance(c, ev.CutCheckpoint)]


def assigned(b: Bench) -> list[ev.AssignStage]:
    return [c for c in b.commands if isinstance(c, ev.AssignStage)]


CUT = ev.CheckpointCut((2, 1), ("a", "b"), "source", tied=True)


def test_peers_wait_until_it_is_cut_and_then_restore_from_it(folder):
    b = bench(folder)
    b.join(0, 1)
    assert cuts(b) == [(2, 1)]
    assert b.waits() == reasons.CheckpointUncut(str(folder))
    assert assigned(b) == []
    b.join(2)
    assert cuts(b) == [(2, 1)], "once"
    b.tell(CUT)
    assert b.state.history.newest == Mark(0, 0, 0, "", layers=(2, 1), parts=("a", "b"), source="source")
    assert len(assigned(b)) == 2
    assert told(b.commands, notices.CheckpointCut) == [notices.CheckpointCut(str(folder), "source", (2, 1), tied=True)]
    status = describe(b.state, b.now, 0.0, 0)
    assert (status.checkpoint, status.checkpoint_sha256) == (folder.name, "source")
    to_step(b, 1)
    assert b.tasks()[:2] == [("link", 0), ("evaluation", 0)], "what the checkpoint was worth"
    b.finish()
    assert not any(isinstance(c, ev.AssignStage) for c in b.commands[len(b.commands) - 1 :])
    assert b.state.history.snapshots[0].parts == ("a", "b"), "the beginning is kept"


def test_the_cut_that_peers_decided_stands(folder):
    b = bench(folder, stages="auto")
    b.tell(ev.Joined(peer(0)))
    b.tell(ev.Joined(replace(peer(1), flops=1e12)))
    [layers] = cuts(b)
    b.tell(replace(CUT, layers=layers, parts=("a",) * len(layers)))
    holders = b.state.history.holders
    b.lose(holders[0])
    b.join(2, 3)
    assert {r.layers for r in b.records if isinstance(r, Placed)} == {layers}
    assert cuts(b) == [layers]
    b.finish()


def test_peers_that_leave_meanwhile_are_waited_for(folder):
    b = bench(folder)
    b.join(0, 1)
    b.lose("p1")
    b.tell(CUT)
    assert not b.state.placed
    b.join(2)
    assert [c.peer for c in assigned(b)] == ["p0", "p2"]


def test_a_coordinator_that_was_restarted_before_it_was_cut_cuts_it(folder):
    from protomodels_cli.coordinator import machine

    b = bench(folder)
    b.join(0, 1)
    b.state = machine.resume(b.state.spec, (0, ""), b.first, b.now)
    b.join(0, 1)
    assert cuts(b) == [(2, 1), (2, 1)]


def test_restoring_from_it_may_take_longer_than_building(folder):
    b = bench(folder, limits={"build_seconds": 10.0, "reuse_seconds": 10.0})
    b.join(0, 1)
    b.tell(CUT)
    b.now += 60
    assert not any(isinstance(c, ev.Dismiss) for c in b.tell(ev.Tick()))


def test_a_rollback_to_the_beginning_restores_it(folder):
    b = bench(folder)
    b.join(0, 1)
    b.tell(CUT)
    to_step(b, 3)
    b.lose("p0")
    b.join(2)
    history = b.state.history
    assert (history.step, history.lineage, history.newest.parts) == (0, 2, ("a", "b"))
    b.finish()
    assert cuts(b) == [(2, 1)]


def test_a_beginning_that_a_new_journal_does_not_have_is_cut_again(folder):
    """Its files were lost with the journal: a rollback beyond what is left must not begin with the seed."""
    b = bench(folder)
    b.join(0, 1)
    b.tell(CUT)
    b.answer_until(lambda: b.state.history.step == 5 and b.state.history.newest.step == 5)
    found = b.state.history.newest
    lost = history_from(beginning(""), [found], 1000, 5)
    kept = history_from(beginning(""), [b.state.history.snapshots[0], found], 1000, 5)
    assert [m.key for m in kept.snapshots] == [(0, 0), found.key]
    assert (kept.snapshots[0].parts, lost.snapshots[0].parts) == (("a", "b"), ())
    for history, again in ((lost, [(2, 1)]), (kept, [])):
        b = bench(folder)
        b.state = replace(b.state, history=replace(history, snapshots=history.snapshots[:1], step=0, lineage=1001))
        b.join(0, 1)
        assert cuts(b) == again
        assert b.state.placed == (not again)


def test_a_peer_that_cannot_read_its_part_may_try_again_and_nobody_goes_back_before_the_beginning(folder):
    b = bench(folder)
    b.join(0, 1)
    b.tell(CUT)
    generation = b.state.history.generation
    lost = ev.SnapshotLost("p0", generation, 0, 0, "damaged", whole_here=True)
    b.tell(lost)
    assert b.state.history.generation == generation + 1
    b.tell(replace(lost, generation=generation + 1, whole_here=False))
    assert b.state.history.generation == generation + 1


# Its files


def settled(first: FirstSnapshot, layers: tuple[int, ...] = (2, 1)) -> History:
    cut = first.cut(layers)
    history = fold(beginning(""), Initialised(layers, cut.parts, cut.source))
    first._snapshots.settle(lambda: history)
    return history


def test_it_is_a_snapshot_like_any_other(first, tmp_path):
    history = settled(first)
    at = tmp_path / "snapshots" / "0000-00000000"
    assert sorted(os.listdir(at)) == ["snapshot.json", "stage-0.safetensors", "stage-1.safetensors"]
    assert [hash_file(at / f"stage-{i}.safetensors") for i in range(2)] == list(history.newest.parts)
    assert first.cut((2, 1)).parts == history.newest.parts, "the same bytes every time"


def test_what_an_interrupted_cut_has_left_is_no_matter(first, tmp_path):
    left = tmp_path / "snapshots" / ".0000-00000000"
    left.mkdir()
    for name in (f"stage-0.{'0' * 64}.safetensors", "stage-1.cut"):
        (left / name).write_bytes(b"half of it")
    settled(first)
    assert len(os.listdir(tmp_path / "snapshots" / "0000-00000000")) == 3


def test_its_source_is_known_by_its_hash(first, folder):
    spec = starting_from(folder)
    with Checkpoint(folder, spec) as checkpoint:
        source = checkpoint.sha256()
    assert first.cut((3,)).source == source
    changed_weights = weights()
    changed_weights["model.norm.weight"][0] += 1
    save_file(changed_weights, folder / "model.safetensors")
    assert first.cut((3,)).source != source


def test_a_full_disk_leaves_nothing_behind(first, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, hard))  # within the second part
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            first.cut((1, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path / "snapshots") == []
    settled(first)


@pytest.mark.parametrize("source", ["there", "changed", "gone"])
def test_a_damaged_part_is_cut_again_if_the_checkpoint_is_the_same(first, folder, tmp_path, source):
    history = settled(first)
    part = tmp_path / "snapshots" / "0000-00000000" / "stage-1.safetensors"
    part.write_bytes(b"rot")
    if source == "changed":
        save_file({**weights(), "lm_head.weight": np.zeros((256, 32), "f4")}, folder / "model.safetensors")
    if source == "gone":
        shutil.rmtree(folder)
    said: list[notices.Notice] = []
    upkeep = Upkeep(Led(history=lambda: history, tell=said.append), first._snapshots, None, first)
    assert asyncio.run(upkeep.is_whole(history.newest, 1)) == (source == "there")
    assert (hash_file(part) == history.newest.parts[1]) == (source == "there")
    assert [type(notice) for notice in said] == [notices.PartRestored] * (source == "there")


# Checkpoints that cannot be used


def without(name: str) -> Callable[[Path], None]:
    return lambda at: save_file({n: w for n, w in weights().items() if n != name}, at / "model.safetensors")


def with_tensor(name: str, array: np.ndarray) -> Callable[[Path], None]:
    return lambda at: save_file({**weights(), name: array}, at / "model.safetensors")


def index(content: str) -> Callable[[Path], None]:
    def write(at: Path) -> None:
        (at / "model.safetensors").rename(at / "other.safetensors")
        (at / "model.safetensors.index.json").write_text(content)

    return write


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "checkpoint"),
    "another config": (
        lambda at: (at / "config.json").write_text(json.dumps(changed({"rope_theta": 1.0}))),
        "checkpoint_changed",
    ),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), "checkpoint_no_weights"),
    "cut short": (lambda at: os.truncate(at / "model.safetensors", 90_000), "checkpoint_damaged"),
    "a folder for a file": (
        lambda at: ((at / "model.safetensors").unlink(), (at / "model.safetensors").mkdir()),
        "checkpoint",
    ),
    "one missing": (without("model.layers.1.mlp.up_proj.weight"), "checkpoint_incomplete"),
    "no head": (without("lm_head.weight"), "checkpoint_incomplete"),
    "a bias": (with_tensor("model.layers.0.self_attn.q_proj.bias", np.zeros(32, "f4")), "checkpoint_tensor"),
    "another shape": (with_tensor("model.norm.weight", np.zeros(31, "f4")), "checkpoint_tensor"),
    "whole numbers": (with_tensor("model.norm.weight", np.zeros(32, "i8")), "checkpoint_tensor"),
    "no map": (index("{}"), "checkpoint_damaged"),
    "no JSON": (index("{"), "checkpoint_damaged"),
    "a file missing": (index('{"weight_map": {"model.norm.weight": "absent.safetensors"}}'), "checkpoint"),
}


@pytest.mark.parametrize(("spoil", "kind"), BAD.values(), ids=BAD)
def test_it_is_not_cut_from_what_is_no_such_checkpoint(first, folder, tmp_path, spoil, kind):
    spoil(folder)
    for work in (first.check, lambda: first.cut((2, 1))):
        with pytest.raises(UserError) as caught:
            work()
        assert (caught.value.kind, caught.value.exit_code) == (kind, EXIT_OUTSIDE)
    assert os.listdir(tmp_path / "snapshots") == []


def test_what_older_files_have_besides_is_no_matter(first, folder):
    with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", np.zeros(4, "f4"))(folder)
    first.check()


def test_a_tied_head_is_the_embedding_whatever_the_file_has(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA))
    spec: RunSpec = starting_from(folder)
    with Checkpoint(folder, spec) as checkpoint:
        assert checkpoint.tied
        assert np.array_equal(checkpoint.array("head.out"), weights()["model.embed_tokens.weight"])
