"""A start that fails or is interrupted leaves nothing; what the owner asks of a run says how the run is."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import make_spec
from starting import begin_afresh, pmtrain
from test_run import coordinator, wait_for_line
from tiers import first
from waiting import PATIENCE

from protomodels_cli.cli import amounts
from protomodels_cli.cli.coordinator import _sample
from protomodels_cli.cli.devices import device_named
from protomodels_cli.errors import OptionError
from protomodels_cli.observe.page.address import Where

LEAD = ("coordinator", "run.yaml", "--host", "127.0.0.1")


def written(folder: Path, **sections) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump(make_spec(**sections).model_dump(mode="json")))
    return folder


def test_a_port_that_is_taken_is_found_before_the_data_and_nothing_is_left(tmp_path: Path):
    written(tmp_path, stages=1, steps=2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for option in (["--port", port], ["--port", "0", "--page", f"127.0.0.1:{port}"]):
            done = pmtrain(*LEAD, *option, cwd=tmp_path)
            assert done.returncode == 3
            assert str(port) in done.stderr
            assert not done.stdout, "no data were prepared"
            assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_the_run_that_has_the_port_is_named(tmp_path: Path):
    with coordinator(make_spec(name="first", stages=1, steps=2), tmp_path) as (leader, link):
        port = re.findall(r":(\d+)/", link)[0]
        written(tmp_path, name="second", stages=1, steps=2)
        done = pmtrain(*LEAD, "--port", port, cwd=tmp_path)
        assert done.returncode == 3
        assert "stop run" in done.stderr
        assert not (tmp_path / "runs").exists()
        leader.kill()


@pytest.fixture
def heeds_hangups() -> Iterator[None]:
    """Programs that the test starts, though the tests themselves may have been started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "folder"),
    first(1, [(signal.SIGTERM, None), (signal.SIGINT, None), (signal.SIGTERM, "there"), (signal.SIGHUP, "new/one")]),
)
def test_a_start_that_is_interrupted_leaves_nothing(
    tmp_path: Path, number: signal.Signals, folder: str | None, heeds_hangups: None
):
    """While data are prepared, in a process of their own: Python's tracker of semaphores says nothing of it either."""
    text = {"source": "text", "files": ["text.txt"], "cache_dir": "../cache"}
    written(tmp_path, stages=1, steps=2, data=text, tokenizer={"kind": "bpe", "vocab_size": 8000})
    (tmp_path / "text.txt").write_text("".join(f"{i * i} and {i} are {i * i + i}\n" for i in range(400_000)))
    if folder == "there":
        (tmp_path / folder).mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    where = [] if folder is None else ["--dir", folder]
    with begin_afresh(*LEAD, "--port", 0, "--no-page", *where, cwd=tmp_path) as process:
        wait_for_line(process, "preparing")
        until = time.monotonic() + PATIENCE
        while not list((tmp_path.parent / "cache").glob(".making-*")) and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(number)
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted" in said
    assert "resource_tracker" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    if folder == "there":
        assert not list((tmp_path / folder).iterdir())


@pytest.mark.full
def test_an_owner_is_told_how_the_run_is(tmp_path: Path):
    """Twice the same is no error, and of a run that nobody leads it is said that nobody does."""

    def asked(*words: str, code: int = 0) -> str:
        done = pmtrain(*words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    with coordinator(make_spec(stages=1, steps=2), tmp_path) as (leader, _):
        assert "already" not in asked("pause", "run")
        assert "already" in asked("pause", "run")
        assert "resumed" in asked("resume", "run")
        assert "resumed" not in asked("resume", "run")
        assert "stop run" in asked("rm", "run", "--yes", code=3)
        asked("stop", "run")
        leader.communicate(timeout=PATIENCE)
        assert leader.returncode == 0
    for command in ("pause", "resume", "stop"):
        assert "--resume --dir run" in asked(command, "run", code=3)
    assert (tmp_path / "run").exists()
    asked("rm", "run", code=2)
    asked("rm", "run", "--yes")
    assert not (tmp_path / "run").exists()


def test_the_prompt_of_the_page_is_remembered(tmp_path: Path):
    where = Where(None, "127.0.0.1", 1, False)  # type: ignore[arg-type]
    assert _sample(None, where, tmp_path) is None
    assert _sample("The ", where, tmp_path) == "The "
    assert _sample(None, where, tmp_path) == "The "
    assert _sample(None, None, tmp_path) is None, "there is no page"
    assert _sample("", where, tmp_path) is None
    assert _sample(None, where, tmp_path) is None, "it was taken back"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("auto", "auto"),
        ("CPU", "cpu"),
        ("toaster", None),
        ("cuda:x", None),
        ("meta", None),
        ("", None),
        ("cpu:1", None),
    ],
)
def test_devices_have_one_vocabulary(text: str, name: str | None):
    if name is None:
        with pytest.raises(OptionError):
            device_named(text)
    else:
        assert device_named(text) == name


def test_gpu_is_cuda(monkeypatch: pytest.MonkeyPatch):
    """Where torch is built for it; the version decides, since torch itself is not imported for this."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    found = [device_named(text) for text in ("gpu", "cuda", "GPU:1", "cuda:1")]
    assert found == ["cuda", "cuda", "cuda:1", "cuda:1"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    with pytest.raises(OptionError) as error:
        device_named("gpu")
    assert error.value.kind == "device_cpu_torch"


@pytest.mark.parametrize(
    ("parse", "text", "value", "old"),
    [
        (amounts.memory_of, "24gib", 24 << 30, False),
        (amounts.memory_of, "512mib", 512 << 20, False),
        (amounts.memory_of, "0.5", 512 << 20, True),
        (lambda text: amounts.seconds_of(text, "--x"), "90min", 5400, False),
        (lambda text: amounts.seconds_of(text, "--x"), "24", 86_400, True),
        (lambda text: amounts.bits_of(text, "--x"), "20mbit", 20e6, False),
        (lambda text: amounts.bits_of(text, "--x"), "5", 5e6, True),
        (lambda text: amounts.bits_of(text, "--x"), "none", 0, False),
    ],
)
def test_amounts_have_units_and_bare_numbers_a_hint(capsys, parse, text: str, value: float, old: bool):
    assert parse(text) == value
    assert bool(capsys.readouterr().err) == old


@pytest.mark.parametrize("text", ["lots", "24gb", "0", "1kib", "-3gib", "nan", "inf"])
def test_no_memory_is_refused(text: str):
    with pytest.raises(OptionError):
        amounts.memory_of(text)
