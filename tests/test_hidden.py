"""`model.hidden: auto`: equal parameters, whatever the form."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli.cost.units import anchor_parameters, block_parameters
from protomodels_cli.spec import SpecError
from protomodels_cli.spec.schema import RunSpec

SHAPES = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 6),
        "width": st.sampled_from([16, 64, 248, 256, 512]),
        "heads": st.sampled_from([2, 4]),
        "kv_heads": st.sampled_from([1, 2]),
        "head_dim": st.sampled_from([None, 6, 64]),
        "qk_norm": st.booleans(),
    }
)


def sized(hidden: int | str | None, model: dict[str, Any], **subspace: Any) -> RunSpec:
    return make_spec(stages=1, model={**model, "hidden": hidden}, subspace=subspace)


@given(SHAPES, st.sampled_from(["reparam", "constrained", "dense", "two_stream"]), st.data())
def test_no_other_hidden_width_is_nearer_to_the_dense_model(model, form, data):
    model["segments"] = data.draw(st.integers(1, model["layers"]))
    k, asked = data.draw(st.integers(1, model["width"])), data.draw(st.sampled_from([None, 64, 100, 1376]))
    anchor = "fixed" if form == "constrained" else data.draw(st.sampled_from(["fixed", "segment"]))
    subspace = {"form": form, "k": k, "anchor": anchor}
    found = sized("auto" if asked is None else f"auto:{asked}", model, **subspace)
    dense = sized(asked, model, form="dense")
    assert found.model.dense_hidden == dense.model.hidden
    step, wanted = 32 if model["width"] >= 256 else 8, block_parameters(dense)
    if block_parameters(sized(dense.model.hidden, model, **subspace)) == wanted:
        assert found.model.hidden == dense.model.hidden, "to the number"
        return
    every = {h: abs(block_parameters(sized(h, model, **subspace)) - wanted) for h in near(found, step)}
    assert found.model.hidden == min(every, key=lambda h: (every[h], h))


def near(spec: RunSpec, step: int) -> list[int]:
    """What is linear has no other minimum further off."""
    assert isinstance(spec.model.hidden, int)
    assert spec.model.hidden % step == 0
    return [h for h in range(spec.model.hidden - 3 * step, spec.model.hidden + 4 * step, step) if h > 0]


def test_what_is_resolved_says_the_number_and_what_it_goes_by():
    spec = make_spec(stages=4, model={"layers": 8, "width": 512, "heads": 8, "hidden": "auto"}, subspace={"k": 64})
    assert (spec.model.hidden, spec.model.dense_hidden) == (2016, 1376)
    assert make_spec(model={"hidden": 100}).model.dense_hidden is None
    two = make_spec(
        stages=4,
        model={"layers": 8, "width": 512, "heads": 8, "hidden": "auto:1376"},
        subspace={"form": "two_stream", "k": 64, "anchor": "segment"},
    )
    assert (two.model.hidden, two.model.dense_hidden) == (1504, 1376)
    assert anchor_parameters(two) == 4 * (256 + 3) * 512


@pytest.mark.parametrize("value", ["auto:0", "auto:", "auto:1.5", "wide", "auto:99999999", 0, True, 2.5, 1 << 25, [1]])
def test_what_is_no_width_is_refused(value):
    with pytest.raises(SpecError) as refused:
        make_spec(model={"hidden": value})
    [problem] = refused.value.problems
    assert (problem.field, problem.kind, problem.value) == ("model.hidden", "hidden", value)
    assert "auto:" in problem.fix
