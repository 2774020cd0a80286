"""The reference: deterministic, the same for every cut, and careful with bad numbers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math

import pytest
import torch
from conftest import make_spec
from safetensors.torch import load_file
from tiers import table

from protomodels_cli.codecs import Carrier
from protomodels_cli.errors import RunStopped
from protomodels_cli.lab.reconstruct import relative
from protomodels_cli.model.snapshot import write_snapshot
from protomodels_cli.model.state import weights
from protomodels_cli.protocol.messages import MessageKey

UPDATES = {"interval": 4, "window": 2, "delay": 1}


def trained(reference, **sections):
    r = reference(**{"steps": 10, **sections})
    rows = list(r.train())
    return r, [row["loss"] for row in rows if row["event"] == "step"]


@pytest.mark.parametrize(
    ("form", "muon"), table([*itertools.product(["reparam", "constrained", "dense"], [True, False])])
)
def test_the_same_spec_gives_the_same_bytes(reference, form, muon):
    optimizer = "muon" if muon else "row_adamw" if form == "constrained" else "adamw"
    update = {} if form == "dense" else UPDATES
    runs = [trained(reference, subspace={"form": form, "update": update}, optimizer={"name": optimizer}) for _ in "ab"]
    assert runs[0][0].weights_sha256() == runs[1][0].weights_sha256()
    assert runs[0][1] == runs[1][1]
    other, _ = trained(reference, seed=1, subspace={"form": form, "update": update})
    assert other.weights_sha256() != runs[0][0].weights_sha256()


@pytest.mark.parametrize(
    ("form", "updates", "optimizer"),
    table(
        [
            ("dense", False, "adamw"),
            ("dense", False, "muon"),
            *itertools.product(["reparam"], [False, True], ["adamw", "muon"]),
        ]
    ),
)
def test_where_the_model_is_cut_changes_no_bit(reference, form, updates, optimizer):
    hashes = set()
    for stages in (1, 2, [1, 3], 4):
        r, _ = trained(
            reference,
            stages=stages,
            subspace={"form": form, "update": UPDATES if updates else {}},
            optimizer={"name": optimizer},
        )
        hashes.add(r.weights_sha256())
        assert r.basis is None or r.basis.version == (2 if updates else 0)
    assert len(hashes) == 1


def test_in_the_constrained_form_the_cut_changes_rounding_only(reference):
    uncut, cut = (trained(reference, stages=s, subspace={"form": "constrained"}) for s in (1, 4))
    assert cut[1] == pytest.approx(uncut[1], rel=1e-5)
    worst = max(
        relative(b, a) for a, b in zip(weights(uncut[0].stages).values(), weights(cut[0].stages).values(), strict=True)
    )
    assert 0 < worst < 1e-2


def test_a_bf16_wire_rounds_what_crosses_and_nothing_else(reference):
    exact, rounded = (trained(reference, steps=30, wire={"forward": w, "backward": w}) for w in ("fp32", "bf16"))
    assert exact[0].weights_sha256() != rounded[0].weights_sha256()
    assert rounded[1] == pytest.approx(exact[1], rel=0.01)
    one_stage = [
        trained(reference, stages=1, wire={"forward": w, "backward": w})[0].weights_sha256() for w in ("fp32", "bf16")
    ]
    assert one_stage[0] == one_stage[1], "with one stage nothing crosses"


def test_each_leg_has_a_codec_of_its_own():
    carry, x = Carrier(make_spec(wire={"forward": "bf16", "backward": "fp32"})), torch.randn(5, 10)
    assert torch.equal(carry(x, MessageKey(1, 0, 0, "backward")), x)
    for leg in ("forward", "evaluation"):
        assert torch.equal(carry(x, MessageKey(1, 0, 0, leg)), x.bfloat16().float())
    assert not torch.equal(carry(x, MessageKey(1, 0, 0, "forward")), x)


def test_microbatches_change_rounding_only(reference):
    one, four = (trained(reference, batch={"size": 4, "microbatches": m}) for m in (1, 4))
    assert four[1] == pytest.approx(one[1], rel=1e-5)


@pytest.mark.full
def test_training_starts_at_ln_v_and_learns(reference):
    r, losses = trained(reference, steps=150, batch={"size": 8})
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert sum(losses[-10:]) / 10 < 3.3
    assert r.evaluate() < 3.6


def test_evaluation_changes_nothing(reference):
    runs = [reference(steps=6, eval={"interval": interval}) for interval in (1, 0)]
    rows = [list(r.train()) for r in runs]
    assert [sum(x["event"] == "eval" for x in found) for found in rows] == [6, 1]
    assert runs[0].weights_sha256() == runs[1].weights_sha256()
    assert runs[0].evaluate() == runs[0].evaluate() == rows[0][-1]["loss"]


def poison(r) -> None:
    with torch.no_grad():
        r.stages[1].layers["1"].attn.q.weight[0, 0] = float("nan")


def test_a_step_with_bad_numbers_is_skipped_everywhere(reference):
    r = reference(steps=10, subspace={"update": {"interval": 4, "window": 4, "delay": 1}})
    r.run_step()
    healthy = {name: w.clone() for name, w in weights(r.stages).items()}
    poison(r)
    with_nan = r.weights_sha256()
    rows = r.run_step()
    assert [row["applied"] for row in rows if row["event"] == "step"] == [False]
    assert r.weights_sha256() == with_nan, "no stage moved"
    assert [t.optimizer.applied for t in r.trainers] == [1] * 4
    with torch.no_grad():
        r.stages[1].layers["1"].attn.q.weight.copy_(healthy["layers.1.attn.q.weight"])
    assert r.run_step()[-1]["applied"], "one good step ends the row of bad ones"
    assert r._skipped_in_a_row == 0
    assert r.trainers[-1].gathering.covariance.total.isfinite().all(), "nothing of the bad step is left in what moves U"
    _, subspace = r.run_step()
    assert subspace["captured_after"] > subspace["captured_before"]


def test_too_many_bad_steps_stop_the_run_with_a_reason(reference):
    r = reference(steps=10, limits={"nonfinite_steps": 3})
    poison(r)
    rows = []

    def watch():
        for row in r.train():
            rows.append(row)

    with pytest.raises(RunStopped, match="step 3") as stopped:
        watch()
    assert stopped.value.kind == "nonfinite"
    assert [row["step"] for row in rows] == [1, 2, 3], "the last row says it too"


def test_metrics_of_a_run_have_the_subspaces_quantities(reference):
    r = reference(steps=6, subspace={"update": {"interval": 5, "window": 5, "delay": 0}})
    [row] = [row for row in r.train() if row["event"] == "subspace"]
    assert row["orthonormality_error"] < 1e-6
    assert row["eigenvalue_min"] == pytest.approx(1, abs=1e-6)
    assert row["eigenvalue_max"] == pytest.approx(1, abs=1e-6)
    assert 0 < row["angle_mean"] <= row["angle_max"] < math.pi / 2
    assert row["captured_after"] > row["captured_before"] > 0


def test_so_do_those_of_a_run_that_does_not_move_it(reference):
    r = reference(steps=9, subspace={"sync_interval": 4})
    rows = [row for row in r.train() if row["event"] == "subspace"]
    assert [(row["step"], row["version"]) for row in rows] == [(4, 0), (8, 0)]
    assert all(row["angle_max"] < 1e-6 and 0 < row["captured_before"] == row["captured_after"] < 1 for row in rows)
    assert not [
        row for row in reference(subspace={"form": "dense", "sync_interval": 2}).train() if row["event"] == "subspace"
    ]


def test_threads_are_set_before_anything_is_computed(reference):
    torch.set_num_threads(2)
    try:
        reference()
        assert torch.get_num_threads() == 1
        reference(compute={"threads": 2})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_snapshot_holds_each_stage_and_old_ones_go(reference, tmp_path):
    r = reference(steps=3, stages=2, optimizer={"name": "muon"})
    for _ in range(3):
        r.run_step()
        write_snapshot(tmp_path, r.step, r.trainers, r.carry, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000002", "00000003"]
    saved = [load_file(tmp_path / "00000003" / f"stage-{i}.safetensors") for i in range(2)]
    for trainer, tensors in zip(r.trainers, saved, strict=True):
        stage, optimizer = trainer.stage, trainer.optimizer
        for name, p in stage.named_parameters():
            assert torch.equal(tensors[f"weights/{name}"], p)
        for p in optimizer.parameters:
            for key, tensor in p.state.items():
                assert torch.equal(tensors[f"optimizer/{p.name}/{key}"], tensor)
        assert tensors["optimizer/applied"] == 3
        assert torch.equal(tensors["basis/u"], stage.basis.u)
    for name, sha256 in json.loads((tmp_path / "00000003" / "hashes.json").read_text())["sha256"].items():
        assert hashlib.sha256((tmp_path / "00000003" / name).read_bytes()).hexdigest() == sha256
