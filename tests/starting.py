"""Programs of ours for tests to start, through fork_server.py. Where they must not find everything imported (another
PYTHONPATH, tests of what is imported), tests use `subprocess`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
COMMANDS = "protomodels_cli.cli.main"
SECONDS = 300.0  # for one command
PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # before any test sets it


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([PATH, str(ROOT / "tests")])
    command = [sys.executable, str(ROOT / "tests" / "fork_server.py"), str(theirs.fileno())]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours, process


class Started:
    """A process, with the part of `subprocess.Popen`'s interface that tests use; `files` are its standard streams."""

    stdin: IO[Any] | None = None
    stdout: IO[Any] | None = None

    def __init__(
        self,
        module: str,
        argv: list[str],
        files: list[int],
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
    ):
        request = {"module": module, "argv": argv, "cwd": str(cwd or Path.cwd()), "env": dict(env)}
        self.returncode: int | None = None
        self._status, status = os.pipe()
        server, _ = _server()
        socket.send_fds(server, [json.dumps(request).encode()], [*files, status])
        os.close(status)
        self.pid = int(server.recv(64))

    def poll(self) -> int | None:
        return self._ended(0)

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            said = os.read(self._status, 64)
            assert said, "the fork server is gone"
            self.returncode = int(said)
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it still says, until it has ended."""
        assert self.stdout is not None
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        self.wait(timeout)
        return "".join(said), None

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc: object) -> None:
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                pipe.close()
        self.wait()


def begin(*arguments: object, cwd: Path) -> Started:
    """One of our commands; what it says, errors included, is in `stdout`."""
    read, write = os.pipe()
    with open(os.devnull) as nothing:
        process = Started(COMMANDS, ["pmtrain", *map(str, arguments)], [nothing.fileno(), write, write], cwd)
    os.close(write)
    process.stdout = os.fdopen(read, encoding="utf-8")
    return process


def begin_logged(folder: Path, name: str, arguments: Sequence[str], *others: object) -> Started:
    """For `launch.local.start`, whose processes are each other's neighbours on one host. The last of its arguments is
    the join link, which goes to the others in the environment."""
    link = [str(others[-1])] if others and others[-1] else []
    with open(os.devnull) as nothing, (folder / "logs" / f"{name}.log").open("a") as log:
        return Started(COMMANDS, ["pmtrain", *arguments, *link], [nothing.fileno(), log.fileno(), log.fileno()])


def begin_afresh(*arguments: object, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """The same, started from the very beginning, and with Ctrl-C: tests in the background of a script have none."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

    def with_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.Popen(_command(arguments), cwd=cwd, env=_env(env), text=True, preexec_fn=with_ctrl_c, **pipes)


def pmtrain(
    *arguments: object, cwd: Path | None = None, seconds: float = SECONDS, **env: str
) -> subprocess.CompletedProcess[str]:
    """One of our commands, to its end. With an environment of its own it is started from the very beginning."""
    if env:
        return subprocess.run(
            _command(arguments), capture_output=True, text=True, cwd=cwd, timeout=seconds, env=_env(env)
        )
    words = ["pmtrain", *map(str, arguments)]
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = Started(COMMANDS, words, [nothing.fileno(), out.fileno(), errors.fileno()], cwd)
        try:
            process.wait(seconds)
        finally:
            process.kill()
        said = [file.read() for file in (out, errors) if not file.seek(0)]
    return subprocess.CompletedProcess(words, process.wait(), *said)


def _command(arguments: Iterable[object]) -> list[str]:
    return [sys.executable, "-m", "protomodels_cli", *map(str, arguments)]


def _env(env: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PATH, **env}
