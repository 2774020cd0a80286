"""A journal that was damaged, lost or mixed up is refused with a sentence; every snapshot stays, to make a new one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import corpus_of, make_spec
from damages import DAMAGES, KINDS, whole_file, without_log
from marks import injected
from pool import Pool
from starting import begin, pmtrain
from test_pipeline import reference_of
from test_run import ends, wait_for_line
from tiers import first
from told import events

from protomodels_cli.coordinator.coordinator import Coordinator
from protomodels_cli.coordinator.history import Began, Decided, History
from protomodels_cli.coordinator.journal import Journal, JournalError
from protomodels_cli.coordinator.run_dir import open_run_dir, run_of
from protomodels_cli.coordinator.stopped import from_journal
from protomodels_cli.coordinator.trust import believe
from protomodels_cli.errors import EXIT_OUTSIDE
from protomodels_cli.spec import RunSpec

KILOBYTE = 1024


@dataclass(frozen=True)
class Run:
    """The directory of a run that was killed with a log beside its journal; and of the same one two snapshots ago."""

    path: Path
    earlier: Path
    spec: RunSpec
    history: History


def a_spec(**changes: object) -> RunSpec:
    update = {"interval": 4, "window": 2, "delay": 1}
    limits = {"lease_seconds": 2.0}  # how long a resumed run waits for those that were killed with it
    return make_spec(
        stages=2, steps=12, subspace={"update": update}, snapshots={"interval": 3}, limits=limits, **changes
    )


def kill_at(step: int) -> dict[str, object]:
    """After the decision on this step is in the journal, and before it is in the metrics."""
    return {"kind": "fail_at", "phase": "commit", "step": step}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Real processes leave it behind, by kill -9."""
    folder = tmp_path_factory.mktemp("killed")
    pool, spec = Pool(folder, peers=2), a_spec()
    try:
        slow = {"fault": {"kind": "slow", "seconds": 0.05}}  # so that a snapshot is complete before the next one begins
        run_dir = pool.start(spec, [slow, slow], fault=kill_at(5))
        for step, copy in ((5, "earlier"), (11, "run")):
            with contextlib.suppress(AssertionError):
                pool.coordinator.result()
            injected(pool.coordinator.marks, "fail_at", step=step)
            shutil.copytree(run_dir, folder / copy)
            if copy == "earlier":
                pool.coordinator.marks = folder / "marks-again"  # the same fault happens a second time
                pool.coordinator.start(
                    kind="coordinator", spec=spec.model_dump(mode="json"), run_dir=str(run_dir), fault=kill_at(11)
                )
    finally:
        pool.close()
    assert (folder / "run" / "journal.sqlite-wal").stat().st_size > KILOBYTE
    history, _ = believe(folder / "run", run_of(folder / "run")[1])
    assert (history.step, history.newest.step) == (11, 9)
    assert (folder / "run" / "snapshots" / "0001-00000009" / "snapshot.json").exists()
    return Run(folder / "run", folder / "earlier", spec, history)


def snapshots(run_dir: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run_dir)): p.read_bytes() for p in sorted((run_dir / "snapshots").glob("[0-9]*/*"))}


def refused(run_dir: Path) -> JournalError:
    """How a coordinator that is to resume the run refuses; `status` says the same."""
    folder = open_run_dir(run_dir, None, Path())
    with contextlib.closing(folder.lock):

        async def lead() -> int:
            coordinator = Coordinator(corpus_of(folder.spec), folder, lambda text: None)
            return await coordinator.run("127.0.0.1", "127.0.0.1", 0, lambda link: pytest.fail("it opened its door"))

        with pytest.raises(JournalError) as said:
            asyncio.run(lead())
    assert said.value.exit_code == EXIT_OUTSIDE
    assert f"--rebuild --dir {run_dir}" in str(said.value)
    with pytest.raises(JournalError) as seen:
        from_journal(run_dir)
    assert str(seen.value) == str(said.value)
    return said.value


@pytest.fixture
def run_dir(killed: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed.path, tmp_path / "run"))


@pytest.mark.full
def test_a_journal_that_was_only_killed_is_believed(killed: Run, run_dir: Path):
    assert believe(run_dir, run_of(run_dir)[1])[0] == killed.history
    (run_dir / "journal.sqlite-shm").unlink()  # which is made again from the log
    assert believe(run_dir, run_of(run_dir)[1])[0] == killed.history
    whole_file(run_dir)
    without_log(run_dir)
    journal = Journal(run_dir / "journal.sqlite", run_of(run_dir)[1])
    assert journal.history == killed.history
    journal.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_and_every_snapshot_stays(run_dir: Path, damage: str):
    before = snapshots(run_dir)
    assert len({name.split("/")[1] for name in before}) == 2
    DAMAGES[damage](run_dir)
    assert refused(run_dir).kind == f"journal_{KINDS.get(damage, 'damaged')}"
    assert snapshots(run_dir) == before


def test_a_journal_cut_at_any_kilobyte_is_refused(run_dir: Path):
    before, file = snapshots(run_dir), whole_file(run_dir)
    whole = file.read_bytes()
    for size in range(0, len(whole), KILOBYTE):
        without_log(run_dir)
        file.write_bytes(whole[:size])
        with pytest.raises(JournalError):
            believe(run_dir, run_of(run_dir)[1])
    refused(run_dir)
    assert snapshots(run_dir) == before


def test_bytes_written_over_are_noticed_wherever_they_count(killed: Run, run_dir: Path):
    """Some fall where a database keeps nothing: then all that was decided is there."""
    draw, file, noticed = random.Random(12), whole_file(run_dir), 0
    whole = file.read_bytes()
    for _ in range(400):
        without_log(run_dir)
        at, size = draw.randrange(len(whole)), draw.choice((1, 16, 512))
        file.write_bytes((whole[:at] + draw.randbytes(size) + whole[at + size :])[: len(whole)])
        try:
            assert believe(run_dir, run_of(run_dir)[1])[0] == killed.history
        except JournalError:
            noticed += 1
    assert noticed > 50


def test_a_log_that_was_cut_is_noticed_as_far_as_it_matters(killed: Run, run_dir: Path):
    """All that SQLite can say of it is that some writes never came; what lies beside the journal knows better. Without
    its very last decision it is as if the kill had come before that."""
    log, noticed = (run_dir / "journal.sqlite-wal").read_bytes(), 0
    for size in range(0, len(log), 8 * KILOBYTE):
        (run_dir / "journal.sqlite-shm").unlink(missing_ok=True)
        (run_dir / "journal.sqlite-wal").write_bytes(log[:size])
        try:
            assert believe(run_dir, run_of(run_dir)[1])[0].step >= killed.history.step - 1
        except JournalError:
            noticed += 1
    assert noticed > size // KILOBYTE // 16


def test_an_older_copy_is_refused(killed: Run, run_dir: Path):
    before = snapshots(run_dir)
    without_log(run_dir)
    for file in killed.earlier.glob("journal.sqlite*"):
        shutil.copy(file, run_dir)
    assert refused(run_dir).kind == "journal_outdated"
    (run_dir / "metrics.jsonl").unlink()  # nor by the snapshots alone
    assert "0001-00000009" in str(refused(run_dir))
    assert snapshots(run_dir) == before


def test_an_older_copy_that_had_begun_the_newest_snapshot_is_refused(run_dir: Path):
    """It would take a complete snapshot for one to be handed in again."""
    identity = run_of(run_dir)[1]
    history = believe(run_dir, identity)[0]
    [folder] = (run_dir / "snapshots").glob("*-00000009")
    journal = Journal(run_dir / "journal.sqlite", identity)
    journal.append([Decided(12, True, 1e-3, 1.0, 3.0, 1.0, history.generation, 0, 0), Began(12)], 1.0)
    journal.close()
    shutil.copytree(folder, folder.with_name("0001-00000012"))
    with pytest.raises(JournalError, match="0001-00000012") as error:
        believe(run_dir, identity)
    assert error.value.kind == "journal_outdated"


def test_another_runs_journal_is_refused(run_dir: Path, tmp_path: Path):
    other = open_run_dir(tmp_path / "other", a_spec(), tmp_path)
    other.lock.close()
    before = snapshots(run_dir)
    shutil.rmtree(run_dir / "ca")
    shutil.copytree(tmp_path / "other" / "ca", run_dir / "ca")
    assert refused(run_dir).kind == "journal_other_run"
    assert snapshots(run_dir) == before


def test_a_run_directory_of_the_old_format_is_refused_by_every_command(run_dir: Path):
    private = json.loads((run_dir / "private.json").read_text())
    del private["format"]
    (run_dir / "private.json").write_text(json.dumps(private))
    for arguments in (["coordinator", "--resume", "--run-dir", run_dir], ["status", run_dir]):
        done = pmtrain(*arguments, cwd=run_dir.parent)
        assert done.returncode == EXIT_OUTSIDE, done.stderr
        assert str(run_dir) in done.stderr
        assert "Traceback" not in done.stderr


# With real processes


def rebuilt(run_dir: Path, spec: RunSpec, *, peers: int = 2) -> dict[str, Any]:
    """What the coordinator tells of the rebuilding, after the run's end; checks its weights."""
    port = ("--host", "127.0.0.1", "--port", 0)
    leader = begin("coordinator", "--rebuild", "--run-dir", run_dir, *port, cwd=run_dir.parent)
    others = []
    try:
        link = wait_for_line(leader, r"pmtrain join '(pm://\S+)'")
        others = [begin("join", link, "--dir", run_dir / f"p{i}", cwd=run_dir.parent) for i in range(peers)]
        code, said = ends(leader)
        assert code == 0, said
        for other in others:
            assert ends(other)[0] == 0
    finally:
        for process in (leader, *others):
            process.kill()
            process.wait()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == reference_of(spec)[0].weights_sha256()
    [_], [told] = events(run_dir, "journal_refused"), events(run_dir, "journal_rebuilt")
    return told


@pytest.mark.parametrize("damage", first(1, ["random-behind-header", "empty"]))
def test_a_rebuilt_run_ends_with_the_undisturbed_weights(killed: Run, run_dir: Path, damage: str):
    DAMAGES[damage](run_dir)
    for arguments in (["coordinator", "--resume", "--run-dir", run_dir], ["status", run_dir]):
        done = pmtrain(*arguments, cwd=run_dir.parent)
        assert done.returncode == EXIT_OUTSIDE, done.stderr
        assert f"--rebuild --dir {run_dir}" in done.stderr
        assert "Traceback" not in done.stderr
    broken = (run_dir / "journal.sqlite").read_bytes()
    newest = run_dir / "snapshots" / "0001-00000009" / "stage-1.safetensors"
    if damage != "empty":  # and the newest snapshot, too
        newest.write_bytes(newest.read_bytes()[:-1])
    told, [aside] = rebuilt(run_dir, killed.spec), run_dir.glob("set-aside-*")
    assert (told["step"], told["lost"], told["aside"]) == (*((9, 1) if damage == "empty" else (6, 4)), str(aside))
    assert bool(events(run_dir, "snapshot_set_aside", snapshot="0001-00000009")) == (damage != "empty")
    assert (aside / "journal.sqlite").read_bytes() == broken
    assert (aside / "snapshots" / "0001-00000009").exists() == (damage != "empty")
    history, _ = believe(run_dir, run_of(run_dir)[1])
    assert (history.over, history.rollbacks, history.lineage > 1000) == (True, 1, True)
    done = pmtrain("coordinator", "--rebuild", "--run-dir", run_dir, cwd=run_dir.parent)
    assert done.returncode == EXIT_OUTSIDE, done.stderr
    assert f"--resume --dir {run_dir}" in done.stderr, "there is nothing to rebuild"


@pytest.mark.full
def test_without_any_snapshot_a_rebuilt_run_begins_again(killed: Run, run_dir: Path):
    DAMAGES["empty"](run_dir)
    shutil.rmtree(run_dir / "snapshots")
    assert rebuilt(run_dir, killed.spec).items() >= {"step": 0, "lost": 10}.items()


@pytest.mark.full
def test_peers_that_are_ahead_of_the_snapshot_are_not_believed(tmp_path: Path):
    """They wait with the stages of a later step in memory while the journal is made anew."""
    pool, spec = Pool(tmp_path, peers=2), a_spec()
    try:
        run_dir = pool.start(spec, [{}, {}], fault=kill_at(8))
        with contextlib.suppress(AssertionError):
            pool.coordinator.result()
        injected(pool.coordinator.marks, "fail_at", step=8)
        DAMAGES["zeroed"](run_dir)
        leader = begin("coordinator", "--rebuild", "--run-dir", run_dir, "--host", "127.0.0.1", cwd=tmp_path)
        try:
            code, said = ends(leader)
        finally:
            leader.kill()
            leader.wait()
        assert code == 0, said
        assert [peer.result()["exit"] for peer in pool.peers] == [0, 0]
    finally:
        pool.close()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == reference_of(spec)[0].weights_sha256()
    assert summary["steps_redone"] > 0
    assert summary["lineage"] > 1000


def test_a_full_disk_at_resume_is_one_sentence(run_dir: Path):
    before = snapshots(run_dir)
    command = [sys.executable, "-m", "protomodels_cli", "coordinator", "--resume", "--run-dir", run_dir]
    no_room = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"]  # not in a fork of this process, which gRPC's threads are in
    done = subprocess.run([*no_room, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == EXIT_OUTSIDE, done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert "--rebuild" not in done.stderr, "nothing is wrong with the journal"
    assert snapshots(run_dir) == before
