"""The small real run that the experiments train."""

from __future__ import annotations

from typing import Any

from protomodels_cli.codecs import Carrier
from protomodels_cli.data.prepare import prepare
from protomodels_cli.model.reference import Reference
from protomodels_cli.spec import spec_from


def small_reference(steps: int, seed: int, device: str, **sections: Any) -> Reference:
    """A four-layer model on Python's own library; `sections` replace fields section by section."""
    base: dict[str, Any] = {
        "name": "lab",
        "seed": seed,
        "steps": steps,
        "stages": 4,
        "model": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "context": 32},
        "subspace": {"form": "reparam", "k": 8},
        "wire": {"forward": "fp32", "backward": "fp32"},
        "optimizer": {"lr": 3e-3, "schedule": {"warmup_steps": min(20, steps)}},
        "batch": {"size": 8, "microbatches": 2},
        "data": {"source": "python", "max_bytes": 2_000_000},
        "tokenizer": {"kind": "bytes"},
        "compute": {},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields} if isinstance(fields, dict) else fields
    spec = spec_from(base)
    return Reference(spec, prepare(spec), Carrier(spec), device)
