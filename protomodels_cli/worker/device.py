"""What this machine brings: the device, its free memory, its measured speed; and whether it has failed.

It must not know the run's state, nor who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

from protomodels_cli.cost.activations import Computation
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.errors import first_line
from protomodels_cli.forms import Dense
from protomodels_cli.model.arithmetic import choose as arithmetic_of
from protomodels_cli.model.compiling import problem_of
from protomodels_cli.model.devices import NoDevice, found
from protomodels_cli.model.llama import Block, Multiplied, Running, rotary
from protomodels_cli.model.memory import is_out_of_memory
from protomodels_cli.model.operators import EAGER
from protomodels_cli.model.shape import Shape
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.troubles import DeviceStuck, OutOfMemory
from protomodels_cli.worker.problems import NoSuchDevice
from protomodels_cli.worker.telling import PeerError

CPU_PROBE, LEAST_TOKENS = 1e11, 64  # operations that tell a CPU's speed in about a second, and tokens at least
MACHINE = "/proc/sys/kernel/random/boot_id", "/etc/machine-id"  # clones of an image share the second
LOOKS = 20  # at a device within the time that one piece of work may take


def choose(name: str) -> torch.device:
    try:
        return found(name)
    except NoDevice as e:
        raise PeerError(NoSuchDevice(name, str(e))) from None


def computation_of(spec: RunSpec, *devices: torch.device) -> Computation:
    """How a peer with these devices computes."""
    arithmetic = arithmetic_of(spec.compute, *devices)
    dtype = "bf16" if arithmetic.matmul == torch.bfloat16 else spec.compute.stored
    return Computation(dtype, arithmetic.compiled, gpu=devices[0].type == "cuda")


def try_compiling(spec: RunSpec, *devices: torch.device) -> str | None:
    """Why operators cannot be compiled here, where the run would have them so: from then on nothing here is compiled.
    Without, a stage takes more memory, which the coordinator must know before it assigns one."""
    if not arithmetic_of(spec.compute, *devices).compiled:
        return None
    return next(filter(None, map(problem_of, dict.fromkeys(devices))), None)


def in_words(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory())
    return _available()


def host_memory(device: torch.device) -> int | None:
    """Free memory of the machine itself, where the device has memory of its own; None: the two are one."""
    return _available() if device.type == "cuda" else None


def _available() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def measure_flops(spec: RunSpec, device: torch.device, seconds: float = 0.1) -> float:
    """Operations a second in forward and backward of a block of the run's size, on one of its microbatches: in the
    type that the run's matrices will be multiplied in, with operators that are not compiled, which would take longer
    than measuring. So a GPU is a little faster than this. A CPU takes as few tokens as say the same."""
    torch.set_num_threads(spec.compute.threads)
    plain = {"form": Dense.name, "anchor": "fixed", "early_loss": 0.0}
    flops = unit_flops(spec.model_copy(update={"subspace": spec.subspace.model_copy(update=plain)}))["layers.0"]
    shape = Shape.of(spec)
    rows, tokens = spec.batch.size // spec.batch.microbatches, spec.model.context
    if device.type == "cpu" and flops * rows * tokens > CPU_PROBE:
        rows, tokens = 1, min(tokens, max(LEAST_TOKENS, int(CPU_PROBE / flops)))
    with torch.device(device):
        block = Block(shape, Dense())
        for p in block.parameters():
            torch.nn.init.normal_(p, std=0.02)
        x = torch.randn(rows, tokens, shape.width, dtype=shape.dtype, requires_grad=True)
    arithmetic = arithmetic_of(spec.compute, device)
    arithmetic.prepare(device)
    cos, sin = rotary(tokens, shape.head_dim, shape.rope_theta, shape.dtype, device)
    run = Running(EAGER, arithmetic.matmul, cos, sin)
    for module in block.modules():
        if isinstance(module, Multiplied):
            module.refresh(arithmetic.matmul)
    best, until = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        block(x, None, run).sum().backward()
        _wait_for(device)
        now = time.perf_counter()
        best = min(best, now - started)
        if now > until:
            return flops * rows * tokens / best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def as_problem(error: Exception) -> Exception:
    """The error that ends the peer: one with a fix, where the device ran out of memory."""
    if not is_out_of_memory(error):
        return error
    return PeerError(
        OutOfMemory(first_line(error).split(". GPU ")[0])
    )  # what follows in torch's message are ten figures


def limit_memory(device: torch.device, most: int) -> None:
    """Make torch refuse more than this on the device, whatever else is free there."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)


def card(device: torch.device) -> str:
    """What peers on the same device have in common: the GPU's UUID, else the machine; empty: not known."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    for path in MACHINE:
        with contextlib.suppress(OSError):
            return Path(path).read_text().strip()
    return ""


async def watch(busy_with: Callable[[], int], limit: float) -> None:
    """Raises once the device has been at one piece of work for `limit` seconds; `busy_with` numbers them, 0: none.

    A driver that hangs raises nothing, and the heartbeats go on. Looks are counted, not seconds: whoever stopped this
    process stopped its device too."""
    looks, before = 0, 0
    while looks < LOOKS:
        await asyncio.sleep(limit / LOOKS)
        now = busy_with()
        looks, before = (looks + 1 if now and now == before else 0), now
    raise PeerError(DeviceStuck(limit))
