"""Where the files of a run lie: in a folder of this machine, or at any URL that fsspec knows. Reads only.

A file of a folder is opened at once: it can then be read to its end, also if the coordinator deletes it meanwhile. A
file elsewhere is fetched when it is needed, to a temporary file, which goes when it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from protomodels_cli.coordinator.snapshots.copies import in_words
from protomodels_cli.errors import UserError
from protomodels_cli.lazy import lazy_import
from protomodels_cli.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    import fsspec
else:
    fsspec = lazy_import("fsspec")


NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
FETCHED = ".pmtrain-part-"  # begins the names of temporary files
Opener = Callable[[], AbstractContextManager[SafetensorsFile]]


class Shelf(Protocol):
    """Paths are below the shelf's own place, and written with slashes. What is not there is a FileNotFoundError."""

    place: str

    def names(self, folder: str = "") -> list[str]: ...
    def exists(self, path: str) -> bool: ...
    def read(self, path: str) -> bytes: ...

    def opener(self, path: str, opened: ExitStack) -> Opener:
        """What opens a large file. One that is opened at once is closed with `opened`."""
        ...


class Folder:
    def __init__(self, path: Path):
        self.path, self.place = path, str(path)

    def names(self, folder: str = "") -> list[str]:
        return [path.name for path in (self.path / folder).iterdir()]

    def exists(self, path: str) -> bool:
        return (self.path / path).exists()

    def read(self, path: str) -> bytes:
        return (self.path / path).read_bytes()

    def opener(self, path: str, opened: ExitStack) -> Opener:
        file = opened.enter_context(SafetensorsFile(self.path / path))
        return lambda: nullcontext(file)


class Store:
    """A store may raise anything: whatever it raises becomes an error that says what to look at."""

    def __init__(self, files: fsspec.AbstractFileSystem, root: str, url: str, scratch: Path | None):
        self._files, self._root, self.place, self._scratch = files, root.rstrip("/"), url, scratch

    def names(self, folder: str = "") -> list[str]:
        with self._reaching():
            found = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]

    def exists(self, path: str) -> bool:
        with self._reaching():
            return bool(self._files.exists(f"{self._root}/{path}"))

    def read(self, path: str) -> bytes:
        with self._reaching():
            return bytes(self._files.cat_file(f"{self._root}/{path}"))

    def opener(self, path: str, opened: ExitStack) -> Opener:
        def fetch() -> SafetensorsFile:
            with tempfile.NamedTemporaryFile(prefix=FETCHED, dir=self._scratch) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                with self._reaching():
                    self._files.get_file(f"{self._root}/{path}", file.name)
                return SafetensorsFile(Path(file.name))  # its name goes now, its bytes when it is closed

        if not self.exists(path):
            raise FileNotFoundError(path)
        return fetch

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as e:
            if isinstance(e, OSError) and e.errno in NO_ROOM:
                raise
            raise _unreachable(self.place, e) from None


def clear_scratch(scratch: Path) -> None:
    """Delete what processes that were killed while they fetched have left: those alive hold a lock."""
    for left in scratch.glob(f"{FETCHED}*"):
        with contextlib.suppress(OSError), left.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _unreachable(place: str, error: Exception) -> UserError:
    fix = "check the URL, the connection and the credentials, and try again"
    return UserError(f"cannot read from {place}: {in_words(error)}", fix, "store_unreachable")


def shelf_at(place: str, scratch: Path | None = None) -> Shelf:
    """A folder, or a store by its URL. `scratch`: where the temporary files of a store lie."""
    if "://" not in place:
        return Folder(Path(place))
    try:
        files, root = fsspec.core.url_to_fs(place)
    except (ImportError, ValueError) as e:
        fix = "install the package for that kind of URL (s3fs for s3://), or check the URL"
        raise UserError(f"cannot use {place}: {in_words(e)}", fix, "store_unknown") from None
    except Exception as e:  # some connect at once
        raise _unreachable(place, e) from None
    if isinstance(files, fsspec.implementations.local.LocalFileSystem):
        return Folder(Path(root))
    return Store(files, root, place.rstrip("/"), scratch)
