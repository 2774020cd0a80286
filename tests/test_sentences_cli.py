"""The one place that checks how the command line reads: errors about options, help, and what `plan` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import make_spec
from lab_tools import TINY
from typer.testing import CliRunner

from protomodels_cli.cli.main import app
from protomodels_cli.cli.run_demo import _faults_in_words
from protomodels_cli.coordinator.snapshots.room import RESERVE, check_room
from protomodels_cli.cost.saving import snapshot_bytes
from protomodels_cli.errors import UserError
from protomodels_cli.lab.scales import text_of
from protomodels_cli.observe.view import crash
from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

ROOT = Path(__file__).parent.parent
LINK = "write BANDWIDTH,LATENCY[,JITTER[,LOSS]] or none; for example 80mbit,25ms or none,25ms,2ms,0.01"
OPTIONS: list[tuple[str, str, str]] = [
    (
        "reference tiny.yaml --device toaster",
        "--device toaster: there is no such device",
        "use auto, cpu, gpu (= cuda), cuda:N or mps",
    ),
    (
        "reference tiny.yaml --dir taken",
        "taken already holds a run",
        "choose another --dir; runs are never overwritten",
    ),
    ("reference tiny.yaml --json .", ". cannot be written", "name a file in a folder that you may write to"),
    ("lab frontier --scale moon", "--scale moon: there is no such scale", "use cpu, gpu or gpu-1024"),
    ("lab frontier --only int9", "--only int9: matches no row", "see the names of all rows with --list"),
    ("lab replicas --only int9", "--only int9: matches no row", "see the names of all rows with --list"),
    (
        "lab replicas --lanes 3",
        "--lanes 3: a step's 8 sequences cannot be shared equally",
        "use a divisor of 8, or another --batch",
    ),
    (
        "lab replicas --sum eden:9",
        "--sum eden:9: the bits per number must be 1 to 6, not '9'",
        "write for example eden:4",
    ),
    (
        "lab replicas --sum sparse",
        "--sum sparse: there is no such sum",
        "write one of exact, bf16, eden:BITS, UP|DOWN, dion:RANK[:ROUNDING], local:STEPS[:SUM], SUM+ef, SUM+late",
    ),
    (
        "lab replicas --sum dion:0",
        "--sum dion:0: the rank must be a whole number, at least 1",
        "write for example dion:64",
    ),
    (
        "lab replicas --sum local:x",
        "--sum local:x: the steps between two sums must be a whole number, at least 1",
        "write for example local:8",
    ),
    ("lab scaling --scale moon", "--scale moon: there is no such scale", "use cpu or gpu"),
    (
        "lab grassmann --plot p.xyz",
        "--plot p.xyz: unknown picture format",
        "use a file name that ends with .png, .svg or .pdf",
    ),
    (
        "plan tiny.yaml --speed 9",
        "--speed 9: must be a speed like 10tflops (mflops, gflops, tflops)",
        "write for example 20gflops or 5tflops",
    ),
    ("plan tiny.yaml --speed 0gflops", "--speed 0gflops: must be above 0", "write for example 20gflops or 5tflops"),
    (
        "plan tiny.yaml --link slow",
        "link 'slow': bandwidth 'slow': must be a bandwidth like 80mbit (bit, kbit, mbit, gbit)",
        LINK,
    ),
    (
        "plan tiny.yaml --link 1mbit,2ms,3ms,4,5",
        "link '1mbit,2ms,3ms,4,5': 5 values where at most 4 are allowed",
        LINK,
    ),
    (
        "plan tiny.yaml --link 1mbit,1ms,1ms,x",
        "link '1mbit,1ms,1ms,x': loss 'x': must be a number from 0 to below 1",
        LINK,
    ),
    (
        "plan fast.yaml --link 80mbit,25ms --speed 60tflops",
        "snapshots.interval = 1: a snapshot is due every 205 ms, and uploading one takes 5.32 s",
        "set snapshots.interval to 26 or more, or raise snapshots.max_bandwidth",
    ),
    (
        "plan timed.yaml --link 100kbit,25ms --speed 60tflops",
        "snapshots.every = 5s: a snapshot is due every 9.5 s, and uploading one takes 8 min 52 s",
        "set snapshots.every to 9min or more",
    ),
    ("bench gpu --shape 3b", "--shape 3b: there is no such shape", "use tiny, 1b, 2b, 8b"),
    (
        "bench gpu --torch compile,fast",
        "--torch compile,fast: 'fast' is not one of compile, eager, float32",
        "write for example --torch compile,eager, or --torch none",
    ),
    (
        "bench gpu --stages 1,x",
        "--stages 1,x: must be whole numbers from 1, separated by commas",
        "write for example --stages 1,8",
    ),
    ("bench gpu --only nothing", "--only nothing: there is no such measurement here", "see --list"),
    (
        "bench gpu --windows 30",
        "--windows 30: not a whole number of microbatches of 4 windows",
        "use a multiple of 4, or another --microbatch",
    ),
    (
        "bench gpu --devices a",
        "--devices a: must be numbers of GPUs, separated by commas",
        "write for example 0,1",
    ),
    (
        "bench wan --method dense",
        "--method dense: there is no codec ''",
        "write for example dense/bf16, reparam/int8/16 or 'dense/topk:0.1|int8'",
    ),
    (
        "bench wan --method densely/int8",
        "--method densely/int8: must be a form (reparam, two_stream, constrained, dense), a codec and optionally k",
        "write for example dense/bf16, reparam/int8/16 or 'dense/topk:0.1|int8'",
    ),
    (
        "bench wan --method dense/int4+aqsgd",
        "--method dense/int4+aqsgd: AQ-SGD sends how a sample's activations have changed since the last epoch, and a "
        "run here is shorter than an epoch",
        "write for example dense/bf16, reparam/int8/16 or 'dense/topk:0.1|int8'",
    ),
    (
        "join pm://… --map-port --no-listen",
        "--map-port --no-listen: one asks to be dialled from outside, the other not to be dialled",
        "leave one of the two out",
    ),
    (
        "join pm://… --upload 64kbit",
        "--upload 64kbit: must be at least 1 Mbit/s; below that, activations hold up the signs of life between "
        "neighbours for so long that their link is given up",
        "write --upload 1mbit or more; the rest of your line stays free",
    ),
    (
        "join pm://… --download 10mb",
        "--download 10mb: must be a bandwidth like 80mbit (bit, kbit, mbit, gbit)",
        "write for example --download 10mbit",
    ),
    (
        "join pm://… --hours 22:00",
        "--hours 22:00: must be two times of day, from 0:00 to 23:59, with a dash between them",
        "write for example --hours 22:00-07:00",
    ),
    (
        "join pm://… --hours 8-8",
        "--hours 8-8: begins when it ends",
        "leave --hours out to take part all day",
    ),
    (
        "join pm://… --device cpu --devices 0,1",
        "--device cpu --devices 0,1: both say where to compute",
        "use one of the two",
    ),
    *(
        (
            f"join pm://… --devices {devices}",
            f"--devices {devices}: must be GPUs, or the CPU several times, separated by commas",
            "write for example 0,1",
        )
        for devices in ("a", "0,", "0,cpu", "cuda,cuda", "auto,auto")
    ),
    ("coordinator --rebuild", "--rebuild needs a run directory", "name the run directory with --dir"),
    ("coordinator", "SPEC is missing", "name a spec file, or use --resume with --dir"),
    ("coordinator --resume --dir empty", "empty holds no run to continue", "name the run directory with --dir"),
    (
        "pause pm://127.0.0.1:1/tttttttttttttttttttttt#fffffffffffffffffffffffffffffffffffffffffff",
        "a join link is not enough for this, and its run directory is not on this machine",
        "do it on the coordinator's machine, or name the run directory",
    ),
    (
        "export empty out",
        "empty is not a run directory",
        "name the directory of a run, or the store that snapshots.copy_to of a run names",
    ),
    (
        "export empty taken",
        "taken exists already",
        "choose another folder, or delete it; an export overwrites nothing",
    ),
    (
        "status empty",
        "empty is not a run directory",
        "`pmtrain runs` lists what is on this machine, or name a join link (pm://…)",
    ),
    *(
        (
            f"{command} nothing",
            "nothing: there is no such folder, nor a run with this name here",
            "`pmtrain runs` lists what is on this machine; elsewhere, name the join link (pm://…)",
        )
        for command in ("status", "peers", "top", "events", "logs", "pause", "resume", "stop")
    ),
    (
        "events pm://h:1/token#print",
        "a join link shows a run's state alone: events and logs are in the folders of coordinator and peers",
        "name a run directory or a peer's folder on this machine (see `pmtrain runs`), or use `pmtrain top`",
    ),
    (
        "events led --kind peer_los",
        "--kind peer_los: there is no such kind of event",
        "use peer_lost; nothing has happened yet",
    ),
    (
        "events led --since lately",
        "--since lately: neither a time nor a moment",
        "write a time like 30min, 2h or 1d (ago), or a moment like 2026-11-16 or 2026-11-16T02:46Z",
    ),
    (
        "logs led --peer desk",
        "--peer desk: no peer of this name has run on this machine",
        "no peer of this run keeps its log here; a peer's log is on its own machine: `pmtrain logs led` there",
    ),
    ("logs led", "led/coordinator.log does not exist", "the program has begun no log yet: look again later"),
    (
        "status joined",
        "joined is a peer's folder without a link to its coordinator",
        "name the join link (pm://…); a peer that joins from now on keeps it",
    ),
    (
        "stop joined",
        "joined is a peer's folder, not a run directory",
        "do that on the coordinator's machine, in the run directory",
    ),
    (
        "status model",
        "model is an exported model, not a run directory",
        "use `pmtrain generate model` or `pmtrain eval model`, or name the run it came from",
    ),
    (
        "status alone",
        "alone is a run of `pmtrain reference`, which no coordinator leads",
        "see alone/metrics.jsonl; `pmtrain export` and `pmtrain eval` take such a run",
    ),
    (
        "status begun",
        "the coordinator of begun has not opened its port yet",
        "look into begun/coordinator.log, or start the coordinator again",
    ),
    (
        "statsu",
        "pmtrain statsu: there is no such command",
        "did you mean `pmtrain status`? `pmtrain --help` lists them",
    ),
    (
        "frontier",
        "pmtrain frontier: there is no such command",
        "did you mean `pmtrain lab frontier`? `pmtrain --help` lists them",
    ),
    (
        "bench abuse --attack edges",
        "--attack edges: is of attacks from within",
        "add --insider, or leave out --attack",
    ),
    ("bench abuse --messages 5", "--messages 5: is of attacks from within", "add --insider, or leave out --messages"),
    (
        "bench abuse --insider --attack x",
        "--attack x: there is no such attack",
        "use one of leaves, false-hashes, impossible-times, link-broken, stands-still, lies-about-parts, no-record, "
        "lying-auditor, reads-others, holds-calls, edges",
    ),
    ("bench qqqq", "pmtrain bench qqqq: there is no such command", "`pmtrain bench --help` lists them"),
]


@pytest.mark.parametrize(("arguments", "what", "fix"), OPTIONS, ids=[row[0] for row in OPTIONS])
def test_options(arguments: str, what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny = (ROOT / "configs" / "tiny.yaml").read_text()
    (tmp_path / "tiny.yaml").write_text(tiny)
    often = re.sub(r"snapshots:.*", "snapshots: {interval: 1, max_bandwidth: 10mbit}", tiny)
    (tmp_path / "fast.yaml").write_text(often)
    (tmp_path / "timed.yaml").write_text(re.sub(r"snapshots:.*", "snapshots: {every: 5s}", tiny))
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("")
    for file in ("led/journal.sqlite", "led/private.json", "begun/private.json", "joined/peer.log"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    for file in ("alone/run.yaml", "alone/metrics.jsonl", "model/config.json", "model/model.safetensors"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    error = CliRunner().invoke(app, arguments.split(), prog_name="pmtrain").exception
    assert isinstance(error, UserError)
    assert error.kind
    assert str(error) == f"{what}\n    fix:  {fix}"


def commands(command: Any, name: str = "pmtrain") -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {child}")


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_every_command_and_option_is_for(name: str):
    command = COMMANDS[name]
    assert command.help or name == "pmtrain bench"
    for parameter in command.params:
        if parameter.name not in ("install_completion", "show_completion", "help"):
            told = parameter.help or ""
            assert re.match("[A-Z$-]", told), (name, parameter.name, told)
            assert told.endswith((".", "…")), (name, parameter.name, told)
            assert not re.match(r"(It|Its|They|Of|What is) ", told), (name, parameter.name, told)


PLAN = """\
# min # s. The delay of your lines is the limit.
A peer needs up to # MiB of memory.
The run takes up to # GB of upload on a line and about # kWh of electricity on all machines (# W a card, assumed: \
--card names one).
builtin has about # k tokens: none is read twice.
tiny: two_stream, k = #, int# forward and int# backward, # peers of # TFLOP/s (--speed), each with a connection of # \
Mbit/s, # ms of latency
The model: # k parameters in blocks (hidden #), # MFLOP a token; embedding # k, head # k (# MFLOP a token), \
anchors # M, early heads # k (in training alone).
Dense, of equal shape: # k parameters in blocks (hidden #), # MFLOP a token; embedding # k, head # k (# MFLOP a token).
# trained anchors: # MiB each, # bytes an entry with its moments.
Every step sends # KiB forward and # KiB backward over each boundary, headers included.
A step takes # ms (#k tok/s); with an ideal link it would take # ms.
The busiest connection carries data for # ms; the busiest stage idles # % of the time (bubble).
Bottleneck: latency of the links.
A snapshot is due every # s; its largest part has # MiB and takes # s to upload while training goes on.
On the coordinator's disk a snapshot takes # MiB; # that are kept and one that arrives (snapshots.keep = #) take # MiB.
A crash costs # s on average: # s to redo, # s to fetch a part and build its stage.
Loss: above dense's at equal tokens, where it was measured (d = #, # M tokens; docs/benchmarks.md, “Loss at a larger \
size”).
Best: at dense's loss soonest, where # % of loss costs # % more steps. What nobody has measured is not
recommended, unless --any-recipe asks for it."""


def test_plan():
    done = CliRunner().invoke(app, ["plan", str(ROOT / "configs" / "tiny.yaml"), "--speed", "60tflops"])
    assert done.exit_code == 0
    said = re.sub(r"\d+([.,]\d+)*", "#", done.output).splitlines()
    tables = ("stage ", "form ", "#  ", "dense ", "reparam ", "two_stream ")
    assert [line for line in said if line and not line.startswith(tables)] == PLAN.splitlines()
    assert not re.search(r"\de[+-]?\d", done.output), "no exponents"


def test_what_audits_would_cost(tmp_path: Path):
    (tmp_path / "run.yaml").write_text((ROOT / "configs" / "tiny.yaml").read_text() + "\naudit: 0.01\n")
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), "--speed", "60tflops"])
    said = re.sub(r"\d+([.,]\d+)*", "#", done.output)
    assert (
        "\naudit = #: # audits a day, #% of each stage's steps; who lies in every message is found within # steps with "
        "probability #. They need a spare with # MiB of memory: without one nobody is audited.\n"
        "For them a peer keeps # KiB of messages on its disk. An audit uploads # KiB (#% of a peer's line on average); "
        "the spare fetches # MiB and takes # "
    ) in said


def test_what_a_crash_would_cost():
    fields = {"step": 50, "snapshot_step": 38, "crash_redo_s": 160.0}
    assert crash(RunStatus(**fields, crash_restore_s=40.0)) == (
        "a crash now would cost about 3 min 20 s: 12 steps to redo (2 min 40 s), "
        "40 s to fetch a part and build its stage"
    )
    assert crash(RunStatus(**fields)) == (
        "a crash now would cost 12 steps to redo (2 min 40 s), and what fetching a part and building its stage takes"
    )


def test_a_disk_that_is_too_small():
    spec = make_spec(stages=2, snapshots={"keep": 3})
    each = snapshot_bytes(spec, [2, 2])

    def said(free: int) -> str:
        with pytest.raises(UserError) as refused:
            check_room(spec, Path("runs/home"), lambda _: free)
        return re.sub(r"\d+(\.\d+)? [KM]iB", "#", str(refused.value))

    why = "runs/home: snapshots need # of disk, and # are free (snapshots.keep = 3: 4 snapshots of #, with the one that"
    assert said(RESERVE + 3 * each) == (
        f"{why} arrives)\n    fix:  free #, set snapshots.keep to 2, or choose a --dir on a larger disk"
    )
    assert said(RESERVE) == f"{why} arrives)\n    fix:  free #, or choose a --dir on a larger disk"


def test_what_became_of_each_injected_fault():
    recovered = {"step": 9, "what": "kill -9 peer-1", "seconds_to_next_step": 4.2, "stalled": False}
    stalled = {"step": 12, "what": "SIGSTOP peer-2", "seconds_to_next_step": None, "stalled": True}
    over = {"step": 99, "what": "cut peer-2 off", "seconds_to_next_step": None, "stalled": False}
    assert _faults_in_words([recovered, stalled, over], 7).splitlines() == [
        "3 faults, 7 steps redone:",
        "  step    9  kill -9 peer-1: next step after 4.2 s",
        "  step   12  SIGSTOP peer-2: no step within 1 min",
        "  step   99  cut peer-2 off",
    ]


def test_a_text_that_is_too_short_for_a_sweep():
    with pytest.raises(UserError) as e:
        text_of(replace(TINY, steps=2000))
    assert str(e.value) == (
        "the text has 35093 tokens to train on, and 2000 steps of 32 tokens need 64001: no token is to be seen twice\n"
        "    fix:  give more text with --text FILE, or train for fewer --steps"
    )
