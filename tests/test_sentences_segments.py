"""How errors about segments, anchors and groups in a spec read."""

from __future__ import annotations

from typing import Any

import pytest
from test_sentences_spec import check, model

SPEC: list[tuple[dict[str, Any], str]] = [
    (
        model(segments="four"),
        "model.segments = 'four' | must be a number of segments from 1, or a list of layers per segment | "
        "write for example `segments: 4` or `segments: [3, 3, 2]`",
    ),
    (
        model(segments=[1, 2]),
        "model.segments = [1, 2] | the layers per segment add up to 3, and model.layers is 4 | "
        "change the list so that it adds up to 4",
    ),
    (
        model(segments=5),
        "model.segments = 5 | every segment needs at least one layer, and model.layers is 4 | "
        "use 4 segments or fewer, or more layers",
    ),
    (
        {"stages": "auto", "subspace": {"anchor": "segment"}},
        "model.segments | is required with stages auto: what the two_stream form with subspace.anchor segment "
        "computes depends on it, and must not depend on who joins | set for example `segments: 2`",
    ),
    (
        {"stages": "auto", "subspace": {"anchor": "segment"}, **model(segments=3)},
        "model.segments = 3 | with stages auto all segments must have the same number of layers, and [2, 1, 1] have "
        "not | use a number of segments that divides model.layers, or write `stages` as a list",
    ),
    (
        {"stages": [1, 3], "subspace": {"anchor": "segment"}, **model(segments=2)},
        "stages = [1, 3] | a stage is made of whole segments, and stages of [1, 3] layers cut through segments of "
        "[2, 2] | change `stages` or model.segments so that every stage ends with a segment",
    ),
    (
        {"subspace": {"form": "constrained", "anchor": "segment"}},
        "subspace.anchor = 'segment' | the constrained form carries T_fixed from stage to stage in its state, and a "
        "stage with its own anchor would not take away what others have added | "
        "set subspace.anchor to fixed, or subspace.form to reparam",
    ),
    (
        {"stages": 2, "subspace": {"form": "two_stream", "unconstrained_layers": 1}},
        "subspace.unconstrained_layers = 1 | with two streams the layers of the last segment write to x itself, and "
        "those are 2 | remove `unconstrained_layers`, or change model.segments",
    ),
    (
        {
            "stages": 2,
            "subspace": {"form": "reparam", "anchor": "segment", "unconstrained_layers": 2},
            **model(segments=4),
        },
        "subspace.unconstrained_layers = 2 | unconstrained layers must be in one segment, and the last one has "
        "1 layer | use at most 1, or change model.segments",
    ),
    (
        {"subspace": {"form": "reparam", "anchor_rank": 8}},
        "subspace.anchor_rank = 8 | subspace.anchor is fixed, and there is no table of changes | "
        "remove `anchor_rank`, or set subspace.anchor to segment",
    ),
    (
        {"subspace": {"anchor": "segment", "anchor_rank": 65}},
        "subspace.anchor_rank = 65 | a table's rows are lifted to model.width (64), and cannot be wider | "
        "use at most 64, for example 8, or remove `anchor_rank`",
    ),
    (
        model(hidden="auto", dense_hidden=100),
        "model.dense_hidden = 100 | is filled in from model.hidden, which is auto | "
        "remove `dense_hidden`, or set model.hidden to auto:100",
    ),
    (
        model(init_std=0.02),
        "model.init_std = 0.02 | has moved: each group of parameters has a standard deviation of its own | "
        "set groups.matrices.std and groups.head.std",
    ),
]


@pytest.mark.parametrize(("changes", "text"), SPEC)
def test_spec(changes: dict[str, Any], text: str):
    check(changes, text)
