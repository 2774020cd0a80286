"""`lab replicas`: sums of replicas' gradients against closed forms, and lanes against one pipeline."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from lab_tools import TINY, TWO_STREAM
from torch import Tensor

from protomodels_cli.codecs.base import Extent, Slot
from protomodels_cli.codecs.eden import LEVELS, Eden
from protomodels_cli.errors import OptionError
from protomodels_cli.lab import bench as benches
from protomodels_cli.lab import lanes as lanes_module
from protomodels_cli.lab import replicas
from protomodels_cli.lab.lanes import Lanes, LocalLanes, SummedLanes, put, taken
from protomodels_cli.lab.recipes import spec_of
from protomodels_cli.lab.replica_sums import BLOCK, EdenRounding, Gradients, Parameter, Sum, orthonormal, parse_sum
from protomodels_cli.lab.results import write_json
from protomodels_cli.lab.trained import Trained
from protomodels_cli.protocol.messages import MessageKey
from protomodels_cli.protocol.steps import decide
from protomodels_cli.spec.schema import RunSpec

R = 4
PLAIN = [Parameter("a", (64, 512), "matrix", 0.9), Parameter("b", (3 * BLOCK,), "other")]
TABLE = Parameter("t", (40, 16), "table")


def drawn(seed: int, parameters: Sequence[Parameter] = PLAIN, lanes: int = R, rows: int = 8) -> list[Gradients]:
    """Independent normal numbers for each lane; of a table in some rows."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(lanes):
        one = Gradients([], [])
        for p in parameters:
            x, touched = torch.randn(p.shape, generator=generator), None
            if p.kind == "table":
                touched = torch.rand(p.shape[0], generator=generator).argsort() < rows
                x[~touched] = 0
            one.tensors.append(x)
            one.touched.append(touched)
        found.append(one)
    return found


def whole(gradients: Sequence[Gradients]) -> list[Tensor]:
    return [sum(own) for own in zip(*(g.tensors for g in gradients), strict=True)]


# Rounding


@pytest.mark.parametrize("bits", LEVELS)
def test_rounding_is_the_codecs(bits):
    key, shape = MessageKey(3, 2, 1, "backward"), (1, 5, BLOCK)
    torch.manual_seed(0)  # of another, a scale may lie at the bound between two of the codec's
    x = torch.randn(shape) * torch.tensor([1.0, 1e-20, 1e20, 0.0, 3.0])[:, None]
    slot, codec = Slot(key, shape, torch.float32, seed=7), Eden(bits)
    right = codec.decode(codec.encode(x, slot), slot)
    found = EdenRounding(bits).arrived(x, [key], seed=7)
    close = torch.isclose(found, right, rtol=1e-4, atol=0) | ((found - right).abs() < 1e-5 * x.abs().amax(-1, True))
    assert close.float().mean() > 0.99, "all but numbers that lie at the bound between two levels"
    assert torch.equal(found[0, 3], torch.zeros(BLOCK))
    counted = EdenRounding(bits).bits(torch.ones(5), torch.full((5,), BLOCK), BLOCK)
    assert counted == 8 * codec.message_bytes(Extent(1, 5, BLOCK, 4, 1, 1))


def distortion(bits: int) -> float:
    """Of a standard normal number in Lloyd and Max's levels, whose own square is what is kept of it."""
    levels = sorted([*LEVELS[bits], *(-level for level in LEVELS[bits])])
    bounds = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
    chances = [(math.erf(b / 2**0.5) - math.erf(a / 2**0.5)) / 2 for a, b in pairwise(bounds)]
    return 1 - sum(p * level**2 for p, level in zip(chances, levels, strict=True))


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_error_and_bits_of_a_sum_are_those_of_a_closed_form(bits):
    """Without bias a message's error is D/(1 − D) of its square; independent lanes' squares add up to the sum's."""
    summing = parse_sum(f"eden:{bits}", PLAIN, R, seed=1)
    for step in range(1, 9):
        summing(drawn(step), step)
    once = distortion(bits) / (1 - distortion(bits))
    assert summing.facts()["error"] == pytest.approx(2 * once + once**2, rel=0.05)
    numbers = 64 * 512 + 3 * BLOCK
    assert summing.bits()["matrices"] == 8 * 2 * (R - 1) / R * numbers * (bits + 16 / BLOCK)


@pytest.mark.parametrize(("way", "number"), [("exact", 32), ("bf16", 16), ("eden:4|exact", None)])
def test_of_a_table_touched_rows_alone_travel(way, number):
    summing, lanes = parse_sum(way, [TABLE], R, seed=1), drawn(1, [TABLE])
    found = summing(lanes, 1)
    union = int(torch.stack([lane.touched[0] for lane in lanes]).any(0).sum())
    assert 8 < union < 32
    assert int(found.touched[0].sum()) == union
    assert torch.equal(found.tensors[0][~found.touched[0]], torch.zeros(40 - union, 16))
    assert torch.allclose(found.tensors[0], whole(lanes)[0], rtol=0.02, atol=0.5 if number is None else 0.05)
    up, down = (4 * 16 + 16, 32 * 16) if number is None else (number * 16, number * 16)
    assert summing.bits() == {"matrices": 0.0, "tables": (R - 1) / R * (8 * up + union * down + 2 * 40)}


def test_the_exact_sum_is_exact_and_keeps_absent_parameters_absent():
    lanes = drawn(1, [*PLAIN, TABLE])
    for lane in lanes:
        lane.tensors[1] = None
    found = parse_sum("exact", [*PLAIN, TABLE], R, seed=1)(lanes, 1)
    assert found.tensors[1] is None
    a, t = (lanes[0].tensors[i] + lanes[1].tensors[i] + lanes[2].tensors[i] + lanes[3].tensors[i] for i in (0, 2))
    assert torch.equal(found.tensors[0], a)
    assert torch.equal(found.tensors[2], t)


# Feedback


def owed(summing: Sum) -> Tensor:
    """What feedback has still to send, of all parameters of one kind."""
    up = sum(t.sum(0) for name, t in summing.memory.kept.items() if name.startswith("up"))
    return up + sum(t[0] for name, t in summing.memory.kept.items() if name.startswith("down"))


@pytest.mark.parametrize("parameter", [PLAIN[0], TABLE])
def test_with_feedback_all_that_was_sent_differs_from_the_truth_by_the_last_residual(parameter):
    summing = parse_sum("eden:2+ef", [parameter], R, seed=1)
    truth, arrived = torch.zeros(parameter.shape), torch.zeros(parameter.shape)
    for step in range(1, 7):
        lanes = drawn(step, [parameter])
        found = summing(lanes, step)
        if step == 3:  # skipped: as if it had never been
            summing.decide(False)
            continue
        summing.decide(True)
        truth += whole(lanes)[0]
        arrived += found.tensors[0]
    left = owed(summing).view(parameter.shape)
    assert left.abs().max() > 0.1
    assert torch.allclose(arrived + left, truth, atol=1e-4)
    none = parse_sum("eden:2", [parameter], R, seed=1)
    none(drawn(1, [parameter]), 1)
    none.decide(True)
    assert not none.memory.kept


# Low rank


def test_dion_of_full_rank_is_a_momentum_whatever_the_lanes():
    parameters = [Parameter("a", (12, 20), "matrix", 0.9), Parameter("b", (20, 12), "matrix", 0.9)]
    for lanes in (1, 4):
        summing = parse_sum("dion:12:exact", parameters, lanes, seed=1)
        momentum = [torch.zeros(p.shape) for p in parameters]
        for step in range(1, 5):
            gradients = drawn(step, parameters, lanes)
            found = summing(gradients, step)
            summing.decide(True)
            momentum = [0.9 * m + 0.1 * g for m, g in zip(momentum, whole(gradients), strict=True)]
            assert all(torch.allclose(f, m, atol=1e-5) for f, m in zip(found.tensors, momentum, strict=True))


@pytest.mark.parametrize("rounding", ["exact", "bf16", "eden:4"])
def test_what_dion_does_not_send_stays_in_the_momenta(rounding):
    parameters = [Parameter("a", (12, 20), "matrix", 0.9)]
    summing = parse_sum(f"dion:3:{rounding}", parameters, R, seed=1)
    truth, arrived = torch.zeros(12, 20), torch.zeros(12, 20)
    for step in range(1, 7):
        lanes = drawn(step, parameters)
        found = summing(lanes, step).tensors[0]
        summing.decide(True)
        assert torch.linalg.matrix_rank(found, rtol=1e-4) == 3
        truth, arrived = truth + whole(lanes)[0], arrived + found
    left = summing.memory.kept["momentum/12x20"].sum(0)[0]
    assert torch.allclose(arrived + left, truth, atol=1e-4)
    if rounding == "bf16":
        assert summing.bits()["matrices"] == 6 * 2 * (R - 1) / R * 16 * 3 * (12 + 20)


def test_dion_finds_the_largest_directions_and_outlives_a_gradient_of_zeros():
    large = torch.outer(torch.randn(12), torch.randn(20)) * 10
    summing = parse_sum("dion:1:exact", [Parameter("a", (12, 20), "matrix", 0.0)], 2, seed=1)
    for step, size in enumerate((0.0, 1.0, 1.0, 1.0), 1):
        lanes = [Gradients([size * (large + 0.01 * torch.randn(12, 20)) / 2], [None]) for _ in range(2)]
        found = summing(lanes, step).tensors[0]
        summing.decide(True)
    assert torch.allclose(found, large, atol=0.2)
    columns = torch.randn(5, 30, 4)
    columns[..., 3] = columns[..., 2]  # parallel ones must not spoil the others
    span = orthonormal(columns)
    assert torch.allclose((span.mT @ span)[:, :3, :3], torch.eye(3), atol=1e-4)
    assert torch.isfinite(span).all()


# Lanes


def shared(lanes: int, way: str, kind: type[Lanes] = SummedLanes, *more: int, dtype: str = "auto") -> Lanes:
    scale = replicas.shared(TINY, lanes)
    return kind(as_type(spec_of(scale, TWO_STREAM, 0), dtype), scale, TWO_STREAM, "cpu", lanes, way, *more)


def alone(dtype: str = "auto") -> Trained:
    scale = replicas.shared(TINY, 1)
    return Trained(as_type(spec_of(scale, TWO_STREAM, 0), dtype), scale, TWO_STREAM, "cpu")


def as_type(spec: RunSpec, dtype: str) -> RunSpec:
    return spec.model_copy(update={"compute": spec.compute.model_copy(update={"dtype": dtype})})


def weights(reference: Trained) -> Tensor:
    return torch.cat([p.detach().flatten() for stage in reference.stages for p in stage.parameters()])


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_lanes_that_sum_exactly_train_as_one_pipeline_does(lanes):
    """One microbatch each: added in the same order, to the same bits. Two each: float64 rounds otherwise."""
    one, several = alone("float64"), shared(lanes, "exact", dtype="float64")
    start = weights(one).clone()
    for _ in range(4):
        losses = [reference.run_step()[0]["loss"] for reference in (one, several)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert (weights(one) - start).abs().max() > 1e-3
    assert torch.allclose(weights(one), weights(several), rtol=0, atol=1e-12)


def test_a_rounded_sum_trains_otherwise_but_the_same_every_time():
    found = []
    for way in ("exact", "eden:4", "eden:4"):
        reference = shared(4, way)
        reference.run_step()
        reference.run_step()
        found.append(weights(reference))
    assert torch.equal(found[1], found[2])
    assert 1e-5 < (found[0] - found[1]).abs().max() < 1


def test_a_late_sum_is_that_of_the_step_before():
    late, hand = shared(4, "exact+late"), alone()
    start, rows = weights(late).clone(), [late.run_step()[0]]
    assert torch.equal(weights(late), start), "the first step has no sum yet"
    rows += [late.run_step()[0], late.run_step()[0]]
    own = [t for trainer in hand.trainers for t in trainer.optimizer.parameters]
    waiting, by_hand = None, []
    for step in (1, 2, 3):
        loss = hand.accumulate(step)
        new = taken(own)
        if waiting is not None:
            put(own, waiting)
            outcome = decide(hand.spec, step, loss, list(hand.prepare().values()))
            hand._decide(step, outcome)
            by_hand.append(outcome)
        waiting = new
    assert torch.allclose(weights(late), weights(hand), rtol=0, atol=1e-6)
    assert (weights(late) - start).abs().max() > 1e-3
    assert [row["lr"] for row in rows[1:]] == [outcome.lr for outcome in by_hand]


def test_local_steps_of_one_lane_that_keeps_all_are_ordinary_training(monkeypatch):
    monkeypatch.setattr(lanes_module, "OUTER_RATE", 1.0)
    monkeypatch.setattr(lanes_module, "OUTER_MOMENTUM", 0.0)
    local, one = shared(1, "exact", LocalLanes, 2), alone()
    for _ in range(4):
        local.run_step()
        one.run_step()
    assert torch.allclose(weights(local), weights(one), rtol=0, atol=1e-5)
    assert local.evaluate() == pytest.approx(one.evaluate(), rel=1e-5)


def test_local_lanes_part_and_meet():
    local = shared(2, "exact", LocalLanes, 3)
    apart, common = [], [w.clone() for w in local.common]
    for _ in range(3):
        local.run_step()
        apart.append(any(not torch.equal(a, b) for a, b in zip(*(lane.weights for lane in local.each), strict=True)))
    assert apart == [True, True, False]
    moved = local.momentum[0]  # the mean change of the lanes
    rate, kept = lanes_module.OUTER_RATE, lanes_module.OUTER_MOMENTUM
    assert torch.allclose(local.common[0], common[0] + rate * (1 + kept) * moved, atol=1e-6)
    assert local.facts()["sum_bits"] == pytest.approx(32 / 3, rel=0.01), "2 · (R − 1)/R · 32 bits in every third step"


# The experiment


SUMS = ["exact", "eden:4", "dion:4", "local:2"]


def test_rows_are_kept_and_held_against_one_pipeline(tmp_path, monkeypatch):
    scale, kept = replace(TINY, seeds=1, steps=3), tmp_path / "runs.jsonl"
    found = replicas.run(scale, sums=SUMS[:2], kept=kept)
    assert [row["name"] for row in found["rows"]] == ["R=1 exact", "R=4 exact", "R=4 eden:4"]
    exact, same, rounded = found["rows"]
    assert exact["gap"] == exact["sum_bits"] == 0
    assert same["loss"] == pytest.approx(exact["loss"], rel=1e-4)
    assert rounded["gap"] == rounded["loss"] / exact["loss"] - 1 != 0
    assert 0 < rounded["sum_bits"] < same["sum_bits"] / 4
    text = replicas.report(found)
    assert all(row["name"] in text for row in found["rows"])
    write_json(found, tmp_path / "r.json")
    assert replicas.report(json.loads((tmp_path / "r.json").read_text())) == text

    def refuse(run: replicas.ReplicaRun) -> None:
        raise AssertionError(f"trained again: {run.name}")

    monkeypatch.setattr(benches, "train", refuse)
    again = replicas.run(scale, sums=SUMS[:2], kept=kept)
    assert again["rows"] == found["rows"]
    shown = replicas.run(scale, sums=SUMS, kept=kept, budget=0)
    assert shown["rows"] == found["rows"]
    assert len(shown["missing"]) == 2
    seeds = replicas._runs(replace(TINY, seeds=2), replicas.plan(TINY), "cpu")
    assert {row.name for row, one in seeds if one.seed == 1} == {row.name for row, _ in seeds if row.matters}
    replicas.plot(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5_000


def test_every_way_has_its_own_kept_run_and_its_rows_are_in_the_promised_order():
    size = replicas._scaled("gpu", None, None, None, None, None)
    assert size.steps * size.tokens_per_step == 13_107_200
    rows = replicas.plan(size)
    names = [row.name for row in rows]
    assert names[:6] == ["R=1 exact", "R=4 eden:4", "R=4 eden:3", "R=4 eden:5", "R=4 eden:6", "R=4 eden:4+ef"]
    assert len(set(names)) == len(names)
    assert {row.lanes for row in rows} == {1, 2, 4, 8}
    for row in rows:
        parse_sum(replicas.local(row.way)[1] if row.way.startswith("local") else row.way, PLAIN, row.lanes, 0)
    runs = [one for _, one in replicas._runs(replace(TINY, seeds=1), replicas.plan(TINY), "cpu")]
    assert len({one.key() for one in runs}) == len(runs)
    listed = replicas.listing("gpu", 1, None, None, [], [], [], None, None)
    assert all(name in listed for name in names)
    few = replicas._chosen(size, ["dion"], [], [8])
    assert [row.name for row in few] == ["R=1 exact", "R=8 dion:64:eden:4"]


@pytest.mark.parametrize("way", ["eden:9", "eden", "dion:0", "dion:x", "local:0", "sparse", "dion:4:eden:7", "exact|x"])
def test_a_sum_that_does_not_exist_is_refused(way):
    with pytest.raises(OptionError) as e:
        replicas._chosen(TINY, [], [way], [])
    assert e.value.kind == "sum"
