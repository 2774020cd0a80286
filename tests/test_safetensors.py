"""Safetensors files as the package of that name reads and writes them, both ways; and what damage is called."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from protomodels_cli.safetensors_file import SafetensorsError, SafetensorsFile, write_safetensors

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@st.composite
def files(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Some tensors of any dtype and shape, empty ones and single numbers among them; any bits, so any floats."""
    names = draw(st.lists(st.text("ab./é", min_size=1, max_size=5), max_size=4, unique=True))
    found = {}
    for name in names:
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        count = int(np.prod(shape)) * dtype.itemsize
        bits = bytearray(draw(st.binary(min_size=count, max_size=count)))
        if dtype is torch.bool:
            bits = bytearray(b % 2 for b in bits)
        found[name] = torch.frombuffer(bits, dtype=dtype).reshape(shape) if bits else torch.empty(shape, dtype=dtype)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@given(files())
def test_what_the_package_writes_is_read(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("read") / "x.safetensors"
    save_file(tensors, path, {"format": "pt"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt"}
        assert set(file.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert (file.tensors[name].shape, DTYPES[file.tensors[name].dtype]) == (tuple(tensor.shape), tensor.dtype)
            assert bytes(file.bytes(name)) == raw(tensor)
            narrow = tensor.dtype in (torch.bfloat16, torch.float16)
            right = (tensor.float() if narrow else tensor).numpy()
            assert file.array(name).dtype == right.dtype
            np.testing.assert_array_equal(file.array(name), right)  # not a number equals not a number


@given(files())
def test_what_is_written_the_package_reads(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("write") / "x.safetensors"
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    described = [(name, dtypes[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    write_safetensors(path, described, lambda name: raw(tensors[name]), {"made": "here"})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"made": "here"}
    found = load_file(path)
    assert {name: (t.dtype, t.shape, raw(t)) for name, t in found.items()} == {
        name: (t.dtype, t.shape, raw(t)) for name, t in tensors.items()
    }
    with SafetensorsFile(path) as again:
        for info in again.tensors.values():
            assert info.start % DTYPES[info.dtype].itemsize == 0


def test_a_file_that_is_deleted_meanwhile_stays_readable(tmp_path):
    save_file({"a": torch.arange(4.0)}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        (tmp_path / "x").unlink()
        assert file.array("a").tolist() == [0, 1, 2, 3]


def test_a_file_that_is_cut_short_meanwhile_is_called_damaged(tmp_path):
    save_file({"a": torch.arange(4.0)}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        os.truncate(tmp_path / "x", file.tensors["a"].end - 1)
        with pytest.raises(SafetensorsError):
            file.array("a")


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


WHOLE = save({"a": torch.arange(4.0), "b": torch.ones(2, 2)})
DAMAGED = {
    "empty": b"",
    "shorter than a length": WHOLE[:7],
    "within the header": WHOLE[:20],
    "within the tensors": WHOLE[:-1],
    "longer than its tensors": WHOLE + b"\0",
    "a header that is too long": (1 << 40).to_bytes(8, "little") + WHOLE[8:],
    "no JSON": with_header(b"{nonsense"),
    "no text": with_header(b"\xff\xfe{}"),
    "deep JSON": with_header(b"[" * 100_000),
    "a list": with_header([]),
    "no fields": with_header({"a": {}}),
    "no object": with_header({"a": 3}),
    "three offsets": with_header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"x"),
    "an unknown dtype": with_header({"a": entry(0, 1, [1], "Q3")}, b"x"),
    "a dtype that is no text": with_header({"a": {**entry(0, 1, [1]), "dtype": ["U8"]}}, b"x"),
    "a negative size": with_header({"a": entry(0, 1, [-1, -1])}, b"x"),
    "a size that is true": with_header({"a": {**entry(0, 1, []), "shape": [True]}}, b"x"),
    "offsets that do not fit the shape": with_header({"a": entry(0, 2, [1])}, b"xx"),
    "overlapping tensors": with_header({"a": entry(0, 2, [2]), "b": entry(1, 3, [2])}, b"xxx"),
    "a gap": with_header({"a": entry(0, 1, [1]), "b": entry(2, 3, [1])}, b"xxx"),
    "metadata that are no texts": with_header({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_an_error_with_a_reason(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SafetensorsError) as damaged:
        SafetensorsFile(tmp_path / "x")
    assert str(damaged.value)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_any_changed_byte_is_read_or_called_damaged(tmp_path_factory, at, value):
    path: Path = tmp_path_factory.mktemp("byte") / "x"
    path.write_bytes(WHOLE[:at] + bytes([value]) + WHOLE[at + 1 :])
    with contextlib.suppress(SafetensorsError), SafetensorsFile(path) as file:
        for name in file.tensors:
            file.array(name)


def test_a_writer_is_told_of_a_wrong_size_and_of_a_name_used_twice(tmp_path):
    with pytest.raises(SafetensorsError):
        write_safetensors(tmp_path / "x", [("a", "F32", (2,))], lambda _: b"1234")
    with pytest.raises(SafetensorsError):
        write_safetensors(tmp_path / "x", [("a", "F32", (1,)), ("a", "F32", (1,))], lambda _: b"1234")
