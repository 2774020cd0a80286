"""The peers' own way to the store, where that speaks S3: URLs that are signed here, by which they put their parts there
and fetch them, so that large snapshots need not pass the coordinator.

A URL is for one object and one verb, and expires. That of an upload signs the size and the hash of the bytes too, and
the store refuses others: whether it does is tried out before the first is handed out. The object's name has the hash as
well, so that nobody can ever put other bytes in its place. The credentials stay here. s3fs signs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from protomodels_cli.coordinator import notices
from protomodels_cli.coordinator.snapshots.copies import Copies, in_words
from protomodels_cli.coordinator.snapshots.upkeep import Repeated, within
from protomodels_cli.observe.logs import SNAPSHOTS
from protomodels_cli.spec.schema import SnapshotSpec
from protomodels_cli.wire.store import StoreRefused, StoreRequest, checksum

if TYPE_CHECKING:
    import fsspec

EXPIRES = 900  # seconds in which a transfer has to begin: it may end later
LARGEST = 5 << 30  # bytes: S3 takes no more in one PUT
AGAIN = 600.0  # seconds until a store that could not be used so is tried again
ANSWER_SECONDS, TRIAL_SECONDS = 15.0, 60.0  # for one answer of the store: a peer's offer takes three; to try it out
MOST_BEGUN = 8  # snapshots whose parts may be on their way
NO_REFUSAL = 408, 429  # of a request that would have been granted at another time


class Unfit(Exception):
    """Why peers cannot be sent to the store."""


class Direct:
    def __init__(self, copies: Copies, tell: Callable[[notices.Notice], None]):
        self._copies, self._tell = copies, tell
        self._trying, self._next = Repeated(self._try), 0.0
        self._store: tuple[fsspec.AbstractFileSystem, str] | None = None
        self._told = False
        self._parts: dict[str, dict[tuple[int, str], str]] = {}  # snapshot → stage and holder → hash
        self.works = False

    def try_out(self) -> None:
        """See whether the store can be used so, unless that is known, or was just tried."""
        if not self.works and not self._trying.under_way and time.monotonic() >= self._next:
            self._trying.again()

    async def usable(self) -> bool:
        """Waits a while for a trial that is under way: a part that goes through the coordinator takes longer."""
        if self._trying.under_way:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._trying.end()), ANSWER_SECONDS)
        return self.works

    def may_put(self, holder: str, snapshot: str, stage: int, sha256: str) -> bool:
        """A holder has one part of a snapshot. One that comes with another is sent through the coordinator, where the
        one takes the other's place: the store would keep both."""
        parts = self._parts.setdefault(snapshot, {})
        if len(self._parts) > MOST_BEGUN:
            del self._parts[next(iter(self._parts))]
        return parts.setdefault((stage, holder), sha256) == sha256

    async def upload_url(self, snapshot: str, name: str, size: int, sha256: str) -> str:
        return await within(ANSWER_SECONDS, self._sign_put, f"{snapshot}/{name}", size, sha256)

    async def fetch_url(self, snapshot: str, name: str) -> str:
        return await within(ANSWER_SECONDS, self._sign, f"{snapshot}/{name}", "get_object")

    async def size(self, snapshot: str, name: str) -> int | None:
        """None: it is not there."""
        try:
            return int(await within(ANSWER_SECONDS, self._at, f"{snapshot}/{name}", "size"))
        except FileNotFoundError:
            return None

    async def beginning(self, snapshot: str, name: str, most: int) -> bytes:
        return bytes(await within(ANSWER_SECONDS, self._at, f"{snapshot}/{name}", "cat_file", start=0, end=most))

    async def delete(self, snapshot: str, name: str) -> None:
        await within(ANSWER_SECONDS, self._at, f"{snapshot}/{name}", "rm_file")

    def failed(self, error: Exception) -> None:
        """Parts go through the coordinator until the store has been tried again."""
        self.works, self._store, self._next = False, None, time.monotonic() + AGAIN
        SNAPSHOTS.warning("peers are not sent to %s: %s", self._copies.url, in_words(error))
        if not self._told:
            self._told = True
            self._tell(notices.StoreNotDirect(self._copies.url, in_words(error)))

    async def _try(self) -> None:
        try:
            await within(TRIAL_SECONDS, self._try_to_cheat)
        except Exception as e:  # a store may raise anything
            self.failed(e)
        else:
            self.works, self._told = True, False
            SNAPSHOTS.info("peers put their parts into %s themselves", self._copies.url)

    def _try_to_cheat(self) -> None:
        """Blocks. Raises Unfit where the store takes other bytes than were signed, or not even those. One that fails
        otherwise has not shown that it would refuse them."""
        right, wrong, name = b"right", b"wrong", f"trial-{secrets.token_hex(8)}"
        url = self._sign_put(name, len(right), sha256 := hashlib.sha256(right).hexdigest())
        try:
            try:
                _put(url, wrong, sha256)
            except StoreRefused as e:
                if not 400 <= e.status < 500 or e.status in NO_REFUSAL:
                    raise
                _put(url, right, sha256)
            else:
                raise Unfit("it does not check the hash of what is put there (x-amz-checksum-sha256)")
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._at(name, "rm_file")

    def _sign_put(self, path: str, size: int, sha256: str) -> str:
        return self._sign(path, "put_object", ContentLength=size, ChecksumSHA256=checksum(sha256))

    def _sign(self, path: str, operation: str, **signed: object) -> str:
        return str(self._at(path, "sign", expiration=EXPIRES, client_method=operation, **signed))

    def _at(self, path: str, what: str, **options: object) -> Any:
        """Over one connection, since making one takes longer than what is asked. s3fs does all its work in a thread
        of its own, so any may ask: none waits for one that hangs."""
        files, root = self._store = self._store or self._connect()
        return getattr(files, what)(f"{root}/{path}", **options)

    def _connect(self) -> tuple[fsspec.AbstractFileSystem, str]:
        """Version 4 signs headers; the default, which depends on the region, may be one that does not."""
        files, root = self._copies.connect()
        config = {**(files.config_kwargs or {}), "signature_version": "s3v4"}
        options = {**files.storage_options, "config_kwargs": config}
        return type(files)(**options, skip_instance_cache=True), root


def direct_to(spec: SnapshotSpec, copies: Copies | None, tell: Callable[[notices.Notice], None]) -> Direct | None:
    """None where peers are never sent to the store."""
    return Direct(copies, tell) if copies is not None and spec.is_direct else None


def _put(url: str, content: bytes, sha256: str) -> None:
    with StoreRequest(url) as request:
        request.begin_put(len(content), sha256)
        request.send(content)
        request.end_put()
