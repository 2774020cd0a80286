"""The one place that checks how errors of the page, `init`, `follow` and `doctor` read."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from test_doctor import HERE, LINE
from typer.testing import CliRunner

from protomodels_cli.cli.main import app
from protomodels_cli.doctor.facts import Failure, Reach
from protomodels_cli.doctor.line_checks import line
from protomodels_cli.errors import UserError
from protomodels_cli.observe.page.address import cannot_listen

OPTIONS = [
    (
        "init new.yaml --yes --size huge",
        "--size huge: must be a number of parameters from 100K to 1T",
        "write for example 10M, 124M or 1.5B",
    ),
    ("init run.yaml --yes", "run.yaml exists already", "name another file, or replace it with --force"),
    (
        "coordinator run.yaml --page nowhere",
        "--page nowhere: must be HOST:PORT",
        "write for example --page 0.0.0.0:7421, and an IPv6 address in brackets",
    ),
    (
        "coordinator run.yaml --no-page --page 0.0.0.0:7421",
        "--no-page --page: one asks for the page that the other forbids",
        "use one",
    ),
    (
        "coordinator run.yaml --no-page --page-sample Once",
        "--no-page --page-sample: one asks for the page that the other forbids",
        "use one",
    ),
    ("follow run", "nothing says where the metrics go", "add --tensorboard DIR or --wandb PROJECT"),
    (
        "follow run --tensorboard board",
        "run: there is no such folder, nor a run with this name here",
        "`pmtrain runs` lists what is on this machine; elsewhere, name the join link (pm://…)",
    ),
]


@pytest.mark.parametrize(("arguments", "what", "fix"), OPTIONS, ids=[row[0] for row in OPTIONS])
def test_options(arguments: str, what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("steps: 2\nmodel: {layers: 2, width: 32, heads: 2}\n")
    error = CliRunner().invoke(app, arguments.split(), prog_name="pmtrain").exception
    assert isinstance(error, UserError)
    assert str(error) == f"{what}\n    fix:  {fix}"


REFUSED = [
    (
        ["--size", "1B", "--peers", "2", "--memory", "4"],
        "a model of # B parameters does not fit # peers with # GiB each: the largest stage needs # GiB at least\n"
        "    fix:  one of --peers # with this memory, --memory #gib on every peer, --size #M on these peers",
    ),
    (
        ["--size", "3B", "--peers", "2", "--memory", "80", "--speed", "5tflops"],
        "a model of # B parameters would take # such peers #,# d # h or more; a run may take a year at most\n"
        "    fix:  one of --peers # with this memory, --size #B on these peers",
    ),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=["memory", "time"])
def test_a_model_that_the_peers_cannot_train(words: list[str], said: str, tmp_path: Path):
    asked = ["init", str(tmp_path / "run.yaml"), "--yes", *words]
    error = CliRunner().invoke(app, asked, prog_name="pmtrain").exception
    assert re.sub(r"\d+(\.\d+)?", "#", str(error)) == said


PLACES = [
    (
        OSError(errno.EADDRINUSE, "in use"),
        "another program uses port 80",
        "stop the other program, or choose another port, for example --page 192.0.2.7:81",
    ),
    (
        OSError(errno.EADDRNOTAVAIL, "not available"),
        "this machine has no address 192.0.2.7",
        "use one of this machine's addresses, or all of them: --page 0.0.0.0:80",
    ),
    (
        socket.gaierror(socket.EAI_NONAME, "unknown"),
        "this machine has no address 192.0.2.7",
        "use one of this machine's addresses, or all of them: --page 0.0.0.0:80",
    ),
    (
        OSError(errno.EACCES, "denied"),
        "port 80 is reserved for the system",
        "choose a port of 1024 or more: --page 192.0.2.7:7421",
    ),
    (OSError(errno.ENOMEM, "no memory"), "no memory", "choose another address or port"),
]


@pytest.mark.parametrize(("error", "why", "fix"), PLACES, ids=[row[1] for row in PLACES])
def test_a_page_that_cannot_be_served(error: OSError, why: str, fix: str):
    told = cannot_listen("192.0.2.7", 80, error, "--page")
    assert str(told) == f"cannot listen on 192.0.2.7:80 for --page: {why}\n    fix:  {fix}"


FOUND = [
    (
        {"ahead": 400.0},
        "6 min 40 s ahead of the coordinator's",
        "clocks may differ by 5 min at most",
        (
            "set this clock: sudo timedatectl set-ntp true",
            "if this clock is right, ask the run's owner to set the coordinator's",
        ),
    ),
    (
        {"round_trip": 0.9},
        "900 ms",
        "every step waits for one round trip to the coordinator",
        ("use a cable in place of Wi-Fi", "turn a VPN off", "ask for a coordinator that is nearer"),
    ),
    (
        {"failure": Failure("unreachable", "the coordinator does not answer", "check the link")},
        "203.0.113.7:7420",
        "the coordinator does not answer",
        (
            "check the link",
            "on the coordinator's machine: is it running, and does its firewall let TCP port 7420 in?",
            "try from another network, as a phone's: nc -vz 203.0.113.7 7420",
        ),
    ),
    (
        {"reach": Reach("198.51.100.9", 4000, False, "refused", (("r.example:7430", 0.02),))},
        "198.51.100.9:4000",
        "neighbours elsewhere cannot dial this machine (refused); links to those whom it cannot dial either go through "
        "relay r.example:7430, 20 ms, which is slower",
        (
            "let it through this machine's firewall: sudo ufw allow 4000/tcp",
            "in the router (http://192.168.1.1): forward TCP port 4000 of 198.51.100.9 to 192.168.1.23, port 4000",
            "look again, then keep the port: pmtrain doctor LINK --port 4000, pmtrain join LINK --port 4000",
            "or leave it: it works relayed, and --no-listen does not even try",
        ),
    ),
]


@pytest.mark.parametrize(("facts", "figure", "problem", "fixes"), FOUND, ids=[row[2] for row in FOUND])
def test_what_doctor_finds(facts: dict[str, object], figure: str, problem: str, fixes: tuple[str, ...]):
    [found] = [f for f in line(HERE, replace(LINE, **facts)) if f.severity in ("warn", "fail")]
    assert (found.figure, found.problem, found.fixes) == (figure, problem, fixes)
