"""Parts with the right hash that are not their stage's: refused by the coordinator, not built from by a peer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save, save_file
from test_exchange import STATE, exchange_of, uploaded
from test_snapshots import CONTENTS, SPEC, Desk

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.snapshots import failures
from protomodels_cli.coordinator.snapshots.content import unfit
from protomodels_cli.coordinator.snapshots.uploads import Refused
from protomodels_cli.files import hash_file
from protomodels_cli.model.shape import slices
from protomodels_cli.worker import notices, orders
from protomodels_cli.worker.engine import Engine
from protomodels_cli.worker.snapshots.loading import UnusablePart, load_part

NORM = "layers.0.attn_norm.weight"
NARROW = {**STATE, f"weights/{NORM}": torch.zeros(1)}
NOT_A_NUMBER = {**STATE, f"weights/{NORM}": torch.full((32,), torch.nan)}


def test_a_part_with_another_header_is_refused_and_its_snapshot_given_up(tmp_path: Path):
    desk, noted = Desk(tmp_path), list[notices.Notice]()

    async def story() -> None:
        async with exchange_of(desk, tmp_path, noted.append) as exchange:
            await exchange.save(1, 3, 0, NARROW)
            await uploaded(exchange)
            assert exchange.parts.all() == [], "the next one is written anew"

    asyncio.run(story())
    right = failures.WrongTensor(f"weights/{NORM}", "F32 [1]", "F32 [32]")
    assert desk.told == [ev.PartFailed("p0", 1, 3, 0, right)]
    assert [type(notice) for notice in noted] == [notices.PartRefused]
    assert desk.snapshots.here(1, 3) == {}


@pytest.mark.parametrize("content", [b"no safetensors at all", (1 << 62).to_bytes(8, "little") + b"{}", b""])
def test_what_is_no_safetensors_file_is_refused_whatever_it_is(tmp_path: Path, content: bytes):
    desk, path = Desk(tmp_path), tmp_path / "part"
    path.write_bytes(content)
    with pytest.raises(Refused):
        desk.hand_in(0, content, size=len(content), sha256=hash_file(path))
    [told] = desk.told
    assert isinstance(told, ev.PartFailed)
    assert isinstance(told.why, failures.NoTensors)


def test_numbers_are_looked_at_once_somebody_cannot_use_them(tmp_path: Path):
    """Not before: a part of gigabytes would be read twice."""
    desk, path = Desk(tmp_path), tmp_path / "part"
    save_file(NOT_A_NUMBER, path)
    content = path.read_bytes()
    desk.hand_in(0, content, size=len(content), sha256=(sha256 := hash_file(path)))
    mark = replace(desk.state.history.pending[0], parts=(sha256, "1"))
    found = asyncio.run(desk.uploads.unfit(mark, 0))
    assert found == failures.WrongTensor(f"weights/{NORM}", "not finite", "finite")


def test_what_a_peer_writes_into_a_header_is_shown_as_one_short_line(tmp_path: Path):
    path = tmp_path / "part"
    path.write_bytes(save({**STATE, "\x1b[2J\n" + "x" * 5000: torch.zeros(1)}))
    desk = Desk(tmp_path)
    found = unfit(path, SPEC, (2, 2), desk.state.history.pending[0], 0)
    assert isinstance(found, failures.WrongTensor)
    assert len(found.tensor) <= 200
    assert found.tensor.isprintable()


@pytest.mark.parametrize("state", [NARROW, NOT_A_NUMBER, {}, None], ids=["narrow", "not a number", "empty", "deleted"])
def test_a_peer_that_cannot_build_from_a_part_says_so_and_stays(tmp_path: Path, state: dict[str, torch.Tensor] | None):
    """Deleted: its snapshot was given up while the peer was about to build from it."""
    path = tmp_path / "part"
    if state is not None:
        save_file(state, path)
    posted: list[Any] = []
    engine = Engine(torch.device("cpu"), 1, lambda generation, item: posted.append((generation, item)), lambda: None)
    assignment, layers = orders.Assignment(1, 7, 1, 3, 1, 0), slices(SPEC)[0]
    layout = [(torch.device("cpu"), layers.layers)]
    engine._obey(orders.Build(assignment, SPEC, layers, layout, None, path))
    [(generation, item)] = posted
    assert (generation, type(item)) == (7, orders.PartUnusable)
    engine._obey(orders.Describe())
    assert posted[-1][1] == orders.Described(None)


def test_a_part_that_is_right_is_loaded(tmp_path: Path):
    path = tmp_path / "part"
    path.write_bytes(CONTENTS[0])
    state = load(CONTENTS[0]) | {"optimizer/applied": torch.tensor(3)}
    save_file(state, path)
    assert load_part(path, SPEC, range(2), 3).keys() == state.keys()
    with pytest.raises(UnusablePart):
        load_part(path, SPEC, range(2, 4), 3)
