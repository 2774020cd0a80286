"""A Hugging Face checkpoint in a new folder, which appears whole or not at all. At most one tensor is in memory.

OUT/model[-I-of-N].safetensors, model.safetensors.index.json, config.json, generation_config.json, README.md,
tokenizer.json, tokenizer_config.json, special_tokens_map.json; of a model in segments also modeling_pmtrain.py
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from protomodels_cli.errors import OptionError
from protomodels_cli.export.card import card
from protomodels_cli.export.out import check_free, not_written
from protomodels_cli.export.shelves import clear_scratch
from protomodels_cli.export.source import Source
from protomodels_cli.export.weights import Maker, Weight, stage_shapes, stage_weights
from protomodels_cli.files import sync_folder
from protomodels_cli.huggingface.config import MODELING, config_of, generation_config_of
from protomodels_cli.huggingface.files import INDEX, WEIGHTS
from protomodels_cli.huggingface.segments import segments_of
from protomodels_cli.protocol.hashes import weights_sha256
from protomodels_cli.quantities import figures
from protomodels_cli.safetensors_file import DTYPES, bytes_of, write_safetensors

MOST_BYTES = 4 * 2**30  # of one file of weights


@dataclass(frozen=True)
class Exported:
    parameters: int
    dtype: str
    files: int  # of weights
    size: int  # bytes of all files
    weights_sha256: str  # of the run's own parameters, as the run prints it


@dataclass(frozen=True)
class _Shard:
    stage: int
    file: str
    weights: tuple[Weight, ...]


def export(
    source: Source,
    out: Path,
    dtype: str | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
    most_bytes: int = MOST_BYTES,
) -> Exported:
    """`dtype`: a name of DTYPES, by default the run's. `tell` hears how many bytes of how many are written. Raises
    UserError; then, and when it is interrupted, nothing is left."""
    check_free(out)
    dtype = dtype or source.spec.compute.stored
    try:
        with _folder_in_the_making(out) as work:
            exported = _write(source, work, dtype, tell, most_bytes)
            for file in work.iterdir():
                _sync(file)
            sync_folder(work)
            _put_in_place(work, out)
    except OSError as e:
        check_free(out)  # somebody else may have made it meanwhile
        raise not_written(out, e) from None
    return exported


@contextlib.contextmanager
def _folder_in_the_making(out: Path) -> Iterator[Path]:
    """A new folder within a hidden one beside OUT, which is locked while its process lives and goes with it. Those of
    processes that were killed are deleted."""
    new = [above for above in out.parents if not above.exists()]
    prefix = f".{out.name}.partial-"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f"{glob.escape(prefix)}*"):
            with contextlib.suppress(OSError), _lock(left):
                shutil.rmtree(left)
        clear_scratch(out.parent)
        hidden, lock = _hidden_folder(prefix, out.parent)
        with lock:
            try:
                work = hidden / "model"
                work.mkdir()
                yield work
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
    except BaseException:
        for above in new:
            with contextlib.suppress(OSError):  # somebody else may use it by now
                above.rmdir()
        raise


def _hidden_folder(prefix: str, parent: Path) -> tuple[Path, IO[bytes]]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            return folder, _lock(folder)
        except (FileNotFoundError, BlockingIOError):
            continue  # another export has taken it for one that was left


def _lock(folder: Path) -> IO[bytes]:
    """The folder's lock file, held until it is closed. Raises OSError."""
    file = (folder / "lock").open("ab")  # for writing: on NFS nothing else can be locked
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock")):
            raise FileNotFoundError(folder)  # deleted meanwhile, by whom had the lock
    except BaseException:
        file.close()
        raise
    return file


def _put_in_place(work: Path, out: Path) -> None:
    """Durably, or not at all."""
    try:
        os.rename(work, out)
        sync_folder(out.parent)
    except BaseException:
        if not work.exists():  # it was renamed
            os.rename(out, work)
        raise


def _write(source: Source, work: Path, dtype: str, tell: Callable[[int, int], None], most_bytes: int) -> Exported:
    shards = _shards(source, dtype, most_bytes)
    total = sum(_bytes(weight, dtype) for shard in shards for weight in shard.weights)
    hashes: dict[str, str] = {}
    done = 0

    def written(weight: Weight) -> None:
        nonlocal done
        done += _bytes(weight, dtype)
        tell(done, total)

    for stage in range(len(source.parts)):
        with stage_weights(source, stage, hashes) as makers:
            for shard in (shard for shard in shards if shard.stage == stage):
                _write_shard(work / shard.file, shard, makers, dtype, written)
    if len(shards) > 1:
        where = {weight.name: shard.file for shard in shards for weight in shard.weights}
        _write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    end_id = None if source.tokenizer is None else source.tokenizer.end_id
    _write_json(work / "config.json", config_of(source.spec, dtype, end_id))
    _write_json(work / "generation_config.json", generation_config_of(end_id))
    if segments_of(source.spec) is not None:
        shutil.copyfile(Path(__file__).with_name(f"{MODELING}.py"), work / f"{MODELING}.py")
    for name, content in source.tokenizer_files.items():
        (work / name).write_text(content, encoding="utf-8")
    parameters = sum(math.prod(weight.shape) for shard in shards for weight in shard.weights)
    sha256 = weights_sha256(hashes.items())
    (work / "README.md").write_text(card(source, dtype, parameters, sha256), encoding="utf-8")
    size = sum(file.stat().st_size for file in work.iterdir())
    return Exported(parameters, dtype, len(shards), size, sha256)


def _shards(source: Source, dtype: str, most_bytes: int) -> list[_Shard]:
    """One per stage, or more where a stage has more than `most_bytes`."""
    groups: list[tuple[int, list[Weight]]] = []
    for stage, weights in enumerate(stage_shapes(source.spec, source.layers)):
        room = 0
        for weight in weights:
            size = _bytes(weight, dtype)
            if size > room or weight is weights[0]:
                groups.append((stage, []))
                room = most_bytes
            groups[-1][1].append(weight)
            room -= size
    many = len(groups)
    return [
        _Shard(stage, WEIGHTS if many == 1 else f"model-{i:05d}-of-{many:05d}.safetensors", tuple(weights))
        for i, (stage, weights) in enumerate(groups, 1)
    ]


def _bytes(weight: Weight, dtype: str) -> int:
    return math.prod(weight.shape) * bytes_of(dtype)


def _write_shard(
    path: Path, shard: _Shard, makers: dict[str, Maker], dtype: str, written: Callable[[Weight], None]
) -> None:
    by_name = {weight.name: weight for weight in shard.weights}

    def content(name: str) -> memoryview:
        made = _converted(makers[name](), name, dtype).view(torch.uint8).numpy().reshape(-1).data
        written(by_name[name])
        return made

    tensors = [(weight.name, DTYPES[dtype], weight.shape) for weight in shard.weights]
    write_safetensors(path, tensors, content, {"format": "pt"})


def _converted(weight: Tensor, name: str, dtype: str) -> Tensor:
    found = weight.to(getattr(torch, dtype)).contiguous()
    if found.dtype != weight.dtype and bool(torch.isinf(found).any()) and not bool(torch.isinf(weight).any()):
        largest, most = float(weight.abs().max()), torch.finfo(found.dtype).max
        raise OptionError(
            f"--dtype {dtype}: {name} has numbers up to {figures(largest)}, and {dtype} ends at {figures(most)}",
            "use --dtype bfloat16, or leave out --dtype",
            "overflow",
        )
    return found


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
