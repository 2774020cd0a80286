"""Messages in frames: cut and put together again, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.protocol.messages import BadMessage, CreditExceeded
from protomodels_cli.wire import frames
from protomodels_cli.wire.frames import Assembler, Frame, Message, frames_of
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


@given(
    st.sampled_from(["forward", "backward", "evaluation"]), st.binary(max_size=64), st.binary(max_size=5000), st.data()
)
def test_any_message_survives_being_cut(leg, ids, payload, data):
    pieces = data.draw(st.sampled_from([1, 7, 100, 1 << 20]))
    original = Message(leg, 3, 2, 1, ids, payload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "PIECE", pieces)
        sent = list(frames_of(original, 9))
    cut = [Frame.from_bytes(f.to_bytes()) for f in sent]
    assert cut == sent
    assert all(len(f.payload) <= pieces and f.size == len(f.to_bytes()) for f in cut)
    assembler = Assembler(len(ids) + len(payload), [leg])
    found = [assembler.add(f) for f in cut]
    assert found[:-1] == [None] * (len(cut) - 1)
    assert found[-1] == original
    if ids or payload:
        tight = Assembler(len(ids) + len(payload) - 1, [leg])
        with pytest.raises(BadMessage) as error:
            list(map(tight.add, cut))
        assert error.value.kind == "message_too_large"


def test_frames_that_do_not_belong_together_are_refused():
    def frame(payload: bytes = b"", **fields) -> Frame:
        return Frame(pb.Frame(**{"leg": pb.Frame.FORWARD, "step": 1, "microbatch": 0, "size": 2, **fields}), payload)

    for first, other, kind in (
        (frame(b"a"), frame(b"b", microbatch=1), "frame_out_of_order"),
        (frame(b"a"), frame(b"b", leg=pb.Frame.EVALUATION), "frame_out_of_order"),
        (frame(b"a"), frame(b"b", ids=b"again"), "frame_out_of_order"),
        (frame(b"a"), frame(b"b", size=3), "frame_out_of_order"),
        (frame(b"a"), frame(), "frame_empty"),
        (frame(b"a"), frame(b"bc"), "message_too_long"),
        (frame(b"ab"), frame(b"a", leg=99), "unknown_leg"),
        (frame(b"ab"), frame(), "frame_empty"),
        (frame(b"ab"), frame(b"abc"), "message_too_long"),
        (frame(b"ab"), frame(b"ab", poison=True), "poison_with_payload"),
        (frame(b"ab"), frame(b"a", poison=True, size=0), "message_too_long"),
    ):
        assembler = Assembler(100, ["forward", "evaluation"])
        assert (assembler.add(first) is None) == (first.payload == b"a")
        with pytest.raises(BadMessage) as error:
            assembler.add(other)
        assert error.value.kind == kind


def test_what_may_not_come_in_takes_no_memory():
    def no_memory(size: int) -> memoryview:
        raise AssertionError(f"{size} bytes were taken")

    def no_credit() -> None:
        raise CreditExceeded(4)

    def begin(**options: Any) -> BadMessage:
        assembler = Assembler(100, allocate=no_memory, **options)
        with pytest.raises(BadMessage) as error:
            assembler.add(Frame(pb.Frame(leg=pb.Frame.BACKWARD, step=1, size=50), b"begins"))
        return error.value

    assert begin(legs=["forward", "evaluation"]).kind == "wrong_side"
    assert begin(legs=["backward"], check_credit=no_credit).kind == "credit_exceeded"


@pytest.mark.parametrize("content", [b"", b"\x01\x00\x00", b"\x01\x00\x00\x00", b"\x01\x00\x00\x00\xff", b"\xff" * 100])
def test_what_is_no_frame_is_refused(content):
    with pytest.raises(BadMessage) as error:
        Frame.from_bytes(content)
    assert error.value.kind == "no_frame"
