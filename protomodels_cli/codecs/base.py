"""What every codec is: facts that need no torch, and pure functions on tensors. Knows no codec by name.

A codec is frozen and holds its parameters only. All that changes is in the `Memory` that comes with a message's slot.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from protomodels_cli import counter
from protomodels_cli.lazy import lazy_import, resolve
from protomodels_cli.protocol.messages import Leg, MessageKey
from protomodels_cli.safetensors_file import bytes_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Layout = list[tuple[tuple[int, ...], torch.dtype]]
else:
    torch = lazy_import("torch")

LARGEST = 2.0**127  # half of what float32 holds: whatever rounds up from here is still a number
NAME_BYTES = 16  # of a sample's name


class CodecError(ValueError):
    """What is written for a leg is not a codec: the rule and the fix."""

    def __init__(self, rule: str, fix: str):
        super().__init__(rule)
        self.rule, self.fix = rule, fix


class Memory:
    """What a codec remembers of one leg over one boundary at one end: tensors by name, in two layers.

    Staged while a step is under way, kept when the step is applied. A step that is skipped or dropped leaves no trace.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        found = self._staged.get(name)
        return self.kept.get(name) if found is None else found

    def put(self, name: str, tensor: Tensor) -> None:
        self._staged[name] = tensor

    def decide(self, apply: bool) -> None:
        if apply:
            self.kept |= self._staged
        self._staged.clear()

    def reset(self) -> None:
        self.kept.clear()
        self._staged.clear()

    def twin(self) -> Memory:
        """The same tensors, which nobody changes in place."""
        twin = Memory()
        twin.kept, twin._staged = dict(self.kept), dict(self._staged)
        return twin


@dataclass(frozen=True)
class Slot:
    """What one end knows of a message before the message arrives."""

    key: MessageKey
    shape: tuple[int, ...]  # (windows, tokens, numbers)
    dtype: torch.dtype
    seed: int = 0  # of the run
    samples: tuple[str, ...] = ()  # a name for the text of each window, the same whenever it comes back
    memory: Memory = field(default_factory=Memory)
    # Where one leg's numbers were, by microbatch, for the other leg; None where that has no use for it.
    positions: dict[int, Tensor] | None = None
    compiled: bool = False  # whether `Fused` functions are
    steps: int = 1  # of the run


class Kept(NamedTuple):
    """A tensor as a snapshot's part has it."""

    dtype: str  # as safetensors files write it
    shape: tuple[int, ...]
    at_most: bool = False  # there may be fewer rows, but as many as in all others that are remembered with it

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * bytes_of(self.dtype)


class Extent(NamedTuple):
    """A run in the numbers that sizes depend on."""

    windows: int  # of a microbatch
    context: int  # tokens of a window
    width: int  # numbers a token
    number_bytes: int  # of a number as a stage computes with it
    microbatches: int  # of a step
    samples: int  # different ones that the run can see
    positions: int = 0  # numbers a window whose positions both ends know from the other leg

    @property
    def tokens(self) -> int:
        return self.windows * self.context

    @property
    def window_bytes(self) -> int:
        """A window's numbers, unrounded."""
        return self.context * self.width * self.number_bytes

    @property
    def message_bytes(self) -> int:
        return self.windows * self.window_bytes

    @property
    def number(self) -> str:
        """The type of a number as a stage computes with it, as safetensors files write it."""
        return "F64" if self.number_bytes == 8 else "F32"

    @property
    def message(self) -> Kept:
        """A message's numbers, unrounded."""
        return Kept(self.number, (self.windows, self.context, self.width))


class AtEnds(NamedTuple):
    """Bytes at the end of a boundary that sends a leg's messages, and at the one that receives them."""

    sender: int = 0
    receiver: int = 0


class Remembered(NamedTuple):
    """Tensors by name, at the end of a boundary that sends a leg's messages and at the one that receives them."""

    sender: Mapping[str, Kept] = {}
    receiver: Mapping[str, Kept] = {}


class Surroundings(NamedTuple):
    """Where a codec is used: the leg, the codec of the other leg, how data are sampled."""

    leg: Leg
    other: Codec  # that of the other leg
    sampling: str  # data.sampling


class Word:
    """Anything that can be written for a leg."""

    name: ClassVar[str]
    usage: ClassVar[str]  # how it is written
    help: ClassVar[str]  # what it does, in a line


class Codec(Word, ABC):
    # Whether what arrives is what was sent.
    exact: ClassVar[bool] = False
    # Whether a loss may change much when a trained model goes without it.
    coarse: ClassVar[bool] = True
    # Whether it uses its memory at all; feedback goes on top of codecs that do not.
    remembers: ClassVar[bool] = False
    # Whether its slots need the samples' names, which cost a hash each.
    remembers_samples: ClassVar[bool] = False
    # Whether its memory is in the machine's own memory, wherever the stage computes.
    memory_on_host: ClassVar[bool] = False
    # Why samples must come back for it to be of any use, as a sentence without its end; empty: they need not.
    needs_revisits: ClassVar[str] = ""

    @abstractmethod
    def __str__(self) -> str:
        """The codec as the spec writes it."""

    def contradictions(self, around: Surroundings) -> Iterator[tuple[str, str]]:
        """Rule and fix of every reason why the codec cannot be used there."""
        yield from ()

    @property
    def uses_positions(self) -> bool:
        """Whether it needs the positions that the other leg's message had."""
        return False

    @property
    def offers_positions(self) -> bool:
        """Whether both ends know positions of its numbers once a message is through, for the other leg to use."""
        return False

    def without_positions(self) -> str:
        """Why the codec offers no positions, as the end of a sentence."""
        return f"{self} sends all positions"

    # Sizes

    @abstractmethod
    def message_bytes(self, e: Extent) -> int:
        """Bytes of a microbatch's tensors, exactly; for a codec that remembers samples, once all samples were seen."""

    def remembered(self, e: Extent) -> Remembered:
        """What the codec remembers between steps, as `saved` has it, once a step was applied."""
        return Remembered()

    def remembered_bytes(self, e: Extent) -> AtEnds:
        """Most bytes that the codec remembers between steps."""
        return AtEnds(*(sum(kept.nbytes for kept in end.values()) for end in self.remembered(e)))

    def staged_bytes(self, e: Extent) -> AtEnds:
        """Most bytes held beside `remembered_bytes` while a step is under way."""
        return AtEnds()

    def in_flight_bytes(self, e: Extent) -> int:
        """What an end holds of a microbatch between its forward and its backward."""
        return 0

    def offered_positions(self, e: Extent) -> int:
        """Number of positions offered per window."""
        return 0

    def first_steps(self, steps: int) -> list[int]:
        """Of a run of so many: each from which on messages look otherwise than before."""
        return [1]

    # Tensors

    @abstractmethod
    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        """The tensors that travel, on the message's device. The message is finite, and so is what comes out."""

    @abstractmethod
    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor: ...

    @abstractmethod
    def layout(self, slot: Slot) -> Layout:
        """Shapes and types of the tensors: what a receiver expects, to the byte."""

    def poison(self, slot: Slot, device: torch.device) -> Tensor:
        """What arrives in place of a message that was not finite and did not travel."""
        return torch.full(slot.shape, torch.nan, dtype=slot.dtype, device=device)

    def for_evaluation(self) -> Codec:
        """What evaluation uses: a memory of other samples is no help there."""
        return self

    def saved(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A memory as it is saved in a snapshot: few tensors."""
        return dict(kept)

    def restored(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(saved)


class BaseCodec(Codec):
    """A codec that stands by itself: `NAME` or `NAME:PARAMETER`."""

    examples: ClassVar[tuple[str, ...]] = ()  # where it has a parameter; at least one, each with a case of its own

    @classmethod
    def parse(cls, parameter: str) -> BaseCodec:
        """A codec from the text after the colon. Raises CodecError."""
        if parameter:
            raise CodecError(f"{cls.name} takes no parameter", f"write {cls.name}")
        return cls()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Feedback(Codec):
    """A codec on top of another, which remembers something to make up for what the other loses: `+NAME`."""

    inner: Codec

    remembers: ClassVar[bool] = True

    @classmethod
    def on(cls, inner: Codec) -> Self:
        if inner.exact:
            raise CodecError(
                f"{inner} is exact, so {cls.name} has no error to correct", f"remove +{cls.name}, or use a lossy codec"
            )
        if inner.remembers:
            raise CodecError(
                f"{inner} keeps a memory of its own, and {cls.name} cannot be added to that", f"write {inner}"
            )
        return cls(inner)

    def __str__(self) -> str:
        return f"{self.inner}+{self.name}"

    def contradictions(self, around: Surroundings) -> Iterator[tuple[str, str]]:
        yield from self.inner.contradictions(around)

    @property
    def uses_positions(self) -> bool:
        return self.inner.uses_positions

    @property
    def offers_positions(self) -> bool:
        return self.inner.offers_positions

    def without_positions(self) -> str:
        return self.inner.without_positions()

    def message_bytes(self, e: Extent) -> int:
        return self.inner.message_bytes(e)

    def in_flight_bytes(self, e: Extent) -> int:
        return self.inner.in_flight_bytes(e)

    def offered_positions(self, e: Extent) -> int:
        return self.inner.offered_positions(e)

    def layout(self, slot: Slot) -> Layout:
        return self.inner.layout(slot)

    def for_evaluation(self) -> Codec:
        return self.inner.for_evaluation()


class Packing(Word, ABC):
    """What is done to the bytes of a message's tensors, without loss: `+NAME` behind everything else."""

    @abstractmethod
    def pack(self, tensors: Sequence[Tensor]) -> bytes: ...

    @abstractmethod
    def unpack(self, payload: bytes, layout: Layout) -> list[Tensor]:
        """Raises BadMessage for what no sender makes, and never takes more memory than the layout says."""


class Fused:
    """A pure function of tensors that is one kernel or two where it is compiled: a message is small, and what a GPU
    does with it one operator at a time takes longer to ask for than to do."""

    def __init__(self, function: Callable[..., Any]):
        self._plain = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, slot: Slot, *arguments: Any) -> Any:
        if not slot.compiled:
            return self._plain(*arguments)
        if self._compiled is None:
            resolve(self._plain.__globals__)
            # Propagating indices overflows where random numbers multiply them by large constants.
            options: dict[str, Any] = {"constant_and_index_propagation": False}
            self._compiled = torch.compile(self._plain, fullgraph=True, dynamic=False, options=options)
        return self._compiled(*arguments)


def parse_number(text: str) -> float:
    """The number that `text` is; NaN if that is not a finite number."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def narrowed(message: Tensor) -> Tensor:
    """The numbers as float32 with room to round up; larger ones become the largest."""
    return message.clamp(-LARGEST, LARGEST).float()


def bounded_sum(a: Tensor, b: Tensor | None) -> Tensor:
    """The sum of two finite tensors, clamped so that it is finite too."""
    return a if b is None else (a + b).clamp(-LARGEST, LARGEST)


def uniform(seed: int | Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Numbers in [0, 1) on a grid of 2⁻²⁴, entry i from word i of the counter's stream: equal on every device."""
    return (counter.words_on(seed, math.prod(shape), device) >> 39).view(*shape).float() * 2.0**-24


def seed_at(slot: Slot, name: str) -> int:
    """A stream of random numbers of its own for every message."""
    key = slot.key
    return counter.subseed(slot.seed, name, key.step, key.microbatch, key.boundary, key.leg)


def seed_on(slot: Slot, name: str, device: torch.device) -> Tensor:
    """The same as a tensor, for functions that are compiled once for all seeds."""
    return torch.full((), counter.signed(seed_at(slot, name)), dtype=torch.int64, device=device)
