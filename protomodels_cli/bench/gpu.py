"""How fast cards are under this pipeline: stages as processes that share a card or several, beside plain torch.

Every case is measured on its own and put into the file at once; those already there are not measured again, so a
machine that is lent for minutes does as many as it can. Ratios and bounds are `gpu_report.py`'s: they are made from
whatever the file holds.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from protomodels_cli.bench.gpu_cases import Case
from protomodels_cli.bench.gpu_report import ratios
from protomodels_cli.bench.gpu_run import Bench, Entry, run
from protomodels_cli.errors import OptionError
from protomodels_cli.files import write_whole
from protomodels_cli.observe.metrics import strict
from protomodels_cli.quantities import duration, plural, rate

PEAKS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100": 312e12}

Say = Callable[[str], None]


def setting(bench: Bench) -> Entry:
    """What entries of one file must have in common, or their ratios mean nothing."""
    plan = bench.plan
    return {
        "model": dict(plan.shape.model),
        "vocabulary": plan.shape.vocabulary,
        "microbatch": plan.microbatch,
        "in_flight": plan.in_flight,
        "compute": dict(plan.compute),
        "devices": list(bench.devices),
        "hardware": [_hardware(device) for device in bench.devices],
        "memory_gib": bench.memory,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def peak_of(hardware: Sequence[str]) -> float | None:
    """FLOP/s of a card in bf16 without sparsity, where its maker's figure is known here."""
    return next((peak for name, peak in PEAKS.items() if all(name in card for card in hardware)), None)


def _hardware(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    try:
        return str(torch.cuda.get_device_properties(device).name)
    except (RuntimeError, AssertionError, ValueError) as e:
        raise OptionError(
            f"--device {device}: {str(e).splitlines()[0]}", "use cpu, or GPUs that this machine has", "device"
        ) from None


def read(path: Path | None, setting: Entry) -> Entry:
    """The results so far. Raises where the file was measured in another setting."""
    if path is None or not path.exists():
        return {"setting": setting, "entries": {}}
    try:
        found = json.loads(path.read_text())
        before, _ = found["setting"], found["entries"]
    except (ValueError, KeyError, TypeError):
        raise OptionError(f"--json {path}: holds no results of this benchmark", "name another file", "json") from None
    if differ := [name for name in setting if before.get(name) != setting[name]]:
        now, then = setting[differ[0]], before.get(differ[0])
        raise OptionError(
            f"--json {path}: was measured with {differ[0]} {then}, and this is {now}: their ratios would mean nothing",
            "name another file, or use the options of before",
            "json",
        )
    return {"setting": setting, "entries": found["entries"]}


def measure(
    bench: Bench,
    todo: Sequence[Case],
    result: Entry,
    path: Path | None,
    work: Path,
    until: float,
    say: Say,
    peak: float | None = None,
    again: bool = False,
) -> None:
    """Measure what is not in the result yet, and write it to the file after each. `until`: on time.monotonic's clock;
    no case starts after it. `peak`: FLOP/s of a card. `again`: those that failed, once more."""
    for case in todo:
        before = result["entries"].get(case.name)
        if before is not None and not (again and "failed" in before):
            continue
        if time.monotonic() >= until:
            say(f"{case.name}: no time left")
            continue
        started = time.monotonic()
        entry = {**case.as_json(), **run(bench, case, work, min(until, started + bench.limit))}
        entry["wall_s"] = time.monotonic() - started
        result["entries"][case.name] = entry
        result["ratios"] = ratios(result, peak)
        if path is not None:
            write_whole(path, json.dumps(strict(result), indent=1).encode() + b"\n")
        say(in_words(case.name, entry))


def in_words(name: str, entry: Entry) -> str:
    if "failed" in entry:
        return f"{name}: failed after {duration(entry['wall_s'])}: {entry['failed']}"
    return (
        f"{name}: {entry['tokens_per_s']:,.0f} tokens/s, {rate(entry['model_flops_per_s'], 'FLOP/s')} "
        f"({plural(entry['counted'], 'step')} counted, {duration(entry['wall_s'])} in all)"
    )
