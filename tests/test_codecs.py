"""What a boundary does to numbers: bounds, bytes, memories, and the randomness that is none."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from statistics import fmean

import numpy as np
import pytest
import torch
from boundary import BASES, CPU, WIRES, plain, slot_of, windows_of, wire_spec
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli import counter
from protomodels_cli.codecs import Carrier, End, pack_ids, parse_codec, unpack_ids
from protomodels_cli.codecs.base import LARGEST, CodecError, Extent
from protomodels_cli.codecs.bf16 import BF16
from protomodels_cli.codecs.lowrank import LowRank
from protomodels_cli.codecs.packing import from_bytes, to_bytes
from protomodels_cli.codecs.quantised import Int4, Int8
from protomodels_cli.codecs.registry import names_in
from protomodels_cli.codecs.topk import TopK
from protomodels_cli.codecs.zstd import Zstd
from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.protocol.messages import BadMessage, MessageKey

FORWARD, BACKWARD, EVALUATION = (MessageKey(3, 1, 0, leg) for leg in ("forward", "backward", "evaluation"))


@st.composite
def messages(draw: st.DrawFn) -> torch.Tensor:
    """Any small shape, from zeros and denormals to the edge of float32."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 9)))
    exponent = draw(st.integers(-44, 38))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 10.0**exponent
    x = x.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    x = x * (torch.rand(shape, generator=torch.Generator().manual_seed(1)) >= draw(st.sampled_from([0.0, 0.5, 1.0])))
    return x.to(draw(st.sampled_from([torch.float32, torch.float64])))


@given(messages(), st.sampled_from(WIRES), st.sampled_from([FORWARD, BACKWARD, EVALUATION]))
def test_bytes_bring_the_very_numbers_that_the_reference_computes_with(x, wire, key):
    """Three messages in a row, so that what is remembered is used."""
    spec = wire_spec(*wire)
    sender, receiver, carry = End(spec), End(spec), Carrier(spec)
    for microbatch, message in enumerate((x, 0.5 * x, -x)):
        if parse_codec(wire[1]).codec.uses_positions and key.leg == "backward":  # positions come from the activations
            slot = sender.slot(MessageKey(3, microbatch, 0, "forward"), x.shape, x.dtype, None)
            sender.unpack(receiver.pack(x.flip(-1), slot), slot, CPU)
            carry(x.flip(-1), slot.key)
        at = MessageKey(3, microbatch, 0, key.leg)
        slot = sender.slot(at, x.shape, x.dtype, windows_of(x))
        payload = sender.pack(message, slot)
        arrived = receiver.unpack(payload, slot, CPU)
        assert arrived.shape == x.shape
        assert arrived.dtype == x.dtype
        assert arrived.isfinite().all()
        assert torch.equal(arrived, carry(message, at, windows_of(x)))
    with pytest.raises(BadMessage) as refused:
        receiver.unpack(payload + b"\0", slot, CPU)
    assert refused.value.kind in ("size", "packing", "positions")


@pytest.mark.parametrize("base", BASES)
def test_the_tensors_of_a_sender_lie_in_memory_as_those_of_a_receiver(base):
    """Otherwise the reference, which decodes the sender's, may round differently."""
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    assert all(tensor.is_contiguous() for tensor in plain(base).encode(x, slot_of(x, FORWARD)))


# Bounds, codec by codec


@given(messages())
def test_bf16_is_within_its_last_bit(x):
    arrived = BF16().decode(BF16().encode(x, slot_of(x, FORWARD)), slot_of(x, FORWARD))
    assert ((arrived - x.clamp(-LARGEST, LARGEST)).abs() <= x.abs() * 2.0**-8 + 1e-40).all()


@given(messages(), st.sampled_from([Int8(), Int4()]), st.sampled_from([FORWARD, BACKWARD]))
def test_rounding_is_within_a_step_of_its_scale(x, codec, key):
    slot = slot_of(x, key)
    error = (codec.decode(codec.encode(x, slot), slot) - x.clamp(-LARGEST, LARGEST)).abs()
    largest = x.clamp(-LARGEST, LARGEST).abs().amax(-1, keepdim=True)
    # a bfloat16 scale has 8 bits: up to 1/128 above the tightest; the smallest denormal is coarser
    step = torch.maximum(largest / codec.levels * (1 + 2**-7), torch.tensor(1e-40))
    assert (error <= step * (0.5 if key.leg == "forward" else 1.0) * 1.0001).all()


@given(messages(), st.floats(0.01, 1.0))
def test_topk_keeps_the_largest_and_nothing_else(x, share):
    codec, slot = TopK(share), slot_of(x, FORWARD)
    arrived = codec.decode(codec.encode(x, slot), slot).flatten(1)
    whole = x.clamp(-LARGEST, LARGEST).flatten(1)
    kept = max(1, round(share * whole.shape[1]))
    assert ((arrived != 0).sum(1) <= kept).all()
    # what is missing is no larger than anything that is there, and what is there is right to bfloat16
    there = arrived != 0
    assert ((arrived - whole).abs()[there] <= (whole.abs() * 2.0**-8 + 1e-40)[there]).all()
    for row, mask in zip(whole.abs().float(), there, strict=True):
        if mask.any() and not mask.all():
            assert row[~mask].max() <= row[mask].min() + 1e-40


@given(messages(), st.integers(1, 4))
def test_low_rank_never_adds_energy_and_finds_what_is_of_its_rank(x, rank):
    codec, slot = LowRank(rank), slot_of(x, FORWARD)
    whole = x.clamp(-LARGEST, LARGEST).flatten(0, -2).double()
    arrived = codec.decode(codec.encode(x, slot), slot).flatten(0, -2).double()
    tiny = 1e-38 * whole.numel()  # what float32 holds no relative precision for
    assert (whole - arrived).norm() <= 1.02 * whole.norm() + tiny
    if torch.linalg.matrix_rank(whole / whole.abs().max().clamp(min=1e-300)) <= rank:
        assert (whole - arrived).norm() <= 0.02 * whole.norm() + tiny


def test_low_rank_is_near_the_best_there_is():
    g = torch.Generator().manual_seed(0)
    spectrum = torch.diag(torch.tensor([2.0**-i for i in range(16)]))
    x = (torch.randn(1, 64, 16, generator=g) @ spectrum) @ torch.linalg.qr(torch.randn(16, 16, generator=g)).Q
    codec, slot = LowRank(4), slot_of(x, FORWARD)
    error = (codec.decode(codec.encode(x, slot), slot) - x).norm()
    best = torch.linalg.svdvals(x[0])[4:].norm()
    assert best * 0.999 <= error <= 1.1 * best


def test_payload_is_what_the_sizes_say():
    for forward, backward in WIRES:
        written = parse_codec(forward), parse_codec(backward)
        if any(w.packing or w.codec.remembers_samples for w in written):
            continue  # the sizes say what they are before packing, and once samples are known
        spec = wire_spec(forward, backward, steps=6)
        x = torch.randn(2, 16, spec.boundary_width)
        end, other, sizes = End(spec), End(spec), boundary_bytes(spec)
        there, back = [], []
        for step in range(1, 1 + spec.steps):  # in the mean over them, where a codec follows on another
            first, second = (end.slot(replace(key, step=step), x.shape, x.dtype, None) for key in (FORWARD, BACKWARD))
            activations = end.pack(x, first)
            other.unpack(activations, first, CPU)
            there.append(len(activations))
            back.append(len(other.pack(x, second)))
        ids = len(pack_ids(np.zeros((2, 16)), 2))
        assert ceil(fmean(there)) + ids == sizes["forward"] * 32, forward
        assert ceil(fmean(back)) == sizes["backward"] * 32, backward


@given(st.lists(st.sampled_from(["eden:3", "eden:5", "int8", "bf16"]), min_size=2, max_size=4), st.integers(1, 50))
def test_codecs_in_turn_share_the_steps_equally(words, steps):
    text = " then ".join(words)
    codec, x = parse_codec(text).codec, torch.randn(1, 2, 6)
    assert str(codec) == text
    assert names_in(text) == [name for word in words for name in names_in(word)]
    starts = [*codec.first_steps(steps), steps + 1]
    shares = [b - a for a, b in pairwise(starts)]
    assert (starts[0], sum(shares)) == (1, steps)
    assert max(shares) - min(shares) <= 1
    for word, (start, end) in zip(words, pairwise(starts), strict=True):
        for step in range(start, end):
            slot = replace(slot_of(x, MessageKey(step, 0, 0, "forward")), steps=steps)
            assert codec.layout(slot) == parse_codec(word).codec.layout(slot)


@pytest.mark.parametrize(("numbers", "width"), [(1 << 16, 2), ((1 << 16) + 1, 3), (1 << 32, 4), ((1 << 32) + 1, 5)])
def test_an_index_has_the_bytes_that_the_largest_one_needs(numbers, width):
    share = 1 / (1 << 16)
    count = round(share * numbers)
    assert TopK(share).message_bytes(Extent(1, numbers, 1, 4, 1, 1)) == count * (2 + width)


def test_byte_planes_and_zstd_shrink_bfloat16_as_promised():
    x = torch.randn(4, 256, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert x.nbytes / len(Zstd().pack([x])) > 1.3
    assert torch.equal(Zstd().unpack(Zstd().pack([x]), [(tuple(x.shape), x.dtype)])[0], x)


def test_a_packed_payload_cannot_grow_without_bound():
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    for payload, kind in ((bomb, "size"), (b"nonsense", "packing")):
        with pytest.raises(BadMessage) as refused:
            Zstd().unpack(payload, [((16,), torch.float32)])
        assert refused.value.kind == kind


# Randomness


def test_gradients_are_rounded_at_random_without_a_lean():
    x = torch.full((1, 4000, 8), 0.3)
    x[..., 0] = 127.0  # scale 1: everything else lies between 0 and 1
    level = Int8().encode(x, slot_of(x, BACKWARD, seed=5))[1]
    up = level[..., 1:].float().mean()
    assert up == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 28000) ** 0.5)
    nearest = Int8().encode(x, slot_of(x, FORWARD, seed=5))[1]
    assert (nearest[..., 1:] == 0).all(), "activations go to the nearest"


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=str)
def test_random_rounding_is_a_pure_function_of_seed_and_key(codec):
    x = torch.randn(3, 50, 8)

    def rounded(seed: int, key: MessageKey) -> torch.Tensor:
        return codec.encode(x, slot_of(x, key, seed))[1]

    first = rounded(5, BACKWARD)
    assert torch.equal(first, rounded(5, BACKWARD))
    others = [
        (5, MessageKey(4, 1, 0, "backward")),
        (5, MessageKey(3, 0, 0, "backward")),
        (5, MessageKey(3, 1, 1, "backward")),
    ]
    for seed, key in [*others, (6, BACKWARD)]:
        assert not torch.equal(first, rounded(seed, key))


@given(st.integers(0, 2**64 - 1))
def test_torch_makes_the_counter_s_words(seed):
    cleared = counter.words(seed, 0, 50) & np.uint64(2**63 - 1)
    assert (counter.words_on(seed, 50, torch.device("cpu")).numpy().astype(np.uint64) == cleared).all()


# Poison


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_becomes_poison_and_changes_no_memory(wire, bad):
    spec = wire_spec(*wire)
    x = torch.randn(2, 3, 6)
    broken = x.clone()
    broken[1, 2, 3] = bad
    for leg in ("forward", "backward", "evaluation"):
        sender, receiver, carry = End(spec), End(spec), Carrier(spec)
        slot = sender.slot(MessageKey(1, 0, 0, leg), x.shape, x.dtype, windows_of(x))
        assert sender.pack(broken, slot) is None
        assert receiver.unpack(None, slot, CPU).isnan().all()
        assert carry(broken, slot.key, windows_of(x)).isnan().all()
        for end in (sender, receiver):
            end.decide(apply=True)
            assert not end.state()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("encode", ["encode", "encode_unread"])  # as on a processor, and as on a card
def test_after_poison_both_ends_expect_the_same_message(wire, encode):
    """The same samples come again within the step, as they may where an epoch ends."""
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    sender, receiver = End(wire_spec(*wire)), End(wire_spec(*wire))
    slots = [sender.slot(MessageKey(1, m, 0, "forward"), x.shape, x.dtype, windows_of(x)) for m in (0, 1)]
    getattr(sender, encode)(torch.full_like(x, torch.nan), slots[0])
    receiver.decode(None, slots[0], CPU)
    assert sender.layout(slots[1]) == receiver.layout(slots[1])
    receiver.unpack(sender.pack(x, slots[1]), slots[1], CPU)


@pytest.mark.parametrize("wire", [w for w in WIRES if parse_codec(w[0]).packing is None])
def test_numbers_from_outside_that_are_not_finite_are_refused(wire):
    """Every number of the second message is infinite, once a memory is there to hide it."""
    spec, x = wire_spec(*wire), torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    sender, receiver = End(spec), End(spec)
    slots = [sender.slot(MessageKey(1, m, 0, "forward"), x.shape, x.dtype, windows_of(x)) for m in (0, 1)]
    receiver.unpack(sender.pack(x, slots[0]), slots[0], CPU)
    tensors = from_bytes(sender.pack(x, slots[1]), receiver.layout(slots[1]))
    for part in tensors:
        if part.is_floating_point():
            part.fill_(torch.inf)
    with pytest.raises(BadMessage) as refused:
        receiver.unpack(to_bytes(tensors), slots[1], CPU)
    assert refused.value.kind == "not_finite"


@pytest.mark.parametrize("share", [0.02, 0.3])  # indices, and a bitmap
def test_positions_that_no_sender_makes_are_refused(share):
    end, x = plain(f"topk:{share}"), torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    slot = slot_of(x, FORWARD)
    values, marks = from_bytes(end.pack(x, slot), TopK(share).layout(slot))
    for wrong in (torch.full_like(marks, 255), torch.zeros_like(marks)):
        with pytest.raises(BadMessage) as refused:
            end.unpack(to_bytes([values, wrong]), slot, CPU)
        assert refused.value.kind == "positions"


# Words


NO_CODECS = """int7 topk topk:2 topk:0 topk:x topk:nan lowrank lowrank:0 lowrank:1.5 lowrank:inf int8:3 int8+int8
int8+ef+ef21 zstd int8+zstd+ef fp32+ef + : eden eden:0 eden:7 eden:2.5 eden:x"""


@pytest.mark.parametrize("text", ["", *NO_CODECS.split()])
def test_words_that_are_no_codec_are_refused_with_a_fix(text):
    with pytest.raises(CodecError) as refused:
        parse_codec(text)
    assert refused.value.fix


@pytest.mark.parametrize(("vocab", "width"), [(256, 2), (1 << 16, 2), (1 << 16 | 1, 3), (1 << 24, 3)])
def test_token_ids_travel_whole(vocab, width):
    tokens = np.array([[0, 1, vocab - 1], [255, vocab // 2, 7]])
    payload = pack_ids(tokens, width)
    assert len(payload) == 6 * width
    assert (unpack_ids(payload, width, 3, vocab) == tokens).all()
    with pytest.raises(BadMessage) as refused:
        unpack_ids(payload[:-1], width, 3, vocab)
    assert refused.value.kind == "size"
    with pytest.raises(BadMessage, match=str(vocab - 1)) as refused:
        unpack_ids(payload, width, 3, vocab - 1)
    assert refused.value.kind == "token_id"


def test_where_activations_were_poison_the_gradient_is_too_for_devices_that_answer_late():
    """Their positions are not known: nothing to encode, and nobody to blame."""
    end = End(wire_spec("topk:0.25", "topk:mask"))
    slot = end.slot(MessageKey(1, 0, 0, "backward"), (1, 4, 6), torch.float32, None)
    tensors, finite = end.encode_unread(torch.full((1, 4, 6), torch.nan), slot)
    assert (tensors, bool(finite)) == ([], False)
