"""T_fixed: the same bytes everywhere, one bit an entry, never a float table."""

import hashlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protomodels_cli import counter
from protomodels_cli.model.t_fixed import TFixed, packed_signs

GOLDEN = "0c989d3d4c03937617e2606df2fdd210ba10267eccabd34e7fcc93190ab1bac1"


def test_golden_bytes():
    """Must never change: a run's peers derive the table from its seed on whatever machine they have."""
    assert hashlib.sha256(packed_signs(1000, 200, seed=7).tobytes()).hexdigest() == GOLDEN


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


class Shapes(TorchDispatchMode):
    """All float tensors that any operation makes."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()}
        return out


@pytest.mark.parametrize("form", ["reparam", "constrained"])
def test_no_float_copy_of_the_table_exists(reference, form):
    """Not on any stage, not for a moment: from the first byte of set-up through a training step."""
    with Shapes() as shapes:
        r = reference(subspace={"form": form}, model={"width": 40, "heads": 4})
        middle = r.stages[1]
        flight = middle.run_forward(torch.arange(16)[None], torch.randn(1, 16, 6))
        middle.run_backward(flight, torch.ones_like(flight.output))
    stage_tables = {(256, 40), (256, 5, 8), (256, 5)}
    trainable = {tuple(p.shape) for p in r.stages[0].parameters()} | {tuple(p.shape) for p in r.stages[-1].parameters()}
    assert (256, 40) in shapes.seen, "the head has this shape: the watch works"
    assert not (shapes.seen & stage_tables) - trainable
    with Shapes() as shapes:  # a middle stage has neither head nor embedding, so nothing of that shape at all
        flight = middle.run_forward(torch.arange(16)[None], torch.randn(1, 16, 6))
        middle.run_backward(flight, torch.ones_like(flight.output))
    assert not {s for s in shapes.seen if 256 in s}
    assert all(p.shape[0] != 256 for p in middle.parameters())
