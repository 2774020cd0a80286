"""Where a device's time goes in a stage: kernels of the model and of messages, by torch's profiler."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from protomodels_cli.bench.lone_stage import Neighbours, messages, take_step
from protomodels_cli.codecs import End
from protomodels_cli.codecs.base import Slot
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.shape import slices
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.worker.stage_work import StageWork
from protomodels_cli.worker.transfers import Payload, Transfers

WARM_UP, TIMED = 3, 5  # steps
WIRE = "pmtrain: messages"
LONGEST = 12  # kernels to be named
ON_GPU, LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
PINNING = 5.0  # seconds after which the memory for a snapshot of some gigabytes is pinned


class _Marked:
    """Transfers whose work the profiler counts as messages'."""

    def __init__(self, inner: Transfers):
        self._inner = inner

    def upload(self, numbers: np.ndarray) -> Tensor:
        with record_function(WIRE):
            return self._inner.upload(numbers)

    def receive(self, end: End, payload: Payload | None, slot: Slot) -> Tensor:
        with record_function(WIRE):
            return self._inner.receive(end, payload, slot)

    def send(self, end: End, message: Tensor, slot: Slot) -> Callable[[], Payload | None]:
        with record_function(WIRE):
            return self._inner.send(end, message, slot)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def measure(spec: RunSpec, index: int, device: torch.device, trace: Path | None = None) -> dict[str, Any]:
    """Of stage `index`: seconds of a step, and how its device time is shared out in one that is profiled."""
    basis = initial_basis(spec.model.width, spec.subspace.k, spec.seed) if spec.form.has_basis else None
    work = StageWork(spec, slices(spec)[index], basis, device)
    held = spec.batch.microbatches if spec.batch.in_flight is None else spec.batch.in_flight
    around, took = Neighbours(spec, index), []
    for step in range(1, WARM_UP + TIMED + 1):
        coming = messages(around, step, spec.batch.microbatches)
        started = time.perf_counter()
        take_step(work, coming, held)
        took.append(time.perf_counter() - started)
    snapshot = _beside_a_snapshot(work, around, held, sorted(took[WARM_UP:])[TIMED // 2])
    work.transfers = _Marked(work.transfers)  # type: ignore[assignment]
    coming = messages(around, work.step + 1, spec.batch.microbatches)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        take_step(work, coming, held)
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        spent = shared_out(json.loads(path.read_text())["traceEvents"], on_gpu)
    busy, on_wire = sum(spent.values()), sum(seconds for (_, wire), seconds in spent.items() if wire)
    return {
        "step_s": sorted(took[WARM_UP:])[TIMED // 2],
        "device_s": busy,
        "messages_s": on_wire,
        "messages_share": on_wire / busy if busy else None,
        "snapshot": snapshot,
        "not_compiled": work.not_compiled,
        "longest": [
            {"name": name, "seconds": seconds, "is_message": wire}
            for (name, wire), seconds in spent.most_common(LONGEST)
        ],
        "peak_memory": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }


def _beside_a_snapshot(work: StageWork, around: Neighbours, held: int, usual: float) -> dict[str, float]:
    """How long a snapshot keeps the compute thread: its call, and what the step beside it takes longer than usual."""
    coming = messages(around, work.step + 1, work.spec.batch.microbatches)
    if work.device.type == "cuda":
        time.sleep(PINNING)
    started = time.perf_counter()
    copied = work.copy_state()
    called = time.perf_counter() - started
    take_step(work, coming, held)
    step = time.perf_counter() - started - called
    size = sum(t.nbytes for t in copied().values())
    return {"bytes": size, "call_s": called, "step_s": step, "stall_s": called + max(0.0, step - usual)}


def shared_out(events: Sequence[dict[str, Any]], on_gpu: bool) -> Counter[tuple[str, bool]]:
    """Seconds of a timeline's kernels (without a GPU: of operators that no other called) by name, and whether a message
    was why. A kernel belongs to the annotation within which it was launched; those that torch draws on the device reach
    from their first kernel to their last, whatever runs between."""
    done = [e for e in events if e.get("ph") == "X"]
    spans = [e for e in done if e.get("cat") == "user_annotation" and e["name"] == WIRE]

    def is_message(launched: dict[str, Any]) -> bool:
        at = launched["ts"]
        return any(s["tid"] == launched["tid"] and s["ts"] <= at <= s["ts"] + s["dur"] for s in spans)

    if on_gpu:
        launches = {
            e["args"]["correlation"]: e for e in done if e.get("cat") in LAUNCHES and "correlation" in e["args"]
        }
        pairs = [(e, launches.get(e["args"].get("correlation"))) for e in done if e.get("cat") in ON_GPU]
    else:
        pairs = [(e, e) for e in _outermost([e for e in done if e.get("cat") == "cpu_op"])]
    spent: Counter[tuple[str, bool]] = Counter()
    for kernel, launched in pairs:
        spent[kernel["name"], launched is not None and is_message(launched)] += kernel["dur"] / 1e6
    return spent


def _outermost(operators: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    ends: dict[Any, float] = {}  # of the last one found, by thread
    for e in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        if e["ts"] >= ends.get(e["tid"], 0.0):
            found.append(e)
            ends[e["tid"]] = e["ts"] + e["dur"]
    return found
