"""The everyday commands, against a run that was really led and joined here: runs, events, logs, top, --format json."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CONFIGS, make_spec
from documented_commands import run_by
from starting import COMMANDS, ROOT, Started, begin, pmtrain
from test_run import coordinator, ends
from told import wait_for_peer_event
from waiting import PATIENCE, wait_for

from protomodels_cli.cli.json_document import document
from protomodels_cli.cli.json_formats import PRINTED
from protomodels_cli.cli.output import FORMAT

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|38|48|9[0-7])[;\dm]")


def joined(folder: Path, link: str, i: int) -> Started:
    return begin("join", link, "--name", f"n{i}", "--dir", folder / "run" / "peers" / str(i), cwd=folder)


def peer_folder(folder: Path, i: int) -> Path:
    [found] = (path for path in (folder / "run" / "peers" / str(i)).iterdir() if path.is_dir())
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a finished run: its directory is `run`."""
    folder = tmp_path_factory.mktemp("everyday")
    with coordinator(make_spec(name="home", stages=2, steps=6, snapshots={"interval": 3}), folder) as (leader, link):
        for process in (*[joined(folder, link, i) for i in range(2)], leader):
            code, said = ends(process)
            assert code == 0, said
    return folder


def printed(command: str, *arguments: object, cwd: Path) -> list[dict]:
    """What a command prints for programs, each object checked against its model."""
    done = pmtrain(command, *arguments, "--format", "json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    form = PRINTED[command]
    found = [json.loads(line) for line in done.stdout.splitlines()] if form.lines else [json.loads(done.stdout)]
    for one in found:
        assert one.pop("format") == FORMAT
        form.model.model_validate_json(json.dumps(one))
    return found


def test_the_document_says_what_is_printed():
    assert (ROOT / "docs" / "json.md").read_text() == document(), "run scripts/docs.sh"


def test_every_command_that_speaks_json_has_a_documented_form():
    import typer

    from protomodels_cli.cli.main import app

    commands = dict(typer.main.get_command(app).commands)
    groups = {name: one for name, one in commands.items() if hasattr(one, "commands")}
    for name, group in groups.items():
        commands |= {f"{name} {inner}": one for inner, one in group.commands.items()}
    speaks = {name for name, one in commands.items() if any("--format" in p.opts for p in one.params)}
    assert speaks == set(PRINTED)


def test_a_model_refuses_what_is_not_in_it():
    found = {"at": "", "level": "info", "logger": "", "text": ""}
    PRINTED["logs"].model.model_validate(found)
    for wrong in ({**found, "more": 1}, {**found, "level": "loud"}, {**found, "text": 1}, {"at": ""}):
        with pytest.raises(ValueError, match="validation error"):
            PRINTED["logs"].model.model_validate(wrong)


@pytest.mark.full
def test_what_a_finished_run_prints_for_programs(ran: Path):
    [status] = printed("status", "run", cwd=ran)
    assert (status["phase"], status["step"], status["name"]) == ("done", 6, "home")
    assert printed("peers", "run", cwd=ran) == [{"peers": []}]
    [last] = printed("top", "run", cwd=ran)
    assert last == status, "once: it is over"
    [found] = printed("runs", cwd=ran)
    [run] = [one for one in found["runs"] if one["path"] == "run"]
    assert (run["kind"], run["state"], run["step"], run["steps"]) == ("run", "done", 6, 6)
    assert run["bytes"] == sum(path.stat().st_size for path in (ran / "run").rglob("*") if path.is_file())
    assert abs(run["last_activity"] - time.time()) < 600
    rows = printed("events", "run", cwd=ran)
    assert [row["kind"] for row in rows][-1] == "run_done"
    assert {row["name"] for row in rows if row["kind"] == "peer_joined"} == {"n0", "n1"}
    lines = printed("logs", "run", cwd=ran)
    assert {line["level"] for line in lines} <= {"info", "warning"}
    assert lines[-1]["text"] == rows[-1]["text"]
    [peers_own] = [row for row in printed("events", peer_folder(ran, 0), cwd=ran) if row["kind"] == "joined"]
    assert peers_own["name"] == "n0"


def test_what_specs_print_for_programs(tmp_path: Path):
    (tmp_path / "bad.yaml").write_text("steps: -1\nmodel: {layers: 2, width: 30, heads: 4}\n")
    done = pmtrain("validate", *CONFIGS, tmp_path / "bad.yaml", "--format", "json")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found.pop("format") == FORMAT
    PRINTED["validate"].model.model_validate_json(json.dumps(found))
    assert [one["ok"] for one in found["files"]] == [True] * len(CONFIGS) + [False]
    [written] = printed("init", "a.yaml", "--yes", "--size", "10M", "--peers", "2", cwd=tmp_path)
    assert (written["file"], written["outlook"]["fits"]) == ("a.yaml", True)
    assert (tmp_path / "a.yaml").is_file()
    for config in [path for path in CONFIGS if path.stem in ("tiny", "dense")]:
        [plan] = printed("plan", config, "--speed", "10gflops", cwd=tmp_path)
        assert plan["recommended"]["codec"] in {choice["codec"] for choice in plan["choices"]}
        assert plan["audit"] is None, "it asks for none"
    audited = tmp_path / "audited.yaml"
    audited.write_text(next(path for path in CONFIGS if path.stem == "tiny").read_text() + "\naudit: 0.01\n")
    [plan] = printed("plan", audited, "--speed", "10gflops", cwd=tmp_path)
    assert plan["audit"]["audits_a_day"] > 0
    assert plan["audit"]["fetched_bytes"] == plan["audit"]["shown_bytes"] + plan["snapshots"]["part_bytes"]
    once = yaml_without_snapshots(tmp_path)
    [plan] = printed("plan", once, "--speed", "10gflops", cwd=tmp_path)
    assert plan["snapshots"]["interval_seconds"] is None


def yaml_without_snapshots(folder: Path) -> Path:
    file = folder / "once.yaml"
    file.write_text(json.dumps(make_spec(stages=2, snapshots={"interval": 0}).model_dump(mode="json")))
    return file


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (["--kind", "run_done"], {"run_done"}),
        (["--kind", "peer_*", "--kind", "run_done"], {"peer_joined", "run_done"}),
        (["--kind", "rolled_back"], set()),
        (["--last", "1"], {"run_done"}),
        (["--since", "1d", "--kind", "stages_*"], {"stages_assigned", "stages_linked"}),
        (["--since", "2200-01-01"], set()),
    ],
)
def test_events_are_filtered(ran: Path, options: list[str], kinds: set[str]):
    assert {row["kind"] for row in printed("events", "run", *options, cwd=ran)} == kinds


def test_events_and_logs_in_text_and_by_peer(ran: Path):
    words = pmtrain("events", "run", "--kind", "run_done", cwd=ran).stdout
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ run_done: .*\b6\b.*\n", words)
    own = pmtrain("logs", "run", "--peer", "n1", cwd=ran)
    assert own.stdout == (peer_folder(ran, 1) / "peer.log").read_text()
    assert (
        pmtrain("logs", peer_folder(ran, 1), "--last", 2, cwd=ran).stdout.splitlines() == own.stdout.splitlines()[-2:]
    )
    elsewhere = pmtrain("logs", "run", "--peer", "n7", cwd=ran)
    assert elsewhere.returncode == 3
    assert "n0, n1" in elsewhere.stderr


def test_a_peer_keeps_its_link_for_its_owner_alone(ran: Path):
    kept = peer_folder(ran, 0) / "link"
    assert kept.read_text() == (ran / "run" / "link").read_text()
    assert kept.stat().st_mode & 0o077 == 0
    token = kept.read_text().split("/")[3].partition("#")[0]
    shown = [
        pmtrain(*words, cwd=ran)
        for words in (["runs"], ["events", "run"], ["logs", "run"], ["status", "run"], ["top", peer_folder(ran, 0)])
    ]
    assert all(one.returncode == 0 and one.stdout for one in shown)
    assert not any(token in one.stdout + one.stderr for one in shown)


@contextlib.contextmanager
def terminal(*arguments: object, cwd: Path, **env: str) -> Iterator[tuple[Started, int]]:
    """A command at a terminal, of which we hold the other end."""
    ours, theirs = pty.openpty()
    changed = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **env}
    process = Started(COMMANDS, ["pmtrain", *map(str, arguments)], [theirs] * 3, cwd, changed)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(timeout=PATIENCE)
        os.close(ours)


def seen(ours: int, wanted: str, seconds: float = 60) -> str:
    """What the terminal shows, until this is in it or nothing more comes."""
    shown, until = "", time.monotonic() + seconds
    while wanted not in shown and time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
    return shown


@pytest.mark.full
def test_top_follows_a_run_through_its_coordinators_end_and_return(tmp_path: Path):
    """At a terminal and without one; q and signals leave; nothing of it changes the run."""
    spec = make_spec(name="home", stages=2, steps=100_000, eval={"interval": 0}, snapshots={"interval": 0})
    with coordinator(spec, tmp_path) as (leader, link):
        peers = [joined(tmp_path, link, i) for i in range(2)]
        wait_for_peer_event(tmp_path / "run" / "peers" / "0", "step_decided")
        assert printed("peers", peer_folder(tmp_path, 0), cwd=tmp_path)[0]["peers"][0]["state"] == "holding"
        with terminal("top", cwd=tmp_path) as (top, ours):  # the one run that is led here
            assert "running" in seen(ours, "n1")
            os.write(ours, b"x")
            assert top.poll() is None
            os.write(ours, b"q")
            shown = seen(ours, "never")
            assert top.wait(timeout=PATIENCE) == 0
        assert "\x1b[?1049l" in shown, "back to the screen as it was"
        assert "home: running" in shown.rpartition("\x1b[?1049l")[2], "with the last picture"
        with terminal("top", link, cwd=tmp_path, NO_COLOR="1") as (top, ours):
            plain = seen(ours, "n1")
            leader.kill()
            leader.wait(timeout=PATIENCE)
            plain += seen(ours, link.split("/")[2])
            top.send_signal(signal.SIGINT)
            plain += seen(ours, "never")
            assert top.wait(timeout=PATIENCE) == 0
        assert not COLOUR.search(plain)
        assert link.split("/")[2] in plain, "who does not answer is named"
        with begin("top", "run", "--format", "json", cwd=tmp_path) as watch:
            wait_for(lambda: b"trying" in os.read(watch.stdout.fileno(), 4096), "it says that nobody answers")
            again = begin("coordinator", "--resume", "--run-dir", "run", cwd=tmp_path)
            steps = [json.loads(next(line for line in watch.stdout if line[0] == "{"))["step"] for _ in range(2)]
            watch.send_signal(signal.SIGTERM)
            assert watch.wait(timeout=PATIENCE) == 0
        assert steps[0] <= steps[1]
        for process in (again, *peers):
            process.kill()
            process.communicate()


def test_what_is_followed_comes_at_once_and_ctrl_c_leaves(ran: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    for name in ("journal.sqlite", "private.json"):
        (tmp_path / "run" / name).touch()
    row = {"kind": "peer_lost", "text": "\x1b[31mred", "at": 1.0}
    with begin("events", "run", "--follow", cwd=tmp_path) as reader:
        with (tmp_path / "run" / "events.jsonl").open("a") as file:
            file.write(json.dumps(row)[:20])
            file.flush()
            time.sleep(0.5)  # half a line is no event yet
            file.write(json.dumps(row)[20:] + "\nnonsense\n" + json.dumps({**row, "kind": "late"}) + "\n")
        lines = [reader.stdout.readline(), reader.stdout.readline()]
        reader.send_signal(signal.SIGINT)
        assert reader.wait(timeout=PATIENCE) == 0
    assert [line.split()[1] for line in lines] == ["peer_lost:", "late:"]
    assert "\x1b" not in "".join(lines), "names are chosen by peers"


def test_nothing_heavy_is_imported_to_look_at_what_is_here(ran: Path):
    program = """
import sys
from protomodels_cli.cli.main import main
sys.argv = ["pmtrain", *sys.argv[1:]]
try:
    main()
finally:
    print(*({"torch", "grpc", "numpy", "rich", "yaml", "google.protobuf"} & set(sys.modules)), file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in (["runs"], ["events", "run"], ["logs", "run"], ["events", "run", "--format", "json"]):
        done = subprocess.run([sys.executable, "-c", program, *words], cwd=ran, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "\n"), words


def test_pipes_have_no_escapes_and_a_reader_that_leaves_is_no_error(ran: Path):
    for words in (["status", "run"], ["peers", "run"], ["events", "run"], ["runs"], ["top", "run"]):
        assert "\x1b" not in pmtrain(*words, cwd=ran).stdout
    command = f"{sys.executable} -m protomodels_cli events run --follow | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["timeout", "60", "bash", "-c", command], cwd=ran, env=env, capture_output=True, text=True)
    assert done.returncode == 0  # and not that of `timeout`: it does not wait for another event
    assert done.stdout.count("\n") == 1
    assert not done.stderr


@pytest.mark.parametrize("line", run_by("test_the_documented_commands_run"))
def test_the_documented_commands_run(line: str, ran: Path, tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(ran / "run")
    done = pmtrain(*shlex.split(line.replace("attic", "n0"))[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
