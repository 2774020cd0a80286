"""What a run directory tells without a coordinator: from the run's own files, as far as they can be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_spec

from protomodels_cli.coordinator.history import Decided, beginning
from protomodels_cli.coordinator.journal import JournalError, create
from protomodels_cli.coordinator.run_dir import RunDir, open_run_dir, owner_secret, run_of
from protomodels_cli.coordinator.stopped import from_journal
from protomodels_cli.coordinator.summary import mend_metrics
from protomodels_cli.coordinator.trust import believe, last_in_metrics
from protomodels_cli.errors import UserError
from protomodels_cli.observe import metrics
from protomodels_cli.observe.metrics import JsonLines

BAD_LINES = [b"\0" * 300 + b"\n", b"[1]\n", b"{}\n", b'{"event": "step"}\n', b"\xff\xfe\n", b'{"event": "st\n']


def a_run(folder: Path, step: int) -> RunDir:
    """The directory of a run that was stopped after this step."""
    run_dir = open_run_dir(folder, make_spec(stages=2, steps=9, data={"cache_dir": "cache"}), folder.parent)
    run_dir.lock.close()
    decided = Decided(step, True, 1e-3, 1.0, 3.0, 1.0, 1, 0, 0)
    create(folder / "journal.sqlite", run_dir.identity, replace(beginning(""), step=step, decision=decided))
    return run_dir


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_in_the_metrics_is_passed_over(tmp_path: Path, bad: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "LONGEST_LINE", 100)  # so that zeros fill all that is looked at first
    run_dir = a_run(tmp_path / "run", 2)
    path = run_dir.path / "metrics.jsonl"
    rows = [{"event": "step", "lineage": 1, "step": step, "seconds": 1.0, "at": 10.0 * step} for step in (1, 2)]
    first, last = (json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(bad + first + bad + last + bad)
    assert last_in_metrics(run_dir.path) == (1, 2)
    history, _ = believe(run_dir.path, run_dir.identity)
    with JsonLines(tmp_path / "other") as other:
        assert mend_metrics(path, other, history, run_dir.spec) == 9.0
    assert (tmp_path / "other").read_bytes() == b"", "the row of step 2 is there"
    path.write_bytes(path.read_bytes() + last.replace(b'"step": 2', b'"step": 3') + bad)
    with pytest.raises(JournalError) as error:
        believe(run_dir.path, run_dir.identity)
    assert error.value.kind == "journal_outdated"


@pytest.mark.parametrize("edit", ["none", "edited", "gone"])
def test_a_stopped_run_is_described_by_what_it_began_with(tmp_path: Path, edit: str):
    run_dir = a_run(tmp_path / "run", 2)
    yaml = run_dir.path / "run.yaml"
    if edit == "edited":
        yaml.write_text(yaml.read_text().replace("steps: 9", "steps: 90"))
    elif edit == "gone":
        yaml.unlink()
    status = from_journal(run_dir.path)
    assert (status.step, status.steps, status.spec_sha256) == (2, 9, run_dir.spec.sha256())


@pytest.mark.parametrize("name", ["format", "token", "owner", "peers_key", "base", "spec"])
def test_private_things_that_miss_a_field_are_refused(tmp_path: Path, name: str):
    path = a_run(tmp_path / "run", 2).path
    private = json.loads((path / "private.json").read_text())
    (path / "private.json").write_text(json.dumps({k: v for k, v in private.items() if k != name}))
    for read in (owner_secret, run_of, lambda path: open_run_dir(path, None, Path())):
        with pytest.raises(UserError) as error:
            read(path)
        assert error.value.kind == ("run_dir_other_format" if name == "format" else "run_dir_damaged")
