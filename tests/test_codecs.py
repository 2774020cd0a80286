"""What a boundary does to numbers: bounds, bytes and the randomness that is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli import counter
from protomodels_cli.model.stage import Place
from protomodels_cli.spec.sizes import boundary_bytes
from protomodels_cli.wire.codecs import Int8, carrier, codec_for, pack, pack_ids, unpack, unpack_ids

FORWARD, BACKWARD = Place(3, 1, 0, "forward"), Place(3, 1, 0, "backward")
WIRES = ("fp32", "bf16", "int8")


@st.composite
def messages(draw: st.DrawFn) -> torch.Tensor:
    """Any small shape, from zeros and denormals to the edge of float32."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 9)))
    exponent = draw(st.integers(-44, 37))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 10.0**exponent
    return x * (torch.rand(shape) > draw(st.sampled_from([0.0, 0.5, 1.0])))


@given(messages(), st.sampled_from(WIRES), st.sampled_from([FORWARD, BACKWARD]))
def test_bytes_bring_the_very_numbers_that_the_reference_computes_with(x, wire, place):
    spec = make_spec(wire={"forward": wire, "backward": wire})
    codec = codec_for(spec, place.leg)
    payload = pack(codec.encode(x, place))
    arrived = codec.decode(unpack(payload, codec.layout(tuple(x.shape), x.dtype)), x.dtype)
    assert torch.equal(arrived, carrier(spec)(x, place))
    with pytest.raises(ValueError, match="belong"):
        unpack(payload + b"\0", codec.layout(tuple(x.shape), x.dtype))


@given(messages(), st.sampled_from([FORWARD, BACKWARD]))
def test_int8_is_within_a_step_of_its_scale(x, place):
    scale, quotient = Int8(0).encode(x, place)
    error = (Int8(0).decode((scale, quotient), x.dtype) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    # a bfloat16 scale has 8 bits: up to 1/128 above the tightest; the smallest denormal is coarser
    step = torch.maximum(largest / 127 * (1 + 2**-7), torch.tensor(1e-40))
    assert (error <= step * (0.5 if place.leg == "forward" else 1.0) * 1.0001).all()
    assert quotient.abs().max() <= 127


def test_payload_is_what_the_sizes_say():
    for wire in WIRES:
        spec = make_spec(wire={"forward": wire, "backward": wire})
        x = torch.randn(2, 16, spec.boundary_width)
        ids = len(pack_ids(np.zeros((2, 16)), 2))
        sizes = boundary_bytes(spec)
        assert len(pack(codec_for(spec, "forward").encode(x, FORWARD))) + ids == sizes["forward"] * 32
        assert len(pack(codec_for(spec, "backward").encode(x, BACKWARD))) == sizes["backward"] * 32


def test_gradients_are_rounded_at_random_without_a_lean():
    x = torch.full((4000, 8), 0.3)
    x[:, 0] = 127.0  # scale 1: everything else lies between 0 and 1
    parts = Int8(5).encode(x, BACKWARD)
    up = parts[1][:, 1:].float().mean()
    assert up == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 28000) ** 0.5)
    assert (Int8(5).encode(x, FORWARD)[1][:, 1:] == 0).all(), "activations go to the nearest"


def test_random_rounding_is_a_pure_function_of_seed_and_place():
    x = torch.randn(3, 50, 8)
    first = Int8(5).encode(x, BACKWARD)[1]
    assert torch.equal(first, Int8(5).encode(x, BACKWARD)[1])
    others = [(5, Place(4, 1, 0, "backward")), (5, Place(3, 0, 0, "backward")), (5, Place(3, 1, 1, "backward"))]
    for seed, place in [*others, (6, BACKWARD)]:
        assert not torch.equal(first, Int8(seed).encode(x, place)[1])


@given(st.integers(0, 2**64 - 1))
def test_torch_makes_the_counter_s_words(seed):
    cleared = counter.words(seed, 0, 50) & np.uint64(2**63 - 1)
    assert (counter.words_on(seed, 50, torch.device("cpu")).numpy().astype(np.uint64) == cleared).all()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_not_finite(wire, bad):
    x = torch.randn(2, 3, 6)
    x[1, 2, 3] = bad
    carry = carrier(make_spec(wire={"forward": wire, "backward": wire}))
    for place in (FORWARD, BACKWARD):
        arrived = carry(x, place)
        assert not arrived[1, 2].isfinite().all()
        assert arrived[0].isfinite().all()
        assert arrived[1, :2].isfinite().all()


@pytest.mark.parametrize(("vocab", "width"), [(256, 2), (1 << 16, 2), (1 << 16 | 1, 3), (1 << 24, 3)])
def test_token_ids_travel_whole(vocab, width):
    tokens = np.array([[0, 1, vocab - 1], [255, vocab // 2, 7]])
    payload = pack_ids(tokens, width)
    assert len(payload) == 6 * width
    assert (unpack_ids(payload, width, 3, vocab) == tokens).all()
    with pytest.raises(ValueError, match="no whole windows"):
        unpack_ids(payload[:-1], width, 3, vocab)
    with pytest.raises(ValueError, match="vocabulary has"):
        unpack_ids(payload, width, 3, vocab - 1)
