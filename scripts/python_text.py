"""Writes the text that labs were measured with at GPU scale: Python source from wheels of PyPI, one file a document.

    python scripts/python_text.py text.jsonl.zst          # needs pip, zstandard and 200 MB to download

The wheels have fixed versions, files that are equal are taken once, and their order is that of their hashes: everybody
gets the same bytes, whose hash is printed. The licences are the packages' own; the text is not part of pmtrain.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import zstandard

WHEELS = [
    "ansible-core==2.21.5",
    "apache-airflow-core==3.3.2",
    "celery==5.7.0",
    "cinder==29.0.0",
    "cirq-core==1.7.0",
    "dagster==1.13.28",
    "dask==2026.8.0",
    "diffusers==0.42.1",
    "distributed==2026.8.0",
    "django==6.1.3",
    "docutils==0.23",
    "ibis-framework==12.0.0",
    "jax==0.12.0.1",
    "keras==3.15.1",
    "keystone==30.0.0",
    "lightning==2.6.6",
    "mne==1.13.2",
    "moto==5.2.5",
    "networkx==3.7",
    "neutron==29.0.0",
    "nipype==1.12.0",
    "nltk==3.10.4",
    "nova==34.0.0",
    "pennylane==0.45.1",
    "prefect==3.9.0",
    "pygments==2.21.0",
    "pymc==6.3.2",
    "sphinx==9.1.1",
    "sqlglot==30.30.0",
    "sympy==1.14.0",
    "transformers==5.22.2",
    "twisted==26.10.0",
    "wagtail==8.0.1",
    "xarray==2026.9.0",
]
LEAST, MOST = 500, 200_000  # bytes of a file that is taken: neither empty nor a table
TEXT_BYTES = 190_000_000  # in all: 53 million tokens of a vocabulary of 8192


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--python-version", "3.12", "--dest", folder, *WHEELS], check=True)
        documents = {hashlib.sha256(source).hexdigest(): source for source in sources(Path(folder))}
    size, digest = 0, hashlib.sha256()
    with zstandard.open(out, "wb", zstandard.ZstdCompressor(level=19, threads=-1)) as file:
        for key in sorted(documents):
            if size + len(documents[key]) > TEXT_BYTES:
                break
            size += len(documents[key])
            line = json.dumps({"text": documents[key].decode()}).encode() + b"\n"
            digest.update(line)
            file.write(line)
    print(f"{out}: {size / 1e6:.1f} MB of text, sha256 of its lines {digest.hexdigest()}")


def sources(folder: Path) -> Iterator[bytes]:
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".py") and LEAST < entry.file_size < MOST:
                    source = archive.read(entry)
                    if is_text(source):
                        yield source


def is_text(source: bytes) -> bool:
    try:
        source.decode()
    except UnicodeDecodeError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
