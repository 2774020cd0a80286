"""Speed over slow links: this pipeline in several forms and codecs, and what people would run instead, on one link.

Every peer is a process on a host of its own with a home connection (`hosts.py`), or, without root, on this machine with
the link emulated in the transport. All rows of a method come with two bounds measured or counted in the same run: the
method's own speed without any link, and the bytes of its busiest line over the bandwidth.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protomodels_cli.bench.loopback import pipeline_rows
from protomodels_cli.codecs import parse_codec
from protomodels_cli.cost.forecast import forecast
from protomodels_cli.cost.line import wire_bytes
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.errors import OptionError
from protomodels_cli.forms import FORMS, form_named
from protomodels_cli.launch.hosts import DEVICE, Hosts
from protomodels_cli.launch.local import cores
from protomodels_cli.spec.link import parse_link
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec

WARM_UP = 2  # steps that do not count: caches and TCP are cold
ROW_SECONDS = 60.0  # a slow row takes fewer steps
LEAST_STEPS = WARM_UP + 1
TORCH_WIRES = {"fp32": 4, "bf16": 2}  # bytes a number
TORCH_SCHEDULES = ("1f1b", "interleaved")  # the second posts its receives early; both are 1F1B

Say = Callable[[str], None]
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    form: str
    k: int  # unused by dense
    codec: str  # FORWARD|BACKWARD where they differ

    @classmethod
    def parse(cls, text: str, default_k: int = 16) -> Method:
        """FORM/CODEC or FORM/CODEC/K."""
        form, codec, k = [*text.split("/"), "", ""][:3]
        try:
            if form not in FORMS.names or text.count("/") > 2 or not (k or "0").isdigit():
                raise ValueError(f"must be a form ({', '.join(FORMS.names)}), a codec and optionally k")
            for why in (parse_codec(leg).codec.needs_revisits for leg in codec.split("|")):
                if why:
                    raise ValueError(f"{why}, and a run here is shorter than an epoch")
        except ValueError as e:
            raise OptionError(
                f"--method {text}: {e}",
                "write for example dense/bf16, reparam/int8/16 or 'dense/topk:0.1|int8'",
                "method",
            ) from None
        return cls(form, int(k or default_k), codec)

    @property
    def legs(self) -> dict[str, str]:
        forward, _, backward = self.codec.partition("|")
        return {"forward": forward, "backward": backward or forward}

    @property
    def name(self) -> str:
        k = f" k={self.k}" if form_named(self.form).has_basis else ""
        return f"{self.form}{k} {self.codec}"


def spec_of(method: Method, steps: int, **sections: Any) -> RunSpec:
    """Four stages of one layer each. AdamW, since torch's side has no other optimizer in common with ours."""
    form = form_named(method.form)
    base: dict[str, Any] = {
        "name": "wan",
        "steps": steps,
        "stages": 4,
        "model": {"layers": 4, "width": 256, "heads": 4, "context": 256},
        "subspace": {"form": method.form, "k": method.k},
        "optimizer": {"name": next(o for o in ("adamw", "row_adamw") if form.optimizer_problem(o) is None)},
        "batch": {"size": 64, "microbatches": 16},
        "data": {"source": "python", "max_bytes": 8_000_000},
        "tokenizer": {"kind": "bpe", "vocab_size": 2048},
        "eval": {"windows": 2, "interval": 0},
        "snapshots": {"interval": 0},
        "wire": method.legs,
    }
    return spec_from(base | sections)


def measure(
    methods: Sequence[Method],
    links: Sequence[str],
    steps: int,
    turns: int,
    hosts: bool,
    torch: bool,
    say: Say,
    **sections: Any,
) -> dict[str, Any]:
    """`hosts`: real TCP between network namespaces; otherwise the emulated link, and nothing of torch's to compare."""
    for method in methods:  # a mistake in the last one shows before the first is measured
        spec_of(method, steps, **sections)
    every = list(dict.fromkeys(["none", *links]))
    rows = [row for method in methods for row in _method_rows(method, every, steps, turns, hosts, say, sections)]
    found: dict[str, Any] = {"setting": _setting(steps, turns, hosts, sections), "rows": rows}
    found["torch_pipelining"] = _torch_rows(every, steps, turns, say, sections) if torch and hosts else []
    found["speedup"] = _speedups(found)
    return found


def _setting(steps: int, turns: int, hosts: bool, sections: dict[str, Any]) -> dict[str, Any]:
    spec = spec_of(Method("dense", 16, "fp32"), steps, **sections)
    return {
        "via": "hosts" if hosts else "emulated",
        "turns": turns,
        "stages": spec.stages,
        "model": spec.model.model_dump(),
        "batch": spec.batch.model_dump(),
        "tokens_per_step": spec.batch.size * spec.model.context,
        "compute_dtype": spec.compute.dtype,
        "optimizer": spec.optimizer.name,
        "cores": len(cores()) or None,
        "overlap": "sending, receiving and computing overlap in every pmtrain row",
    }


def _method_rows(
    method: Method, links: Sequence[str], steps: int, turns: int, hosts: bool, say: Say, sections: dict[str, Any]
) -> list[Row]:
    """One row for each link, the one without a limit first. In turns, so that a busy machine troubles all alike."""
    runs: dict[str, list[Row]] = {link: [] for link in links}
    speed = 0.0
    for _ in range(turns):
        for link in links:
            count = steps
            if speed:  # known from the run without a limit
                step = forecast(spec_of(method, steps, **sections), parse_link(link), speed, len(cores()) or math.inf)
                count = max(LEAST_STEPS, min(steps, math.ceil(ROW_SECONDS / step.step_seconds) + WARM_UP))
            took = _run(spec_of(method, count, **sections), link, hosts)
            done = took[WARM_UP:]
            runs[link] += done
            if link == "none" and not speed:
                speed = _speed(spec_of(method, steps, **sections), took[WARM_UP - 1 :])
            seconds = statistics.median(r["seconds"] for r in done)
            say(f"{method.name} over {link}: {done[0]['tokens'] / seconds:.0f} tokens/s")
    free = _rate(runs["none"])
    return [_row(spec_of(method, steps, **sections), method, link, runs[link], free, speed) for link in links]


def _run(spec: RunSpec, link: str, hosts: bool) -> list[Row]:
    """Run once; returns the metrics rows of the steps."""
    with contextlib.ExitStack() as stack:
        there = None
        if hosts:
            there = stack.enter_context(Hosts(int(spec.stages) + 1, parse_link(link)))  # type: ignore[arg-type]
        elif link != "none":
            wire = spec.wire.model_copy(update={"link": parse_link(link)})
            spec = spec.model_copy(update={"wire": wire})
        _, rows = pipeline_rows(spec, hosts=there)
    return rows


def _speed(spec: RunSpec, rows: list[Row]) -> float:
    """Operations a second of CPU from the first of these steps to the last, all work of all stages counted."""
    cpu = sum(b["cpu_s"] - a["cpu_s"] for a, b in zip(rows[0]["stages"], rows[-1]["stages"], strict=True))
    return sum(unit_flops(spec).values()) * rows[0]["tokens"] * (len(rows) - 1) / cpu


def _rate(rows: Sequence[Row]) -> float:
    return float(rows[0]["tokens"] / statistics.median(r["seconds"] for r in rows))


def _row(spec: RunSpec, method: Method, link: str, steps: list[Row], free: float, speed: float) -> dict[str, Any]:
    tokens, seconds, rate = steps[0]["tokens"], statistics.median(r["seconds"] for r in steps), _rate(steps)
    stages = len(steps[0]["stages"])
    sent = [
        {
            leg: statistics.mean(r["stages"][i][f"{leg}_bytes"] for r in steps) / tokens
            for leg in ("forward", "backward")
        }
        for i in range(stages)
    ]
    forward = statistics.mean(s["forward"] for s in sent[:-1])
    backward = statistics.mean(s["backward"] for s in sent[1:])
    line = forward + backward if stages > 2 else max(forward, backward)  # bytes a token over the busiest line
    bandwidth = parse_link(link).bits_per_second
    wire = bandwidth / 8 / line
    predicted = forecast(spec, parse_link(link), speed, len(cores()) or math.inf)
    width = spec.model.width
    return {
        "form": method.form,
        "k": method.k if spec.form.has_basis else None,
        "codec": method.codec,
        "link": link,
        "tokens_per_s": rate,
        "step_s": seconds,
        "steps": len(steps),
        "bytes_per_token": forward + backward,
        "bytes_per_token_forward": forward,
        "bytes_per_token_backward": backward,
        "ratio_bf16": 4 * width / (forward + backward),
        "ratio_fp32": 8 * width / (forward + backward),
        "bound_compute": free,
        "bound_wire": wire if math.isfinite(wire) else None,
        "efficiency": rate / min(free, wire),
        "of_unshaped": rate / free,
        "stage_utilisation": [
            statistics.mean(r["stages"][i]["compute_s"] / r["seconds"] for r in steps) for i in range(stages)
        ],
        "link_utilisation": [
            8 * wire_bytes(int((s["forward"] + s["backward"]) * tokens)) / seconds / bandwidth for s in sent
        ],
        "predicted_step_s": predicted.step_seconds,
        "predicted_over_measured": predicted.step_seconds / seconds,
        "bottleneck": asdict(predicted.bottleneck),
    }


def _torch_rows(links: Sequence[str], steps: int, turns: int, say: Say, sections: dict[str, Any]) -> list[Row]:
    """torch.distributed.pipelining on the same hosts and links, in the better of its two 1F1B schedules."""
    from protomodels_cli.bench.torch_pipelining import run

    spec = spec_of(Method("dense", 16, "fp32"), steps, **sections)
    rows = []
    for wire, number in TORCH_WIRES.items():
        free = 0.0
        for link in links:
            line = 2 * number * spec.model.width  # bytes a token: a middle rank sends both legs
            bound = parse_link(link).bits_per_second / 8 / line
            step = spec.batch.size * spec.model.context / bound
            count = max(LEAST_STEPS, min(steps, math.ceil(ROW_SECONDS / max(step, 1e-9)) + WARM_UP))
            rates = {}
            for schedule in TORCH_SCHEDULES:
                with tempfile.TemporaryDirectory() as folder, Hosts(int(spec.stages), parse_link(link)) as hosts:  # type: ignore[arg-type]
                    seconds: list[float] = []
                    for _ in range(turns):
                        done = run(spec, wire, count, Path(folder), hosts.command, hosts.address, DEVICE, schedule)
                        seconds += done["step_seconds"][WARM_UP:]
                rates[schedule] = spec.batch.size * spec.model.context / statistics.median(seconds)
                say(f"torch.distributed.pipelining {wire} {schedule} over {link}: {rates[schedule]:.0f} tokens/s")
            best = max(rates, key=lambda s: rates[s])
            free = free or rates[best]
            rows.append(
                {
                    "form": "dense",
                    "codec": wire,
                    "link": link,
                    "schedule": best,
                    "tokens_per_s": rates[best],
                    "tokens_per_s_by_schedule": rates,
                    "bytes_per_token": line,
                    "bound_compute": free,
                    "bound_wire": bound if math.isfinite(bound) else None,
                    "efficiency": rates[best] / min(free, bound),
                }
            )
    return rows


def _speedups(found: dict[str, Any]) -> list[Row]:
    """Every row of ours over torch's on the same link, for each of its wires."""
    theirs = {(r["link"], r["codec"]): r["tokens_per_s"] for r in found["torch_pipelining"]}
    return [
        {
            **{key: row[key] for key in ("form", "k", "codec", "link")},
            **{f"over_torch_{wire}": row["tokens_per_s"] / theirs[row["link"], wire] for wire in TORCH_WIRES},
        }
        for row in found["rows"]
        if theirs
    ]
