"""What the pipeline costs beside the model's own work, measured on this machine without a slow link.

Five questions, each answered by real processes: CPU time against the reference, the price of a commit in round trips,
bytes at the socket against the payload, a middle stage's memory against the number of microbatches, a link's speed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protomodels_cli.bench.link import measure_link
from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.launch.cable import cable
from protomodels_cli.launch.local import cores, local_run, start
from protomodels_cli.quantities import size
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.usage import by_stage

ROUND_TRIP = 0.1
TURNS = 3
Say = Callable[[str], None]


def small(**sections: Any) -> RunSpec:
    """Four stages of two layers each, whatever a spec's defaults are; some fields replaced."""
    base: dict[str, Any] = {
        "name": "bench",
        "stages": 4,
        "model": {"layers": 8, "width": 128, "heads": 4, "kv_heads": 2, "context": 64},
        "subspace": {"form": "reparam", "k": 16},
        "wire": {"forward": "fp32", "backward": "fp32"},
        "batch": {"size": 16, "microbatches": 4},
        "data": {"source": "python", "max_bytes": 8_000_000},
        "tokenizer": {"kind": "bpe", "vocab_size": 2048},
        "eval": {"windows": 8, "interval": 0},
        "snapshots": {"interval": 0},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return spec_from(base)


def measure(steps: int, only: str | None, say: Say) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, part in PARTS.items():
        if only in (None, name):
            result[name] = part(steps)
            say(in_words(name, result[name]))
    return result


def pipeline(spec: RunSpec, **options: Any) -> tuple[dict[str, Any], list[float]]:
    """Run a pipeline; returns its summary and the seconds of each step."""
    summary, rows = pipeline_rows(spec, **options)
    return summary, [row["seconds"] for row in rows]


def pipeline_rows(spec: RunSpec, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a pipeline; returns its summary and the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        with local_run(spec, Path(folder) / "run", **options) as running:
            if running.coordinator.wait():
                raise running.failure()
        rows = [json.loads(line) for line in (running.folder / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((running.folder / "summary.json").read_text())
        return summary, [row | {"stages": by_stage(row["stages"])} for row in rows if row["event"] == "step"]


def reference(spec: RunSpec, core: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "spec.yaml").write_text(json.dumps(spec.model_dump(mode="json")))
        arguments = [str(folder / "spec.yaml"), "--run-dir", str(folder / "run"), "--json", str(folder / "out.json")]
        process = start(folder, "reference", ["reference", *arguments], core)
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, "pmtrain reference")
        return dict(json.loads((folder / "out.json").read_text()))


def overhead(steps: int) -> dict[str, Any]:
    """CPU seconds of all processes together, from the first grant to the last commit, over the reference's.

    Twice: with every process on one and the same core, and left to the system, where stages are each other's neighbours
    on the two threads of a core and the reference has none. The least of several turns each: what else a shared machine
    does only ever adds."""
    spec = small(steps=steps)
    result: dict[str, Any] = {}
    for way, core in (*(("one_core", core) for core in cores()[:1]), ("free", None)):
        alone, together = [], []
        for _ in range(TURNS):
            single = reference(spec, core)
            summary, _ = pipeline(spec, core=core)
            assert summary["weights_sha256"] == single["weights_sha256"]
            alone.append(single["cpu_seconds"])
            together.append(summary["cpu_seconds"]["coordinator"] + sum(summary["cpu_seconds"]["stages"]))
        result[way] = {
            "reference_cpu_s": min(alone),
            "pipeline_cpu_s": min(together),
            "ratio": min(together) / min(alone),
            "turns": [{"reference_cpu_s": a, "pipeline_cpu_s": t} for a, t in zip(alone, together, strict=True)],
        }
    return result


def commit(steps: int) -> dict[str, Any]:
    """How much longer the median step takes when the coordinator is a round trip away, in round trips."""
    quick = {"layers": 4, "width": 32, "heads": 2, "kv_heads": 2, "context": 16}  # the machine's noise grows with work
    spec = small(steps=30, model=quick, batch={"size": 4, "microbatches": 4})
    _, near = pipeline(spec)
    medians = {"near": statistics.median(near)}
    with cable(ROUND_TRIP / 2) as far_away:
        _, far = pipeline(spec, through=lambda peer, link: far_away.through(link))
    medians["far"] = statistics.median(far)
    return {
        "round_trip_s": ROUND_TRIP,
        "median_step_s": medians["near"],
        "median_step_delayed_s": medians["far"],
        "round_trips": (medians["far"] - medians["near"]) / ROUND_TRIP,
    }


def wire(steps: int) -> dict[str, Any]:
    """Bytes that a relay's sockets saw, TLS and all, over the payload, at 4096 tokens a microbatch."""
    result = {}
    for codec in ("fp32", "bf16", "int8"):
        spec = small(
            steps=3,
            stages=2,
            model={"layers": 2, "width": 32, "context": 256},  # what crosses depends on k, not on the width
            batch={"size": 64, "microbatches": 4},
            data={"max_bytes": 1_000_000},
            tokenizer={"vocab_size": 512},
            wire={"forward": codec, "backward": codec},
            eval={"windows": 1, "interval": 0},
        )
        summary, _ = pipeline(spec, join_options=["--no-listen"])
        tokens = summary["steps"] * spec.batch.size * spec.model.context
        payload = boundary_bytes(spec)
        [crossed] = summary["relayed_bytes"]
        result[codec] = {
            leg: {
                "payload_bytes_per_token": payload[leg],
                "socket_bytes_per_token": crossed[leg] / tokens,
                "ratio": crossed[leg] / tokens / payload[leg],
            }
            for leg in ("forward", "backward")
        }
    return result


def memory(steps: int) -> dict[str, Any]:
    """Peak memory of the middle stage with ever more microbatches of one size, and with a wider limit."""
    rows = []
    for microbatches, in_flight in ((4, 2), (16, 2), (64, 2), (64, 32)):
        spec = small(
            steps=3,
            stages=3,
            model={"layers": 6, "context": 256},
            batch={"size": 4 * microbatches, "microbatches": microbatches, "in_flight": in_flight},
        )
        summary, _ = pipeline(spec)
        rows.append(
            {
                "microbatches": microbatches,
                "in_flight": in_flight,
                "peak_memory_bytes": summary["peak_memory_bytes"][1],
                "most_in_flight": summary["most_in_flight"][1],
            }
        )
    return {"rows": rows, "growth": rows[2]["peak_memory_bytes"] / rows[0]["peak_memory_bytes"]}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "overhead": overhead,
    "commit": commit,
    "wire": wire,
    "memory": memory,
    "link": lambda steps: measure_link(),
}


def in_words(name: str, found: dict[str, Any]) -> str:
    match name:
        case "overhead":
            ways: Sequence[tuple[str, str]] = (("one_core", "on one core"), ("free", "left to the system"))
            return "\n".join(
                f"overhead {words}: {found[way]['pipeline_cpu_s']:.1f} CPU s against the reference's "
                f"{found[way]['reference_cpu_s']:.1f}: {found[way]['ratio']:.3f} ×"
                for way, words in ways
                if way in found
            )
        case "commit":
            return (
                f"commit: a step takes {1000 * found['median_step_s']:.0f} ms, with the coordinator "
                f"{1000 * ROUND_TRIP:.0f} ms away and back {1000 * found['median_step_delayed_s']:.0f} ms: "
                f"{found['round_trips']:.2f} round trips more"
            )
        case "wire":
            return "\n".join(
                f"wire {codec}: "
                + ", ".join(
                    f"{leg} {row['socket_bytes_per_token']:.2f} bytes a token at the socket, "
                    f"payload {row['payload_bytes_per_token']:.0f}: {row['ratio']:.3f} ×"
                    for leg, row in legs.items()
                )
                for codec, legs in found.items()
            )
        case "link":
            return "\n".join(
                f"link, messages of {size(row['message_bytes'])} both ways: {row['gigabytes_per_s']:.3f} GB/s in "
                f"and out, {row['cpu_s_per_gigabyte']:.2f} CPU s a GB at each end, the event loop away for at most "
                f"{1000 * row['longest_pause_s']:.0f} ms"
                for row in found["rows"]
            )
        case _:
            return "\n".join(
                f"memory of the middle stage: {row['peak_memory_bytes'] / 2**20:.0f} MiB with {row['microbatches']} "
                f"microbatches, at most {row['most_in_flight']} in flight"
                for row in found["rows"]
            )
