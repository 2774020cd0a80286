"""The command line as a user meets it: real processes, their output and their exit codes."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CONFIGS
from starting import ROOT, begin, pmtrain

from protomodels_cli.cli.json_formats import PRINTED
from protomodels_cli.cli.output import FORMAT

TINY = """\
name: small
steps: 12
stages: 2
model: {layers: 2, width: 32, heads: 2, context: 16}
subspace: {form: reparam, k: 4, update: {interval: 5, window: 2}}
batch: {size: 4, microbatches: 2}
data: {max_bytes: 200000, val_fraction: 0.1}
tokenizer: {kind: bytes}
eval: {interval: 5, windows: 8}
snapshots: {interval: 5}
"""


HELP = """
import sys
from protomodels_cli.cli.main import main
for page in {pages}:
    sys.argv = ["pmtrain", *page.split(), "--help"]
    try:
        main()
    except SystemExit as e:
        assert e.code == 0, page
    assert not {{"torch", "grpc", "numpy"}} & set(sys.modules), page
"""

TYPER_ALONE = """
import sys, typer
sys.argv = ["alone", "--help"]
typer.run(lambda a: None)
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(TINY)
    return tmp_path


def _cpu_seconds(code: str) -> tuple[float, str]:
    """Of the CPU: other tests run beside this one."""
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    now = os.times()
    assert done.returncode == 0, done.stderr
    return now.children_user + now.children_system - before.children_user - before.children_system, done.stdout


@pytest.mark.full
def test_help_answers_nearly_as_soon_as_an_app_of_typer_alone_without_torch():
    ours, alone = [], []
    for _ in range(4):
        seconds, page = _cpu_seconds(HELP.format(pages=[""]))
        assert "reference" in page
        ours.append(seconds)
        alone.append(_cpu_seconds(TYPER_ALONE)[0])
    assert min(ours) < 2.5 * min(alone), (ours, alone)


def test_every_help_page_comes_without_torch():
    pages = [
        "init",
        "validate",
        "coordinator",
        "doctor",
        "join",
        "status",
        "peers",
        "demo",
        "reference",
        "lab",
        "lab rank",
        "lab frontier",
        "lab scaling",
        "lab replicas",
        "bench gpu",
        "bench loopback",
        "bench recovery",
        "bench stage",
        "bench swarm",
        "bench transfers",
        "bench viewers",
        "bench wan",
        "plan",
        "export",
        "follow",
        "generate",
        "eval",
    ]
    code = HELP.format(pages=pages)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_set_of_commands_and_options_is_deliberate():
    import typer

    from protomodels_cli.cli.main import app

    found = {}

    def walk(command, name):
        if hasattr(command, "commands"):
            for child, inner in command.commands.items():
                walk(inner, f"{name} {child}".strip())
        else:
            found[name] = sorted(o for p in command.params for o in p.opts if o.startswith("--"))

    walk(typer.main.get_command(app), "")
    logs = ["--log-level", "--verbose"]
    lab = ["--device", "--json", "--output", "--plot", "--seed", "--steps"]
    sweep = {
        "--device",
        "--json",
        "--output",
        "--plot",
        "--steps",
        "--budget",
        "--keep",
        "--list",
        "--only",
        "--rates",
        "--scale",
    }
    sweep |= {"--seeds", "--text", "--workers"}
    assert found == {
        "init": sorted(
            {"--data", "--device", "--force", "--link", "--memory", "--name", "--peers", "--size", "--speed", "--steps"}
            | {"--any-recipe", "--card", "--format", "--vocabulary", "--yes"}
        ),
        "doctor": ["--device", "--dir", "--format", "--measure", "--port"],
        "validate": ["--format"],
        "coordinator": sorted(
            {"--also-at", "--dir", "--from", "--host", "--key", "--port", "--rebuild", "--resume", "--run-dir", *logs}
            | {"--no-page", "--notify", "--page", "--page-sample", "--relay"}
        ),
        "relay": sorted(
            {"--dir", "--host", "--peer-limit", "--peer-mbit", "--port", "--run-limit", "--run-mbit", *logs}
        ),
        "invite": ["--for", "--format", "--html", "--install-from", "--qr"],
        "rm": ["--yes"],
        "pause": [],
        "resume": [],
        "stop": [],
        "kick": ["--yes"],
        "token create": ["--for", "--format", "--hours", "--lasts", "--uses"],
        "token list": ["--format"],
        "token revoke": [],
        "join": sorted(
            {"--device", "--devices", "--dir", "--give-up-after", "--listen", "--memory", "--name", "--port", *logs}
            | {"--download", "--hours", "--map-port", "--metrics", "--power", "--preflight", "--upload"}
        ),
        "rest": ["--run"],
        "wake": ["--run"],
        "status": ["--format"],
        "peers": ["--format"],
        "top": ["--format"],
        "events": ["--follow", "--format", "--kind", "--last", "--since"],
        "logs": ["--follow", "--format", "--last", "--peer"],
        "runs": ["--format"],
        "generate": ["--device", "--dtype", "--prompt", "--seed", "--temperature", "--tokens", "--top-p"],
        "eval": [
            "--context",
            "--data",
            "--device",
            "--dtype",
            "--field",
            "--format",
            "--json",
            "--output",
            "--windows",
        ],
        "demo": sorted(
            {"--chaos", "--device", "--dir", "--json", "--output", "--run-dir", "--stages", "--steps", *logs}
        ),
        "export": ["--dtype", "--format", "--step"],
        "follow": ["--once", "--tensorboard", "--wandb"],
        "bench abuse": sorted(
            {
                "--connections",
                "--cores",
                "--json",
                "--output",
                "--link",
                "--rate",
                "--seconds",
                "--slow",
                "--steps",
                "--turns",
            }
            | {"--insider", "--attack", "--messages"}
        ),
        "bench gpu": sorted(
            {"--shape", "--layers", "--stages", "--method", "--k", "--link", "--torch", "--microbatch", "--windows"}
            | {"--device", "--devices", "--dtype", "--compile", "--recompute", "--in-flight", "--memory"}
            | {"--warm-up", "--steps", "--seconds", "--limit", "--minutes", "--peak-tflops"}
            | {"--only", "--list", "--again", "--work", "--json", "--output", "--out", "--plot"}
        ),
        "bench loopback": ["--json", "--only", "--output", "--steps"],
        "bench recovery": [
            "--json",
            "--months",
            "--only",
            "--output",
            "--plot",
            "--rates",
            "--runs",
            "--seed",
            "--turns",
        ],
        "bench stage": sorted(
            {"--shape", "--stages", "--stage", "--method", "--k", "--microbatch", "--windows", "--device"}
            | {"--trace", "--json", "--output"}
        ),
        "bench transfers": ["--json", "--link", "--minutes", "--output", "--size"],
        "bench viewers": ["--count", "--json", "--link", "--output", "--seconds", "--turns"],
        "bench swarm": ["--churn", "--clients", "--json", "--minutes", "--output", "--stages", "--step-seconds"],
        "bench wan": [
            "--emulated",
            "--json",
            "--link",
            "--method",
            "--output",
            "--plot",
            "--steps",
            "--torch",
            "--turns",
        ],
        "plan": ["--any-recipe", "--card", "--device", "--format", "--link", "--memory", "--peers", "--speed"],
        "reference": ["--device", "--dir", "--json", "--output", "--run-dir", "--steps"],
        "lab reconstruct": lab,
        "lab optimizer": lab,
        "lab rank": lab,
        "lab grassmann": ["--device", "--interval", "--json", "--output", "--plot", "--seed", "--updates"],
        "lab frontier": sorted({*sweep, "--trials"}),
        "lab scaling": sorted(sweep),
        "lab replicas": sorted({*sweep, "--batch", "--lanes", "--sum"} - {"--rates"}),
        "lab bandwidth": sorted({*lab, "--keep", "--scale", "--speed", "--target", "--text"}),
    }


def test_the_commands_of_the_docs_are_the_groups_of_the_help():
    import typer

    from protomodels_cli.cli import main

    table = (ROOT / "docs" / "commands.md").read_text().partition("| to | commands |")[2].partition("\n\n")[0]
    documented = [set(re.findall(r"`(\w+)`", row)) for row in table.splitlines()[2:]]
    command = typer.main.get_command(main.app)
    groups: dict[str, set[str]] = {}
    for name, one in command.commands.items():
        groups.setdefault(one.rich_help_panel, set()).add(name)
    assert documented == list(groups.values())


def test_a_usage_line_is_what_one_types():
    import typer

    from protomodels_cli.cli.main import app

    def usages(command, context):
        yield command.get_usage(context)
        for name, inner in getattr(command, "commands", {}).items():
            yield from usages(inner, type(context)(inner, parent=context, info_name=name))

    command = typer.main.get_command(app)
    found = [" ".join(line.split()) for line in usages(command, command.context_class(command, info_name="pmtrain"))]
    assert not [line for line in found if "{" in line or "[[" in line]
    for line in (
        "kick [OPTIONS] [RUN] PEER",
        "status [OPTIONS] [RUN]",
        "validate [OPTIONS] SPEC...",
        "join [OPTIONS] LINK",
    ):
        assert f"Usage: pmtrain {line}" in found


def test_validate_good_and_bad(tmp_path):
    good = pmtrain("validate", *CONFIGS)
    assert good.returncode == 0
    assert good.stdout.count(": ok, ") == len(CONFIGS)
    (tmp_path / "bad.yaml").write_text("steps: -1\nmodel: {layers: 2, width: 30, heads: 4}\nstagse: 2\n")
    bad = pmtrain("validate", CONFIGS[0], tmp_path / "bad.yaml", tmp_path / "absent.yaml")
    assert bad.returncode == 2
    assert "bad.yaml:1: steps = -1\n" in bad.stderr
    assert "bad.yaml:2: model.heads = 4\n" in bad.stderr
    assert "'stages'" in bad.stderr
    assert "absent.yaml" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert bad.stderr.count("\n    fix:  ") == 4
    assert re.findall(r"\d+", bad.stderr.splitlines()[-1]) == ["4", "2", "3"]
    as_json = json.loads(pmtrain("validate", CONFIGS[0], tmp_path / "bad.yaml", "--format", "json").stdout)["files"]
    assert [r["ok"] for r in as_json] == [True, False]
    found = [(p["line"], p["field"], p["kind"]) for p in as_json[1]["problems"]]
    assert found == [
        (1, "steps", "greater_than_equal"),
        (2, "model.heads", "heads_divide_width"),
        (3, "stagse", "unknown"),
    ]


def test_reference_trains_and_leaves_its_files(small):
    done = pmtrain("reference", "small.yaml", "--json", "summary.json", cwd=small)
    assert done.returncode == 0, done.stderr
    summary = json.loads((small / "summary.json").read_text())
    assert summary["loss_first"] == pytest.approx(math.log(256), abs=0.2)
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["peak_memory_bytes"] > 10_000_000
    assert "step  1/12" in done.stdout
    assert "step 12/12" in done.stdout
    assert f"weights sha256 {summary['weights_sha256']}" in done.stdout
    run = small / "runs" / "small"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["event"] == "step"] == list(range(1, 13))
    assert {r["event"] for r in rows} == {"step", "eval", "subspace", "switch"}
    assert sorted(p.name for p in (run / "snapshots").iterdir()) == ["00000010", "00000012"]
    # the saved spec is the run: the same command on it gives the same bytes, in a folder of its own
    again = pmtrain("reference", run / "run.yaml", "--json", "again.json", cwd=small)
    assert again.returncode == 0, again.stderr
    repeated = json.loads((small / "again.json").read_text())
    assert repeated["weights_sha256"] == summary["weights_sha256"]
    assert repeated["spec_sha256"] == summary["spec_sha256"]
    assert repeated["run_dir"] == "runs/small-2"
    # and what came out can be taken out
    exported = pmtrain("export", "small", "model", "--dtype", "bfloat16", "--format", "json", cwd=small)
    assert exported.returncode == 0, exported.stderr
    found = json.loads(exported.stdout)
    assert found.pop("format") == FORMAT
    PRINTED["export"].model.model_validate(found)
    assert (found["weights_sha256"], found["folder"]) == (summary["weights_sha256"], "model")
    assert json.loads((small / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert f"{summary['eval_loss']:.4f}" in (small / "model" / "README.md").read_text()


def test_the_saved_spec_finds_its_files_from_its_own_folder(small):
    (small / "text").mkdir()
    (small / "text" / "a.txt").write_text("The cat sat on the mat.\n" * 400)
    (small / "own.yaml").write_text(
        TINY.replace("data: {", "data: {source: text, files: [text/*.txt], cache_dir: cache, ")
    )
    first = pmtrain("reference", "own.yaml", "--steps", "2", "--run-dir", "deep/run", cwd=small)
    assert first.returncode == 0, first.stderr
    again = pmtrain("reference", "deep/run/run.yaml", "--steps", "2", "--run-dir", "again", cwd=small)
    assert again.returncode == 0, again.stderr
    assert first.stdout.splitlines()[-1] == again.stdout.splitlines()[-1]
    assert sorted(p.name for p in small.iterdir()) == ["again", "cache", "deep", "own.yaml", "small.yaml", "text"]


def test_a_run_that_cannot_start_leaves_no_folder(small):
    (small / "text.yaml").write_text(TINY.replace("data: {", "data: {source: text, files: [none.txt], "))
    assert pmtrain("reference", "text.yaml", cwd=small).returncode == 3
    assert not (small / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["reference", "absent.yaml"], 2, "absent.yaml"),
        (["reference", "small.yaml", "--device", "cuda:99"], 2, "--device cuda:99"),
        (["reference", "small.yaml", "--device", "toaster"], 2, "--device toaster"),
        (["reference", "small.yaml", "--device", "meta"], 2, "--device meta"),
        (["reference", "small.yaml", "--json", "file/x.json"], 3, os.strerror(errno.EEXIST)),
        (["lab", "rank", "--device", "toaster"], 2, "--device toaster"),
        (["lab", "frontier", "--scale", "moon"], 2, "--scale moon"),
        (["lab", "frontier", "--only", "int9"], 2, "--only int9"),
        (["lab", "bandwidth", "--speed", "fast"], 2, "--speed fast"),
        (["plan", "small.yaml", "--link", "slow"], 2, "'slow'"),
        (["plan", "small.yaml", "--link", "1mbit,2ms,3ms,4,5"], 2, "'1mbit,2ms,3ms,4,5'"),
        (["plan", "small.yaml", "--speed", "9"], 2, "--speed 9"),
        (["plan", "small.yaml", "--speed", "0gflops"], 2, "--speed 0gflops"),
        (["plan", "small.yaml", "--speed", "1tflops", "--peers", "99"], 2, "stages = 99"),
        (["export", "absent", "out"], 3, "absent"),
        (["bench", "gpu", "--shape", "3b"], 2, "--shape 3b"),
        (["bench", "gpu", "--device", "cpu", "--windows", "30"], 2, "--windows 30"),
        (["bench", "stage", "--stages", "2", "--stage", "2"], 2, "--stage 2"),
        (["bench", "swarm", "--clients", "30"], 2, "--clients 30"),
        (["bench", "wan", "--method", "dense"], 2, "--method dense"),
        (["bench", "wan", "--method", "dense/int9"], 2, "'int9'"),
        (
            ["bench", "wan", "--emulated", "--method", "dense/bf16", "--method", "reparam/int8/999"],
            2,
            "subspace.k = 999",
        ),
        (["bench", "wan", "--method", "dense/int4+aqsgd"], 2, "--method dense/int4+aqsgd"),
        (["bench", "wan", "--link", "80mbit,fast"], 2, "'fast'"),
        (["lab", "grassmann", "--plot", "p.xyz"], 2, "--plot p.xyz"),
        (["lab", "grassmann", "--json", "."], 3, ". "),
        (["reference", "small.yaml", "--run-dir", "taken"], 3, "taken"),
        (["reference", "small.yaml", "--run-dir", "file"], 3, "file"),
        (["reference", "text.yaml"], 3, "'none.txt'"),
        (["reference", "hot.yaml"], 4, "step 3"),
    ],
)
def test_a_users_mistake_is_one_message_and_an_exit_code(small, arguments, code, named):
    (small / "taken").mkdir()
    (small / "taken" / "metrics.jsonl").write_text("")
    (small / "file").write_text("")
    (small / "text.yaml").write_text(TINY.replace("data: {", "data: {source: text, files: [none.txt], "))
    (small / "hot.yaml").write_text(TINY + "optimizer: {lr: 1.0e+30, clip: 0}\nlimits: {nonfinite_steps: 2}\n")
    done = pmtrain(*arguments, cwd=small)
    assert done.returncode == code, done.stderr
    assert named in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) <= 3, done.stderr
    assert lines[-1].startswith("    fix:  ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["reference", "small.yaml", "--steps", "0"], "--steps"),
        (["lab", "rank", "--steps", "0"], "--steps"),
        (["reference", "small.yaml", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
    ],
)
def test_what_the_parser_refuses(small, arguments, named):
    done = pmtrain(*arguments, cwd=small)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_says_what_is_left(small):
    (small / "long.yaml").write_text(TINY.replace("steps: 12", "steps: 100000"))
    with begin("reference", "long.yaml", cwd=small) as run:
        for line in run.stdout:
            if line.startswith("basis 1"):  # step 5 was taken, and its snapshot written
                run.send_signal(signal.SIGINT)
                break
        lines, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    said = lines.splitlines()[-1]
    assert said.endswith("runs/small")
    rows = [json.loads(line) for line in (small / "runs" / "small" / "metrics.jsonl").read_text().splitlines()]
    written = max(r["step"] for r in rows if r["event"] == "step")
    [step] = map(int, re.findall(r"\d+", said))
    assert step in (written, written + 1), "the signal may come between a step and its row"


def test_a_snapshot_that_cannot_be_written_leaves_the_earlier_one(small):
    """A folder where step 10's snapshot is written first, as a file: that write fails, step 5's stays."""
    (small / "run" / "snapshots").mkdir(parents=True)
    (small / "run" / "snapshots" / "00000010").mkdir()
    (small / "run" / "snapshots" / "00000010" / "in the way").write_text("")
    done = pmtrain("reference", "small.yaml", "--run-dir", "run", cwd=small)
    assert done.returncode == 3
    assert "step 10 " in done.stderr
    assert "fix:" in done.stderr
    assert sorted(p.name for p in (small / "run" / "snapshots").iterdir()) == ["00000005", "00000010"]


def test_a_full_disk_is_one_message(small):
    """/dev/full takes no byte, as a full disk does."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = pmtrain("reference", "small.yaml", "--steps", "1", "--json", "/dev/full", cwd=small)
    assert done.returncode == 3
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named(tmp_path):
    hide = "import sys; sys.modules['matplotlib'] = None"  # as if it were not installed
    (tmp_path / "sitecustomize.py").write_text(hide)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = pmtrain("lab", "grassmann", "--plot", tmp_path / "p.png", PYTHONPATH=path)
    assert done.returncode == 3
    what, fix = done.stderr.splitlines()
    assert "matplotlib" in what
    assert fix.endswith("-m pip install 'matplotlib'")


def test_version():
    from protomodels_cli import __version__

    assert pmtrain("--version").stdout.strip() == f"pmtrain {__version__}"
