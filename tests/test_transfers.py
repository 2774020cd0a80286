"""What lies between a device's queue and bytes, as far as no card is needed: layouts, buffers, the clock."""

import pytest
import torch

from protomodels_cli.codecs.packing import check_size, sizes_of, to_bytes
from protomodels_cli.protocol.messages import BadMessage
from protomodels_cli.worker import transfers
from protomodels_cli.worker.pinning import HostMemory
from protomodels_cli.worker.transfers import Clock, PinnedBuffer, Transfers, parts_of

STATE = {
    "a": torch.arange(3000.0),
    "b": torch.tensor(7),
    "c": torch.arange(33 * 77).view(33, 77).to(torch.bfloat16),
    "empty": torch.zeros(0),
    "d": torch.arange(5),
}


def whole(tensors):
    return torch.frombuffer(bytearray(to_bytes(tensors)), dtype=torch.uint8)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.int8), (torch.int8, torch.bfloat16, torch.float32)])
def test_the_tensors_of_a_payload_whatever_their_alignment(dtypes):
    tensors = [torch.arange(5 + i).to(dtype) for i, dtype in enumerate(dtypes)]
    layout = [(tuple(t.shape), t.dtype) for t in tensors]
    assert all(torch.equal(*pair) for pair in zip(parts_of(whole(tensors), layout), tensors, strict=True))
    assert sum(sizes_of(layout)) == whole(tensors).numel()


@pytest.mark.parametrize("payload", [b"", b"7 bytes", b"9 bytes!!"])
def test_a_payload_of_another_size_is_refused(payload):
    with pytest.raises(BadMessage) as caught:
        check_size(payload, [((2,), torch.float32)])
    assert caught.value.kind == "size"


@pytest.fixture
def buffer(monkeypatch):
    """Memory of a few regions, which no card has pinned."""
    monkeypatch.setattr(transfers, "REGION", 4096)
    monkeypatch.setattr(PinnedBuffer, "_pin", lambda self: None)
    made = PinnedBuffer(sum(-(-t.nbytes // 16) * 16 for t in STATE.values()), torch.device("cpu"))
    made._memory = torch.empty(made.size, dtype=torch.uint8)
    return made


def test_a_state_goes_into_a_buffer_piece_by_piece(buffer):
    places = buffer.lend(STATE)
    copied = 0
    for name, tensor in STATE.items():
        for place, part in buffer.pieces(places[name], tensor):
            start = place.data_ptr() - buffer._memory.data_ptr()
            assert place.numel() == 0 or start // 4096 == (start + place.numel() - 1) // 4096, "crosses two regions"
            place.copy_(part)
            copied += 1
    assert copied > len(STATE)
    assert all(torch.equal(places[name], STATE[name]) for name in STATE)


def test_a_buffer_is_lent_once_at_a_time(buffer):
    places = buffer.lend(STATE)
    assert buffer.lend(STATE) is None
    del places
    assert buffer.lend(STATE) is not None


def test_what_does_not_fit_is_not_lent(buffer):
    assert buffer.lend({**STATE, "more": torch.zeros(100)}) is None


class Limited:
    """Stands for memory of which only this many bytes can be pinned."""

    WHY = "CUDA error: out of memory"

    def __init__(self, most):
        self.left, self.pinned = most, []

    def __call__(self, size):
        if size > self.left:
            raise RuntimeError(f"{self.WHY}\nand what else CUDA says")
        self.left -= size
        self.pinned.append(torch.empty(size, dtype=torch.uint8))
        return self.pinned[-1]

    def has(self, tensor):
        return any(tensor.data_ptr() == pinned.data_ptr() for pinned in self.pinned)


@pytest.mark.parametrize("tensor", [torch.arange(6).view(2, 3), torch.arange(6.0).view(2, 3).T, torch.zeros(0, 4)])
def test_numbers_are_copied_to_pinned_memory(tensor):
    pin, told = Limited(1 << 10), []
    memory = HostMemory(told.append, pin)
    copied, room = memory.holding(tensor), memory.empty(7)
    assert torch.equal(copied, tensor)
    assert copied.dtype == tensor.dtype
    assert pin.has(copied)
    assert pin.has(room)
    assert told == []


def test_where_no_memory_can_be_pinned_ordinary_memory_takes_its_place_and_it_is_told_once():
    told = []
    memory = HostMemory(told.append, Limited(0))
    came = memory.allocate(5)
    came[:] = b"whole"
    tensor = torch.arange(6)
    assert bytes(came) == b"whole"
    assert memory.holding(tensor) is tensor
    assert memory.empty(7).shape == (7,)
    assert told == [Limited.WHY]


def test_memory_is_pinned_again_once_there_is_some():
    pin = Limited(0)
    memory = HostMemory(pin=pin)
    assert not pin.has(memory.empty(7))
    pin.left = 7
    assert pin.has(memory.empty(7))


def test_a_clock_says_what_took_how_long(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 3.5, 10.0, 11.0])
    monkeypatch.setattr(transfers.time, "perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))
    for doing in ("compute", "wire", "idle"):
        clock.turn(doing)
    assert clock.read() == {"compute": 2.0, "wire": 0.5, "idle": 7.5}
    assert clock.read() == {"compute": 0.0, "wire": 0.0, "idle": 1.0}


def test_without_a_queue_a_copy_is_there_at_once():
    tensor = torch.zeros(3)
    wait = Transfers(torch.device("cpu")).copy({"x": tensor})
    tensor.add_(1)
    assert torch.equal(wait()["x"], torch.zeros(3))
