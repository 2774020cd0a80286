"""The frontier and scaling experiments: how they tune, what they compare, and what their rows are made into."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab_tools import DENSE, TINY, TWO_STREAM
from typer.testing import CliRunner

from protomodels_cli.cli.main import app
from protomodels_cli.codecs import parse_codec
from protomodels_cli.errors import OptionError
from protomodels_cli.lab import frontier, scaling, wires
from protomodels_cli.lab.frontier_report import contenders, grouped
from protomodels_cli.lab.recipes import Recipe, carried, dense
from protomodels_cli.lab.results import write_json
from protomodels_cli.lab.runs import Run
from protomodels_cli.lab.scales import SCALES
from protomodels_cli.lab.shared_anchor import Sharing
from protomodels_cli.lab.time_to_loss import (
    LATENCY,
    LINKS,
    MICROBATCHES,
    STAGES,
    step_seconds,
    steps_to,
    time_to_loss,
    times,
)
from protomodels_cli.lab.tuning import coordinates, tune, tuned_rates
from protomodels_cli.spec.units import bits_per_second

ONLY = ["two_stream segment k=8 int8", "shared int4 every 4"]
ROWS = {
    "dense fp32": [0, 1],
    "dense segment fp32": [0, 1],
    "two_stream segment k=8 int8": [0, 1],
    "two_stream shared int4 every 4 late 2 k=8 int8": [0],
    "two_stream shared int4 every 4 late 2 k=4 int8": [0],
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frontier") / "runs.jsonl"


@pytest.fixture(scope="module")
def result(kept: Path) -> dict[str, Any]:
    return frontier.run(TINY, only=ONLY, kept=kept)


# The experiment


@pytest.mark.full
def test_rows_are_held_against_both_dense_ones_of_the_same_seed(result):
    seeds: dict[str, list[int]] = {}
    for row in result["rows"]:
        seeds.setdefault(row["name"], []).append(row["seed"])
    assert {name: seeds[name] for name in ROWS} == ROWS
    losses = {(row["name"], row["seed"]): row["loss"] for row in result["rows"]}
    assert losses["dense fp32", 0] != losses["dense fp32", 1]
    for row in (row for row in result["rows"] if row["segments"] == TINY.segments):
        assert row["gap_to_dense"] == pytest.approx(row["loss"] / losses["dense fp32", row["seed"]] - 1)
        anchored = losses["dense segment fp32", row["seed"]]
        assert row["gap_to_anchored"] == pytest.approx(row["loss"] / anchored - 1)


@pytest.mark.full
def test_bytes_are_those_of_one_boundary_both_ways_with_the_token_id(result):
    by_name = {row["name"]: row for row in result["rows"]}
    ours, plain = by_name["two_stream segment k=8 int8"], by_name["dense fp32"]
    assert ours["bytes_per_token"] == 2 * (8 + 2) + 2  # eight int8 and a scale each way
    assert plain["bytes_per_token"] == 2 * 4 * 16 + 2
    assert ours["ratio_fp32"] == pytest.approx(2 * 4 * 16 / 22) == 2 * ours["ratio_bf16"]


@pytest.mark.full
def test_a_shared_anchor_stands_beside_a_larger_k_at_its_bytes(result):
    shared = [row for row in result["rows"] if row["sharing"] is not None]
    for row in shared:
        k = row["k"] + int(row["bytes_of_sums"] / 2)
        equal = [r for r in result["rows"] if r["anchor"] == "segment" and r["sharing"] is None and r["k"] == k]
        assert len(equal) == (k < TINY.width)


@pytest.mark.full
def test_every_family_has_as_many_trials_on_other_text_than_is_reported(result):
    found = {name: family["trials"] for name, family in result["families"].items()}
    assert {name: len(trials) for name, trials in found.items()} == dict.fromkeys(found, TINY.trials)
    assert set(found) == {"dense fixed", "dense segment", "two_stream segment"}
    names = [coordinates(r) for r in (DENSE, TWO_STREAM, replace(TWO_STREAM, anchor="fixed"))]
    assert [len(name) for name in names] == [4, 4, 4]
    assert len(set(names)) == 3


@pytest.mark.full
def test_what_there_was_no_time_for_is_missing_and_comes_the_next_time(tmp_path, monkeypatch):
    kept = tmp_path / "runs.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protomodels_cli.lab.bench.Bench.expected", lambda self, run: 1e9 if run.seed else 0.0)
        first = frontier.run(replace(TINY, trials=0), only=["dense fp32"], budget=1e6, kept=kept)
    assert {row["seed"] for row in first["rows"]} == {0}
    assert len(first["missing"]) == 2
    assert len(frontier.report(first).splitlines()) > 10
    second = frontier.run(replace(TINY, trials=0), only=["dense fp32"], kept=kept)
    assert {row["seed"] for row in second["rows"]} == {0, 1}
    assert second["missing"] == {}
    assert len(kept.read_text().splitlines()) == 4


@pytest.mark.full
def test_what_was_kept_is_shown_where_its_device_is_not(tmp_path):
    kept = tmp_path / "runs.jsonl"
    frontier.run(replace(TINY, trials=0), only=["dense fp32"], kept=kept)
    again = frontier.run(replace(TINY, trials=0), only=["dense", "k=4 int8"], kept=kept, budget=0)
    assert {row["name"] for row in again["rows"]} == {"dense fp32", "dense segment fp32"}
    assert "d=16 two_stream segment k=4 int8 seed 0" in again["missing"]
    words = ["lab", "frontier", "--device", "cuda:77", "--trials", "0", "--only", "dense", "--budget"]
    assert CliRunner().invoke(app, [*words, "1"]).exit_code != 0
    shown = CliRunner().invoke(app, [*words, "0"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert "d=64 dense fp32 seed 0" in shown.output


def test_a_family_that_is_not_tuned_has_no_rows():
    found = frontier.run(TINY, only=["dense fp32"], budget=1e-9)
    assert found["rows"] == []
    assert {"dense fp32", "dense segment fp32"} <= found["missing"].keys()
    assert all(family["unfinished"] for family in found["families"].values())
    assert frontier.report(found)


def test_the_plans_rows_are_those_promised():
    gpu = SCALES["gpu"]
    rows = {row.recipe.name: row for row in frontier.plan(gpu)}
    assert all(rows[name].matters for name in ("dense fp32", "dense segment fp32", "two_stream segment k=64 int8"))
    assert all(parse_codec(codec) for row in rows.values() for codec in row.recipe.codecs)
    assert {
        "reparam fixed k=64 int8",
        "constrained fixed k=64 bf16",
        "two_stream shared exact k=16 int8",
    } <= rows.keys()
    assert gpu.tokens >= 26e6
    assert SCALES["gpu-1024"].tokens >= 50e6
    with pytest.raises(OptionError):
        frontier.run(TINY, only=["int9"])
    listed = frontier.listing("gpu", None, None, [], None, None, None)
    assert all(name in listed for name in rows)


@pytest.mark.full
def test_report_and_picture(result, tmp_path):
    text = frontier.report(result)
    assert all(word in text for word in (*ROWS, "10mbit"))
    picture = tmp_path / "p.png"
    frontier.plot(result, picture)
    assert picture.stat().st_size > 10_000
    write_json(result, tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert frontier.report(read) == text, "what is written can be reported again"


@pytest.mark.full
def test_rates_that_were_tuned_can_be_taken_up(result, tmp_path):
    write_json(result, tmp_path / "r.json")
    rates = tuned_rates(tmp_path / "r.json")
    families = frontier.families(TINY, rates)
    for name, family in result["families"].items():
        best = family["best"]
        assert families[name].lr == pytest.approx(best["lr"])
        assert families[name].weight_decay == pytest.approx(best["weight_decay"])
        assert families[name].anchor_lr == best["anchor_lr"]
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(OptionError):
        tuned_rates(tmp_path / "r.json")


# Tuning


def test_tuning_climbs_to_the_best_point_within_its_trials():
    def losses(recipes: Sequence[Recipe]) -> list[float | None]:
        asked.extend(recipes)
        return [1 + abs(r.lr / 0.04 - 1) + abs(r.weight_decay / 0.5 - 1) for r in recipes]

    asked: list[Recipe] = []
    start = replace(DENSE, lr=0.01, weight_decay=1.0)
    found = tune({"a": start, "b": replace(start, lr=0.08)}, 20, losses)
    assert [(t.best.lr, t.best.weight_decay) for t in found.values()] == [(0.04, 0.5)] * 2
    assert not any(t.unfinished for t in found.values())
    assert all(
        len({(r.lr, r.weight_decay, r.embedding_lr, r.embedding_std) for r, _ in t.trials}) == len(t.trials)
        for t in found.values()
    ), "no point is trained twice"
    few = tune({"a": start}, 3, losses)["a"]
    assert len(few.trials) == 3
    assert few.best.lr == 0.04
    assert tune({"a": start}, 0, losses)["a"].best == start


def test_a_search_that_was_cut_short_says_so():
    def losses(recipes: Sequence[Recipe]) -> list[float | None]:
        return [None if r.lr > DENSE.lr else 1.0 for r in recipes]

    found = tune({"a": DENSE}, 9, losses)["a"]
    assert found.unfinished
    assert [recipe for recipe, _ in found.trials] == [DENSE]


# Rows


def row(name: str, nbytes: float, losses: list[float | None], **fields: Any) -> dict:
    evals = [{"step": 10 * (i + 1), "loss": x} for i, x in enumerate(losses)]
    last = losses[-1]
    base = {"name": name, "form": "dense", "anchor": "fixed", "k": None, "codec": name, "seed": 0}
    measured = {"bytes_per_token": nbytes, "ratio_bf16": 1, "ratio_fp32": 1, "evals": evals}
    measured["step_seconds"] = dict.fromkeys(LINKS, nbytes / 100)
    measured["lighter_seconds"] = {"int8": dict.fromkeys(LINKS, nbytes / 400)}
    sizes = {"parameters": {"blocks": 1, "tables": 1, "head": 1}, "flops_per_token": 1, "stages": 2}
    gaps = {"gap_to_dense": last and last / 2 - 1, "gap_to_anchored": None}
    return {**base, **measured, **sizes, "loss": last, **gaps, **fields}


def test_the_front_is_what_nothing_cheaper_beats():
    rows = [
        row("fp32", 100, [2.0]),
        row("bf16", 50, [2.0]),  # as good, for less
        row("int8", 25, [2.5]),
        row("int4", 10, [None]),
        row("lowrank:4", 25, [2.45]),  # as cheap as int8 and better
    ]
    assert [g["name"] for g in grouped(rows) if g["pareto"]] == ["lowrank:4", "bf16"]


def test_a_group_has_the_mean_of_its_paired_gaps_and_none_with_a_diverged_seed():
    (group,) = grouped([row("int4", 10, [2.0]), row("int4", 10, [None], seed=1)])
    assert group["loss"] is group["gap_to_dense"] is None
    (group,) = grouped([row("int4", 10, [2.0]), row("int4", 10, [3.0], seed=1)])
    assert (group["loss"], group["loss_spread"]) == (2.5, 1.0)
    assert (group["gap_to_dense"], group["gap_to_dense_spread"]) == (0.25, 0.5)


def test_rows_of_other_seeds_are_compared_by_their_gaps():
    """The second seed's text is harder: that must not count against a row which has it."""
    rows = [
        row("dense fp32", 100, [2.0], gap_to_dense=0.0),
        row("dense fp32", 100, [3.0], gap_to_dense=0.0, seed=1),
        row("both", 10, [1.98], gap_to_dense=-0.01),
        row("both", 10, [2.97], gap_to_dense=-0.01, seed=1),
        row("one", 5, [2.02], gap_to_dense=0.01),
    ]
    assert {g["name"]: g["pareto"] for g in grouped(rows)} == {"one": True, "both": True, "dense fp32": False}
    assert [g["paired_loss"] for g in grouped(rows)] == pytest.approx([2.525, 2.475, 2.5])
    reached = {one["name"]: one["reached"] for one in times(rows)["rows"] if one["above_dense"] == 0}
    assert reached == {"one": 0, "both": 2, "dense fp32": 2, "dense int8 as fp32": 2}


def test_steps_to_a_loss_lie_between_two_evaluations():
    evals = row("fp32", 1, [4.0, 3.0, 3.5, 2.0])["evals"]
    assert steps_to(evals, 3.25) == 17.5
    assert steps_to(evals, 2.75) == pytest.approx(35.0)
    assert steps_to(evals, 5.0) == 10.0
    assert steps_to(evals, 1.0) is None


def test_time_to_a_loss_is_steps_times_seconds_a_step():
    rows = [row("fp32", 1000, [4.0, 2.0]), row("int8", 10, [4.0, 2.0]), row("int4", 5, [4.0, 3.9])]
    found = {one["name"]: one | {"link": LINKS[0]} for one in time_to_loss(rows, LINKS[0], {0: 3.0})}
    assert found["fp32"]["seconds"] == pytest.approx(15 * 10)
    assert found["int8"]["seconds"] == pytest.approx(15 * 0.1)
    assert found["int4"]["seconds"] is None
    assert contenders(list(found.values()), [LINKS[0]]) == ["fp32", "int8"]


def test_dense_takes_as_many_steps_with_a_lighter_codec_unless_it_was_trained_with_it():
    def seconds(rows: list[dict]) -> dict[str, float | None]:
        return {one["name"]: one["seconds"] for one in times(rows)["rows"] if one["above_dense"] == 0}

    rows = [row("dense fp32", 100, [4.0, 2.0]), row("ours", 10, [4.0, 1.9])]
    assert seconds(rows) == pytest.approx({"ours": 0.1 * (10 + 10 / 1.05), "dense fp32": 20, "dense int8 as fp32": 5})
    found = times(rows)["rows"]
    assert contenders([one for one in found if one["above_dense"] == 0], LINKS) == [
        "dense fp32",
        "dense int8 as fp32",
        "ours",
    ]
    assert "dense int8 as fp32" not in seconds([*rows, row("dense int8", 25, [4.0, 2.1])])


def test_seconds_a_step_are_at_least_those_of_line_latency_and_compute():
    """By hand: a middle stage sends activations one way and gradients the other, and the first waits for the last."""
    wide = replace(TINY, width=1024, heads=8, context=512, batch=16)
    run = Run(wide, replace(DENSE, codec="bf16"), 0, "cpu")
    measured = {"flops": run.flops, "compute_seconds": 1e-9, "stages": 2, "bytes_of_sums": 0.0}
    there_and_back = 2 * (STAGES - 1) * float(LATENCY.removesuffix("ms")) / 1000
    for link, found in step_seconds(run, measured).items():
        line = 8 * 2 * 2 * wide.width * wide.tokens_per_step / bits_per_second(link)
        fill = 2 * (STAGES - 1) * line / 2 / MICROBATCHES
        assert line + there_and_back < found < 1.1 * (line + there_and_back + fill) + 0.1
    free = step_seconds(run, measured)["200mbit"]
    slow = step_seconds(run, measured | {"compute_seconds": 100.0})["200mbit"] - free
    assert 100 < slow < 100 * (1 + 2 * STAGES / MICROBATCHES), "each stage computes for 100 s, the last with the head"
    sums = step_seconds(run, measured | {"bytes_of_sums": 1e6})
    assert sums["200mbit"] - free == pytest.approx(0.04 * wide.tokens_per_step)


def test_the_same_three_are_the_fastest_on_every_link():
    rows = [row("dense fp32", 100, [4.0, 2.0]), *(row(f"ours {i}", 10 + i, [4.0, 1.9]) for i in range(5))]
    found = [one for one in times(rows)["rows"] if one["above_dense"] == 0]
    assert contenders(found, LINKS) == ["dense fp32", "dense int8 as fp32", "ours 2", "ours 1", "ours 0"]


# Scaling


@pytest.mark.parametrize("width", [256, 512, 1024])
@pytest.mark.parametrize("ratio", wires.RATIOS)
@pytest.mark.parametrize("codec", ["int8", *wires.LEGS])
def test_k_is_the_largest_that_sends_so_little(width, ratio, codec):
    k = wires.k_for(width, ratio, codec)
    assert 8 * width / wires.bytes_a_token(codec, k) >= ratio
    assert 8 * width / wires.bytes_a_token(codec, k + (8 if k >= 64 else 2)) < ratio


@pytest.mark.full
def test_bytes_of_a_wire_are_those_that_cross(result):
    for row in result["rows"]:
        if row["k"] is not None and row["sharing"] is None:
            assert row["bytes_per_token"] == pytest.approx(wires.bytes_a_token(row["codec"], row["k"]))


@pytest.mark.full
def test_scaling_goes_over_widths_and_layers_a_segment(monkeypatch, tmp_path):
    monkeypatch.setitem(scaling.WIDTHS, "cpu", (8, 16, 32))
    monkeypatch.setitem(SCALES, "cpu", TINY)
    found = scaling.run("cpu", steps=3, kept=tmp_path / "runs.jsonl")
    names = ["d=8, 2 a segment", "d=16, 2 a segment", "d=32, 2 a segment", "d=16, 1 a segment"]
    assert list(found["scales"]) == names
    for name in names:
        rows = [row for row in found["rows"] if row["point"] == name]
        (plain,) = [row["loss"] for row in rows if row["name"] == "dense fp32"]
        ours = [row for row in rows if row["form"] == "two_stream"]
        assert ours
        assert all(row["gap_to_dense"] == pytest.approx(row["loss"] / plain - 1) for row in ours)
        assert all(row["gap_to_anchored"] is not None for row in ours)
        assert {row["segments"] for row in ours} == {4 // rows[0]["layers_per_segment"]}
    assert all(name in scaling.report(found) for name in names)
    scaling.plot(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    again = scaling.run("cpu", steps=3, only=["d=8,"], kept=tmp_path / "runs.jsonl")
    assert again["rows"] == [row for row in found["rows"] if row["point"] == names[0]]
    assert all(name in scaling.listing("cpu", None, 3, [], None, None) for name in names)


def test_at_d_512_scaling_and_frontier_share_their_runs():
    (point,) = [p for p in scaling.points(SCALES["gpu"]) if p.name == "d=512, 2 a segment"]
    assert point.scale == replace(SCALES["gpu"], seeds=point.scale.seeds)
    planned = {row.recipe.name for row in frontier.plan(SCALES["gpu"])}
    assert {recipe.name for recipe in point.recipes()} <= planned
    assert carried(dense("fp32"), SCALES["gpu"]) == dense("fp32")
    assert Sharing(bits=4, every=4, late=2).row_bytes(512) == 258
