"""T_fixed: the same bytes everywhere, one bit an entry, never a float table."""

import hashlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protomodels_cli import counter
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.shape import slices
from protomodels_cli.model.stage import Stage
from protomodels_cli.model.t_fixed import TFixed
from protomodels_cli.protocol import t_fixed

GOLDEN = "0c989d3d4c03937617e2606df2fdd210ba10267eccabd34e7fcc93190ab1bac1"


@pytest.mark.parametrize(("block", "count"), [(1, 1000), (100, 334), (1 << 20, 1)])
def test_golden_bytes(monkeypatch, block, count):
    """Must never change: a run's peers derive the table from its seed on whatever machine they have. However many rows
    are made at once."""
    monkeypatch.setattr(t_fixed, "_BLOCK", block)
    assert hashlib.sha256(t_fixed.packed_signs(1000, 200, seed=7).tobytes()).hexdigest() == GOLDEN
    blocks = [*t_fixed.sign_blocks(1000, 200, seed=7)]
    assert len(blocks) == count
    assert t_fixed.t_fixed_sha256(blocks, 1000, 200, 0.1) == TFixed(1000, 200, 0.1, 7).sha256()


@pytest.mark.parametrize("width", [1, 7, 8, 63, 64, 65, 200])
def test_rows_are_the_signs_by_definition(width):
    table = TFixed(vocab_size=5, width=width, scale=0.3, seed=3)
    seed, words = counter.subseed(3, "t_fixed", 1), -(-width // 64)
    rows = table.rows(torch.arange(5), torch.float64)
    for token in range(5):
        for j in range(width):
            bit = counter.word(seed, token * words + j // 64) >> (j % 64) & 1
            assert rows[token, j].item() == (0.3 if bit else -0.3)


def test_one_bit_an_entry():
    table = TFixed(vocab_size=1000, width=256, scale=0.1, seed=0)
    assert table.signs.nbytes == 1000 * 256 // 8


def test_high_rank_and_balanced():
    """A good code for tokens: no direction of the stream is missing, and any two rows are nearly orthogonal."""
    rows = TFixed(512, 128, 1.0, 0).rows(torch.arange(512), torch.float64)
    values = torch.linalg.svdvals(rows)
    assert values[-1] > 0.3 * values[0]  # Marchenko–Pastur: (1 − √¼)/(1 + √¼) = 1/3 for a Gaussian of this shape
    assert abs(rows.mean()) < 0.02
    cosines = (rows @ rows.T / 128).fill_diagonal_(0)
    assert cosines.abs().max() < 0.5


def test_hash_covers_bits_scale_and_shape():
    table = TFixed(100, 64, 0.1, 0)
    before = table.sha256()
    assert TFixed(100, 64, 0.2, 0).sha256() != before
    assert TFixed(100, 64, 0.1, 1).sha256() != before
    table.signs[50, 3] ^= 4
    assert table.sha256() != before
    table.signs[50, 3] ^= 4
    assert table.sha256() == before == TFixed(100, 64, 0.1, 0).sha256()


class LargestFloat(TorchDispatchMode):
    """The size of the largest float tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        floats = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        self.largest = max([self.largest, *(t.numel() for t in floats)])
        return out


@pytest.mark.parametrize("form", ["reparam", "constrained"])
def test_no_float_copy_of_the_table_exists(spec, form):
    """Not for a moment, from set-up through forward and backward: on a middle stage, which has neither embedding nor
    head, no float tensor comes near the table's size."""
    s = spec(subspace={"form": form}, tokenizer={"kind": "bpe", "vocab_size": 5000})
    basis = initial_basis(s.model.width, s.subspace.k, s.seed)
    with LargestFloat() as seen:
        stage = Stage(s, slices(s)[1], basis)
        flight = stage.run_forward(torch.arange(16)[None], torch.randn(1, 16, s.subspace.k))
        stage.run_backward(flight, torch.ones_like(flight.output))
    assert stage.t_fixed.signs.numel() == 5000 * s.model.width / 8
    assert 0 < seen.largest < 5000 * s.model.width / 10
    with LargestFloat() as seen:
        stage.t_fixed.rows(torch.arange(5000), torch.float32)
    assert seen.largest == 5000 * s.model.width, "the watch sees one when it is made"
