"""A second copy of every complete snapshot, at any URL that fsspec knows. All of it blocks: call it in a thread.

URL/NAME-FINGERPRINT/LINEAGE-STEP/stage-I.safetensors, VERSION.u, snapshot.json    the last comes last: it is whole then
URL/NAME-FINGERPRINT/LINEAGE-STEP/stage-I.HASH.safetensors                         a part that its peer put there itself
URL/NAME-FINGERPRINT/spec.json, corpus.json, tokenizer.json                        what is needed to use the weights
URL/NAME-FINGERPRINT/taken-over-LINEAGE    by whoever went on from this copy: up to there no lineage is new any more
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from protomodels_cli.coordinator.as_json import as_json
from protomodels_cli.coordinator.history import History, beginning
from protomodels_cli.coordinator.snapshots.manifest import MANIFEST, PUT_THERE, STORED
from protomodels_cli.data.kept import KEPT
from protomodels_cli.errors import UserError
from protomodels_cli.lazy import lazy_import
from protomodels_cli.spec.schema import RunSpec

if TYPE_CHECKING:
    import fsspec
else:
    fsspec = lazy_import("fsspec")  # few runs have a second copy


SPEC = "spec.json"
BLOCK = 8 << 20  # bytes that are asked for at a time: few enough for an answer over a slow line
TAKEN_OVER = re.compile(r"taken-over-(\d+)")


class TakenOver(Exception):
    """Another coordinator has continued the run from this copy: what is there is that one's."""


class OutOfReach(Exception):
    """The store does not answer now, or not with what is there: whether that is whole nobody can say."""


def papers(run_dir: Path, spec: RunSpec) -> dict[str, bytes]:
    """The small files that go beside the snapshots."""
    kept = [path for name in KEPT if (path := run_dir / name).exists()]
    return {SPEC: as_json(spec.model_dump(mode="json")), **{path.name: path.read_bytes() for path in kept}}


class Copies:
    def __init__(
        self,
        url: str,
        run: str,
        beside: Callable[[], Mapping[str, bytes]] = dict,
        history: Callable[[], History] = partial(beginning, ""),
    ):
        """`run`: its own name there, which no other run has. `beside`: small files that go beside the snapshots.
        `history`: of the coordinator whose copies these are."""
        try:
            fsspec.get_filesystem_class(fsspec.core.split_protocol(url)[0])
        except (ImportError, ValueError) as e:
            fix = "install the package for that kind of URL (s3fs for s3://), or choose another snapshots.copy_to"
            raise UserError(f"cannot use snapshots.copy_to = {url}: {e}", fix, kind="store_unknown") from None
        self.url = f"{url.rstrip('/')}/{run}"
        self._beside, self._has_beside, self._history = beside, False, history
        self.copied = set[str]()  # names of snapshots that are known to be there

    def bring_up_to_date(
        self,
        snapshots: Sequence[Path],
        dropped: Collection[str],
        reading: Callable[[Path], AbstractContextManager[bool]],
    ) -> None:
        """Copy these where they are not there yet, the newest (the last) first, and delete those that were dropped: by
        name, so that what the journal does not know stays. One that fails does not hold up the others; then raises the
        first thing that the store raised. `reading` keeps a folder in place, if it is there."""
        files, root = self.connect()
        there = names_in(files, root)
        self.check_ours(there)
        failures = list[Exception]()
        try:
            self._put_beside(files, root)
        except Exception as e:
            failures.append(e)
        for folder in reversed(snapshots):
            at = f"{root}/{folder.name}"
            try:  # a store may raise anything
                if folder.name not in there or not files.exists(f"{at}/{MANIFEST}"):
                    with reading(folder) as here:
                        if not here:
                            continue
                        _copy(files, folder, at)
                self.copied.add(folder.name)
            except Exception as e:
                failures.append(e)
        for name in sorted(there & set(dropped)):
            self.copied.discard(name)
            try:
                files.rm(f"{root}/{name}", recursive=True)
            except Exception as e:
                failures.append(e)
        if failures:
            raise failures[0]

    def _put_beside(self, files: fsspec.AbstractFileSystem, root: str) -> None:
        """Once by every process: a kill may have left half a file."""
        if not self._has_beside:
            files.makedirs(root, exist_ok=True)
            for name, content in self._beside().items():
                files.pipe_file(f"{root}/{name}", content)
            self._has_beside = True

    def get(self, snapshot: str, file: str, to: Path) -> None:
        """Raises FileNotFoundError if it is not there, and whatever else the store raises."""
        files, root = self.connect()
        files.get_file(f"{root}/{snapshot}/{file}", str(to))

    def open(self, snapshot: str, file: str) -> BinaryIO:
        """Raises FileNotFoundError if it is not there, and whatever else the store raises."""
        files, root = self.connect()
        return cast(BinaryIO, files.open(f"{root}/{snapshot}/{file}", "rb", block_size=BLOCK))

    def has_anything(self) -> bool:
        """Of this run. If not, it is not the store that it was: a disk that is not mounted is empty."""
        return bool(names_in(*self.connect()))

    def check_ours(self, there: Iterable[str]) -> None:
        """Raises TakenOver. `there`: the names in the run's folder."""
        if taken_over(there) > self._history().highest_lineage:
            raise TakenOver("another coordinator has continued this run from there (`pmtrain coordinator --from`)")

    def connect(self) -> tuple[fsspec.AbstractFileSystem, str]:
        """Anew for every use: by the next snapshot a connection may be gone, and no two threads may share one."""
        return connect(self.url)


def connect(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    return files, root.rstrip("/")


def taken_over(names: Iterable[str]) -> int:
    """The highest lineage that a coordinator elsewhere has claimed; 0: none has."""
    return max((int(m[1]) for name in names if (m := TAKEN_OVER.fullmatch(name))), default=0)


def names_in(files: fsspec.AbstractFileSystem, root: str) -> set[str]:
    """What is there. Where a store has no folders, an empty one is none."""
    try:
        return {str(path).rstrip("/").rsplit("/", 1)[-1] for path in files.ls(root, detail=False)}
    except FileNotFoundError:
        return set()


def _copy(files: fsspec.AbstractFileSystem, folder: Path, to: str) -> None:
    """And delete what peers have put there and does not count."""
    files.makedirs(to, exist_ok=True)
    counts = {file.with_suffix(".safetensors").name for file in folder.iterdir() if file.suffix == STORED}
    for name in sorted(names_in(files, to) - counts):
        if PUT_THERE.fullmatch(name):
            files.rm_file(f"{to}/{name}")
    for file in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
        if file.suffix == STORED:
            continue  # it is there already
        files.put_file(str(file), f"{to}/{file.name}")


def in_words(error: Exception) -> str:
    words: Any = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(words).splitlines()[0][:200]
