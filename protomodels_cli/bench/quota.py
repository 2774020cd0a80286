"""Holds a process to a share of a core: by the system's own means where this user may use them, else by stopping it.

Knows processes and cgroups. It must not know what is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

FIRST, SECOND = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # where the two versions of cgroups are
PERIOD = 0.1  # seconds
LOOK_EVERY, BURST = 0.005, 0.05  # seconds: of the clock, and of the processor that may be saved up


class Held:
    """`how` it is enforced: `cgroup cpu.cfs_quota_us`, `cgroup cpu.max`, or `SIGSTOP by processor time`."""

    def __init__(self, pid: int, share: float, group: Path | None, how: str):
        self.pid, self.share, self.how, self._group = pid, share, how, group
        self._process, self._began = psutil.Process(pid), time.monotonic()
        self._before, self._over = self._used(), threading.Event()
        if group is not None:
            (group / "cgroup.procs").write_text(str(pid))
        else:
            threading.Thread(target=self._stop_and_go, daemon=True).start()

    def _used(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def cores(self) -> float:
        """That it has used on average, since it is held."""
        return (self._used() - self._before) / max(1e-9, time.monotonic() - self._began)

    def end(self) -> None:
        self._over.set()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def _stop_and_go(self) -> None:
        """A token bucket of processor time. While it is empty the process stands still."""
        left, before, used = BURST, time.monotonic(), self._before
        stopped = False
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has ended
            while not self._over.wait(LOOK_EVERY):
                now, all_of_it = time.monotonic(), self._used()
                left = min(BURST, left + self.share * (now - before)) - (all_of_it - used)
                before, used = now, all_of_it
                if (left < 0) != stopped:
                    stopped = left < 0
                    os.kill(self.pid, signal.SIGSTOP if stopped else signal.SIGCONT)


@contextlib.contextmanager
def held(pid: int, share: float) -> Iterator[Held]:
    group, how = _group(share)
    one = Held(pid, share, group, how)
    try:
        yield one
    finally:
        one.end()
        if group is not None:
            threading.Thread(target=_remove, args=(group,), daemon=True).start()


def _group(share: float) -> tuple[Path | None, str]:
    """A cgroup that has this share; None: this user may not make one."""
    name, quota, period = f"pmtrain-{os.getpid()}-{time.monotonic_ns()}", str(int(share * PERIOD * 1e6)), "100000"
    for parent, how, files in (
        (FIRST, "cgroup cpu.cfs_quota_us", {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}),
        (SECOND, "cgroup cpu.max", {"cpu.max": f"{quota} {period}"}),
    ):
        if not all((parent / file).exists() or parent is SECOND for file in files):
            continue
        group = parent / name
        try:
            group.mkdir()
            for file, text in files.items():
                if not (group / file).exists():  # the controller is not there: a plain folder would take any file
                    raise OSError
                (group / file).write_text(text)
            return group, how
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
    return None, "SIGSTOP by processor time"


def _remove(group: Path) -> None:
    """The process in it is gone only once it was waited for."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
