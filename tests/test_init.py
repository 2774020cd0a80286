"""`pmtrain init`: whatever is answered, the spec it writes is valid, planned, and fits; one is run to its end."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import corpus_of, make_spec
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starting import ROOT, begin, pmtrain
from test_run import ends, wait_for_line
from typer.testing import CliRunner

from protomodels_cli.cli.init_choose import Answers, choose
from protomodels_cli.cli.init_refuse import refusal
from protomodels_cli.cli.init_shape import shape_of
from protomodels_cli.cli.init_text import text_of
from protomodels_cli.cli.known_cards import CARDS, card_named
from protomodels_cli.cli.line import as_option, line_of
from protomodels_cli.cli.main import app
from protomodels_cli.cli.run_plan import cut_for
from protomodels_cli.cost.daily import daily
from protomodels_cli.cost.forecast import forecast
from protomodels_cli.cost.saving import forecast_saving
from protomodels_cli.cost.ways import expected_loss
from protomodels_cli.data.amount import tokens_of
from protomodels_cli.errors import EXIT_SPEC
from protomodels_cli.spec import load_spec, parse_spec
from protomodels_cli.spec.link import parse_link

GIB = 1 << 30
SIZES = [1e6, 1e7, 3e7, 1.24e8, 3.5e8, 1e9, 3e9, 8e9]


def answers(parameters: float, peers: int, mbit: int, gib: int, **more: object) -> Answers:
    link = parse_link(f"{mbit}mbit,25ms")
    return Answers("x", parameters, {"source": "builtin"}, link, peers, gib * GIB, 2e13, **more)  # type: ignore[arg-type]


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SIZES),
    st.integers(1, 8),
    st.sampled_from([10, 20, 80, 300, 1000]),
    st.sampled_from([6, 8, 12, 24, 80]),
    st.booleans(),
)
@example(1e7, 32, 1000, 8, False)
@example(8e9, 32, 10, 8, False)
@example(8e9, 2, 100, 8, True)
@pytest.mark.full
def test_every_spec_is_valid_and_says_what_was_chosen(parameters, peers, mbit, gib, any_recipe):
    asked = answers(parameters, peers, mbit, gib, any_recipe=any_recipe)
    chosen = choose(asked)
    if chosen is None:
        assert refusal(asked).exit_code == EXIT_SPEC
        return
    spec = parse_spec(text_of(chosen, "none is read twice"), "run.yaml")
    assert spec == chosen.spec, "the text says what was chosen"
    assert spec.min_peers == chosen.stages <= peers
    assert chosen.shape.parameters == pytest.approx(parameters, rel=0.3)
    cut = cut_for(spec, memory=gib * GIB)
    assert forecast(cut, asked.link, asked.speed, memory=gib * GIB) == chosen.forecast, "`plan` says the same"
    assert any_recipe or expected_loss(cut) is not None


@pytest.mark.parametrize(
    ("size", "peers", "link", "memory"), [("10M", 3, "10mbit,40ms", 4), ("1B", 8, "1gbit,5ms", 16)]
)
def test_validate_and_plan_pass_on_it(tmp_path: Path, monkeypatch, size, peers, link, memory):
    monkeypatch.chdir(tmp_path)
    words = ["init", "a.yaml", "--yes", "--size", size, "--peers", str(peers), "--link", link, "--memory", str(memory)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, ["validate", "a.yaml"]).exit_code == 0
    [planned] = [line.split()[1:] for line in done.output.splitlines() if line.strip().startswith("pmtrain plan ")]
    done = CliRunner().invoke(app, [*planned, "--format", "json"])
    assert done.exit_code == 0, done.output
    stages = json.loads(done.stdout)["forecast"]["stages"]
    assert max(stage["memory"] for stage in stages) <= memory * GIB


@given(st.floats(1e6, 7e10), st.integers(1, 16))
def test_shapes_are_near_their_size_and_whole(parameters, stages):
    shape = shape_of(parameters, stages)
    assert shape.layers % stages == 0
    assert shape.width % shape.heads == 0
    assert shape.heads % shape.kv_heads == 0
    if shape_of(parameters).layers >= stages:
        assert shape.parameters == pytest.approx(parameters, rel=0.35)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["--size", "huge"], "--size huge"),
        (["--link", "slow"], "'slow'"),
        (["--speed", "9"], "--speed 9"),
        (["--card", "RTX 30900"], "RTX 3090"),
        (["--data", "absent/*.txt"], "absent/*.txt"),
        (["--name", "a b"], "--name a b"),
    ],
)
def test_answers_that_cannot_be_used(tmp_path: Path, words, kind):
    done = pmtrain("init", "a.yaml", "--yes", *words, cwd=tmp_path)
    assert done.returncode == EXIT_SPEC
    assert kind in done.stderr
    assert "\n    fix:  " in done.stderr
    assert not (tmp_path / "a.yaml").exists()


def test_nothing_is_overwritten_without_force(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("mine")
    assert pmtrain("init", "a.yaml", "--yes", cwd=tmp_path).returncode == EXIT_SPEC
    assert (tmp_path / "a.yaml").read_text() == "mine"
    assert pmtrain("init", "a.yaml", "--yes", "--force", "--size", "10M", "--peers", "2", cwd=tmp_path).returncode == 0
    assert load_spec(tmp_path / "a.yaml").name == "a"


def test_data_are_found_from_the_specs_own_folder(tmp_path: Path):
    (tmp_path / "specs").mkdir()
    (tmp_path / "text.txt").write_text("word " * 100)
    (tmp_path / "ids.bin").write_bytes(bytes(100))
    for data, source, file in (("text.txt", "files", "../text.txt"), ("*.bin", "bin", "../*.bin")):
        words = ("--size", "1M", "--peers", 2, "--data", data, "--force")
        done = pmtrain("init", "specs/a.yaml", "--yes", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        spec = load_spec(tmp_path / "specs" / "a.yaml")
        assert (spec.data.source, spec.data.files) == (source, [file])


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["--device", "cpu"], "enormous\n2M\n\n3\n10mbit,10ms\n\n"),
        ([], "2M\n\n3\n10mbit\n3O60\nRTX 3060\n\n"),
    ],
)
def test_it_asks_on_a_terminal(words: list[str], typed: str, tmp_path: Path):
    """A wrong answer is asked for again; what an option says is not asked, nor what a card says."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "protomodels_cli", "init", "a.yaml", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=child, stdout=subprocess.PIPE, stderr=child) as process:
        os.close(child)
        os.write(parent, typed.encode())
        said, _ = process.communicate(timeout=240)
    os.close(parent)
    assert process.returncode == 0, said
    assert "Traceback" not in said.decode()
    spec = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert 1 <= spec["min_peers"] <= 3
    assert spec["data"]["source"] == "builtin"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("rtx3090 24GB", "RTX 3090"),
        ("3060", "RTX 3060"),
        ("4060ti-16gb", "RTX 4060 Ti 16"),
        ("NVIDIA RTX A4000", "A4000"),
        ("A100-SXM4-80GB", "A100 80"),
        ("Apple M2", "M2"),
    ],
)
def test_cards_are_known_as_people_write_them(text, name):
    assert card_named(text).name == name


def test_no_card_is_faster_than_half_of_its_peak_nor_has_all_of_its_memory():
    for card in CARDS:
        assert 0 < card.memory < card.gib
        assert card.speed == card.peak * 1e12 / 2
        assert card_named(card.name) is card


def test_a_card_stands_for_its_memory_and_its_speed(tmp_path: Path):
    def told(*words: str) -> dict:
        asked = ["init", str(tmp_path / "a.yaml"), "--yes", "--force", "--size", "10M", "--peers", "2"]
        return json.loads(CliRunner().invoke(app, [*asked, *words, "--format", "json"]).stdout)

    card = card_named("RTX 3060")
    found = told("--card", "3060")
    assert (found["memory"], found["flops"]) == (card.memory * GIB, card.speed)
    assert found["outlook"]["daily"]["watts"] == card.watts
    assert told("--card", "3060", "--memory", "4")["memory"] == 4 * GIB


@pytest.mark.parametrize(
    ("text", "link"),
    [("20mbit", "20mbit,25ms"), ("20mbit,3ms", "20mbit,3ms"), ("none", "none,0ms"), ("none,9ms", "none,9ms")],
)
def test_a_line_without_a_delay_has_one_of_a_home(text, link):
    assert as_option(line_of(text)) == link


@pytest.mark.parametrize("vocabulary", [1024, 4096])
def test_tokens_of_the_builtin_text_are_counted_about_right_without_reading_it(vocabulary):
    data = {"source": "builtin", "max_bytes": 1 << 20}
    spec = make_spec(data=data, tokenizer={"kind": "bpe", "vocab_size": vocabulary})
    assert tokens_of(spec, Path()) == pytest.approx(len(corpus_of(spec).train), rel=0.2)


def test_tokens_of_files_are_counted_by_their_sizes(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "b.txt").write_text("y" * 3000)
    spec = make_spec(data={"source": "files", "files": ["*.txt"], "val_fraction": 0.25}, tokenizer={"kind": "bytes"})
    assert tokens_of(spec, tmp_path) == 3000
    assert tokens_of(make_spec(data={"source": "hf", "dataset": "a/b"}), tmp_path) is None


def test_a_day_takes_what_is_sent_and_never_more_than_the_line_carries():
    spec = make_spec(stages=4, subspace={"form": "dense"})
    link = parse_link("1mbit,1ms")
    found = forecast(spec, link, 1e12)
    saving = forecast_saving(spec, link.bits_per_second, found.step_seconds)
    each = found.bytes_per_step["forward"] + found.bytes_per_step["backward"]  # a middle stage sends both
    alone = daily(found, replace(saving, interval_seconds=math.inf), link, 100.0)
    assert alone.upload_bytes == pytest.approx(min(each / found.step_seconds, 125_000) * 86_400)
    assert daily(found, replace(saving, interval_seconds=1e-3), link, 100.0).upload_bytes == 125_000 * 86_400
    assert 4 * 24 * (0.06 + 0.025) <= alone.kwh <= 4 * 24 * 0.16


@pytest.mark.full
def test_a_spec_from_init_is_run_to_its_end(tmp_path: Path):
    words = ("--size", "300K", "--peers", 2, "--device", "cpu", "--memory", 2, "--steps", 3, "--link", "100mbit,1ms")
    done = pmtrain("init", "tiny.yaml", "--yes", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    leader = begin("coordinator", "tiny.yaml", "--host", "127.0.0.1", "--port", 0, cwd=tmp_path)
    peers = []
    try:
        link = wait_for_line(leader, r"pmtrain join '(pm://\S+)'")
        peers += [begin("join", link, "--device", "cpu", "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        for process in (*peers, leader):
            code, said = ends(process)
            assert code == 0, said
    finally:
        for process in (leader, *peers):
            process.kill()
    assert json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["steps"] == 3
