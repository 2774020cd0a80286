"""A user's mistake, on every command: one to three lines, a fix, the right exit code, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from starting import pmtrain

from protomodels_cli.cli.main import app

SPEC = "steps: 2\nmodel: {layers: 2, width: 32, heads: 2, context: 16}\n"
ASKS = ("status", "peers", "top", "events", "logs")
CONTROLS = ("pause", "resume", "stop")
MODELS = ("generate", "eval")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that are no run, a run of a newer version, runs with unreadable or half-written files."""
    home = tmp_path_factory.mktemp("mistakes")
    (home / "good.yaml").write_text(SPEC)
    (home / "empty").mkdir()
    (home / "file").write_text("x")
    (home / "text.yaml").write_bytes(b"\xff\xfe\x00 not text")
    (home / "half.yaml").write_text("steps: 2\nmodel: {layers: 2, wid")
    newer = {"format": 99, "token": "t", "owner": "o", "peers_key": "00", "base": ".", "spec": {}}
    for name, private in {"newer": json.dumps(newer), "half": json.dumps(newer)[:20], "damaged": "\0\0\0"}.items():
        (home / "runs" / name).mkdir(parents=True)
        (home / "runs" / name / "private.json").write_text(private)
        (home / "runs" / name / "journal.sqlite").write_bytes(b"SQLite format 3\0half a page")
        (home / "runs" / name / "link").write_text("pm://127.0.0.1:1/" if name == "half" else _link())
    return home


def _link() -> str:
    return f"pm://127.0.0.1:1/{'t' * 22}#{'f' * 43}\n"


def refused(home: Path, words: list[str], code: int) -> str:
    done = pmtrain(*words, cwd=home)
    assert done.returncode == code, (words, done.stderr)
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 3, done.stderr
    assert lines[-1].startswith("    fix:  ")
    assert not done.stdout
    return done.stderr


@pytest.mark.parametrize("command", [*ASKS, *CONTROLS, "export", *MODELS])
@pytest.mark.parametrize("place", ["nothing", "empty", "file"])
def test_what_is_no_run(home: Path, command: str, place: str):
    more = {"export": ["out"], "generate": ["--prompt", "x"]}.get(command, [])
    assert place in refused(home, [command, place, *more], 3)


@pytest.mark.parametrize("command", ["status", "peers", *CONTROLS, "export"])
@pytest.mark.parametrize("place", ["newer", "half", "damaged"])
def test_a_run_of_a_newer_version_and_files_that_are_not_whole(home: Path, command: str, place: str):
    more = ["out"] if command == "export" else []
    code = 2 if place == "half" and command in ("status", "peers") else 3  # its link ends too soon
    said = refused(home, [command, f"runs/{place}", *more], code)
    if place == "newer":
        assert "99" in said


def test_what_is_here_is_listed_whatever_its_state(home: Path):
    done = pmtrain("runs", "--format", "json", cwd=home)
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one["state"] for one in json.loads(done.stdout)["runs"] if one["path"].startswith("runs")}
    assert found == {"newer": "other_version", "half": "unreadable", "damaged": "unreadable"}


@pytest.mark.parametrize("command", ["validate", "plan", "reference", "coordinator"])
@pytest.mark.parametrize("file", ["nothing.yaml", "empty", "text.yaml", "half.yaml"])
def test_a_spec_that_cannot_be_read(home: Path, command: str, file: str):
    done = pmtrain(command, file, cwd=home)
    assert done.returncode == 2, done.stderr
    assert file in done.stderr
    assert "    fix:  " in done.stderr
    assert len(done.stderr.splitlines()) <= 3 + (command == "validate"), "validate counts them as well"


def test_two_runs_of_one_name_are_told_apart(home: Path):
    (home / "newer").mkdir(exist_ok=True)
    (home / "newer" / "private.json").touch()
    try:
        assert pmtrain("status", "newer", cwd=home / "runs").returncode == 3
        assert "newer" in refused(home / "empty", ["status", "newer"], 3)
    finally:
        (home / "newer" / "private.json").unlink()
        (home / "newer").rmdir()


def leaves(command: object, name: str = "") -> dict[str, object]:
    inner = getattr(command, "commands", {})
    if not inner:
        return {name: command}
    return {k: v for key, one in inner.items() for k, v in leaves(one, f"{name} {key}".strip()).items()}


COMMANDS = leaves(typer.main.get_command(app))


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_and_a_missing_argument(home: Path, command: str):
    said = refused(home, [*command.split(), "--nonsense"], 2)
    assert "--nonsense" in said
    assert f"pmtrain {command}" in said
    if any(p.required for p in COMMANDS[command].params):  # type: ignore[attr-defined]
        assert f"`pmtrain {command} --help`" in refused(home, command.split(), 2)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("statsu", "status"),
        ("event", "events"),
        ("lab frontir", "lab frontier"),
        ("loopback", "bench loopback"),
        ("qqqq", "--help"),
    ],
)
def test_an_unknown_command_names_the_nearest(home: Path, words: str, near: str):
    assert f"`pmtrain {near}`" in refused(home, words.split(), 2)
