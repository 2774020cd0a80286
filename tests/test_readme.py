"""The README's figures: each is held against the code, a run, or the results that it was taken from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from starting import pmtrain

from protomodels_cli.cli.run_demo import introduction
from protomodels_cli.spec.load import load_spec

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "docs" / "results"
TINY = load_spec(ROOT / "configs" / "tiny.yaml")
[DEMO] = re.findall(r"```\n(pmtrain demo: .*?)```", README, re.DOTALL)
NUMBER = r"[-−+]?\d+(?:\.\d+)?"


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def rows_of(heading: str) -> dict[str, list[str]]:
    """The rows of the table that has this in its heading, by their first cell."""
    [table] = re.findall(rf"(?m)^\| [^\n]*{re.escape(heading)}[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", README)
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
    return {first: cells for first, *cells in rows}


def test_the_demo_block_is_of_the_shipped_spec():
    assert DEMO.startswith(introduction(TINY, stages=4))
    assert f"step 190/{TINY.steps} ({100 * 190 / TINY.steps:.1f} %)" in DEMO
    [start] = re.findall(rf"ln V = ({NUMBER})", README)
    assert start == f"{math.log(TINY.tokenizer.vocab_size):.3f}"


@pytest.mark.full
@pytest.mark.timeout(960)  # its hundreds of steps take minutes beside other tests
def test_the_demo_ends_with_the_loss_that_the_readme_shows(tmp_path):
    """The demo's weights are the reference's, as other tests show; the reference takes half of the time."""
    command = ("reference", ROOT / "configs" / "tiny.yaml", "--run-dir", tmp_path / "run")
    done = pmtrain(*command, cwd=ROOT, seconds=900)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["loss"] for row in rows if row["event"] == "step"]
    held_out = {row["step"]: row["loss"] for row in rows if row["event"] == "eval"}
    [last] = re.findall(rf"loss ({NUMBER}) → ({NUMBER}), held-out ({NUMBER})", DEMO)
    assert [*map(number, last)] == pytest.approx([steps[0], steps[-1], held_out[TINY.steps]], abs=5e-3)
    [amid] = re.findall(rf"step 190/.* loss ({NUMBER}) \| held-out ({NUMBER})", DEMO)
    assert [*map(number, amid)] == pytest.approx([steps[189], held_out[160]], abs=5e-3)


def gaps(size: int, name: str, against: str = "gap_to_dense") -> list[float]:
    """In percent, one for each seed."""
    rows: Iterable[dict[str, Any]] = json.loads((RESULTS / f"frontier-{size}.json").read_text())["rows"]
    return [100 * row[against] for row in rows if row["name"] == name]


LOSSES_TABLE = "fewer bytes than fp32"
LOSSES = {  # the README's words → the row's name at d = 512 and at d = 1024
    "dense int8": ("dense int8", None),
    "an eighth of the numbers in `int8`": ("two_stream segment k=64 int8", None),
    "a sixth in `eden:6`": ("two_stream segment k=86 eden:6", "two_stream segment k=178 eden:6"),
    "a fifteenth in `eden:3 then eden:5`": (
        "two_stream segment k=34 eden:3 then eden:5",
        "two_stream segment k=74 eden:3 then eden:5",
    ),
    "the paper's own form, T_fixed frozen, in bf16; not tuned": ("constrained fixed k=64 bf16", None),
}


def gaps_of_all_seeds(name: str) -> list[float]:
    """Three seeds are in the frontier's file. Those that were trained after it are kept with the runs."""
    kept = {}
    for line in (RESULTS / "gpu-runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        kept[run["name"]] = run["result"]["loss"]
    later = [seed for seed in (3, 4) if f"d=512 {name} seed {seed}" in kept]
    more = [100 * (kept[f"d=512 {name} seed {seed}"] / kept[f"d=512 dense fp32 seed {seed}"] - 1) for seed in later]
    return gaps(512, name) + more


def same(shown: str, right: float) -> None:
    """As many digits as are shown."""
    digits = len(shown.partition(".")[2])
    assert number(shown) == round(right, digits), (shown, right)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("words", LOSSES)
def test_the_table_of_losses_is_of_the_kept_runs(words):
    small, large = LOSSES[words]
    ratio, at_512, at_1024, against_anchored = rows_of(LOSSES_TABLE)[words]
    runs = json.loads((RESULTS / "frontier-512.json").read_text())["rows"]
    same(re.findall(NUMBER, ratio)[0], next(run["ratio_fp32"] for run in runs if run["name"] == small))
    shown, *spread = re.findall(NUMBER, at_512)
    found = gaps_of_all_seeds(small)
    same(shown, mean(found))
    assert len(spread) == (2 if len(found) > 1 else 0)
    for limit, right in zip(spread, (min(found), max(found)), strict=False):
        same(limit, right)
    if large:
        same(re.findall(NUMBER, at_1024)[0], gaps(1024, large)[0])
    anchored = [mean(gaps(512, small, "gap_to_anchored")), *(gaps(1024, large, "gap_to_anchored") if large else [])]
    for figure, right in zip(re.findall(NUMBER, against_anchored), anchored, strict=False):
        same(figure, right)


def test_every_row_of_losses_is_checked():
    assert rows_of(LOSSES_TABLE).keys() == LOSSES.keys()


def test_how_much_sooner_is_of_the_forecasts():
    rows = json.loads((RESULTS / "frontier-1024.json").read_text())["time_to_loss"]["rows"]
    seconds = {r["name"]: r["seconds"] for r in rows if (r["above_dense"], r["link"]) == (0, "200mbit")}
    ours = seconds["two_stream segment k=178 eden:6"]
    shown = re.findall(rf"({NUMBER}) times sooner", README)
    for figure, name in zip(shown, ("dense bf16 as fp32", "dense int8 as fp32"), strict=True):
        same(figure, seconds[name] / ours)


SPEEDS = {  # the README's words → the list in wan.json, form and codec
    "subspace, k = d/16, int8": ("rows", "reparam", "int8"),
    "dense int8": ("rows", "dense", "int8"),
    "torch.distributed.pipelining, bf16": ("torch_pipelining", "dense", "bf16"),
}


@pytest.mark.parametrize("words", SPEEDS)
def test_the_table_of_speeds_is_of_the_kept_benchmark(words):
    kind, form, codec = SPEEDS[words]
    *shown, bytes_shown = rows_of("no link")[words]
    rows = json.loads((RESULTS / "wan.json").read_text())[kind]
    rows = [row for row in rows if (row["form"], row["codec"]) == (form, codec)]
    assert len(rows) == len(shown) == 4
    for figure, row in zip(shown, rows, strict=True):
        same(figure, row["tokens_per_s"])
    same(bytes_shown, rows[0]["bytes_per_token"])
