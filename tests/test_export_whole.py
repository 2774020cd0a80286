"""An export appears whole or not at all, whatever ends it: signals, a failing disk, somebody else at the same place."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from exporting import save_run, save_snapshot
from typer.testing import CliRunner

from protomodels_cli.cli.main import app
from protomodels_cli.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, UserError
from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import export


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    save_run(folder, 1)
    return folder


@pytest.fixture
def signals():
    """As they were before, after a command has set its own. Until then SIGHUP is not ignored, whoever started us."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def refusal(run: Path, out: Path, **options) -> UserError:
    with pytest.raises(UserError) as refused, open_source(run) as source:
        export(source, out, **options)
    assert refused.value.exit_code == EXIT_OUTSIDE
    assert len(str(refused.value).splitlines()) == 2
    return refused.value


@pytest.mark.parametrize("renamed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_last_moment(run, tmp_path, monkeypatch, signals, number, renamed):
    rename = os.rename

    def signalled(*paths: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        if renamed:
            rename(*paths)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(os, "rename", signalled)
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "new" / "out")])
    assert done.exit_code == EXIT_INTERRUPTED
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_nohup_ignores_is_ignored(run, tmp_path, signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_rename_that_cannot_be_made_durable_is_undone(run, tmp_path, monkeypatch):
    fsync, out = os.fsync, tmp_path / "new" / "out"

    def failing(handle: int) -> None:
        if out.exists():  # only the folder that it was renamed into is left to sync
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    assert refusal(run, out).kind == "disk_failed"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("made", ["folder", "file", "link"])
def test_an_out_that_appears_meanwhile(run, tmp_path, made):
    out = tmp_path / "out"

    def meanwhile(done: int, total: int) -> None:
        if done == total and made == "folder":
            out.mkdir()
            (out / "theirs").write_text("")
        elif done == total:
            out.write_text("theirs") if made == "file" else out.symlink_to(tmp_path)

    assert refusal(run, out, tell=meanwhile).kind == "out_exists"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_replaced(run, tmp_path, monkeypatch):
    """Known before the work, not after it."""
    monkeypatch.chdir(tmp_path)
    assert refusal(run, Path()).kind == "out_fixed"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_export_has_cleared_away_is_made_anew(run, tmp_path, monkeypatch):
    """Between its making and its lock it looks like one that a kill has left."""
    flock, cleared = fcntl.flock, []

    def late(file, how: int) -> None:
        if not cleared:
            cleared.extend(tmp_path.glob(".out.partial-*"))
            shutil.rmtree(cleared[0])
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with open_source(run) as source:
        export(source, tmp_path / "out")
    assert len(cleared) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "lock").exists()


def test_the_card_of_what_a_run_began_with(tmp_path):
    """The snapshot that a checkpoint is cut into is older than all lineages; its evaluation is the first one's."""
    r = save_run(tmp_path / "run", 0)
    save_snapshot(tmp_path / "run", r, lineage=0)
    rows = [
        {"event": "eval", "lineage": 1, "step": 0, "loss": 5.1234},
        {"event": "step", "lineage": 1, "step": 1, "loss": 5.4321},
        {"event": "eval", "lineage": 1, "step": 1, "loss": 8.8888},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open_source(tmp_path / "run") as source:
        assert (source.step, source.facts.eval_loss, source.facts.eval_step) == (0, 5.1234, 0)
        assert source.facts.loss is None
