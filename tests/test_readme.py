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
[ONE_PAGE] = re.findall(r"(?s)## The results on one page\n(.*?)\n## ", (ROOT / "docs" / "benchmarks.md").read_text())
RESULTS = ROOT / "docs" / "results"
TINY = load_spec(ROOT / "configs" / "tiny.yaml")
[DEMO] = re.findall(r"```\n(pmtrain demo: .*?)```", README, re.DOTALL)
NUMBER = r"[-−+]?\d+(?:\.\d+)?"


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table that has this in its heading, by their first cell."""
    [table] = re.findall(rf"(?m)^\| [^\n]*{re.escape(heading)}[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", page)
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
LOSSES = {  # the words of README and results → the row's name at d = 512 and at d = 1024
    "an eighth of the numbers in `int8`": ("two_stream segment k=64 int8", None),
    "a sixth in `eden:6`": ("two_stream segment k=86 eden:6", "two_stream segment k=178 eden:6"),
    "a fifteenth in `eden:3 then eden:5`": (
        "two_stream segment k=34 eden:3 then eden:5",
        "two_stream segment k=74 eden:3 then eden:5",
    ),
}
ON_ONE_PAGE = {
    "all numbers in `int8`": ("dense int8", None),
    "an eighth in `int8` (the default)": LOSSES["an eighth of the numbers in `int8`"],
    "a sixth in `eden:6`": LOSSES["a sixth in `eden:6`"],
    "a fifteenth in `eden:3 then eden:5`": LOSSES["a fifteenth in `eden:3 then eden:5`"],
    "the paper's own form in bf16, rates not tuned for it": ("constrained fixed k=64 bf16", None),
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


def check_losses(names: tuple[str, str | None], ratio: str, at_512: str, at_1024: str) -> int:
    """How many seeds there are."""
    small, large = names
    runs = json.loads((RESULTS / "frontier-512.json").read_text())["rows"]
    same(re.findall(NUMBER, ratio)[0], next(run["ratio_fp32"] for run in runs if run["name"] == small))
    shown, *spread = re.findall(NUMBER, at_512)
    found = gaps_of_all_seeds(small)
    same(shown, mean(found))
    assert len(spread) == (2 if len(found) > 1 else 0)
    for limit, right in zip(spread, (min(found), max(found)), strict=False):
        same(limit, right)
    assert bool(at_1024) == bool(large)
    if large:
        same(re.findall(NUMBER, at_1024)[0], gaps(1024, large)[0])
    return len(found)


@pytest.mark.parametrize("words", LOSSES)
def test_the_table_of_losses_is_of_the_kept_runs(words):
    check_losses(LOSSES[words], *rows_of(README, LOSSES_TABLE)[words])


@pytest.mark.parametrize("words", ON_ONE_PAGE)
def test_the_results_on_one_page_are_of_the_kept_runs(words):
    ratio, at_512, seeds, at_1024 = rows_of(ONE_PAGE, LOSSES_TABLE)[words]
    assert check_losses(ON_ONE_PAGE[words], ratio, at_512, at_1024) == int(seeds)


def test_every_row_of_losses_is_checked():
    assert rows_of(README, LOSSES_TABLE).keys() == LOSSES.keys()
    assert rows_of(ONE_PAGE, LOSSES_TABLE).keys() == ON_ONE_PAGE.keys()


def test_no_sentence_of_the_readme_has_more_than_25_words():
    prose = re.sub(r"(?ms)^```.*?^```|^\|[^\n]*|^#[^\n]*|^!\[[^\n]*", "\n", README)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n|\n- ", prose)]
    sentences = [s for block in blocks for s in re.split(r"(?<=[.:;!?])\s+", block)]
    long = [s for s in sentences if len(re.sub(r"\]\([^)]*\)", "]", s).split()) > 25]
    assert not long


GROUPS = {  # the README's group and model → the options of init
    ("4 × RTX 3090", "124M"): ("--card", "RTX 3090", "--peers", "4", "--size", "124M"),
    ("4 × RTX 3090", "1.3B"): ("--card", "RTX 3090", "--peers", "4", "--size", "1.3B"),
    ("8 × RTX 4090", "7B"): ("--card", "RTX 4090", "--peers", "8", "--size", "7B"),
}


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS, ids=[size for _, size in GROUPS])
def test_what_a_group_can_train_is_what_init_forecasts(group, tmp_path):
    [table] = re.findall(r"(?m)^\| your group [^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", README)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {(row[0], row[1]) for row in rows} == GROUPS.keys()
    [(tokens, time, upload)] = [row[2:] for row in rows if (row[0], row[1]) == group]
    line = ("--link", "20mbit,25ms", "--yes", "--format", "json")
    done = pmtrain("init", tmp_path / "run.yaml", *GROUPS[group], *line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    outlook = found["outlook"]
    assert found["chosen"]["expected_loss"] == pytest.approx(0.008)
    assert float(tokens.replace(",", "")) == pytest.approx(found["forecast"]["tokens_per_s"], rel=0.02)
    shown, unit = time.replace(",", "").split()[:2]
    assert float(shown) * {"hours": 3600, "days": 86400}[unit] == pytest.approx(outlook["seconds"], rel=0.02)
    bytes_a_day = outlook["daily"]["upload_bytes"] * min(1.0, outlook["seconds"] / 86400)
    assert float(upload.split()[0]) == pytest.approx(bytes_a_day / 1e9, rel=0.02)


def test_how_much_sooner_is_of_the_forecasts():
    rows = json.loads((RESULTS / "frontier-1024.json").read_text())["time_to_loss"]["rows"]
    seconds = {r["name"]: r["seconds"] for r in rows if (r["above_dense"], r["link"]) == (0, "200mbit")}
    ours = seconds["two_stream segment k=178 eden:6"]
    shown = re.findall(rf"({NUMBER}) times sooner", ONE_PAGE)
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
    shown = rows_of(ONE_PAGE, "no link")[words]
    rows = json.loads((RESULTS / "wan.json").read_text())[kind]
    rows = [row for row in rows if (row["form"], row["codec"]) == (form, codec)]
    assert len(rows) == len(shown) == 4
    for figure, row in zip(shown, rows, strict=True):
        same(figure, row["tokens_per_s"])
