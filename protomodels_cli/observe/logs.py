"""The log: Python's `logging` under a few names, in a rotated file, and on the terminal where asked for.

    pmtrain.coordinator   pmtrain.worker   pmtrain.wire   pmtrain.snapshots

A program calls `begin` once, and `to_file` when it knows its folder. Secrets are registered with `hide` and reach no
log.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

COORDINATOR = logging.getLogger("pmtrain.coordinator")
WORKER = logging.getLogger("pmtrain.worker")
WIRE = logging.getLogger("pmtrain.wire")
SNAPSHOTS = logging.getLogger("pmtrain.snapshots")

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FILES, FILE_BYTES = 5, 10_000_000
SELDOM_SECONDS = 60.0
SHOWN = "shown"  # a record with this mark is on the terminal already

_OURS, _ASYNCIO = logging.getLogger("pmtrain"), logging.getLogger("asyncio")
_OURS.addHandler(logging.NullHandler())  # or Python would print warnings by itself
_secrets: set[str] = set()
_seldom: dict[str, tuple[float, int]] = {}  # by kind: when one was logged, and how many were left out since


class _Lines(logging.Formatter):
    """2026-11-16T02:46:46.123Z INFO coordinator: lost desk (stage 2): no heartbeat for 5 s"""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for secret in _secrets:
            text = text.replace(secret, "[hidden]")
        return text

    def formatMessage(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return f"{at} {record.levelname} {record.name.removeprefix('pmtrain.')}: {record.message}"


def begin(level: str | None = None, verbose: bool = False) -> None:
    """`level` is the least that is logged: info, or debug where `verbose` shows the log on the terminal too."""
    _OURS.setLevel(LEVELS[level or ("debug" if verbose else "info")])
    _OURS.propagate = False
    _drop(lambda handler: not isinstance(handler, logging.NullHandler))
    if verbose:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setFormatter(_Lines())
        terminal.addFilter(lambda record: not getattr(record, SHOWN, False))
        _OURS.addHandler(terminal)


def _drop(which: Callable[[logging.Handler], bool]) -> None:
    for logger in (_OURS, _ASYNCIO):
        for handler in filter(which, list(logger.handlers)):
            logger.removeHandler(handler)
            if isinstance(handler, RotatingFileHandler):
                handler.close()


def to_file(path: Path) -> None:
    """From now on into this file, and what asyncio reports of tasks that failed unseen. A file that cannot be
    written is no reason to end a run: the terminal and events.jsonl say the same."""
    _drop(lambda handler: isinstance(handler, RotatingFileHandler))
    try:
        file = RotatingFileHandler(path.resolve(), maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8")
    except OSError as e:
        _OURS.warning("no log file: %s: %s", path, e.strerror)
        return
    file.setFormatter(_Lines())
    file.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk is reported by who needs it
    _OURS.addHandler(file)
    _ASYNCIO.addHandler(file)
    if logging.lastResort is not None:
        _ASYNCIO.addHandler(logging.lastResort)  # which prints only while a logger has no other handler


def seldom(logger: logging.Logger, text: str, what: str, kind: str = "") -> None:
    """What anybody can cause as often as they like: the first of a kind in a minute, and how many there were before."""
    now, kind = time.monotonic(), kind or what
    since, left_out = _seldom.get(kind, (-SELDOM_SECONDS, 0))
    if now - since < SELDOM_SECONDS:
        _seldom[kind] = since, left_out + 1
        return
    _seldom[kind] = now, 0
    logger.info(text + (f" ({left_out:,} more like it before)" if left_out else ""), what)


def hide(*secrets: str) -> None:
    """These never reach a log."""
    _secrets.update(secret for secret in secrets if secret)


def failed(error: Exception) -> None:
    """What ended the program, and its fix; the terminal has it already."""
    _OURS.error(str(error), extra={SHOWN: True})


def bug(error: BaseException) -> None:
    """The traceback of what nobody expected; the terminal has it already."""
    _OURS.critical("a bug: %s", type(error).__name__, exc_info=error, extra={SHOWN: True})
