"""What `bench gpu` measures: shapes by name, and a case with a name for each method, cut, batch and link.

Pure. A case knows how to say itself as a spec; how it is run is `gpu.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from protomodels_cli.bench.torch_plain import WAYS
from protomodels_cli.bench.wan import Method
from protomodels_cli.errors import OptionError
from protomodels_cli.forms import form_named
from protomodels_cli.spec.link import parse_link
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec

NO_END = 1_000_000  # steps: a run is ended from outside, before its last evaluation and snapshot

LEASE = 60.0  # seconds without a heartbeat: processes that compile on few cores answer late


@dataclass(frozen=True)
class Shape:
    model: dict[str, int]
    vocabulary: int
    stages: tuple[int, ...]
    microbatch: int
    windows: tuple[int, ...]


SHAPES = {
    "tiny": Shape(
        {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "context": 32}, 512, (1, 2), 2, (8,)
    ),
    "1b": Shape(
        {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "context": 2048},
        32768,
        (1, 8),
        2,
        (32, 128),
    ),
    "2b": Shape(
        {"layers": 8, "width": 4096, "heads": 32, "kv_heads": 32, "hidden": 11008, "context": 1024},
        32000,
        (1, 8),
        4,
        (32, 128),
    ),
    "8b": Shape(
        {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "context": 4096},
        128256,
        (8, 32),
        1,
        (32,),
    ),
}


def shape_named(name: str, layers: int | None = None) -> Shape:
    """`layers`: another depth than its own, so that stages of a model that is too large for one card can be seen."""
    if name not in SHAPES:
        raise OptionError(f"--shape {name}: there is no such shape", f"use {', '.join(SHAPES)}", "shape")
    shape = SHAPES[name]
    return shape if layers is None else replace(shape, model=shape.model | {"layers": layers})


@dataclass(frozen=True)
class Case:
    """One measurement: plain torch in one of its ways, or a pipeline."""

    windows: int  # a step
    way: str = ""  # of plain torch
    method: Method | None = None
    stages: int = 1
    link: str = "none"

    @property
    def name(self) -> str:
        if self.method is None:
            return f"torch-{self.way}-w{self.windows}"
        codec = [self.method.codec] if self.stages > 1 else []  # one stage has no boundary
        link = [] if self.link == "none" else [self.link.replace(",", "-")]
        k = str(self.method.k) if form_named(self.method.form).has_basis else ""
        return "-".join([f"{self.method.form}{k}", *codec, f"s{self.stages}", f"w{self.windows}", *link])

    def as_json(self) -> dict[str, Any]:
        method = None if self.method is None else asdict(self.method)
        return {"way": self.way, "method": method, "stages": self.stages, "windows": self.windows, "link": self.link}


@dataclass(frozen=True)
class Plan:
    """What all cases of an invocation have in common."""

    shape: Shape
    microbatch: int
    in_flight: int | None = None
    compute: dict[str, Any] = field(default_factory=dict)

    def spec(self, case: Case, tokens: Path | None = None) -> RunSpec:
        """The case as a spec; plain torch's is the dense model, for its operations. `tokens`: a file of ids."""
        method = case.method or Method("dense", 1, "fp32")
        form = form_named(method.form)
        return spec_from(
            {
                "name": "gpu",
                "steps": NO_END,
                "stages": case.stages,
                "model": dict(self.shape.model),
                "subspace": {"form": method.form, "k": method.k, "sync_interval": NO_END},
                "optimizer": {
                    "name": next(o for o in ("adamw", "row_adamw") if form.optimizer_problem(o) is None),
                    "lr": 1e-4,
                    "schedule": {"decay": "constant"},
                },
                "batch": {
                    "size": case.windows,
                    "microbatches": case.windows // self.microbatch,
                    "in_flight": self.in_flight,
                },
                "data": {
                    "source": "bin",
                    "files": [str(tokens or "tokens.bin")],
                    "sampling": "random",
                    "cache_dir": str(tokens.parent / "cache") if tokens else None,
                },
                "tokenizer": {"kind": "none", "vocab_size": self.shape.vocabulary},
                "eval": {"windows": 1, "interval": 0},
                "snapshots": {"interval": 0},
                "limits": {"lease_seconds": LEASE, "build_seconds": 600.0},
                "wire": {**method.legs, "link": parse_link(case.link).model_dump()},
                "compute": dict(self.compute),
            }
        )

    def check(self, cases: Sequence[Case]) -> None:
        """A mistake in the last case shows before the first is measured."""
        for case in cases:
            if case.windows % self.microbatch:
                raise OptionError(
                    f"--windows {case.windows}: not a whole number of microbatches of {self.microbatch} windows",
                    f"use a multiple of {self.microbatch}, or another --microbatch",
                    "windows",
                )
            self.spec(case)


def cases(
    ways: Sequence[str], methods: Sequence[Method], stages: Sequence[int], windows: Sequence[int], links: Sequence[str]
) -> list[Case]:
    """In the order in which they are measured: what others are held against comes first.

    The first of `windows` is for every case. The others, larger steps, are for what crosses a link in a subspace, for
    the same without its link, and for the first way of plain torch: dense messages would take minutes a step."""
    found = [Case(windows[0], way=way) for way in ways]
    found += [Case(windows[0], method=m, stages=n) for n in stages for m in methods]
    longest = max(stages)
    if longest > 1:
        linked = [Case(windows[0], method=m, stages=longest, link=link) for link in links for m in methods]
        found += filter(_has_basis, linked)
        for more in windows[1:]:
            found += [Case(more, way=way) for way in ways[:1]]
            for method in (m for m in methods if form_named(m.form).has_basis):
                found += [Case(more, method=method, stages=longest, link=link) for link in ("none", *links)]
        found += linked  # the dense ones among them, which are the slowest, are last
    return list({case.name: case for case in found}.values())


def _has_basis(case: Case) -> bool:
    return case.method is not None and form_named(case.method.form).has_basis


def numbers(option: str, text: str) -> tuple[int, ...]:
    """1,8 → (1, 8)."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise OptionError(
            f"{option} {text}: must be whole numbers from 1, separated by commas",
            f"write for example {option} 1,8",
            option.removeprefix("--"),
        )
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def ways(text: str) -> tuple[str, ...]:
    """compile,eager → ("compile", "eager"); none → ()."""
    found = () if text == "none" else tuple(dict.fromkeys(text.split(",")))
    if unknown := set(found) - set(WAYS):
        raise OptionError(
            f"--torch {text}: {min(unknown)!r} is not one of {', '.join(WAYS)}",
            "write for example --torch compile,eager, or --torch none",
            "torch",
        )
    return found


def links(texts: Sequence[str]) -> tuple[str, ...]:
    """Those that are links at all, each of them checked."""
    return tuple(dict.fromkeys(text for text in texts if parse_link(text).emulated))


def named(found: Sequence[Case], patterns: str | None) -> list[Case]:
    """Those with one of these names, by pattern. Every pattern must name one."""
    if patterns is None:
        return list(found)
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(case.name, pattern) for case in found):
            raise OptionError(f"--only {pattern}: there is no such measurement here", "see --list", "only")
    return [case for case in found if any(fnmatchcase(case.name, pattern) for pattern in wanted)]
