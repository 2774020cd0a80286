"""One arena for all threads, seen by the C library's own account of itself."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, sys, threading
from protomodels_cli.cli.heap import use_one_arena
if "one" in sys.argv:
    assert use_one_arena()
libc, ready, go = ctypes.CDLL(None), threading.Barrier(5), threading.Event()
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.malloc_info.argtypes = [ctypes.c_size_t], [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
threads = [threading.Thread(target=lambda: (libc.malloc(5000), ready.wait(), go.wait())) for _ in range(4)]
for thread in threads:
    thread.start()
ready.wait()
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
go.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
@pytest.mark.parametrize("options", [["one"], []])
def test_threads_share_one_arena_where_the_coordinator_asks_for_it(options):
    told = subprocess.run([sys.executable, "-c", COUNT, *options], capture_output=True, text=True, check=True).stdout
    assert (told.count("<heap nr=") == 1) == bool(options), told


def test_elsewhere_nothing_changes(monkeypatch):
    from protomodels_cli.cli import heap

    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not heap.use_one_arena()
