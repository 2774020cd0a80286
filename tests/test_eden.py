"""EDEN against its definitions: levels, rotation, scales, and the error that all of it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from boundary import CPU, slot_of

from protomodels_cli.codecs.base import LARGEST, Extent
from protomodels_cli.codecs.eden import LEVELS, Eden, _code, _drawn, _packed, _restored, _rotated, _signs, _unpacked
from protomodels_cli.codecs.packing import to_bytes
from protomodels_cli.codecs.quantised import Int4
from protomodels_cli.protocol.messages import MessageKey

FORWARD, BACKWARD, EVALUATION = (MessageKey(3, 1, 0, leg) for leg in ("forward", "backward", "evaluation"))
BITS = sorted(LEVELS)
PLAIN = slot_of(torch.zeros(1, 1, 1), FORWARD)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def crossed(codec: Eden | Int4, x: torch.Tensor, key: MessageKey, seed: int = 0) -> torch.Tensor:
    slot = slot_of(x, key, seed)
    return codec.decode(codec.encode(x, slot), slot)


def error(arrived: torch.Tensor, x: torch.Tensor) -> float:
    return float((arrived - x).square().sum() / x.square().sum())


def of_normal(low: float, high: float, function: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The integral of a function times a standard normal's density, by midpoints in float64."""
    x = low + (high - low) * (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    return float((torch.exp(-x * x / 2) * function(x)).mean()) * (high - low) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("bits", BITS)
def test_levels_and_error_are_those_of_lloyd_and_max(bits):
    """Every level is the mean of what lies nearest to it; for a normal density one set of levels alone is such."""
    levels = LEVELS[bits]
    ends = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), 12.0]
    means = [of_normal(*cell, lambda x: x) / of_normal(*cell, torch.ones_like) for cell in pairwise(ends)]
    assert levels == pytest.approx(means, abs=1e-7)
    cells = zip(pairwise(ends), levels, strict=True)
    least = 2 * sum(of_normal(*cell, lambda x, level=level: (x - level).square()) for cell, level in cells)
    x = normal(4, 64, 512)
    assert error(crossed(Eden(bits), x, FORWARD), x) == pytest.approx(least, rel=0.03)


@pytest.mark.parametrize("bits", BITS)
def test_a_code_is_that_of_the_nearest_level(bits):
    z = normal(5000)
    levels = torch.tensor([*LEVELS[bits], *(-level for level in LEVELS[bits])])
    assert torch.equal(_code(z, bits).long(), (z[:, None] - levels).abs().argmin(1))


def sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rotation(width: int, signs: torch.Tensor) -> torch.Tensor:
    """As a matrix: the first block's, then the last one's."""
    block = 1 << width.bit_length() - 1
    whole = torch.eye(width, dtype=torch.float64)
    for start, sign in zip((0, width - block), signs, strict=False):
        one = torch.eye(width, dtype=torch.float64)
        one[start : start + block, start : start + block] = sylvester(block) * sign
        whole = one @ whole
    return whole


@pytest.mark.parametrize("first", range(1, 131, 10))
def test_a_rotation_is_its_matrix_and_comes_back(first):
    for width in range(first, first + 10):
        signs = _signs(PLAIN, torch.tensor(width), width)
        matrix = rotation(width, signs.double())
        assert torch.allclose(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
        x = normal(3, width)
        assert torch.allclose(_rotated(x, signs).double(), x.double() @ matrix.T, atol=1e-5)
        code = _code(_rotated(x, signs), 3)
        level = torch.tensor([*LEVELS[3], *(-level for level in LEVELS[3])], dtype=torch.float64)[code.long()]
        scale = torch.tensor([1.0, 0.5, 2.0], dtype=torch.bfloat16)
        back = _restored(PLAIN, scale, _packed(code, 3), 3, signs, (3, width), torch.float64)
        assert torch.allclose(back, scale.double()[:, None] * level @ matrix, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 30])
def test_codes_take_their_bits_and_nothing_more(bits, count):
    code = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.uint8)
    packed = _packed(code, bits)
    whole = sum(int(c) << bits * i for i, c in enumerate(code))
    assert packed.numpy().tobytes() == whole.to_bytes(bits * -(-count // 8), "little")
    assert torch.equal(_unpacked(packed, bits, count), code.long())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [1, 2, 3, 16, 40, 96])
def test_messages_have_the_size_that_was_said(bits, width):
    x = normal(2, 5, width)
    sent = to_bytes(Eden(bits).encode(x, slot_of(x, BACKWARD)))
    assert len(sent) == Eden(bits).message_bytes(Extent(2, 5, width, 4, 1, 1)) == 20 + bits * math.ceil(10 * width / 8)


# Scales


@pytest.mark.parametrize("width", [1, 3, 16, 96])
@pytest.mark.parametrize("bits", BITS)
def test_activations_get_the_scale_of_least_error(bits, width):
    """The error stands at a right angle to what arrives, to bfloat16."""
    x = normal(4, 50, width).double()
    arrived = crossed(Eden(bits), x, FORWARD)
    leaning = ((x - arrived) * arrived).sum(-1).abs() / arrived.square().sum(-1)
    assert leaning.max() <= 2.0**-8


@pytest.mark.parametrize(("bits", "width", "lean"), [(1, 96, 0.04), (2, 256, 0.01), (4, 256, 0.01), (2, 16, 0.15)])
def test_gradients_are_right_in_the_mean_over_their_rotations(bits, width, lean):
    """What is left falls with the number of messages, down to a lean that small widths have: few rotations exist."""
    g, count = normal(1, 4, width, seed=3), 200
    keys = [MessageKey(step, 0, 0, "backward") for step in range(count)]
    arrived = torch.stack([crossed(Eden(bits), g, key) for key in keys])
    each = sum(error(one, g) for one in arrived) / count
    assert error(arrived.mean(0), g) <= 1.3 * each / count + lean**2
    along = (arrived * g).sum(-1) / g.square().sum(-1)
    assert (along - 1).abs().max() <= 2.0**-7, "each one of them, to bfloat16"
    if bits < 4:  # the mean of what has the least error falls short
        short = torch.stack([crossed(Eden(bits), g, FORWARD, seed) for seed in range(50)]).mean(0)
        assert float((short * g).sum() / g.square().sum()) < 0.97


def test_a_gradients_scale_is_right_in_the_mean_too():
    """A rotation does not change the scale of a single number: rounded to nearest it would lean the same way always."""
    g, count = normal(1, 64, 1), 300
    arrived = torch.stack([crossed(Eden(2), g, MessageKey(step, 0, 0, "backward")) for step in range(count)])
    assert (arrived.mean(0) / g - 1).abs().max() <= 4 * 2.0**-8 / math.sqrt(count)


def test_gradients_lose_far_less_than_in_four_bits_rounded_at_random():
    """The more so, the further a token's largest number is from the others."""
    g = normal(4, 64, 512)
    for x, part in ((g, 0.3), (g**3, 0.1)):
        assert error(crossed(Eden(4), x, BACKWARD), x) < part * error(crossed(Int4(), x, BACKWARD), x)


@pytest.mark.parametrize("width", [96, 127, 512, 768])
def test_an_outlier_spoils_nothing(width):
    """A number as large as all others together, wherever it is: int4's error is then many times the signal's rest."""
    for place in (0, width // 2, width - 1):
        x = normal(4, 64, width)
        x[..., place] = math.sqrt(width)
        assert error(crossed(Eden(2), x, FORWARD), x) < 0.16


# Edges


@pytest.mark.parametrize("key", [FORWARD, BACKWARD], ids=lambda key: key.leg)
@pytest.mark.parametrize("bits", BITS)
def test_zeros_arrive_as_zeros_beside_others(bits, key):
    x = normal(1, 4, 24)
    x[0, 1] = 0
    x[0, 2] = 1e-40  # below what every device can hold
    scale, _ = Eden(bits).encode(x, slot_of(x, key))
    arrived = crossed(Eden(bits), x, key)
    assert (scale[0, 1:3] == 0).all()
    assert (arrived[0, 1:3] == 0).all()
    assert error(arrived[0, 0], x[0, 0]) < 0.8


@pytest.mark.parametrize("key", [FORWARD, BACKWARD], ids=lambda key: key.leg)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [2.0**-120, LARGEST / 8])
def test_small_and_large_numbers_are_as_good_as_others(bits, key, size):
    x = normal(2, 8, 64).clamp(-4, 4)
    ordinary = crossed(Eden(bits), x, key) * size
    assert torch.allclose(crossed(Eden(bits), x * size, key), ordinary, rtol=2.0**-7, atol=0)
    edge = torch.full((1, 1, 64), torch.finfo(torch.float32).max)
    assert crossed(Eden(bits), edge, key).isfinite().all()


def test_what_aligns_with_the_rotation_stays_finite():
    """All of a token's size in one rotated number, at the edge of float32."""
    slot = slot_of(torch.empty(1, 1, 512), FORWARD)
    signs = _signs(slot, *_drawn(slot, CPU))
    for bits in BITS:
        scale, packed = Eden(bits).encode(signs[None] * LARGEST, slot)
        assert scale.isfinite().all()
        back = _restored(PLAIN, torch.full_like(scale, LARGEST), packed, bits, signs, (1, 1, 512), torch.float32)
        assert back.isfinite().all()


# Randomness


def test_a_gradients_rotation_is_a_pure_function_of_seed_and_key():
    x = normal(2, 8, 64)

    def sent(seed: int, key: MessageKey) -> bytes:
        return to_bytes(Eden(2).encode(x, slot_of(x, key, seed)))

    others = [
        (5, MessageKey(2, 1, 0, "backward")),
        (5, MessageKey(3, 0, 0, "backward")),
        (5, MessageKey(3, 1, 1, "backward")),
        (6, BACKWARD),
        (5, FORWARD),
    ]
    assert sent(5, BACKWARD) == sent(5, BACKWARD)
    assert len({sent(5, BACKWARD), *(sent(*other) for other in others)}) == 1 + len(others)


def test_activations_are_rotated_by_seed_and_boundary_alone():
    x = normal(2, 8, 64)

    def arrived(key: MessageKey, seed: int = 5) -> torch.Tensor:
        return crossed(Eden(2), x, key, seed)

    for same in (replace(FORWARD, step=9), replace(FORWARD, microbatch=0), EVALUATION):
        assert torch.equal(arrived(same), arrived(FORWARD))
    assert not torch.equal(arrived(replace(FORWARD, boundary=1)), arrived(FORWARD))
    assert not torch.equal(arrived(FORWARD, 6), arrived(FORWARD))
