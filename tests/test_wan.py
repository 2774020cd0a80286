"""`bench wan`: its arithmetic on rows by hand, and one small real measurement over the emulated link."""

from __future__ import annotations

import json

import pytest
from starting import begin_logged

from protomodels_cli.bench import wan, wan_report
from protomodels_cli.bench.wan import Method

SMALL = {
    "stages": 3,
    "model": {"layers": 3, "width": 64, "heads": 4, "context": 32},
    "batch": {"size": 16, "microbatches": 8},
    "data": {"max_bytes": 200_000},
    "tokenizer": {"kind": "bytes"},
}


def step(seconds: float, cpu: float = 0.0) -> dict:
    """Three stages that sent 10 bytes a token forward and 6 back, of 100 tokens."""
    stages = [
        {"forward_bytes": 1000 * (i < 2), "backward_bytes": 600 * (i > 0), "compute_s": seconds / 2, "cpu_s": cpu}
        for i in range(3)
    ]
    return {"tokens": 100, "seconds": seconds, "stages": stages}


def test_a_row_holds_what_was_measured_against_both_bounds():
    spec = wan.spec_of(Method("dense", 16, "bf16"), 5, **SMALL)
    row = wan._row(spec, Method("dense", 16, "bf16"), "8kbit,0ms", [step(4.0), step(2.0), step(2.0)], 80.0, 1e9)
    assert row["tokens_per_s"] == 50
    assert (row["bytes_per_token_forward"], row["bytes_per_token_backward"]) == (10, 6)
    assert row["bound_wire"] == pytest.approx(1000 / 16)  # a middle stage sends both legs over one line
    assert row["bound_compute"] == 80
    assert row["efficiency"] == pytest.approx(50 / 62.5)
    assert row["of_unshaped"] == pytest.approx(50 / 80)
    assert (row["ratio_bf16"], row["ratio_fp32"]) == (4 * 64 / 16, 8 * 64 / 16)
    assert row["stage_utilisation"] == [0.5] * 3
    assert row["link_utilisation"][1] > row["link_utilisation"][0] > 0


def test_speed_is_operations_over_cpu_seconds():
    spec = wan.spec_of(Method("dense", 16, "bf16"), 5, **SMALL)
    one = wan._speed(spec, [step(1, cpu=1.0), step(1, cpu=2.0)])
    assert wan._speed(spec, [step(1, cpu=1.0), step(1, cpu=3.0)]) == pytest.approx(one / 2)


def test_speedups_are_over_each_of_torchs_wires():
    torch = [{"link": "x", "codec": "fp32", "tokens_per_s": 10}, {"link": "x", "codec": "bf16", "tokens_per_s": 20}]
    ours = {"form": "dense", "k": None, "codec": "int8", "link": "x", "tokens_per_s": 50}
    [found] = wan._speedups({"rows": [ours], "torch_pipelining": torch})
    assert (found["over_torch_fp32"], found["over_torch_bf16"]) == (5, 2.5)


@pytest.mark.full
def test_a_small_measurement_has_the_promised_names_and_is_right_about_the_link(tmp_path, monkeypatch):
    monkeypatch.setattr("protomodels_cli.launch.local.start", begin_logged)
    methods = [Method.parse("dense/fp32"), Method.parse("reparam/int8/4")]
    for _ in range(3):  # what else the machine does makes steps longer; if it does so all the time, that is no fault
        found = wan.measure(methods, ["1mbit,5ms"], 5, 1, hosts=False, torch=False, say=print, **SMALL)
        dense, subspace = (row for row in found["rows"] if row["link"] == "1mbit,5ms")
        if dense["efficiency"] > 0.6 and abs(dense["predicted_over_measured"] - 1) < 0.2:
            break
    named = {"form", "codec", "link", "tokens_per_s", "bytes_per_token", "bound_compute", "bound_wire", "efficiency"}
    assert all(set(row) >= named for row in found["rows"])
    assert found["torch_pipelining"] == []
    json.dumps(found, allow_nan=False)
    assert dense["bytes_per_token"] == pytest.approx(2 * 4 * 64 + 2, rel=0.05)
    assert subspace["bytes_per_token"] == pytest.approx(2 * (4 + 2) + 2, rel=0.2)
    assert 0.5 < dense["efficiency"] <= 1.0, "the line is busy most of the time"
    assert dense["predicted_over_measured"] == pytest.approx(1, abs=0.4)
    assert subspace["tokens_per_s"] > 2 * dense["tokens_per_s"]
    text = wan_report.in_words(found)
    assert all(f"{wan_report.name_of(row)} over {row['link']}" in text for row in found["rows"])
    wan_report.plot(found, tmp_path / "wan.png")
    assert (tmp_path / "wan.png").read_bytes()[:4] == b"\x89PNG"
