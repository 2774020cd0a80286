"""The frontier experiment: what it counts, how it tunes, and what its rows are made into."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protomodels_cli.codecs import Carrier, parse_codec
from protomodels_cli.lab import frontier
from protomodels_cli.lab.frontier_report import contenders, grouped, inference, link_seconds, steps_to, time_to_loss
from protomodels_cli.lab.results import write_json
from protomodels_cli.lab.runs import SCALES, Bench, Recipe, Run, corpus_of, train
from protomodels_cli.model.reference import Reference

MODEL = {
    "layers": 3,
    "width": 16,
    "heads": 2,
    "kv_heads": 1,
    "context": 8,
    "microbatches": 2,
    "ks": (4,),
    "k": 4,
    "rank": 2,
}
LENGTH = {"batch": 4, "steps": 6, "eval_windows": 4, "text": 60_000, "seeds": 2, "workers": 1}
TINY = replace(SCALES["cpu"], **MODEL, **LENGTH)
DENSE = Recipe("dense", None, "fp32", "fp32", "muon", 0.01)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frontier") / "runs.jsonl"


@pytest.fixture(scope="module")
def result(kept: Path) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "ROUNDS", 1)  # tuning further has a test of its own
        yield frontier.run(TINY, only=["k=4 int8 muon"], kept=kept)


def test_rows_have_the_promised_names_and_are_held_against_dense_of_the_same_seed(result):
    names = {"form", "k", "codec", "optimizer", "t_fixed_scale", "seed", "bytes_per_token", "loss", "loss_codec_off"}
    assert all(names | {"gap_to_dense"} <= row.keys() for row in result["rows"])
    base = result["baseline"]
    dense = {
        row["seed"]: row
        for row in result["rows"]
        if row["form"] == "dense" and row["optimizer"] == base["optimizer"] and row["codec"] == "fp32"
    }
    ours = [row for row in result["rows"] if row["form"] == "reparam"]
    assert sorted(dense) == sorted(row["seed"] for row in ours) == [0, 1]
    assert dense[0]["loss"] != dense[1]["loss"]
    for row in ours:
        assert row["gap_to_dense"] == pytest.approx(row["loss"] / dense[row["seed"]]["loss"] - 1)
        assert row["loss"] != row["loss_codec_off"]


def test_the_baseline_is_the_best_of_the_dense_sweep(result):
    sweep = result["dense_sweep"]
    (base,) = [row for row in sweep if row["baseline"]]
    assert base["loss"] <= min(row["loss"] for row in sweep) / frontier.GAIN
    assert {row["optimizer"] for row in sweep} == {"muon", "adamw"}
    assert len({row["lr"] for row in sweep}) > 2
    assert len({row["embedding_std"] for row in sweep}) > 2
    assert {row["form"] for row in result["subspace_sweep"]} == {"reparam"}


def test_bytes_are_those_of_one_boundary_both_ways_with_the_token_id(result):
    by_form = {row["form"]: row for row in result["rows"]}
    assert by_form["reparam"]["bytes_per_token"] == 2 * (4 + 2) + 2  # four int8 and a scale each way
    assert by_form["dense"]["bytes_per_token"] == 2 * 4 * 16 + 2
    assert by_form["reparam"]["ratio_bf16"] == pytest.approx(2 * 2 * 16 / 14)
    assert by_form["reparam"]["ratio_fp32"] == pytest.approx(2 * 4 * 16 / 14)


@pytest.mark.parametrize(("forward", "backward"), [*frontier.dense_codecs(TINY)])
def test_every_codec_sends_what_arithmetic_says(forward, backward):
    run = Run(replace(TINY, steps=3), replace(DENSE, forward=forward, backward=backward), 0, "cpu")
    found = train(run)
    assert found["epochs"] >= 3
    if parse_codec(forward).packing is not None:
        assert 0 < found["bytes_per_token"] < 1.5 * found["bytes_by_arithmetic"]
    elif parse_codec(forward).codec.remembers_samples:  # a third of all windows came for the first time, whole
        first, later = 4 * 16, 16 / 2 + 2
        assert found["bytes_forward"] == pytest.approx(first / 3 + later * 2 / 3 + 2)
    else:
        assert found["bytes_per_token"] == pytest.approx(found["bytes_by_arithmetic"])


def test_a_run_is_the_reference_on_the_same_spec():
    run = Run(TINY, replace(DENSE, forward="int4", backward="topk:0.3"), 1, "cpu")
    spec = run.spec()
    reference = Reference(spec, corpus_of(TINY), Carrier(spec))
    losses = [row["loss"] for row in reference.train() if row["event"] == "step"]
    found = train(run)
    assert found["loss"] == reference.evaluate()
    assert found["loss_codec_off"] == reference.evaluate(codecs=False) != found["loss"]
    assert [point["loss"] for point in found["curve"]] == losses
    assert found["evals"][-1] == {"step": 6, "loss": found["loss"], "loss_codec_off": found["loss_codec_off"]}


def test_a_run_that_diverges_is_a_row_without_a_loss():
    found = train(Run(TINY, replace(DENSE, lr=1e30), 0, "cpu"))
    assert found["loss"] is None
    assert "non-finite" in found["stopped"]
    assert json.dumps(found, allow_nan=False)


def test_finished_runs_are_kept_and_not_repeated(result, kept, monkeypatch):
    def refuse(run: Run) -> None:
        raise AssertionError(f"trained again: {run.recipe.name}")

    monkeypatch.setattr("protomodels_cli.lab.runs.train", refuse)
    again = frontier.run(TINY, only=["k=4 int8 muon"], kept=kept)
    assert again["rows"] == result["rows"]


def test_processes_side_by_side_give_the_same_numbers():
    runs = [Run(TINY, DENSE, seed, "cpu") for seed in (0, 1)]
    with Bench(workers=2, expected=2) as bench:
        found = bench.results(runs)
    assert [row["loss"] for row in found] == [train(run)["loss"] for run in runs]


def test_tuning_climbs_to_the_best_point_and_stays_there():
    def losses(recipes: list[Recipe]) -> list[float]:
        trained.extend(recipes)
        return [1 + abs(r.lr / 0.04 - 1) + abs(r.embedding_std - 0.32) for r in recipes]

    trained: list[Recipe] = []
    ends, seen = frontier.climb([DENSE, replace(DENSE, lr=0.08)], losses, frontier.around, 9)
    assert ends == [replace(DENSE, lr=0.04, embedding_std=0.32)] * 2
    assert all(near in seen for near in frontier.around(ends[0], 0.0))
    assert len(trained) == len(set(trained)), "no point is trained twice"


def row(codec: str, nbytes: float, losses: list[float | None], off: float | None = None, **fields: Any) -> dict:
    evals = [{"step": 10 * (i + 1), "loss": x, "loss_codec_off": x} for i, x in enumerate(losses)]
    last = losses[-1]
    base = {"form": "dense", "k": None, "codec": codec, "optimizer": "muon", "t_fixed_scale": None, "seed": 0, "lr": 1}
    measured = {"bytes_per_token": nbytes, "ratio_bf16": 1, "ratio_fp32": 1, "compute_seconds": 0.5, "evals": evals}
    loss = {"loss": last, "loss_codec_off": last if off is None else off, "gap_to_dense": last and last / 2 - 1}
    return {**base, **measured, **loss, **fields}


def test_the_front_is_what_nothing_cheaper_beats():
    rows = [
        row("fp32", 100, [2.0]),
        row("bf16", 50, [2.0]),  # as good, for less
        row("int8", 25, [2.5]),
        row("topk:0.1", 30, [2.6], off=2.4),  # better than int8 with the codec off
        row("int4", 10, [None]),
        row("lowrank:4", 25, [2.45]),  # as cheap as int8 and better
    ]
    assert [g["codec"] for g in grouped(rows) if g["pareto"]] == ["lowrank:4", "topk:0.1", "bf16"]


def test_a_group_with_a_diverged_seed_has_no_mean():
    (group,) = grouped([row("int4", 10, [2.0]), row("int4", 10, [None], seed=1)])
    assert group["loss"] is None
    (group,) = grouped([row("int4", 10, [2.0]), row("int4", 10, [3.0], seed=1)])
    assert (group["loss"], group["spread"]) == (2.5, 1.0)


def test_steps_to_a_loss_lie_between_two_evaluations():
    evals = row("fp32", 1, [4.0, 3.0, 3.5, 2.0])["evals"]
    assert steps_to(evals, 3.25) == 17.5
    assert steps_to(evals, 2.75) == pytest.approx(35.0)
    assert steps_to(evals, 5.0) == 10.0
    assert steps_to(evals, 1.0) is None


def test_time_to_a_loss_is_steps_times_the_slower_of_compute_and_line():
    rows = [row("fp32", 1000, [4.0, 2.0]), row("int8", 10, [4.0, 2.0]), row("int4", 5, [4.0, 3.9])]
    seconds = link_seconds("1mbit", tokens_per_step=250)
    by_codec = {found["codec"]: found for found in time_to_loss(rows, seconds, 3.0)}
    assert by_codec["fp32"]["seconds"] == pytest.approx(15 * 2.0)  # 2 Mbit a step
    assert by_codec["int8"]["seconds"] == pytest.approx(15 * 0.5)  # the line takes 0.02 s, compute 0.5 s
    assert by_codec["int4"]["seconds"] is None


def test_the_finding_about_inference_follows_the_numbers():
    def verdicts(plain: float, feedback: float) -> list[str]:
        rows = [row("topk:0.1", 1, [2.0], off=plain), row("topk:0.1+ef", 1, [2.0], off=feedback)]
        return [line.partition(": ")[2].removesuffix(" here") for line in inference({"rows": rows})[-2:]]

    assert verdicts(2.5, 1.9) == ["confirmed", "confirmed"]
    assert verdicts(1.9, 1.9) == ["refuted", "confirmed"]
    assert verdicts(2.5, 2.5) == ["confirmed", "refuted"]
    assert verdicts(2.0, 2.0) == ["not decided"] * 2


def test_report_and_picture(result, tmp_path):
    text = frontier.report(result)
    assert all(word in text for word in ("k=4", "int8", "5mbit"))
    picture = tmp_path / "p.png"
    frontier.plot(result, picture)
    assert picture.stat().st_size > 10_000
    write_json(result, tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert frontier.report(read) == text, "what is written can be reported again"
    rows = [r for r in read["time_to_loss"]["rows"] if r["above_dense"] == 0.1]
    assert len(contenders(rows, read["time_to_loss"]["links"])) >= 1
