"""`pmtrain init`: whatever is answered, the spec it writes is valid, planned, and fits; one is run to its end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starting import ROOT, begin, pmtrain
from test_run import ends, wait_for_line
from typer.testing import CliRunner

from protomodels_cli.cli.init_choose import Answers, choose
from protomodels_cli.cli.init_shape import parse_size, shape_of
from protomodels_cli.cli.init_text import text_of
from protomodels_cli.cli.main import app
from protomodels_cli.cli.run_plan import cut_for
from protomodels_cli.cost.forecast import forecast
from protomodels_cli.errors import EXIT_SPEC, OptionError
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
    st.integers(2, 8),
    st.sampled_from([10, 20, 80, 300, 1000]),
    st.sampled_from([6, 8, 12, 24, 80]),
)
@example(1e7, 32, 1000, 8)
@example(8e9, 32, 10, 8)
@example(8e9, 2, 100, 8)
@pytest.mark.full
def test_every_spec_is_valid_and_fits_or_is_refused_with_what_would(parameters, peers, mbit, gib):
    asked = answers(parameters, peers, mbit, gib)
    refused, chosen = None, None
    try:
        chosen = choose(asked)
    except OptionError as e:
        refused = e
    if chosen is None:
        assert (refused.kind, refused.exit_code) == ("does_not_fit", EXIT_SPEC)
        assert parameters / peers > 2e7 * gib, "40 bytes a parameter would fit"
        return
    spec = parse_spec(text_of(chosen), "run.yaml")
    assert spec == chosen.spec, "the text says what was chosen"
    assert chosen.stages <= peers
    assert spec.min_peers == chosen.stages
    assert chosen.shape.parameters == pytest.approx(parameters, rel=0.3)
    cut = cut_for(spec, memory=gib * GIB)
    predicted = forecast(cut, asked.link, asked.speed, memory=gib * GIB)
    assert predicted == chosen.forecast, "`plan` says the same"
    assert len(predicted.stages) <= peers
    assert max(stage.memory for stage in predicted.stages) <= gib * GIB


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


@pytest.mark.full
def test_what_a_refusal_suggests_is_possible():
    with pytest.raises(OptionError) as refused:
        choose(answers(8e9, 2, 100, 8))
    fix = str(refused.value).split("one of ")[1]
    peers, memory, size = (part.split()[1] for part in fix.split(", "))
    assert int(peers) > 2
    for possible in (
        answers(8e9, int(peers), 1000, 8),
        Answers("x", 8e9, {"source": "builtin"}, parse_link("none"), 2, int(float(memory) * GIB), 2e13),
        answers(parse_size(size), 2, 1000, 8),
    ):
        assert choose(possible).forecast.stages


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


def test_it_asks_on_a_terminal(tmp_path: Path):
    """A wrong answer is asked for again; what an option says is not asked."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "protomodels_cli", "init", "a.yaml", "--device", "cpu"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=child, stdout=subprocess.PIPE, stderr=child) as process:
        os.close(child)
        os.write(parent, b"enormous\n2M\n\n3\n10mbit,10ms\n\n")
        said, _ = process.communicate(timeout=120)
    os.close(parent)
    assert process.returncode == 0, said
    assert "Traceback" not in said.decode()
    spec = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert 2 <= spec["min_peers"] <= 3
    assert spec["data"]["source"] == "builtin"


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
