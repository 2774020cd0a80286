"""Pieces of text to ids, in order: in this process, and from a certain amount of text on in several.

    python -m protomodels_cli.data.encoding FOLDER        one of those processes, for the tokenizer in FOLDER

The ids are the same either way. Every process has one group of pieces at a time and they take turns, so what comes
back needs no sorting; it ends with its standard input, also if the process that feeds it was killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from protomodels_cli.data.errors import Outage
from protomodels_cli.data.sources import Piece
from protomodels_cli.data.tokenizers import Bytes, Json, Tokenizer

GROUP_CHARACTERS, GROUP_PIECES = 1 << 20, 8192
ALONE = 32 << 20  # characters that one process encodes in less time than others take to start
_MOST_PROCESSES = 32  # beyond, reading the text is what takes the time


class Encoded(NamedTuple):
    pieces: list[Piece]
    ids: np.ndarray  # of all pieces, end to end, with the mark that ends a document
    lengths: np.ndarray  # of each


def processes() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_PROCESSES)


def encoded(tokenizer: Tokenizer, source: Iterator[Piece], folder: Path, count: int) -> Iterator[Encoded]:
    """`folder` has the tokenizer's file, for `count` processes."""
    groups, alone = _groups(source), 0
    several = count > 1 and not isinstance(tokenizer, Bytes)  # bytes are their ids
    for group in groups:
        yield Encoded(group, *_ids(tokenizer, [p.text for p in group], [p.ends for p in group]))
        alone += sum(len(p.text) for p in group)
        if several and alone >= ALONE:
            break
    yield from _in_turns(groups, folder, count)


def _groups(source: Iterator[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in source:
        group.append(piece)
        size += len(piece.text)
        if size >= GROUP_CHARACTERS or len(group) == GROUP_PIECES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _ids(tokenizer: Tokenizer, texts: list[str], ends: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], dtype=np.uint32)
    parts = [np.append(ids, end) if last else ids for ids, last in zip(tokenizer.encode(texts), ends, strict=True)]
    return np.concatenate(parts).astype(np.uint32), np.array([len(part) for part in parts])


def _in_turns(groups: Iterator[list[Piece]], folder: Path, count: int) -> Iterator[Encoded]:
    first = next(groups, None)
    if first is None:
        return
    command = [sys.executable, "-m", "protomodels_cli.data.encoding", str(folder)]
    busy: deque[tuple[list[Piece], _Process]] = deque()
    with contextlib.ExitStack() as started:
        idle = deque(started.enter_context(_Process(command)) for _ in range(count))
        group: list[Piece] | None = first
        while group is not None or busy:
            if group is not None and idle:
                idle[0].give(group)
                busy.append((group, idle.popleft()))
                group = next(groups, None)  # read while they encode
                continue
            pieces, process = busy.popleft()
            ids, lengths = process.take()
            idle.append(process)
            yield Encoded(pieces, ids, lengths)


class _Process:
    def __init__(self, command: list[str]):
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed below; a pipe nobody reads could fill up
        # A group of its own: Ctrl-C is answered by the process that feeds it.
        self._inner = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, process_group=0
        )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.kill()
        self._inner.wait()
        for pipe in (*self._pipes(), self._said):
            with contextlib.suppress(OSError):
                pipe.close()

    def give(self, group: list[Piece]) -> None:
        try:
            pickle.dump(([p.text for p in group], [p.ends for p in group]), self._pipes()[0])
            self._pipes()[0].flush()
        except BrokenPipeError:
            raise self._ended() from None

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        try:
            ids, lengths = pickle.load(self._pipes()[1])
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None
        return ids, lengths

    def _ended(self) -> Outage:
        """Why nothing more comes from it."""
        with contextlib.suppress(OSError):
            self._pipes()[0].close()  # with which it ends, if it has not
        code = self._inner.wait()
        if code < 0:
            return killed()
        self._said.seek(0)
        last = self._said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        return Outage(
            f"a process that tokenises the text ended with exit code {code}: {last or 'it did not say why'}",
            "mend what the message names and start again; what was tokenised is kept",
            "ended",
        )

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._inner.stdin is not None
        assert self._inner.stdout is not None
        return self._inner.stdin, self._inner.stdout


def killed() -> Outage:
    return Outage(
        "the process that tokenises the text was killed, perhaps because memory ran out",
        "free memory, or copy the token cache (data.cache_dir) from a larger machine",
        "killed",
    )


def _serve(folder: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core
    tokenizer = Json((folder / "tokenizer.json").read_text(encoding="utf-8"))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pickle.dump(_ids(tokenizer, *pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
