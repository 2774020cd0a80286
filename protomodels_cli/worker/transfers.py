"""Numbers on their way between a stage's device and this machine's memory. Knows no peers and no threads.

Where the device is the machine itself, nothing is under way for longer than a call. A CUDA device works through a
queue: what is received is uploaded beside it, what is to be sent is fetched once it is there, and whether numbers are
finite is read together with them, so that the thread that feeds the queue never waits for its end.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from protomodels_cli.codecs import End
from protomodels_cli.codecs.base import Slot
from protomodels_cli.codecs.crossing import all_finite
from protomodels_cli.codecs.packing import check_size, from_bytes, sizes_of, to_bytes
from protomodels_cli.model.state import on_host
from protomodels_cli.protocol.messages import BadMessage, Leg
from protomodels_cli.worker.pinning import HostMemory

if TYPE_CHECKING:
    from protomodels_cli.codecs.base import Layout

Payload = bytes | memoryview
State = dict[str, Tensor]
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all cards
REGION, PINNING_PAUSE = 64 << 20, 0.01  # bytes pinned at once, and seconds in which it is others' turn
PAGE = 4096
MOST_PINNED = 0.5  # of the machine's memory that is available: a stage's state beyond it is copied without, more slowly
AHEAD = 2  # pieces of work queued on a device: the next is there when one ends, and a gradient waits for no more


class Transfers:
    """For a device whose work is done when a call returns."""

    def __init__(self, device: torch.device):
        """`device`: that of messages. Tensors that are copied may be on others."""
        self.device = device

    def upload(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)

    def receive(self, end: End, payload: Payload | None, slot: Slot) -> Tensor:
        """A message that arrived. Raises BadMessage, here or in `check`."""
        return end.unpack(payload, slot, self.device)

    def send(self, end: End, message: Tensor, slot: Slot) -> Callable[[], Payload | None]:
        """What waits until the message is here, and returns it; None is poison."""
        payload = end.pack(message, slot)
        return lambda: payload

    def check(self) -> None:
        """Raises BadMessage if something received was not finite and nothing was sent since."""

    def copy(self, state: Mapping[str, Tensor]) -> Callable[[], State]:
        """What waits until a copy of these tensors is here, and returns it."""
        copied = on_host(state)
        return lambda: copied

    def before_change(self) -> None:
        """Call before tensors change that were given to `copy`."""

    def forget(self) -> None:
        """What was received is void: whether it was finite is nobody's fault any more."""

    def expect(self, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """A state such as this is going to be copied."""

    def pace(self) -> None:
        """Call after each piece of work: waits while the device has more than a little queued."""


class CudaTransfers(Transfers):
    def __init__(self, device: torch.device, *others: torch.device, memory: HostMemory | None = None):
        super().__init__(device)
        self._memory = memory or HostMemory()
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._asides = {card: torch.cuda.Stream(card) for card in (device, *others) if card.type == "cuda"}
        self._queued: deque[torch.cuda.Event] = deque()
        self._leaving: deque[tuple[torch.cuda.Event, Payload]] = deque()  # what is being uploaded from where it is
        self._unread: list[tuple[Leg, Tensor]] = []  # whether what was received is finite
        self._copied: dict[torch.device, torch.cuda.Event] = {}
        self._buffer: PinnedBuffer | None = None

    def upload(self, numbers: np.ndarray) -> Tensor:
        return self._uploaded(self._memory.holding(torch.from_numpy(numbers)))

    def _uploaded(self, here: Tensor) -> Tensor:
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._up):
            there = here.to(self.device, non_blocking=here.is_pinned())  # other memory is its owner's again at once
        compute.wait_stream(self._up)
        there.record_stream(compute)
        return there

    def _whole(self, payload: Payload) -> Tensor:
        """A payload's bytes on the device: from where they are, if they were put together in pinned memory."""
        with warnings.catch_warnings():  # of memory that may not be written to: it is not
            warnings.simplefilter("ignore", UserWarning)
            here = torch.frombuffer(payload, dtype=torch.uint8)
        if not here.is_pinned():
            return self._uploaded(self._memory.holding(here))
        there = self._uploaded(here)
        uploaded = torch.cuda.Event()
        uploaded.record(self._up)
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        self._leaving.append((uploaded, payload))
        return there

    def receive(self, end: End, payload: Payload | None, slot: Slot) -> Tensor:
        if payload is None:
            return end.decode(None, slot, self.device)
        packing, layout = end.packing[slot.key.leg], end.layout(slot)
        if packing is not None:
            payload = to_bytes(packing.unpack(bytes(payload), layout))
        check_size(payload, layout)
        parts = parts_of(self._whole(payload), layout)
        message = end.decode(parts, slot, self.device)
        floats = [part for part in (*parts, message) if part.is_floating_point()]
        self._unread += [(slot.key.leg, all_finite(slot, part)) for part in floats]
        return message

    def send(self, end: End, message: Tensor, slot: Slot) -> Callable[[], Payload | None]:
        tensors, finite = end.encode_unread(message, slot)
        legs = [leg for leg, _ in self._unread]
        flags = torch.stack([finite, *(flag for _, flag in self._unread)]).view(torch.uint8)
        self._unread.clear()
        parts = [part.contiguous().flatten().view(torch.uint8) for part in (*tensors, flags)]
        sizes = [part.numel() for part in parts]
        here = self._memory.empty(sum(sizes))
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            for part, place in zip(parts, here.split(sizes), strict=True):
                place.copy_(part, non_blocking=True)
                part.record_stream(self._down)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(self._down)
        layout = [(tuple(part.shape), part.dtype) for part in tensors]

        def wait() -> Payload | None:
            arrived.synchronize()
            *_, said = here.split(sizes)
            is_finite, *were_finite = said.tolist()
            for leg, was_finite in zip(legs, were_finite, strict=True):
                if not was_finite:
                    raise _not_finite(leg)
            if not is_finite:
                return None
            whole = here.numpy().data[: sum(sizes[:-1])]
            packing = end.packing[slot.key.leg]
            return whole if packing is None else packing.pack(from_bytes(whole, layout))

        return wait

    def check(self) -> None:
        unread, self._unread = self._unread, []
        if unread:
            found = torch.stack([flag for _, flag in unread]).tolist()
            for (leg, _), was_finite in zip(unread, found, strict=True):
                if not was_finite:
                    raise _not_finite(leg)

    def copy(self, state: Mapping[str, Tensor]) -> Callable[[], State]:
        buffer = self._buffer
        places = None if buffer is None else buffer.lend(state)
        if buffer is None or places is None:
            return super().copy(state)
        for card, aside in self._asides.items():
            aside.wait_stream(torch.cuda.current_stream(card))
        for name, tensor in state.items():
            with torch.cuda.stream(self._asides.get(tensor.device)):  # none: it is on the host
                for place, part in buffer.pieces(places[name], tensor):
                    place.copy_(part, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                tensor.record_stream(self._asides[tensor.device])  # should nobody else keep it until it is copied
        copied = self._copied = {card: torch.cuda.Event(blocking=True) for card in self._asides}
        for card, event in copied.items():
            event.record(self._asides[card])

        def wait() -> State:
            for event in copied.values():
                event.synchronize()
            return places

        return wait

    def before_change(self) -> None:
        for card, copied in self._copied.items():
            torch.cuda.current_stream(card).wait_event(copied)
        self._copied = {}

    def expect(self, state: Callable[[], Mapping[str, Tensor]]) -> None:
        if self._buffer is None or self._buffer.is_too_small:
            self._buffer = PinnedBuffer(sum(map(_rounded, state().values())), self.device)

    def forget(self) -> None:
        self._unread.clear()

    def pace(self) -> None:
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self.device))
        self._queued.append(done)
        if len(self._queued) > AHEAD:
            self._queued.popleft().synchronize()


def parts_of(whole: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors of a payload that is on a device as bytes, as many as they take."""
    parts = zip(whole.split(sizes_of(layout)), layout, strict=True)
    return [_aligned(part, dtype).view(dtype).view(shape) for part, (shape, dtype) in parts]


def _aligned(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part if part.storage_offset() % dtype.itemsize == 0 else part.clone()


def _not_finite(leg: Leg) -> BadMessage:
    error = BadMessage("a payload with numbers that are not finite", "not_finite")
    error.leg = leg
    return error


class Lent(dict[str, Tensor]):
    """A state in a buffer, which is free again when nobody has this any more."""


class PinnedBuffer:
    """Memory of this machine that a CUDA device copies to by itself. Made in a thread of its own, and pinned piece by
    piece: the driver takes about a second for three gigabytes, and lets nobody else in meanwhile."""

    def __init__(self, size: int, device: torch.device):
        self.size, self._device = size, device
        self.is_too_small = False  # for what was to be copied last
        self._memory: Tensor | None = None
        self._lent = False
        threading.Thread(target=self._pin, name="pinning", daemon=True).start()

    def _pin(self) -> None:
        if self.size > MOST_PINNED * psutil.virtual_memory().available:
            return  # … and others' programs have room
        torch.cuda.set_device(self._device)  # a thread's own is the first card
        cudart: Any = torch.cuda.cudart()
        try:
            memory = torch.empty(self.size + PAGE, dtype=torch.uint8)
            memory = memory[-memory.data_ptr() % PAGE :][: self.size]
            for piece in memory.split(REGION):
                piece.zero_()  # its pages are there before the driver asks for them
                if int(cudart.cudaHostRegister(piece.data_ptr(), piece.numel(), PORTABLE)) != 0:
                    return
                weakref.finalize(memory, cudart.cudaHostUnregister, piece.data_ptr())
                time.sleep(PINNING_PAUSE)
        except (RuntimeError, MemoryError):
            return  # states are then copied through memory that is not pinned, which takes longer
        self._memory = memory

    def lend(self, state: Mapping[str, Tensor]) -> Lent | None:
        """Room for these tensors; None while there is none."""
        self.is_too_small = sum(map(_rounded, state.values())) > self.size
        if self._memory is None or self._lent or self.is_too_small:
            return None
        places, offset = Lent(), 0
        for name, tensor in state.items():
            place = self._memory[offset : offset + tensor.nbytes]
            places[name] = place.view(tensor.dtype).view(tensor.shape)
            offset += _rounded(tensor)
        self._lent = True
        weakref.finalize(places, self._give_back)
        return places

    def pieces(self, place: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A place that was lent and what goes there, as bytes, cut where regions meet: no copy may cross that."""
        assert self._memory is not None
        to, source = (t.contiguous().view(-1).view(torch.uint8) for t in (place, tensor.detach()))
        offset = to.data_ptr() - self._memory.data_ptr()
        cuts = [min(REGION - offset % REGION, to.numel())]
        while sum(cuts) < to.numel():
            cuts.append(min(REGION, to.numel() - sum(cuts)))
        yield from zip(to.split(cuts), source.split(cuts), strict=True)

    def _give_back(self) -> None:
        self._lent = False


def _rounded(tensor: Tensor) -> int:
    """A tensor's bytes, so that the next one begins where any type may."""
    return -(-tensor.nbytes // 16) * 16


def transfers_for(devices: Sequence[torch.device], memory: HostMemory | None = None) -> Transfers:
    """For a stage on these, of which the first is that of messages."""
    return CudaTransfers(*devices, memory=memory) if devices[0].type == "cuda" else Transfers(devices[0])


Doing = Literal["compute", "wire", "idle"]


class Clock:
    """How long a device has been doing what: by its own clock, since a queue runs behind the calls that fill it."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._turns: list[tuple[Any, Doing]] = [(self._now(), "idle")]

    def turn(self, to: Doing) -> None:
        """From here on the device does something else."""
        self._turns.append((self._now(), to))

    def read(self) -> dict[Doing, float]:
        """Seconds of each since the last reading. Waits for the device."""
        last = self._now()
        if self._stream is not None:
            last.synchronize()
        found: dict[Doing, float] = {"compute": 0.0, "wire": 0.0, "idle": 0.0}
        ends = [when for when, _ in self._turns[1:]] + [last]
        for (begin, doing), end in zip(self._turns, ends, strict=True):
            found[doing] += _seconds(begin, end)
        self._turns = [(last, self._turns[-1][1])]
        return found

    def _now(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        now = torch.cuda.Event(enable_timing=True, blocking=True)
        now.record(self._stream)
        return now


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
