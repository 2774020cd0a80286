"""What codecs remember: against their definitions, over steps that are dropped, in snapshots and out of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from boundary import CPU, REMEMBERING, WIRES, plain, slot_of, stream, windows_of, wire_spec

from protomodels_cli.codecs import End
from protomodels_cli.codecs.packing import to_bytes
from protomodels_cli.cost.traffic import remembered_by_codecs, staged_by_codecs
from protomodels_cli.protocol.messages import MessageKey


@pytest.mark.parametrize("codec", ["int4", "eden:2", "topk:0.2", "lowrank:1"])
def test_ef_sends_what_is_new_and_what_was_lost(codec):
    sender, receiver, bare = plain(f"{codec}+ef"), plain(f"{codec}+ef"), plain(codec)
    e = torch.zeros(2, 4, 6)
    for x, key in stream(6):
        slot = slot_of(x, key)
        c = bare.decode(bare.encode(x + e, slot), slot, CPU)
        e = x + e - c
        assert torch.equal(receiver.decode(sender.encode(x, slot), slot, CPU), c)
        sender.decide(apply=True)
    assert torch.equal(sender.state()["forward/error"], e)
    assert not receiver.state()


@pytest.mark.parametrize("codec", ["int4", "eden:2", "topk:0.2", "lowrank:1"])
def test_ef21_keeps_one_mirror_at_both_ends(codec):
    sender, receiver, bare = plain(f"{codec}+ef21"), plain(f"{codec}+ef21"), plain(codec)
    a = torch.zeros(2, 4, 6)
    for x, key in stream(6):
        slot = slot_of(x, key)
        a = a + bare.decode(bare.encode(x - a, slot), slot, CPU)
        assert torch.equal(receiver.decode(sender.encode(x, slot), slot, CPU), a)
        for end in (sender, receiver):
            end.decide(apply=True)
            assert torch.equal(end.state()["forward/mirror"], a)


def test_aqsgd_sends_a_sample_whole_and_then_its_changes():
    sender, receiver, bare = plain("int4+aqsgd"), plain("int4+aqsgd"), plain("int4")
    last: dict[int, torch.Tensor] = {}
    g = torch.Generator().manual_seed(3)
    for i, ids in enumerate([(0, 1), (2, 3), (0, 2), (1, 4), (3, 0)]):  # whole, whole, changes, one of each, changes
        x = torch.randn(2, 4, 6, generator=g)
        slot = sender.slot(
            MessageKey(i + 1, 0, 0, "forward"), x.shape, x.dtype, torch.tensor(ids)[:, None].expand(-1, 5)
        )
        right = x.clone()
        old = [row for row, sample in enumerate(ids) if sample in last]
        if old:
            before = torch.stack([last[ids[row]] for row in old])
            change = slot_of(x[old], slot.key)
            right[old] = before + bare.decode(bare.encode(x[old] - before, change), change, CPU)
        payload = sender.pack(x, slot)
        assert len(payload) == (2 - len(old)) * 4 * 6 * 4 + len(old) * 4 * (3 + 2)
        assert torch.equal(receiver.unpack(payload, slot, CPU), right)
        last |= dict(zip(ids, right, strict=True))
        for end in (sender, receiver):
            end.decide(apply=True)
    assert equal_states(sender, receiver)
    assert sender.state().keys() == {"forward/samples", "forward/last"}, "a file of few tensors, whatever the samples"
    assert len(sender.state()["forward/last"]) == len(last) == 5


def equal_states(a: End, b: End) -> bool:
    mine, theirs = a.state(), b.state()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.parametrize("codec", REMEMBERING)
def test_a_message_that_was_dropped_and_repeated_leaves_equal_memories(codec):
    """Half of step 2 is lost on the way and the step is given up; then it is done again from the start."""
    undisturbed, disturbed = (plain(codec), plain(codec)), (plain(codec), plain(codec))

    def step(ends: tuple[End, End], number: int, lost: bool = False) -> list[torch.Tensor]:
        arrived = []
        for x, key in itertools.islice(stream(8), 2 * number - 2, 2 * number):
            slot = ends[0].slot(key, x.shape, x.dtype, windows_of(x, key.microbatch * 2))
            payload = ends[0].pack(x, slot)
            if lost and key.microbatch == 1:
                break
            arrived.append(ends[1].unpack(payload, slot, CPU))
        for end in ends:
            end.decide(apply=not lost)
        return arrived

    for number in (1, 2, 3):
        if number == 2:
            before = [dict(end.state()) for end in disturbed]
            step(disturbed, number, lost=True)
            for end, state in zip(disturbed, before, strict=True):
                assert all(torch.equal(end.state()[k], state[k]) for k in state)
                assert end.state().keys() == state.keys()
        right, found = step(undisturbed, number), step(disturbed, number)
        assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
    assert all(equal_states(a, b) for a, b in zip(undisturbed, disturbed, strict=True))
    if disturbed[1].state():  # the receiver remembers too
        assert equal_states(*disturbed)
    assert disturbed[0].state()


@pytest.mark.parametrize("codec", REMEMBERING)
def test_a_memory_is_saved_restored_and_reset(codec):
    def run(end: End, part: int) -> list[bytes]:
        sent = []
        for x, key in itertools.islice(stream(8), 4 * part, 4 * part + 4):
            sent.append(end.pack(x, end.slot(key, x.shape, x.dtype, windows_of(x))))
            end.decide(apply=True)
        return sent

    first = plain(codec)
    run(first, 0)
    second = plain(codec)
    second.load({name: t.clone() for name, t in first.state().items()}, CPU)
    assert run(first, 1) == run(second, 1)
    first.reset()
    assert not first.state()
    x, key = next(stream(1))
    slot = first.slot(key, x.shape, x.dtype, windows_of(x))
    assert first.pack(x, slot) == plain(codec).pack(x, slot)


@pytest.mark.parametrize("codec", REMEMBERING)
def test_evaluation_touches_no_memory(codec):
    end = plain(codec)
    for x, key in stream(2):
        end.encode(x, end.slot(key, x.shape, x.dtype, windows_of(x)))
    end.decide(apply=True)
    before = {name: t.clone() for name, t in end.state().items()}
    x = torch.randn(2, 4, 6)
    slot = end.slot(MessageKey(1, 0, 0, "evaluation"), x.shape, x.dtype, windows_of(x))
    end.decode(end.encode(x, slot), slot, CPU)
    end.decide(apply=True)
    assert end.state().keys() == before.keys()
    assert all(torch.equal(end.state()[name], before[name]) for name in before)


def test_positions_are_forgotten_once_they_were_used():
    """Memory must not grow with the number of microbatches."""
    end = End(wire_spec("topk:0.1", "topk:mask"))
    x = torch.randn(2, 4, 6)
    for microbatch in range(10):
        end.pack(x, end.slot(MessageKey(1, microbatch, 0, "forward"), x.shape, x.dtype, None))
        slot = end.slot(MessageKey(1, microbatch, 0, "backward"), x.shape, x.dtype, None)
        end.unpack(to_bytes([torch.zeros(2, 2, dtype=torch.bfloat16)]), slot, CPU)
        assert not end._positions


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_remembered_and_staged_has_the_size_that_was_said(wire):
    """At both ends of a boundary, over a whole step."""
    spec = wire_spec(*wire, steps=1)
    before, behind = End(spec), End(spec)
    for m in range(spec.batch.microbatches):
        x = torch.randn(2, spec.model.context, spec.boundary_width)
        forward = before.slot(MessageKey(1, m, 0, "forward"), x.shape, x.dtype, windows_of(x, 2 * m))
        behind.unpack(before.pack(x, forward), forward, CPU)
        backward = behind.slot(MessageKey(1, m, 0, "backward"), x.shape, x.dtype, None)
        before.unpack(behind.pack(x, backward), backward, CPU)
    for end, remembered, staged in (
        (before, sum(s.next for s in remembered_by_codecs(spec)), sum(s.next for s in staged_by_codecs(spec))),
        (behind, sum(s.previous for s in remembered_by_codecs(spec)), sum(s.previous for s in staged_by_codecs(spec))),
    ):
        assert sum(t.nbytes for memory in end._memories.values() for t in memory._staged.values()) == staged
        end.decide(apply=True)
        assert sum(t.nbytes for t in end.state().values()) == remembered


@pytest.mark.parametrize(("codec", "home"), [("int4+ef", "meta"), ("int4+ef21", "meta"), ("int4+aqsgd", "cpu")])
def test_a_restored_memory_is_where_its_codec_wants_it(codec, home):
    """Beside the stage, on whichever device that is; AQ-SGD's, which has an entry a sample, in the host's memory."""
    first, second = plain(codec), plain(codec)
    for x, key in stream(2):
        first.pack(x, first.slot(key, x.shape, x.dtype, windows_of(x)))
    first.decide(apply=True)
    second.load(first.state(), torch.device("meta"))
    assert second.state().keys() == first.state().keys() != set()
    assert {t.device.type for t in second.state().values()} == {home}
