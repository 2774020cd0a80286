"""A run as people meet it: the real commands in real processes, from the coordinator's first line to the last."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import corpus_of, make_spec
from starting import Started, begin, pmtrain
from test_pipeline import random_spec, reference_of
from tiers import first
from told import events, peer_events, wait_for_event, wait_for_peer_event
from waiting import PATIENCE, wait_for

from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.spec import RunSpec


@contextmanager
def coordinator(spec: RunSpec, folder: Path) -> Iterator[tuple[Started, str]]:
    """A coordinator, and the join command as it printed it."""
    (folder / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    process = begin("coordinator", "run.yaml", "--host", "127.0.0.1", "--port", 0, "--run-dir", "run", cwd=folder)
    try:
        yield process, wait_for_line(process, r"pmtrain join '(pm://\S+)'")
    finally:
        process.kill()
        process.wait(timeout=PATIENCE)


def wait_for_line(process: Started, pattern: str, seconds: float = 120) -> str:
    """A line that it says, or the test's end: then it is killed, and what it said instead is shown."""
    lines, patience = [], threading.Timer(seconds, process.kill)
    patience.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(pattern, line):
                return found[1] if found.groups() else line
    finally:
        patience.cancel()
    raise AssertionError(f"no {pattern!r} within {seconds:g} s in {''.join(lines)}")


def status(folder: Path) -> dict[str, Any]:
    return json.loads(pmtrain("status", "run", "--format", "json", cwd=folder).stdout)


def ends(process: Started) -> tuple[int, str]:
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


FRESH = [
    ("fp32", 2, "reparam", True),
    ("bf16", 3, "constrained", True),
    ("int8", 4, "reparam", False),
    ("int8", 2, "dense", False),
    ("bf16", 1, "reparam", True),
    ("fp32", 3, "dense", False),
]


@pytest.mark.parametrize(("wire", "stages", "form", "moves"), first(2, FRESH))
def test_from_nothing_to_the_references_weights(tmp_path, wire, stages, form, moves):
    """The README's walk: one terminal leads, the others paste the line that it printed."""
    spec = random_spec(wire, stages, form, moves)
    with coordinator(spec, tmp_path) as (leader, link):
        peers = [begin("join", link, "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(stages)]
        for peer in peers:
            code, said = ends(peer)
            assert code == 0, said
        code, said = ends(leader)
    assert code == 0, said
    assert reference_of(spec)[0].weights_sha256() in said
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.name != "basis") == [
        "ca",
        "coordinator.log",
        "corpus.json",
        "events.jsonl",
        "journal.sqlite",
        "link",
        "lock",
        "metrics.jsonl",
        "page",
        "private.json",
        "run.yaml",
        "snapshots",
        "summary.json",
    ]
    for secret in ("link", "page", "private.json", "ca/ca.key"):
        assert (tmp_path / "run" / secret).stat().st_mode & 0o077 == 0
    logs = [tmp_path / "run" / "coordinator.log", *tmp_path.glob("p*/*/peer.log")]
    assert len(logs) == 1 + stages
    private = json.loads((tmp_path / "run" / "private.json").read_text())
    logged = "".join(log.read_text() for log in logs)
    assert not any(secret in logged for secret in (private["token"], private["owner"], private["peers_key"]))
    told = [event["text"] for event in events(tmp_path / "run")]
    assert told
    assert all(text in logs[0].read_text() for text in told)


def test_status_and_peers_before_during_and_after(tmp_path):
    spec = make_spec(stages=2, steps=100_000, eval={"interval": 0})
    with coordinator(spec, tmp_path) as (leader, link):
        early = json.loads(pmtrain("status", link, "--format", "json", cwd=tmp_path).stdout)
        assert early["phase"] == "waiting_for_peers"
        assert early["waiting_kind"] == "no_peers"
        peers = [begin("join", link, "--name", f"n{i}", "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        wait_for(lambda: status(tmp_path)["step"] != 0, "no step was decided")
        during = status(tmp_path)
        assert during["phase"] == "running"
        assert [s["stage"] for s in during["stages"]] == [0, 1]
        assert during["stages"][0]["forward_bytes_per_token"] > 24
        assert sum(during["stages"][1][k] for k in ("compute_share", "wait_share", "wire_share")) == pytest.approx(1)
        text = pmtrain("status", link, cwd=tmp_path).stdout
        assert "small" not in text
        assert re.search(r"^run: running \| .*\b\d+/100000", text, re.MULTILINE)
        assert re.search(r"0 +0–1 +n\d ", text)
        who = json.loads(pmtrain("peers", link, "--format", "json", cwd=tmp_path).stdout)["peers"]
        assert sorted(p["name"] for p in who) == ["n0", "n1"]
        assert {(p["state"], p["stage"]) for p in who} == {("holding", 0), ("holding", 1)}
        assert "directly" in pmtrain("peers", "run", cwd=tmp_path).stdout
        with begin("top", "run", "--format", "json", cwd=tmp_path) as watch:
            steps = [json.loads(watch.stdout.readline())["step"] for _ in range(3)]
            watch.send_signal(signal.SIGINT)
            assert watch.wait(timeout=PATIENCE) == 0
        assert steps[0] < steps[2]
        # the owner stops it; peers are told, and what the journal knows can still be asked for
        assert "stopping" in pmtrain("stop", "run", cwd=tmp_path).stdout
        code, said = ends(leader)
        assert code == 0, said
        for peer in peers:
            code, said = ends(peer)
            assert code == 0, said
    after = status(tmp_path)
    assert after["phase"] == "not_running"
    assert after["step"] >= during["step"]
    gone = pmtrain("status", link, cwd=tmp_path)
    assert gone.returncode == 3
    assert link.split("/")[2] in gone.stderr, "the address"


# With a long lease: a peer that is late on a busy machine has not left.
LONG = {"stages": 2, "steps": 100_000, "eval": {"interval": 0}, "limits": {"lease_seconds": 30.0}}


def test_ctrl_c_leaves_after_the_step_and_the_next_joiner_goes_on_from_there(tmp_path):
    with coordinator(make_spec(**LONG), tmp_path) as (leader, link):
        peers = [begin("join", link, "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        wait_for_peer_event(tmp_path / "p0", "step_decided")
        peers[0].send_signal(signal.SIGINT)
        code, said = ends(peers[0])
        assert code == 130, said
        assert peer_events(tmp_path / "p0", "leaving_after_step")
        assert peer_events(tmp_path / "p0")[-1]["reason"] == "asked_to_leave"
        wait_for_event(tmp_path / "run", "peer_left")
        status = json.loads(pmtrain("status", "run", "--format", "json", cwd=tmp_path).stdout)
        assert status["phase"] == "waiting"
        assert status["waiting_kind"] == "stages_without_peer"
        assert status["snapshot_step"] == status["step"]
        again = begin("join", link, "--dir", tmp_path / "p0", cwd=tmp_path)
        wait_for_peer_event(tmp_path / "p0", "stage_assigned", source="snapshot", step=status["step"])
        wait_for_peer_event(tmp_path / "p1", "stage_assigned", source="memory", step=status["step"])
        for process in (again, peers[1], leader):
            process.kill()
            process.communicate()


def test_the_same_command_goes_on_after_kill_9_and_pause_and_resume_are_obeyed(tmp_path):
    """The peers stay where they are, and say what they do meanwhile."""
    with coordinator(make_spec(**LONG), tmp_path) as (leader, link):
        peers = [begin("join", link, "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        wait_for_peer_event(tmp_path / "p0", "step_decided")
        before = int(status(tmp_path)["step"])
        leader.kill()
        leader.wait(timeout=PATIENCE)
        lost = wait_for_peer_event(tmp_path / "p0", "connection_lost")
        assert lost["stage"] in (0, 1)
    with coordinator(make_spec(**LONG), tmp_path) as (leader, again):
        assert again == link
        wait_for_peer_event(tmp_path / "p0", "stage_assigned", since=lost["at"], source="memory", stage=lost["stage"])
        wait_for_peer_event(tmp_path / "p0", "step_decided", since=lost["at"])
        assert "pausing" in pmtrain("pause", "run", cwd=tmp_path).stdout
        wait_for(lambda: status(tmp_path)["phase"] == "paused", "it was not paused")
        found = status(tmp_path)
        assert int(found["step"]) > before
        assert found["steps_redone"] == 0
        assert (found["waiting_kind"], found["reason_kind"]) == ("owners_resume", "by_owner")
        assert pmtrain("resume", "run", cwd=tmp_path).stdout == "resumed\n"
        assert pmtrain("stop", "run", cwd=tmp_path).returncode == 0
        assert ends(leader)[0] == 0
        assert [ends(peer)[0] for peer in peers] == [0, 0]


def test_ctrl_c_once_is_enough_for_a_peer_that_waits(tmp_path):
    with coordinator(make_spec(stages=2, steps=3), tmp_path) as (_, link):
        spare = begin("join", link, "--dir", tmp_path / "p", cwd=tmp_path)
        wait_for_event(tmp_path / "run", "peer_joined")
        spare.send_signal(signal.SIGINT)
        code, said = ends(spare)
        assert code == 130, said


def test_ctrl_c_twice_leaves_in_the_middle_of_a_step(tmp_path):
    """Two peers whose steps take minutes: the first Ctrl-C waits for the step, the second does not."""
    long = {"size": 4096, "microbatches": 4096}
    with coordinator(make_spec(stages=2, steps=3, model={"context": 128}, batch=long), tmp_path) as (leader, link):
        peers = [begin("join", link, "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        for i in range(2):
            wait_for_peer_event(tmp_path / f"p{i}", "stage_assigned")
        wait_for_event(tmp_path / "run", "stages_linked")
        os.kill(leader.pid, signal.SIGSTOP)  # nobody answers the first one
        peers[0].send_signal(signal.SIGINT)
        wait_for_peer_event(tmp_path / "p0", "leaving_after_step")
        assert peers[0].poll() is None
        peers[0].send_signal(signal.SIGINT)
        code, said = ends(peers[0])
        assert code == 130, said
        assert "Traceback" not in said
        os.kill(leader.pid, signal.SIGCONT)
        peers[1].kill()
        peers[1].communicate()


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["coordinator", "run.yaml", "--host", "127.0.0.1", "--port", "TAKEN"], 3, "port TAKEN"),
        (["coordinator", "run.yaml", "--run-dir", "locked"], 3, "locked"),
        (["coordinator", "run.yaml", "--run-dir", "used"], 3, "private.json"),
        (["coordinator", "run.yaml", "--run-dir", "other"], 3, "other"),
        (["coordinator", "run.yaml", "--run-dir", "new", "--resume"], 3, "new"),
        (["coordinator"], 2, "SPEC"),
        (["pause", "nowhere"], 3, "nowhere"),
        (["pause", "pm://127.0.0.1:1/SECRET#FINGERPRINT"], 2, "join link"),
        (["coordinator", "run.yaml", "--run-dir", "file/below"], 3, "file"),
        (["coordinator", "absent.yaml"], 2, "absent.yaml"),
        (["join", "pm://127.0.0.1:1/short"], 2, "fingerprint"),
        (["join", f"pm://127.0.0.1:1/{'A' * 22}#{'A' * 43}"], 3, "127.0.0.1:1"),
        (["join", f"pm://127.0.0.1:TAKEN/{'A' * 22}#{'A' * 43}", "--device", "toaster"], 2, "--device toaster"),
        (["status", "file"], 3, "file"),
        (["peers", "nowhere"], 3, "nowhere"),
        (["demo", "--stages", "9"], 2, "stages = 9"),
        (["demo", "--device", "cuda:99", "--steps", "1", "--run-dir", "d"], 2, "--device cuda:99"),
    ],
)
def test_mistakes_are_one_message_and_an_exit_code(tmp_path, arguments, code, named):
    import fcntl

    spec = make_spec(stages=1, steps=1)
    corpus_of(spec)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "journal.sqlite").write_text("")
    (tmp_path / "locked").mkdir()
    open_run_dir(tmp_path / "other", make_spec(stages=1, steps=2), tmp_path).lock.close()
    (tmp_path / "other" / "journal.sqlite").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken, (tmp_path / "locked" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        port = str(taken.getsockname()[1])
        done = pmtrain(*(a.replace("TAKEN", port) for a in arguments), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert named.replace("TAKEN", port) in done.stderr
    assert "\n    fix:  " in done.stderr
    assert "SECRET" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_the_demo_says_what_it_did(tmp_path):
    results = []
    (tmp_path / "run3").mkdir()
    (tmp_path / "run3" / "model").write_text("in the way of the export")
    for stages, code in ((2, 0), (3, 3)):
        file = tmp_path / f"{stages}.json"
        arguments = ["--steps", 3, "--stages", stages, "--run-dir", tmp_path / f"run{stages}", "--json", file]
        done = pmtrain("demo", *arguments, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        results.append(json.loads(file.read_text()))
    two, three = results
    assert "text" in two
    assert "text" not in three, "the run's own figures outlive an export that fails"
    for field in (
        "steps",
        "stages",
        "seconds",
        "loss_first",
        "loss_last",
        "tokens_per_s",
        "dense_bytes_per_token_bf16",
        "ratio_bf16",
        "ratio_fp32",
    ):
        assert isinstance(two[field], int | float), field
    assert set(two["bytes_per_token"]) == {"forward", "backward"}
    assert 20 <= two["bytes_per_token"]["forward"] < 20 * 1.05  # 16 numbers of a byte, a scale and an id of 2 each
    assert 18 <= two["bytes_per_token"]["backward"] < 18 * 1.05
    assert two["ratio_fp32"] == pytest.approx(2 * two["ratio_bf16"])
    assert (two["stages"], three["stages"]) == (2, 3)
    assert len(events(tmp_path / "run3", "peer_joined")) == 3
    printed = list((tmp_path / "run3" / "logs").iterdir())
    assert sorted(log.stem for log in printed) == ["coordinator", "peer-1", "peer-2", "peer-3"]
    assert all(log.stat().st_mode & 0o077 == 0 for log in printed), "the join link is in one of them"
    assert three["weights_sha256"] in done.stdout
    assert f"{two['ratio_bf16']:.1f}" in done.stdout
    assert "pmtrain" in done.stdout, "what to run next"
