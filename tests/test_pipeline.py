"""The pipeline gives the reference's numbers: real processes, real sockets, TLS; weights compared bit for bit."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
from typing import Any

import pytest
import torch
from conftest import corpus_of, make_spec
from injection import fault
from marks import injected
from pool import Pool
from safetensors.torch import load_file
from tiers import first, table
from told import events, peer_events

from protomodels_cli.codecs import Carrier, parse_codec
from protomodels_cli.cost.traffic import remembered_by_codecs
from protomodels_cli.data.batches import Batches
from protomodels_cli.errors import RunStopped
from protomodels_cli.model.reference import Reference
from protomodels_cli.observe.metrics import strict
from protomodels_cli.spec import RunSpec, spec_from
from protomodels_cli.spec.cut import layers_per_stage


def reference_of(spec: RunSpec) -> tuple[Reference, list[dict[str, Any]]]:
    r = Reference(spec, corpus_of(spec), Carrier(spec))
    return r, list(r.train())


FORMS = [("dense", False), ("two_stream", False), *itertools.product(("reparam", "constrained"), (False, True))]
CASES = list(itertools.product(("fp32", "bf16", "int8"), (1, 2, 3, 4), FORMS))


FEW_WINDOWS = {"max_bytes": 1000, "val_fraction": 0.1}  # of the built-in text: 56 of 16 bytes
CODECS = [  # what remembers, what is sparse and what is packed, each on either leg
    ("int4", "int4+zstd"),
    ("eden:2", "eden:3+ef21"),
    ("eden:3 then eden:5", "eden:2 then int8 then bf16"),
    ("topk:0.2", "topk:mask"),
    ("topk:0.1+ef", "int4+ef"),
    ("topk:0.3+ef21", "topk:mask+ef21"),
    ("bf16+zstd", "topk:0.5+ef21"),
    ("lowrank:2", "lowrank:3+ef"),
    ("int4+aqsgd", "int8"),
]


def random_spec(wire: str, stages: int, form: str, moves: bool, backward: str | None = None) -> RunSpec:
    """A small spec with everything else drawn at random, the same for the same case."""
    draw = random.Random(f"{wire} {stages} {form} {moves}")
    other = wire if draw.random() < 0.8 else draw.choice(["fp32", "bf16", "int8"])
    layers = draw.randint(max(stages, 2), 5)
    cuts = sorted(draw.sample(range(1, layers), stages - 1))
    microbatches = draw.choice([1, 2, 3, 4, 6])
    steps = draw.randint(4, 7)
    interval = draw.randint(2, 3)
    update = {"interval": interval, "window": draw.randint(1, interval), "delay": draw.randint(0, interval - 1)}
    update["move"] = draw.choice(["transport", "project"])
    free = 1 if form != "dense" and draw.random() < 0.7 else 0
    optimizers = ["muon", "row_adamw" if form == "constrained" else "adamw"]
    segments = random.Random(f"segments of {wire} {stages} {form} {moves}")
    anchor = "fixed" if form == "constrained" else segments.choice(["fixed", "segment"])
    within = [at for at in range(1, layers) if at in cuts or segments.random() < 0.5]  # ends of segments
    return make_spec(
        name="case",
        seed=draw.randint(0, 10**6),
        steps=steps,
        stages=[b - a for a, b in itertools.pairwise([0, *cuts, layers])],
        model={
            "layers": layers,
            "width": draw.choice([24, 32]),
            "heads": draw.choice([2, 4]),
            "kv_heads": 2,
            "hidden": draw.choice([48, 64]),
            "context": draw.choice([8, 16]),
            "qk_norm": draw.random() < 0.3,
            "segments": [b - a for a, b in itertools.pairwise([0, *within, layers])],
        },
        subspace={
            "form": form,
            "k": draw.randint(2, 9),
            "anchor": anchor,
            "unconstrained_layers": None if form == "two_stream" else free,
            "update": update if moves else {},
            "sync_interval": draw.choice([2, 3, 100]),
            "reproject_interval": draw.choice([0, 2]),
        },
        optimizer={"name": draw.choice(optimizers), "clip": draw.choice([0.1, 1.0])},
        batch={
            "size": microbatches * draw.randint(1, 3),
            "microbatches": microbatches,
            "in_flight": draw.choice([None, 1, 2]),
        },
        wire={"forward": wire, "backward": backward or other},
        compute={"dtype": "float64" if draw.random() < 0.2 else "float32"},
        eval={"interval": draw.choice([0, 2]), "windows": draw.randint(3, 8)},
        snapshots={"interval": draw.choice([0, 3])},
    )


@pytest.mark.parametrize(("wire", "stages", "form"), table(CASES))
def test_every_wire_cut_and_form_ends_with_the_references_weights(pool, wire, stages, form):
    equals_its_reference(pool, random_spec(wire, stages, *form))


@pytest.mark.parametrize(("wire", "form"), table(list(itertools.product(CODECS, FORMS))))
def test_every_codec_and_form_ends_with_the_references_weights(pool, wire, form):
    forward, backward = wire
    spec = random_spec(forward, 2 + len(forward) % 3, *form, backward)
    if parse_codec(forward).codec.needs_revisits:
        again = {"steps": 20, "batch": {"size": 8, "microbatches": 4}, "data": FEW_WINDOWS}
        spec = spec_from(spec.model_dump(mode="json") | again)
    equals_its_reference(pool, spec)


@pytest.mark.full
def test_aqsgd_trains_three_epochs_as_the_reference_does(pool):
    spec = make_spec(stages=3, steps=60, data=FEW_WINDOWS, wire={"forward": "int4+aqsgd", "backward": "int8"})
    windows = Batches(corpus_of(spec).train, spec).windows
    assert 60 * spec.batch.size > 3 * windows
    led = equals_its_reference(pool, spec)
    rows = [json.loads(line) for line in (led["run_dir"] / "metrics.jsonl").read_text().splitlines()]
    sent = [sum(r["stages"]["forward_bytes"]) for r in rows if r["event"] == "step"]
    assert sent[-1] < 0.4 * sent[0], "once all samples were seen, only changes travel"


@pytest.mark.parametrize(
    ("wire", "leg"),
    first(
        1,
        itertools.product(
            [("int4+aqsgd", "int8+ef21"), ("int4+ef", "int4+ef"), ("topk:0.3+ef21", "topk:mask+ef21")],
            ["forward", "backward"],
        ),
    ),
)
def test_a_skipped_step_leaves_no_trace_in_what_codecs_remember(pool, tmp_path, wire, leg):
    """One message in the middle of step 3 is poison: the step is skipped by all, and later ones are as if it had not
    been. Compared with the reference, which meets the same poison."""
    spec = make_spec(
        stages=3,
        steps=20,
        batch={"size": 4, "microbatches": 4},
        data=FEW_WINDOWS,
        wire=dict(zip(("forward", "backward"), wire, strict=True)),
    )
    bad = {"step": 3, "microbatch": 1, "boundary": 1, "leg": leg}
    with fault(tmp_path, "poison", **bad):
        led = equals_its_reference(pool, spec, [{"fault": {"kind": "poison", **bad}}] * 3)
    injected(tmp_path, "poison", **bad)
    rows = [json.loads(line) for line in (led["run_dir"] / "metrics.jsonl").read_text().splitlines()]
    assert [r["applied"] for r in rows if r["event"] == "step"] == [step != 3 for step in range(1, 21)]


@pytest.mark.full
def test_a_snapshot_takes_a_cache_that_is_larger_than_its_stage(pool):
    data = {"max_bytes": 40_000, "val_fraction": 0.1}
    wire = {"forward": "int4+aqsgd", "backward": "int8"}
    batch = {"size": 64, "microbatches": 2}
    spec = make_spec(stages=2, steps=40, data=data, wire=wire, batch=batch, subspace={"form": "dense"})
    led, peers = pool.run(spec, 2)
    assert [led["exit"], *(p["exit"] for p in peers)] == [0, 0, 0], led
    [part] = (led["run_dir"] / "snapshots").glob("*/stage-1.safetensors")
    windows = Batches(corpus_of(spec).train, spec).windows
    remembered = sum(t.nbytes for name, t in load_file(part).items() if name.startswith("codecs/"))
    assert (
        1 << 21 < remembered <= remembered_by_codecs(spec, windows).host.previous
    )  # windows of the same text count once


@pytest.mark.parametrize("wire", [("int4+ef", "topk:0.2+ef21"), ("topk:0.3+ef21", "int4+ef"), ("bf16", "int8+ef")])
def test_what_codecs_remember_has_the_size_that_was_said(wire):
    spec = make_spec(stages=3, steps=2, wire=dict(zip(("forward", "backward"), wire, strict=True)))
    reference, _ = reference_of(spec)
    (previous, following), on_host = remembered_by_codecs(spec)
    assert on_host == (0, 0)
    sizes = [sum(t.nbytes for t in reference.carry.state(stage).values()) for stage in range(3)]
    assert sizes == [following, previous + following, previous]


def test_what_codecs_remember_is_in_the_snapshot(pool):
    spec = make_spec(stages=3, steps=4, wire={"forward": "topk:0.3+ef21", "backward": "int4+ef"})
    led = equals_its_reference(pool, spec)
    reference, _ = reference_of(spec)
    for stage in range(3):
        [part] = (led["run_dir"] / "snapshots").glob(f"*/stage-{stage}.safetensors")
        found = {name: t for name, t in load_file(part).items() if name.startswith("codecs/")}
        right = {f"codecs/{name}": t for name, t in reference.carry.state(stage).items()}
        assert found.keys() == right.keys()
        assert len(found) == [1, 3, 2][stage]  # a mirror at each end of a boundary, an error where gradients leave
        assert all(torch.equal(found[name], right[name]) for name in right)


def equals_its_reference(pool: Pool, spec: RunSpec, options: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    stages = len(layers_per_stage(spec))
    led, peers = pool.run(spec, options or stages)
    assert led["exit"] == 0, led
    assert [p["exit"] for p in peers] == [0] * stages, peers
    reference, rows = reference_of(spec)
    assert led["summary"]["weights_sha256"] == reference.weights_sha256()
    found = [json.loads(line) for line in (led["run_dir"] / "metrics.jsonl").read_text().splitlines()]
    for kind, fields in (
        ("step", ("step", "loss", "grad_norm", "lr", "applied", "basis_version")),
        ("eval", ("step", "loss")),
        ("switch", ("step", "version", "sha256")),
        ("subspace", ("step", "version", "captured_after")),
    ):
        mine, theirs = (
            [[r[f] for f in fields] for r in source if r["event"] == kind] for source in (found, strict(rows))
        )
        assert mine == theirs, kind
    return led


@pytest.mark.full
def test_the_cut_changes_no_bit_in_reparam_and_dense_with_a_float32_wire(pool):
    for form in ("reparam", "dense"):
        cuts = [[4], [1, 3], [2, 1, 1], [1, 1, 1, 1]]
        specs = [make_spec(stages=cut, steps=4, subspace={"form": form}) for cut in cuts]
        hashes = {pool.run(spec, len(spec.stages))[0]["summary"]["weights_sha256"] for spec in specs}
        assert len(hashes) == 1


def test_a_step_that_is_not_finite_is_skipped_everywhere(pool):
    """A rate that blows the weights up: the same steps are skipped as in the reference, then the run pauses."""
    spec = make_spec(stages=3, steps=20, optimizer={"lr": 1e30, "clip": 0.0}, limits={"nonfinite_steps": 3})
    led, peers = pool.run(spec, 3)
    assert led["exit"] == 0
    assert [p["exit"] for p in peers] == [0, 0, 0]
    [paused] = events(led["run_dir"], "paused")
    assert (paused["reason"]["kind"], paused["reason"]["steps"]) == ("non_finite", 3)
    rows = [json.loads(line) for line in (led["run_dir"] / "metrics.jsonl").read_text().splitlines()]
    applied = [r["applied"] for r in rows if r["event"] == "step"]
    reference = Reference(spec, corpus_of(spec), Carrier(spec))
    right: list[bool] = []
    with contextlib.suppress(RunStopped):
        for row in reference.train():
            right.append(row["applied"])
    assert applied == right
    assert applied[-3:] == [False] * 3


def test_peers_that_nobody_can_dial_meet_through_the_coordinator(pool):
    spec = make_spec(stages=3, steps=4)
    led, _ = pool.run(spec, 3, fault={"kind": "unreachable"})
    assert led["exit"] == 0
    rows = [json.loads(line) for line in (led["run_dir"] / "metrics.jsonl").read_text().splitlines()]
    paths = [row["stages"]["path"] for row in rows if row["event"] == "step"]
    assert {path for row in paths for path in row if path} == {"door"}
    assert led["summary"]["weights_sha256"] == reference_of(spec)[0].weights_sha256()


def test_stages_auto_is_cut_to_fit_who_joined(pool):
    spec = make_spec(stages="auto", min_peers=3, steps=4, model={"layers": 5})
    led, _ = pool.run(spec, 3)
    layers = led["summary"]["layers_per_stage"]
    assert sum(layers) == 5
    assert 1 <= len(layers) <= 3
    cut = spec.model_copy(update={"stages": layers})
    assert led["summary"]["weights_sha256"] == reference_of(cut)[0].weights_sha256()


@pytest.mark.full
def test_memory_is_bounded_by_credits_not_by_microbatches(pool):
    """Thirty-two microbatches, two in flight: no stage ever holds a third."""
    spec = make_spec(stages=3, steps=2, batch={"size": 32, "microbatches": 32, "in_flight": 2})
    led, _ = pool.run(spec, 3)
    assert led["summary"]["most_in_flight"] == [2, 2, 0]
    free = spec.model_copy(update={"batch": spec.batch.model_copy(update={"in_flight": 32})})
    held = pool.run(free, 3)[0]["summary"]
    assert max(held["most_in_flight"]) > 2, "without the limit there would be more"
    assert held["weights_sha256"] == led["summary"]["weights_sha256"]


@pytest.mark.full
def test_coarser_wires_stay_near_float32_over_100_steps():
    """Through the reference, which the pipeline equals bit for bit."""
    curves = {}
    for wire in ("fp32", "bf16", "int8"):
        spec = make_spec(
            steps=100, stages=4, batch={"size": 8, "microbatches": 1}, wire={"forward": wire, "backward": wire}
        )
        rows = Reference(spec, corpus_of(spec), Carrier(spec)).train()
        curves[wire] = [r["loss"] for r in rows if r["event"] == "step"]
    for wire, tolerance in (("bf16", 0.001), ("int8", 0.002)):
        gaps = [abs(a - b) / b for a, b in zip(curves[wire], curves["fp32"], strict=True)]
        print(f"{wire}: largest gap {max(gaps):.4f}, at the end {sum(gaps[-20:]) / 20:.4f}")
        assert max(gaps) < tolerance
        assert curves[wire] != curves["fp32"]


def test_a_part_that_a_peer_cannot_write_costs_that_snapshot_only(pool):
    spec = make_spec(stages=2, steps=6, snapshots={"interval": 2})
    led, peers = pool.run(spec, [{}, {"fault": {"kind": "full_disk_once"}}])
    assert led["exit"] == 0, led
    assert [p["exit"] for p in peers] == [0, 0]
    [failed] = events(led["run_dir"], "snapshot_failed")
    assert (failed["step"], failed["name"]) == (2, "peer-1")
    assert failed["peer"]
    assert failed["reason"] == {"kind": "not_written", "detail": os.strerror(errno.ENOSPC)}
    assert peer_events(led["run_dir"] / "p1", "part_failed", step=2)
    assert [p.name for p in sorted((led["run_dir"] / "snapshots").iterdir())] == ["0001-00000004", "0001-00000006"]
