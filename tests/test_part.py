"""What a part must hold, said without torch, against parts that real stages make after real steps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import corpus_of, make_spec
from safetensors.torch import load_file, save_file

from protomodels_cli.codecs import Carrier
from protomodels_cli.codecs.base import Kept
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.part import Flaw, PartContents, flaw_of_numbers, has_applied, part_contents
from protomodels_cli.forms import FORMS
from protomodels_cli.model.reference import Reference
from protomodels_cli.model.state import on_host
from protomodels_cli.safetensors_file import SafetensorsFile
from protomodels_cli.spec import RunSpec
from protomodels_cli.spec.errors import SpecError

MOVING = {"sync_interval": 3, "update": {"interval": 3, "window": 2, "delay": 1}}
WIRES = {
    "exact": {},
    "ef": {"forward": "int8+ef21", "backward": "int4+ef"},
    "aqsgd": {"forward": "int8+aqsgd", "backward": "topk:0.2+ef21"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "moving": {"subspace": MOVING, "wire": WIRES["ef"]},
    "gathering all the time": {"subspace": {"sync_interval": 3, "update": {"interval": 3, "window": 3}}},
    "in float64, with norms of q and k": {"compute": {"dtype": "float64"}, "model": {"qk_norm": True}},
    "narrow anchors": {"subspace": {"anchor": "segment", "anchor_rank": 4}, "model": {"segments": 4}},
    "row AdamW without first moments": {
        "subspace": {"form": "constrained"},
        "optimizer": {"name": "row_adamw", "beta1": 0.0, "moments": "bf16"},
    },
    "tables in rows": {"optimizer": {"tables": "row_adamw"}},
    "free layers": {"subspace": {"unconstrained_layers": 2}, "optimizer": {"name": "muon"}, "stages": [1, 1, 2]},
}


def cases() -> dict[str, RunSpec]:
    """All that a spec allows of forms × anchors × optimizers, with the wires in turn, and a few that stand apart."""
    found = {}
    optimizers = [
        {"name": name, "moments": kept} for name in ("adamw", "row_adamw", "muon") for kept in ("float32", "bf16")
    ]
    wires = itertools.cycle(WIRES)
    for form, anchor, optimizer in itertools.product(FORMS.names, ("fixed", "segment"), optimizers):
        wire = next(wires)
        try:
            found[f"{form} {anchor} {' '.join(optimizer.values())} {wire}"] = make_spec(
                stages=3,
                subspace={"form": form, "anchor": anchor},
                optimizer=optimizer,
                wire=WIRES[wire],
                model={"segments": 4},
                data={"sampling": "epochs"},
                steps=3000,
            )
        except SpecError:
            continue
    return found | {name: make_spec(**{"stages": 3, "steps": 6, **sections}) for name, sections in OTHERS.items()}


CASES = cases()


def parts_of(reference: Reference, folder: Path) -> list[Path]:
    """As the worker writes them."""
    paths = [folder / f"{reference.step}-{i}.safetensors" for i in range(len(reference.trainers))]
    for i, (trainer, path) in enumerate(zip(reference.trainers, paths, strict=True)):
        save_file(on_host(trainer.state(reference.carry.state(i))), path)
    return paths


def contents_of(reference: Reference, stage: int, applied: bool = True) -> PartContents:
    return part_contents(reference.spec, reference.stages[stage].slice.layers, reference.step, applied)


def test_all_forms_and_ways_are_among_the_cases():
    assert {name.split()[0] for name in CASES} >= set(FORMS.names)
    assert {name.split()[-1] for name in CASES} >= set(WIRES)
    assert len(CASES) > 30


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
def test_a_stages_own_part_is_what_its_spec_says(spec: RunSpec, tmp_path: Path):
    reference = Reference(spec, corpus_of(spec), Carrier(spec))
    for step in range(7 if spec.steps == 6 else 3):  # over a move of U, where it moves
        if step:
            reference.run_step()
        for stage, path in enumerate(parts_of(reference, tmp_path)):
            contents = contents_of(reference, stage, applied=step > 0)
            with SafetensorsFile(path) as part:
                assert contents.flaw_in(part.tensors) is None
                assert has_applied(part) == (step > 0)
                assert flaw_of_numbers(part) is None
                if step:
                    assert contents_of(reference, stage, applied=False).flaw_in(part.tensors) is not None
                size = sum(info.end - info.start for info in part.tensors.values())
            layers = reference.stages[stage].slice.layers
            assert size <= StageMemory(spec).saved(layers.start, layers.stop) + 16 * 2


def test_what_is_there_or_not_is_never_there_by_half(tmp_path: Path):
    names = {"codecs/next/forward/samples": Kept("U8", (9, 16), at_most=True)}
    contents = PartContents({}, ({**names, "codecs/next/forward/last": Kept("F32", (9, 4, 6), at_most=True)},))
    few, many = Kept("U8", (2, 16)), Kept("F32", (3, 4, 6))
    tensors = {"codecs/next/forward/samples": few, "codecs/next/forward/last": many}
    assert contents.flaw_in({}) is None
    assert contents.flaw_in(tensors) == Flaw("codecs/next/forward/samples", "2 rows", "3 rows")
    assert contents.flaw_in({**tensors, "codecs/next/forward/last": Kept("F32", (2, 4, 6))}) is None
    assert contents.flaw_in(dict(list(tensors.items())[:1])).tensor == "codecs/next/forward/last"
    for wrong in (Kept("F32", (0, 4, 6)), Kept("F32", (10, 4, 6)), Kept("F32", (4, 6)), Kept("F64", (2, 4, 6))):
        assert contents.flaw_in({**tensors, "codecs/next/forward/last": wrong}).found.startswith(wrong.dtype)


SPOILT = {
    "a tensor less": (lambda state: state.pop("basis/u"), Flaw("basis/u", "", "F32 [32, 6]")),
    "a tensor more": (lambda state: state.update({"weights/x": torch.zeros(2)}), Flaw("weights/x", "F32 [2]", "")),
    "another shape": (
        lambda state: state.update({"weights/layers.1.attn.q.weight": torch.zeros(1)}),  # which would be broadcast
        Flaw("weights/layers.1.attn.q.weight", "F32 [1]", "F32 [32, 32]"),
    ),
    "another type": (
        lambda state: state.update({"basis/u": state["basis/u"].bfloat16()}),
        Flaw("basis/u", "BF16 [32, 6]", "F32 [32, 6]"),
    ),
}


@pytest.mark.parametrize(("spoil", "flaw"), SPOILT.values(), ids=SPOILT)
def test_whatever_else_it_holds_is_found(reference, tmp_path: Path, spoil, flaw: Flaw):
    trained = reference(stages=4)
    trained.run_step()
    path = parts_of(trained, tmp_path)[1]
    state = load_file(path)
    spoil(state)
    save_file(state, path)
    with SafetensorsFile(path) as part:
        assert contents_of(trained, 1).flaw_in(part.tensors) == flaw


def test_a_parameter_that_is_not_finite_is_found_and_a_moment_may_be(reference, tmp_path: Path):
    trained = reference(stages=4)
    trained.run_step()
    path = parts_of(trained, tmp_path)[1]
    state = load_file(path)
    name = "layers.1.attn_norm.weight"
    state[f"optimizer/{name}/second"][-1] = torch.inf
    save_file(state, path)
    with SafetensorsFile(path) as part:
        assert flaw_of_numbers(part) is None
    state[f"weights/{name}"][-1] = torch.nan
    save_file(state, path)
    with SafetensorsFile(path) as part:
        assert flaw_of_numbers(part) == Flaw(f"weights/{name}", "not finite", "finite")
