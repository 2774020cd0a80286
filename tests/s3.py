"""An S3 server beside a test (s3_server.py), and what was asked of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from heavy import heavy
from s3_server_key import KEY, SECRET
from waiting import wait_for

URL = "s3://bucket/runs"


class S3:
    def __init__(self, folder: Path):
        self._log = folder / "requests"
        command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "s3_server.py"), str(folder / "files")]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log)
        port = wait_for(lambda: self._log.read_text().partition("\n")[0], "the S3 server did not start")
        self.endpoint = f"http://127.0.0.1:{port}"
        self.env = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def files(self) -> fsspec.AbstractFileSystem:
        return fsspec.core.url_to_fs(URL, skip_instance_cache=True)[0]

    def presigned(self, verb: str) -> list[str]:
        """Paths of requests with a URL that somebody else has signed, and that were granted."""
        return [row[1] for row in self._rows() if row[0] == verb and row[2] in ("200", "206") and row[3:] == ["1"]]

    def has(self, name: str) -> bool:
        """Was a file put there whose path ends like this?"""
        return any(row[:3:2] == ["PUT", "200"] and row[1].endswith(name) for row in self._rows())

    def _rows(self) -> list[list[str]]:
        return [line.split() for line in self._log.read_text().splitlines()[1:]]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    heavy("s3fs")
    heavy("swift")
    server = S3(folder)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
