"""Ways to sum the gradients of a stage's replicas, and the bits that a replica sends for each.

All of them play a butterfly in one process. Every replica owns a slice of the parameters: it gets the others'
contributions to that slice, adds them in replica order and sends the sum to everybody. So a number crosses the network
twice, as a contribution and as a part of the sum, and is rounded both times. Of tables only the touched rows travel,
with a bit for each row that says whether it does. Knows no model: a parameter is a name, a shape and a kind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.codecs.base import LARGEST, CodecError, Memory, Slot, narrowed, seed_at
from protomodels_cli.codecs.eden import LEVELS, SMALLEST, Eden
from protomodels_cli.errors import OptionError
from protomodels_cli.protocol.messages import MessageKey

BLOCK = 512  # numbers that are rotated together and share a scale; a table's row is a block of its own
SHIFT = 1e-12  # of a Gram matrix' trace, added to its diagonal: columns may be parallel


Kind = Literal["matrix", "table", "other"]  # a matrix is one that Muon moves; a table has a row for each token


class Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: Kind
    momentum: float = 0.0  # of Muon


@dataclass
class Gradients:
    """Those of one replica, or their sum. None: the parameter has none in this step."""

    tensors: list[Tensor | None]
    touched: list[Tensor | None]  # of a table: which rows have a gradient


# Rounding


class Rounding(ABC):
    """What a message does to the numbers in it."""

    name: ClassVar[str]

    @abstractmethod
    def bits(self, sent: Tensor, numbers: Tensor, block: int) -> Tensor:
        """Of the blocks that are `sent`; `numbers` has how many each holds without padding."""

    @abstractmethod
    def arrived(self, x: Tensor, keys: Sequence[MessageKey], seed: int) -> Tensor:
        """Messages (messages, blocks, block) as they are decoded; each has its own key."""


class Exact(Rounding):
    name = "exact"

    def __str__(self) -> str:
        return self.name

    def bits(self, sent: Tensor, numbers: Tensor, block: int) -> Tensor:
        return 32.0 * (sent * numbers).sum()

    def arrived(self, x: Tensor, keys: Sequence[MessageKey], seed: int) -> Tensor:
        return x


class Bf16(Rounding):
    name = "bf16"

    def __str__(self) -> str:
        return self.name

    def bits(self, sent: Tensor, numbers: Tensor, block: int) -> Tensor:
        return 16.0 * (sent * numbers).sum()

    def arrived(self, x: Tensor, keys: Sequence[MessageKey], seed: int) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)


@dataclass(frozen=True)
class EdenRounding(Rounding):
    """The codec `eden:BITS` as it rounds gradients, without bias. The codec rotates by sums alone, so that all devices
    agree; a product of matrices is faster for messages of millions of numbers, and equal up to float32's rounding."""

    number_bits: int

    name = "eden"

    def __str__(self) -> str:
        return f"{self.name}:{self.number_bits}"

    def bits(self, sent: Tensor, numbers: Tensor, block: int) -> Tensor:
        return sent.sum() * float(self.number_bits * block + 16)

    def arrived(self, x: Tensor, keys: Sequence[MessageKey], seed: int) -> Tensor:
        blocks, block = x.shape[1:]
        slots = [Slot(key, (1, blocks, block), torch.float32, seed) for key in keys]
        signs = torch.stack([_signs(seed_at(slot, Eden.name), block, x.device) for slot in slots]).unsqueeze(1)
        noise = torch.stack([_noise(seed_at(slot, f"{Eden.name}/scale"), blocks, x.device) for slot in slots])
        return _rounded(narrowed(x), self.number_bits, signs, noise).to(x.dtype)


def _rounded(x: Tensor, bits: int, signs: Tensor, noise: Tensor) -> Tensor:
    block = x.shape[-1]
    rotation = hadamard(block, x.device)
    largest = x.abs().amax(-1, keepdim=True)
    is_zero = largest < SMALLEST
    y = (x / torch.where(is_zero, 1.0, largest) * signs) @ rotation
    deviation = y.square().mean(-1, keepdim=True).sqrt()
    z = y / torch.where(is_zero, 1.0, deviation)
    bounds, levels = _levels(bits, x.device)
    level = levels[torch.bucketize(z, bounds, right=True, out_int32=True)]
    ratio = z.square().sum(-1) / (z * level).sum(-1)
    scale = torch.where(is_zero, 0.0, ratio.unsqueeze(-1) * deviation * largest).clamp(max=LARGEST)
    narrow = ((scale.view(torch.int32) + noise.unsqueeze(-1)) >> 16).to(torch.int16).view(torch.bfloat16)
    return (level @ rotation) * signs * narrow.float()


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Orthonormal and symmetric."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


@cache
def _levels(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The bounds between levels, and the levels, in order."""
    levels = sorted([*LEVELS[bits], *(-level for level in LEVELS[bits])])
    bounds = [(below + above) / 2 for below, above in pairwise(levels)]
    return torch.tensor(bounds, device=device), torch.tensor(levels, device=device)


def _signs(seed: int, block: int, device: torch.device) -> Tensor:
    return 1.0 - 2.0 * (counter.words_on(seed, block, device) >> 62).float()


def _noise(seed: int, blocks: int, device: torch.device) -> Tensor:
    return (counter.words_on(seed, blocks, device) >> 47).to(torch.int32)


def parse_rounding(text: str) -> Rounding:
    name, _, parameter = text.partition(":")
    if name == EdenRounding.name:
        try:
            return EdenRounding(Eden.parse(parameter).bits)
        except CodecError as error:
            raise OptionError(f"--sum {text}: {error}", error.fix, "sum") from None
    for rounding in (Exact, Bf16):
        if text == rounding.name:
            return rounding()
    raise OptionError(f"--sum {text}: there is no such sum", f"write one of {', '.join(USAGES)}", "sum")


# What a group of messages is made of


class Group(NamedTuple):
    """Some parameters as blocks of one size: all but tables together, and tables by their width."""

    members: tuple[int, ...]
    block: int
    is_table: bool


def groups_of(parameters: Sequence[Parameter]) -> list[Group]:
    plain = tuple(i for i, p in enumerate(parameters) if p.kind != "table")
    found = [Group(plain, BLOCK, False)] if plain else []
    widths = dict.fromkeys(p.shape[1] for p in parameters if p.kind == "table")
    for width in widths:
        members = (i for i, p in enumerate(parameters) if p.kind == "table" and p.shape[1] == width)
        found.append(Group(tuple(members), 1 << (width - 1).bit_length(), True))
    return found


def blocks_of(tensor: Tensor, block: int, by_row: bool) -> Tensor:
    """(blocks, block), the last of them, or every row, filled up with zeros."""
    rows = tensor if by_row else tensor.reshape(1, -1)
    return F.pad(rows, (0, -rows.shape[1] % block)).view(-1, block)


class Blocks(NamedTuple):
    numbers: Tensor  # (blocks, block)
    sent: Tensor  # whether a block has something to say


# Sums


class Sum(ABC):
    """From all replicas' gradients of a step to their sum, as every replica gets it. Memories change with `decide`."""

    usage: ClassVar[str]
    help: ClassVar[str]
    has_own_momentum = False  # the sum of matrices is a momentum already, and Muon is to have none
    is_late = False  # the step has no sum yet

    def __init__(self, parameters: Sequence[Parameter], lanes: int, seed: int):
        self.parameters, self.lanes, self.seed = list(parameters), lanes, seed
        self.memory = Memory()
        self.share = (lanes - 1) / lanes  # of a message, that goes to others
        self._bits: dict[str, Tensor | float] = {"matrices": 0.0, "tables": 0.0}

    @abstractmethod
    def __call__(self, lanes: Sequence[Gradients], step: int) -> Gradients: ...

    def decide(self, apply: bool) -> None:
        self.memory.decide(apply)

    def bits(self) -> dict[str, float]:
        """Sent so far by a replica, the mean over replicas: of tables, and of all others."""
        return {kind: float(bits) for kind, bits in self._bits.items()}

    def facts(self) -> dict[str, float]:
        """What else was measured."""
        return {}

    def _sent(self, kind: str, bits: Tensor | float) -> None:
        self._bits[kind] = self._bits[kind] + self.share * bits


class Butterfly(Sum):
    """Each number rounded as a contribution and as a part of the sum. With feedback, every sender keeps the error of
    what it sent, and adds it to the next."""

    usage = "exact, bf16 or eden:BITS; UP|DOWN for contributions and sum; +ef"
    help = "every number, rounded both times; +ef: with error feedback at both"

    def __init__(
        self, parameters: Sequence[Parameter], lanes: int, seed: int, up: Rounding, down: Rounding, feedback: bool
    ):
        super().__init__(parameters, lanes, seed)
        self.up, self.down, self.feedback = up, down, feedback
        self.groups = groups_of(parameters)
        self._numbers: dict[Group, Tensor] = {}
        self._error: Tensor | float = 0.0
        self._touched: Tensor | float = 0.0
        self._steps = 0

    @torch.no_grad()
    def __call__(self, lanes: Sequence[Gradients], step: int) -> Gradients:
        if self.lanes == 1:
            return lanes[0]
        tensors: list[Tensor | None] = [None] * len(self.parameters)
        touched: list[Tensor | None] = [None] * len(self.parameters)
        wrong, whole = [], []
        for number, group in enumerate(self.groups):
            packed = [self._packed(lane, group) for lane in lanes]
            raw, sent = torch.stack([p.numbers for p in packed]), torch.stack([p.sent for p in packed])
            keys = [MessageKey(step, lane, number, "backward") for lane in range(self.lanes + 1)]
            arrived = self._crossed(self.up, raw, sent, keys[:-1], f"up/{number}")
            union = sent.any(0, keepdim=True)
            total = self._crossed(self.down, in_order(arrived).unsqueeze(0), union, keys[-1:], f"down/{number}")[0]
            self._count(group, sent, union)
            exact = in_order(raw)
            wrong.append((total - exact).square().sum())
            whole.append(exact.square().sum())
            self._unpack(group, Blocks(total, union[0]), lanes, tensors, touched)
        if whole:
            self._error = self._error + (torch.stack(wrong).sum() / torch.stack(whole).sum()).nan_to_num()
        self._steps += 1
        return Gradients(tensors, touched)

    def _crossed(self, rounding: Rounding, x: Tensor, sent: Tensor, keys: Sequence[MessageKey], name: str) -> Tensor:
        error = self.memory.get(name) if self.feedback else None
        owed = x if error is None else x + error
        arrived = rounding.arrived(torch.where(sent.unsqueeze(-1), owed, 0), keys, self.seed)
        if self.feedback:
            self.memory.put(name, owed - arrived)
        return arrived

    def _packed(self, lane: Gradients, group: Group) -> Blocks:
        numbers, sent = [], []
        like = next(t for t in lane.tensors if t is not None)
        for i in group.members:
            tensor, rows = lane.tensors[i], lane.touched[i]
            there = tensor is not None
            tensor = (
                torch.zeros(self.parameters[i].shape, dtype=like.dtype, device=like.device) if not there else tensor
            )
            assert tensor is not None
            numbers.append(blocks_of(tensor, group.block, group.is_table))
            mask = torch.full((len(numbers[-1]),), there, device=like.device)
            sent.append(rows if there and rows is not None else mask)
        return Blocks(torch.cat(numbers), torch.cat(sent))

    def _unpack(
        self,
        group: Group,
        total: Blocks,
        lanes: Sequence[Gradients],
        tensors: list[Tensor | None],
        touched: list[Tensor | None],
    ) -> None:
        start = 0
        for i in group.members:
            shape = self.parameters[i].shape
            count = shape[0] if group.is_table else -(-math.prod(shape) // group.block)
            own = total.numbers[start : start + count]
            if any(lane.tensors[i] is not None for lane in lanes):
                tensors[i] = own[:, : shape[1]] if group.is_table else own.flatten()[: math.prod(shape)].view(shape)
                touched[i] = total.sent[start : start + count] if group.is_table else None
            start += count

    def _count(self, group: Group, sent: Tensor, union: Tensor) -> None:
        """A contribution is as long as the mean of the lanes' is; which rows of a table travel is a bit each."""
        numbers = self._numbers_in(group, sent.device)
        bits = self.up.bits(sent, numbers, group.block) / self.lanes + self.down.bits(union, numbers, group.block)
        if group.is_table:
            bits = bits + 2.0 * union.numel()
            self._touched = self._touched + (sent.double().mean() + union.double().mean()) / 2
        self._sent("tables" if group.is_table else "matrices", bits)

    def _numbers_in(self, group: Group, device: torch.device) -> Tensor:
        """How many numbers each block has without padding."""
        if group not in self._numbers:
            shapes = (self.parameters[i].shape for i in group.members)
            ones = [blocks_of(torch.ones(shape), group.block, group.is_table).sum(1) for shape in shapes]
            self._numbers[group] = torch.cat(ones).double().to(device)
        return self._numbers[group]

    def facts(self) -> dict[str, float]:
        tables = sum(group.is_table for group in self.groups)
        steps = max(1, self._steps)
        return {
            "error": float(self._error) / steps,  # of the sum, squared, over the exact one's, mean over steps
            "touched": float(self._touched) / steps / tables if tables else 0.0,  # share of tables' rows that travel
        }


class Dion(Sum):
    """Dion's kind of sum (Ahn et al. 2025) for matrices, with Muon behind it: RANK·(m+n) numbers of an m × n matrix.

    Each replica keeps a momentum of its own gradients. One step of power iteration finds RANK directions of the sum of
    all momenta. The part along them is the update, and decays; the rest was not sent and stays in the momentum. All
    other parameters go through a butterfly of 4 bits."""

    usage = "dion:RANK or dion:RANK:ROUNDING"
    help = "matrices by RANK directions of their momentum (in bf16, or rounded otherwise); the rest in eden:4"
    has_own_momentum = True

    def __init__(self, parameters: Sequence[Parameter], lanes: int, seed: int, rank: int, rounding: Rounding):
        super().__init__(parameters, lanes, seed)
        self.rank, self.rounding = rank, rounding
        self.others = [i for i, p in enumerate(parameters) if p.kind != "matrix"]
        rest = EdenRounding(4)
        self.rest = Butterfly([parameters[i] for i in self.others], lanes, seed, rest, rest, feedback=False)
        self._message_bits: dict[int, float] = {}  # by how many numbers it has
        self.shapes: dict[tuple[int, ...], list[int]] = {}
        for i, p in enumerate(parameters):
            if p.kind == "matrix":
                self.shapes.setdefault(p.shape, []).append(i)

    @torch.no_grad()
    def __call__(self, lanes: Sequence[Gradients], step: int) -> Gradients:
        tensors: list[Tensor | None] = [None] * len(self.parameters)
        touched: list[Tensor | None] = [None] * len(self.parameters)
        others = [
            Gradients([lane.tensors[i] for i in self.others], [lane.touched[i] for i in self.others]) for lane in lanes
        ]
        rest = self.rest(others, step)
        for place, i in enumerate(self.others):
            tensors[i], touched[i] = rest.tensors[place], rest.touched[place]
        for number, (shape, members) in enumerate(self.shapes.items()):
            gradients = torch.stack([torch.stack([_there(lane.tensors[i]) for i in members]) for lane in lanes])
            total = self._shared(shape, number, gradients, self.parameters[members[0]].momentum, step)
            for i, one in zip(members, total.unbind(), strict=True):
                tensors[i] = one
        return Gradients(tensors, touched)

    def _shared(self, shape: tuple[int, ...], number: int, gradients: Tensor, momentum: float, step: int) -> Tensor:
        """Of matrices of one shape, (lanes, matrices, m, n)."""
        name = f"{shape[0]}x{shape[1]}"
        rank = min(self.rank, *shape)
        kept, basis = self.memory.get(f"momentum/{name}"), self.memory.get(f"basis/{name}")
        if basis is None:
            basis = self._first_basis(name, (gradients.shape[1], shape[1], rank)).to(gradients)
        momenta = gradients if kept is None else gradients + kept
        _, left = self._crossed(momenta @ basis, 2 * number, step)
        left = orthonormal(left)
        sent, right = self._crossed(momenta.mT @ left, 2 * number + 1, step)
        decayed = momenta - (1 - momentum) * left @ sent.mT
        decayed[0] -= (
            (1 - momentum) * left @ (right - in_order(sent)).mT
        )  # the sum's own rounding, which its owner knows
        norm = torch.linalg.vector_norm(right, dim=-2, keepdim=True)
        self.memory.put(f"momentum/{name}", decayed)
        self.memory.put(f"basis/{name}", torch.where(norm > 0, right / torch.where(norm > 0, norm, 1.0), basis))
        return (1 - momentum) * left @ right.mT

    def _crossed(self, factors: Tensor, number: int, step: int) -> tuple[Tensor, Tensor]:
        """What each lane's factors are once they were sent, and the sum of them as everybody gets it."""
        shape = factors.shape
        if self.lanes == 1:
            return factors, factors[0]
        keys = [MessageKey(step, lane, 1000 + number, "backward") for lane in range(self.lanes + 1)]
        blocks = torch.stack([blocks_of(one, BLOCK, False) for one in factors.unbind()])
        arrived = self.rounding.arrived(blocks, keys[:-1], self.seed)
        total = self.rounding.arrived(in_order(arrived).unsqueeze(0), keys[-1:], self.seed)
        size = math.prod(shape[1:])
        if size not in self._message_bits:
            numbers = blocks_of(torch.ones(size), BLOCK, False).sum(1).double()
            self._message_bits[size] = float(self.rounding.bits(numbers > 0, numbers, BLOCK))
        self._sent("matrices", 2 * self._message_bits[size])
        return arrived.flatten(1)[:, :size].view(shape), total.flatten()[:size].view(shape[1:])

    def _first_basis(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(counter.subseed(self.seed, "dion", name) >> 1)
        return torch.randn(shape, generator=generator)

    def decide(self, apply: bool) -> None:
        super().decide(apply)
        self.rest.decide(apply)

    def bits(self) -> dict[str, float]:
        own, rest = super().bits(), self.rest.bits()
        return {kind: own[kind] + rest[kind] for kind in own}

    def facts(self) -> dict[str, float]:
        return {"touched": self.rest.facts()["touched"]}


class Late(Sum):
    """Another sum, which a step gets from the step before it: there is a whole step's time to form it."""

    usage = "SUM+late"
    help = "the sum of the step before; the first step moves nothing"

    def __init__(self, inner: Sum):
        super().__init__(inner.parameters, inner.lanes, inner.seed)
        self.inner = inner
        self.has_own_momentum = inner.has_own_momentum
        self._waiting: Gradients | None = None

    def __call__(self, lanes: Sequence[Gradients], step: int) -> Gradients:
        new = self.inner(lanes, step)
        last, self._waiting = self._waiting, new
        self.is_late = last is None
        return new if last is None else last

    def decide(self, apply: bool) -> None:
        self.inner.decide(apply or self.is_late)

    def bits(self) -> dict[str, float]:
        return self.inner.bits()

    def facts(self) -> dict[str, float]:
        return self.inner.facts()


USAGES = ("exact", "bf16", "eden:BITS", "UP|DOWN", "dion:RANK[:ROUNDING]", "local:STEPS[:SUM]", "SUM+ef", "SUM+late")


def parse_sum(text: str, parameters: Sequence[Parameter], lanes: int, seed: int) -> Sum:
    """The sum that a row's name says."""
    if text.endswith("+late"):
        return Late(parse_sum(text.removesuffix("+late"), parameters, lanes, seed))
    if text.startswith("dion:"):
        rank, _, rounding = text.removeprefix("dion:").partition(":")
        if not rank.isdecimal() or int(rank) < 1:
            raise OptionError(
                f"--sum {text}: the rank must be a whole number, at least 1", "write for example dion:64", "sum"
            )
        return Dion(parameters, lanes, seed, int(rank), parse_rounding(rounding or Bf16.name))
    up, _, down = text.removesuffix("+ef").partition("|")
    first, second = parse_rounding(up), parse_rounding(down or up)
    return Butterfly(parameters, lanes, seed, first, second, feedback=text.endswith("+ef"))


def in_order(lanes: Tensor) -> Tensor:
    """Added one after another: every replica's sum has the same bits."""
    total = lanes[0]
    for one in lanes[1:]:
        total = total + one
    return total


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns' span. Columns that are all zero stay zero. Cholesky twice, in float64, is
    faster on a GPU than the QR of many small matrices."""
    y = columns.double()
    for _ in range(2):
        gram = y.mT @ y
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        shift = SHIFT * trace + torch.finfo(torch.float64).tiny
        factor, _ = torch.linalg.cholesky_ex(gram + shift * torch.eye(gram.shape[-1], dtype=y.dtype, device=y.device))
        y = torch.linalg.solve_triangular(factor.mT, y, upper=True, left=False)
    return y.to(columns.dtype)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a matrix has a gradient in every step"
    return tensor
