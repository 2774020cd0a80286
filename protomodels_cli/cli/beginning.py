"""The start of a coordinator until its run has begun: one that fails or is interrupted leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

from protomodels_cli.cli.say import say
from protomodels_cli.errors import EXIT_INTERRUPTED


class Beginning:
    """What it has made is undone when the block ends, or by a signal, unless there is a run by then."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._empty_before = False
        self._made: list[Path] = []  # folders that were not there, the innermost first

    def __enter__(self) -> Beginning:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo()

    def handle_signals(self) -> None:
        """Ctrl-C, SIGTERM and SIGHUP end the program, until it has handlers of its own."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
                signal.signal(number, self._leave)

    def made(self, folder: Path, above: list[Path]) -> None:
        """A folder that was made for this start alone, and those above it that were not there."""
        self._folder, self._empty_before, self._made = folder, True, [folder, *above]

    def will_make(self, folder: Path) -> None:
        """Called before the folder is made, or its files."""
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        self._empty_before = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        self._folder = folder

    def _leave(self, *_: object) -> None:
        if "multiprocessing" in sys.modules:  # data are prepared in a process of its own
            from multiprocessing import active_children

            for child in active_children():
                child.terminate()
        begun = self._has_run()
        self._undo()
        how = "the run goes on with the same command" if begun else "no run was begun, and nothing is left of it"
        with contextlib.suppress(OSError):
            say(f"interrupted; {how}")
        os._exit(EXIT_INTERRUPTED)

    def _has_run(self) -> bool:
        from protomodels_cli.coordinator.run_dir import holds_a_run

        return self._folder is not None and holds_a_run(self._folder)

    def _undo(self) -> None:
        if self._folder is None or not self._empty_before or self._has_run():
            return
        for inner in self._folder.iterdir() if self._folder.is_dir() else ():
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner, ignore_errors=True)
            else:
                inner.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else may use them by now
            for path in self._made:
                path.rmdir()
