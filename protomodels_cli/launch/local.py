"""A run on this machine, as real processes, all on one host or each on an emulated one: for demo and benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

import yaml

from protomodels_cli.errors import EXIT_STOPPED, UserError
from protomodels_cli.observe.metrics import rows_from_last
from protomodels_cli.quantities import duration
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.join_link import JoinLink

START_SECONDS = 300.0  # the first time, the text is tokenised
LEAVE_SECONDS = 8.0

Process = subprocess.Popen  # of bytes


class Machines(Protocol):
    """Hosts by number, the coordinator's first."""

    def address(self, host: int, /) -> str: ...

    def command(self, host: int, argv: Sequence[str], /) -> list[str]: ...


@dataclass
class LocalRun:
    """A coordinator's process and its peers', by name."""

    folder: Path
    link: JoinLink
    coordinator: Process[bytes]
    commands: dict[str, Callable[[], Process[bytes]]]  # by which each of them is started
    peers: dict[str, Process[bytes]] = field(default_factory=dict)

    def start_again(self, who: str) -> None:
        """Start a process once more, with the same command as before."""
        process = self.commands[who]()
        if who == "coordinator":
            self.coordinator = process
        else:
            self.peers[who] = process

    def failure(self, who: str = "coordinator") -> UserError:
        """Why a process ended, as an error of ours."""
        process = self.coordinator if who == "coordinator" else self.peers[who]
        return _failure(self.folder, who, process.returncode)


def _failure(folder: Path, who: str, code: int) -> UserError:
    log = folder / "logs" / f"{who}.log"
    error = process_failed(who, code, log, _why_ended(folder, who))
    error.exit_code = code if code > 0 else EXIT_STOPPED
    return error


def process_failed(who: str, code: int, log: Path, why: str | None = None) -> UserError:
    """Where nothing says why, with the last lines of the log as they are."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    why = why or " / ".join(said[-2:])
    what = f"{who} ended with exit code {code}" + (f": {why}" if why else "")
    return UserError(what, f"look into {log}", "process_failed")


def _why_ended(folder: Path, who: str) -> str | None:
    """As the process itself put it down last; None where it ended before it had a folder, or without knowing why."""
    files = [folder / "events.jsonl"] if who == "coordinator" else _peer_folder(folder, who).glob("*/events*.jsonl")
    rows = [row for path in files if path.exists() and (row := next(rows_from_last(path), None)) is not None]
    newest = max(rows, key=lambda row: float(row["at"]), default={"kind": ""})
    return str(newest["detail"]) if newest["kind"] == "ended" else None


def _peer_folder(folder: Path, name: str) -> Path:
    return folder / "peers" / name.removeprefix("peer-")


@contextmanager
def local_run(
    spec: RunSpec,
    folder: Path,
    device: str | Sequence[str] = "cpu",
    join_options: Sequence[str] = (),
    through: Callable[[int, JoinLink], JoinLink] = lambda peer, link: link,
    core: int | None = None,
    hosts: Machines | None = None,
    speak: bool = False,
    spares: int = 0,
    options: Sequence[str] = (),
    module: str = "protomodels_cli",
    lead_options: Sequence[str] = (),
) -> Iterator[LocalRun]:
    """Start a coordinator and a peer for each stage; end them all when the block ends.

    Peers are dealt out over `device` where those are several. `through` may lead a peer's connections to the
    coordinator somewhere else; `core` pins every process to one core. With `hosts` the coordinator is on the first and
    peers are on the others. `speak`: the coordinator's words are shown. `options` go to all of them, `join_options` to
    peers, `lead_options` to the coordinator. `module`: the program that peers run."""

    def run(
        host: int,
        name: str,
        arguments: Sequence[str],
        speak: bool = False,
        module: str = "protomodels_cli",
        link: str = "",
    ) -> Process[bytes]:
        wrap = (lambda argv: hosts.command(host, argv)) if hosts else list
        return start(folder, name, arguments, core, wrap, speak, module, link)

    devices = [device] if isinstance(device, str) else device
    coordinate = partial(run, 0, "coordinator", speak=speak)
    public, words = hosts.address(0) if hosts else "127.0.0.1", [*options, *lead_options]
    with local_coordinator(spec, folder, coordinate, public, words) as running:
        for i in range(1, peers_of(spec) + spares + 1):
            name = f"peer-{i}"
            on = devices[(i - 1) % len(devices)]
            arguments = ["--device", on, "--name", name, "--dir", str(_peer_folder(folder, name))]
            command, link = ["join", *arguments, *join_options, *options], str(through(i, running.link))
            running.commands[name] = partial(run, i, name, command, module=module, link=link)
            running.start_again(name)
        yield running


@contextmanager
def local_coordinator(
    spec: RunSpec,
    folder: Path,
    run: Callable[[Sequence[str]], Process[bytes]] | None = None,
    host: str = "127.0.0.1",
    options: Sequence[str] = (),
) -> Iterator[LocalRun]:
    """Start a coordinator, by `run` where it is given; end it, and what peers the block adds, when the block ends."""
    if (folder / "journal.sqlite").exists() or (folder / "link").exists():
        raise UserError(
            f"{folder} already holds a run", "choose another --dir; runs are never overwritten", "run_exists"
        )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    spec_file = folder / f"{spec.name}.yaml"
    spec_file.write_text(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False))
    arguments = ["coordinator", str(spec_file), "--host", host, "--port", "0", "--run-dir", str(folder), *options]
    command = partial(run or partial(start, folder, "coordinator"), arguments)
    coordinator = command()
    running: LocalRun | None = None
    try:
        running = LocalRun(folder, _wait_for_link(folder, coordinator), coordinator, {"coordinator": command})
        yield running
    finally:
        everyone = (coordinator,) if running is None else (running.coordinator, *running.peers.values())
        for process in everyone:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in everyone:
            try:
                process.wait(timeout=LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def peers_of(spec: RunSpec) -> int:
    """The number of peers a run starts with: its stages, or `min_peers` where the stages are cut to fit the peers."""
    return spec.min_peers if spec.stages == "auto" else len(layers_per_stage(spec))


def start(
    folder: Path,
    name: str,
    arguments: Sequence[str],
    core: int | None = None,
    wrap: Callable[[Sequence[str]], list[str]] = list,
    speak: bool = False,
    module: str = "protomodels_cli",
    link: str = "",
) -> Process[bytes]:
    """Start one of our commands with its output in a file, in a process group of its own: Ctrl-C reaches this process,
    which passes it on. A link goes into its environment: anybody can read command lines."""

    def pin() -> None:
        assert core is not None
        os.sched_setaffinity(0, {core})

    with _private_file(folder / "logs" / f"{name}.log") as log:
        command = wrap([sys.executable, "-m", module, *arguments])
        out = None if speak else log
        return Process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"PMTRAIN_LINK": link} if link else None,
            preexec_fn=None if core is None else pin,
        )


def _private_file(path: Path) -> BinaryIO:
    """What is printed may have the join link in it, and with it the token: nobody else may read it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(handle, 0o600)
    return os.fdopen(handle, "ab")


def _wait_for_link(folder: Path, coordinator: Process[bytes]) -> JoinLink:
    started = time.monotonic()
    while time.monotonic() - started < START_SECONDS:
        if (folder / "link").exists():
            return JoinLink.parse((folder / "link").read_text())
        if coordinator.poll() is not None:
            raise _failure(folder, "coordinator", coordinator.returncode)
        time.sleep(0.05)
    what = f"the coordinator did not open its port within {duration(START_SECONDS)}"
    raise UserError(what, f"look into {folder}/logs/coordinator.log", "not_started")


def cores() -> list[int]:
    """The cores that processes can be pinned to; none if the system cannot pin processes."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
