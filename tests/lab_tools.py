"""What the laboratory's tests share: a scale so small that a run takes a moment."""

from __future__ import annotations

from dataclasses import replace

from protomodels_cli.lab.recipes import Recipe, carried, dense
from protomodels_cli.lab.scales import SCALES

TINY = replace(
    SCALES["cpu"],
    width=16,
    heads=2,
    kv_heads=1,
    layers=4,
    context=8,
    vocabulary=256,
    batch=4,
    steps=6,
    ks=(8, 4),
    eval_windows=8,
    evals=3,
    seeds=2,
    trials=2,
    workers=1,
    source="builtin",  # whose documents are short
    text=60_000,
)
DENSE = carried(dense("fp32"), TINY)
TWO_STREAM = carried(Recipe("two_stream", "segment", 4, "int8"), TINY)
