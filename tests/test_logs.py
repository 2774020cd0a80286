"""The log: where it goes, what it has, and what it never has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomodels_cli.coordinator import notices
from protomodels_cli.coordinator.reasons import NoHeartbeat
from protomodels_cli.coordinator.sentences import sentence
from protomodels_cli.observe import logs
from protomodels_cli.observe.metrics import JsonLines
from protomodels_cli.observe.notices import Teller

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) [a-z.]+: ")


@pytest.fixture(autouse=True)
def _afterwards() -> Iterator[None]:
    yield
    logs.begin()


def test_a_line_has_its_time_in_utc_its_level_and_its_logger(tmp_path: Path):
    logs.begin()
    logs.to_file(tmp_path / "x.log")
    for logger in (logs.COORDINATOR, logs.WORKER, logs.WIRE, logs.SNAPSHOTS):
        logger.warning("hello %d", 7)
    lines = (tmp_path / "x.log").read_text().splitlines()
    assert all(LINE.match(line) for line in lines)
    assert [line.split()[2] for line in lines] == ["coordinator:", "worker:", "wire:", "snapshots:"]


@pytest.mark.parametrize(
    ("level", "verbose", "in_file", "on_terminal"),
    [
        (None, False, "iwe", ""),
        (None, True, "diwe", "diwe"),
        ("debug", False, "diwe", ""),
        ("warning", False, "we", ""),
        ("error", True, "e", "e"),
    ],
)
def test_levels(tmp_path: Path, capfd, level: str | None, verbose: bool, in_file: str, on_terminal: str):
    logs.begin(level, verbose)
    logs.to_file(tmp_path / "x.log")
    for name in ("debug", "info", "warning", "error"):
        logs.COORDINATOR.log(logs.LEVELS[name], name)
    out, err = capfd.readouterr()
    assert "".join(line.split()[-1][0] for line in (tmp_path / "x.log").read_text().splitlines()) == in_file
    assert "".join(line.split()[-1][0] for line in err.splitlines()) == on_terminal
    assert not out


def test_a_notice_goes_to_events_to_the_log_and_once_to_the_terminal(tmp_path: Path, capfd):
    logs.begin(verbose=True)
    logs.to_file(tmp_path / "x.log")
    said: list[str] = []
    with JsonLines(tmp_path / "events.jsonl") as rows:
        tell = Teller(sentence, logs.COORDINATOR, said.append, rows)
        tell(notices.PeerLost("p1", "desk", 2, NoHeartbeat(5.0)))
        tell(notices.SnapshotComplete(3))
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert {k: v for k, v in first.items() if k != "at"} == {
        "kind": "peer_lost",
        "peer": "p1",
        "name": "desk",
        "stage": 2,
        "reason": {"seconds": 5.0, "kind": "no_heartbeat"},
        "text": said[0],
    }
    assert second["kind"] == "snapshot_complete"
    assert len(said) == 1, "the terminal has the other from the log alone"
    logged = (tmp_path / "x.log").read_text()
    assert said[0] in logged
    assert second["text"] in logged
    assert capfd.readouterr().err.count("\n") == 1, "with --verbose nothing is shown twice"


def test_secrets_reach_no_log_not_even_in_a_traceback(tmp_path: Path, capfd):
    logs.begin(verbose=True)
    logs.to_file(tmp_path / "x.log")
    logs.hide("s3cr3t-t0k3n", "")
    logs.WIRE.error("joined with %s", "s3cr3t-t0k3n")
    try:
        raise RuntimeError("pm://host:1/s3cr3t-t0k3n#print")
    except RuntimeError as e:
        logs.bug(e)
    text = (tmp_path / "x.log").read_text()
    assert "s3cr3t" not in text + capfd.readouterr().err
    assert text.count("[hidden]") >= 2, "in the message and in the traceback"
    assert "Traceback" in text


def test_the_file_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "FILE_BYTES", 1000)
    logs.begin()
    logs.to_file(tmp_path / "x.log")
    logs.to_file(tmp_path / "x.log")  # once is enough
    for i in range(200):
        logs.WORKER.info("line %04d", i)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["x.log", *(f"x.log.{i}" for i in range(1, logs.FILES))]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert (tmp_path / "x.log").read_text().count("line 0199") == 1


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, capfd):
    logs.begin()
    logs.to_file(tmp_path / "no such folder" / "x.log")
    logs.COORDINATOR.info("still here")
    assert capfd.readouterr().err == ""


def test_a_task_that_failed_unseen_is_in_the_log_and_on_the_terminal_as_before(tmp_path: Path, capfd):
    logs.begin()
    logs.to_file(tmp_path / "x.log")

    async def main() -> None:
        async def fails() -> None:
            raise RuntimeError("unseen")

        task = asyncio.create_task(fails())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        assert task.done()

    asyncio.run(main())
    assert "unseen" in (tmp_path / "x.log").read_text()
    assert "unseen" in capfd.readouterr().err


def test_others_keep_their_own_loggers(tmp_path: Path):
    logs.begin(verbose=True)
    logs.to_file(tmp_path / "x.log")
    logging.getLogger("grpc._cython.cygrpc").warning("noise")
    assert "noise" not in (tmp_path / "x.log").read_text()
