"""A process that has imported everything, and forks those that tests start: an import of torch for each would be a
third of the suite. What is forked is a process like any other, but for its parent.

A request is a packet on a socket with four descriptors: standard input, output and error, and one to which the exit
status is written. Nothing has run here that starts threads, so forking is safe.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

PRELOADED = [
    *("torch", "grpc", "numpy", "safetensors.torch", "rich.live", "cryptography.x509"),
    *("protomodels_cli.cli.main", "protomodels_cli.coordinator.coordinator", "protomodels_cli.worker.join"),
    *("protomodels_cli.model.reference", "protomodels_cli.cli.run_reference", "protomodels_cli.cli.run_demo"),
]


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page that it shares with this process
    child_ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; this one ends with its socket
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, child_ended], [], [])
        if child_ended in ready:
            os.read(child_ended, 4096)
            for pid in [pid for pid in statuses if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                status = statuses.pop(pid)
                os.write(status, str(code).encode())
                os.close(status)
        if requests in ready:
            packet, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not packet:
                return
            *standard, status = descriptors
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                for inherited in (requests.detach(), child_ended, wake, status, *statuses.values()):
                    os.close(inherited)
                become(json.loads(packet), standard)
            statuses[pid] = status
            for descriptor in standard:
                os.close(descriptor)
            requests.send(str(pid).encode())


def become(request: dict[str, Any], standard: list[int]) -> None:
    """The program of the request, as if it had been started with exec."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = request["argv"]
    end_with(status_of(importlib.import_module(request["module"]).main))


def status_of(program: Callable[[], object]) -> int:
    """Whatever is not an exit status ends the process as it would end any."""
    try:
        program()
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        raise
    return 0


def end_with(status: int) -> None:
    """As the interpreter ends, but for taking apart all that was imported: a second of copying pages in each child."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(status)  # which says so
    os._exit(status)


if __name__ == "__main__":
    main()
