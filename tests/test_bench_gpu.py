"""`bench gpu`: which cases and steps count, ratios by hand, plain torch against an oracle, and one small real run."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
from conftest import make_spec
from typer.testing import CliRunner

from protomodels_cli.bench import gpu, gpu_report, stage_profile
from protomodels_cli.bench.gpu_cases import SHAPES, Case, Plan, cases, named
from protomodels_cli.bench.gpu_run import Bench
from protomodels_cli.bench.timing import Timing
from protomodels_cli.bench.torch_plain import Llama, Training
from protomodels_cli.bench.wan import Method
from protomodels_cli.cli.main import app
from protomodels_cli.coordinator.snapshots.room import RESERVE, check_room
from protomodels_cli.cost.units import unit_parameters
from protomodels_cli.errors import OptionError
from protomodels_cli.lab.plain_llama import mean_loss, streams_and_logits

DENSE, SUBSPACE = Method("dense", 40, "fp32"), Method("reparam", 40, "int8")
LINK = "500kbit,5ms"
TINY = Plan(SHAPES["tiny"], 2, compute={"dtype": "auto", "compile": "auto", "recompute": "auto"})  # as by default
BENCH = Bench(TINY, ("cpu",), Timing(1, 3, 5.0), limit=60.0)


@pytest.mark.parametrize(
    ("took", "counted", "reached"),
    [
        ([], [], False),
        ([9, 9], [], False),  # two to warm up
        ([1, 1, 1], [2], False),
        ([1, 1, 1, 1, 1], [2, 3, 4], True),
        ([1, 1, 1, 1, 1, 1], [2, 3, 4], True),
        ([1, 1, 20], [2], True),  # one slow step that counts is enough
        ([20], [], False),
        ([20, 20], [1], True),  # and one to warm up
        ([20, 1, 1], [1, 2], False),  # the first compiled
    ],
)
def test_a_few_steps_count_after_a_few_and_slow_ones_end_early(took, counted, reached):
    timing = Timing(warm_up=2, steps=3, seconds=15)
    assert list(timing.counted(took)) == counted
    assert timing.reached(took) is reached


def test_larger_steps_are_for_subspaces_over_links_and_slow_cases_come_last():
    found = [case.name for case in cases(("compile", "eager"), [DENSE, SUBSPACE], (1, 8), (32, 128), ("80mbit,25ms",))]
    assert found == [
        "torch-compile-w32",
        "torch-eager-w32",
        "dense-s1-w32",
        "reparam40-s1-w32",
        "dense-fp32-s8-w32",
        "reparam40-int8-s8-w32",
        "reparam40-int8-s8-w32-80mbit-25ms",
        "torch-compile-w128",
        "reparam40-int8-s8-w128",
        "reparam40-int8-s8-w128-80mbit-25ms",
        "dense-fp32-s8-w32-80mbit-25ms",
    ]


def test_one_stage_is_measured_once_for_each_form():
    found = cases((), [DENSE, Method("dense", 40, "bf16")], (1,), (32, 128), ("80mbit,25ms",))
    assert [case.name for case in found] == ["dense-s1-w32"]


def test_cases_are_chosen_by_pattern():
    found = cases(("compile", "eager"), [DENSE], (1, 2), (8,), ())
    assert [case.name for case in named(found, "torch-e*,dense-s1-w8")] == ["torch-eager-w8", "dense-s1-w8"]
    with pytest.raises(OptionError) as e:
        named(found, "torch-eager-w8,nothing")
    assert e.value.kind == "only"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_case_is_a_spec_of_its_shape_and_does_nothing_beside_its_steps(shape):
    plan = Plan(SHAPES[shape], 2, in_flight=3, compute={"dtype": "bf16", "recompute": "stage"})
    spec = plan.spec(Case(8, method=SUBSPACE, stages=2, link=LINK))
    assert {name: getattr(spec.model, name) for name in SHAPES[shape].model} == SHAPES[shape].model
    assert spec.vocab_size == SHAPES[shape].vocabulary
    assert (spec.batch.size, spec.batch.microbatches, spec.batch.in_flight) == (8, 4, 3)
    assert (spec.compute.dtype, spec.compute.recompute) == ("bf16", "stage")
    assert (spec.wire.forward, spec.wire.link.bandwidth, spec.optimizer.name) == ("int8", "500kbit", "adamw")
    assert (spec.snapshots.interval, spec.eval.interval) == (0, 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_case_needs_no_disk_for_snapshots_that_it_does_not_take(shape, tmp_path):
    plan = Plan(SHAPES[shape], 2)
    for case in cases((), [DENSE, SUBSPACE], SHAPES[shape].stages, (8,), (LINK,)):
        check_room(plan.spec(case), tmp_path, lambda _: RESERVE)


def entry(case: Case, rate: float, flops: float, cards: int = 1, wire_bound: float | None = None) -> dict:
    return case.as_json() | {
        "tokens_per_s": rate,
        "flops_per_token": flops,
        "model_flops_per_s": rate * flops,
        "cards": cards,
        "wire_bound": wire_bound,
        "peak_memory": None,
    }


def test_ratios_are_of_operations_on_a_card_and_of_the_lower_bound():
    plain, free = Case(8, way="compile"), Case(8, method=SUBSPACE, stages=2)
    linked, dense = (Case(8, method=m, stages=2, link=LINK) for m in (SUBSPACE, DENSE))
    other = Case(32, method=SUBSPACE, stages=2)
    result = {
        "entries": {
            plain.name: entry(plain, 100, 4),
            free.name: entry(free, 300, 2, cards=2),
            linked.name: entry(linked, 120, 2, cards=2, wire_bound=150),
            dense.name: entry(dense, 10, 4, cards=2, wire_bound=12),
            other.name: entry(other, 300, 2, cards=2),
            "broken": {"failed": "why"},
        }
    }
    found = gpu_report.ratios(result, peak=1000.0)
    assert "broken" not in found
    assert found[plain.name] == {"mfu": 0.4, "over_torch": {}}
    assert found[free.name] == {"mfu": 0.3, "over_torch": {"compile": 0.75}}
    assert found[linked.name] == {
        "mfu": 0.12,
        "over_torch": {"compile": 0.3},
        "compute_bound": 300,
        "wire_bound": 150,
        "of_compute_bound": 0.4,
        "of_bound": 0.8,
        "over_dense": {"fp32": 12.0},
    }
    assert found[dense.name]["of_compute_bound"] is None, "not measured without its link"
    assert found[dense.name]["of_bound"] == pytest.approx(10 / 12)
    assert found[other.name]["over_torch"] == {}, "plain torch took other steps"


def test_what_is_in_the_file_is_not_measured_again(tmp_path):
    done, failed, late = (Case(8, way=way) for way in ("compile", "eager", "float32"))
    before = {done.name: entry(done, 1, 1), failed.name: {**failed.as_json(), "failed": "why"}}
    path, said = tmp_path / "out.json", []
    path.write_text(json.dumps({"setting": gpu.setting(BENCH), "entries": before}))
    result = gpu.read(path, gpu.setting(BENCH))
    gpu.measure(BENCH, [done, failed, late], result, path, tmp_path, until=0.0, say=said.append)
    assert result["entries"] == before
    assert len(said) == 1, "there is no time for the third"
    other = Bench(Plan(SHAPES["tiny"], 4), ("cpu",), BENCH.timing, BENCH.limit)
    with pytest.raises(OptionError) as e:
        gpu.read(path, gpu.setting(other))
    assert e.value.kind == "json"


def test_a_case_that_fails_is_put_down_with_its_reason_and_tried_again_when_asked(tmp_path):
    case, path = Case(8, way="float32"), tmp_path / "out.json"
    hurried = Bench(TINY, ("cpu",), BENCH.timing, limit=0.0)
    result = gpu.read(path, gpu.setting(hurried))
    for again, lasted in ((False, 1), (False, 1), (True, 2)):
        gpu.measure(hurried, [case], result, path, tmp_path, math.inf, lambda text: None, again=again)
        assert json.loads(path.read_text())["entries"][case.name]["kind"] == "too_slow"
        assert len(list(tmp_path.glob("torch-*"))) == lasted


@pytest.mark.full
def test_a_small_pipeline_is_measured(tmp_path):
    case, path = Case(8, method=SUBSPACE, stages=2, link=LINK), tmp_path / "out.json"
    result = gpu.read(path, gpu.setting(BENCH))
    started = time.monotonic()
    gpu.measure(BENCH, [case], result, path, tmp_path, math.inf, print, peak=1e12)
    found = json.loads(path.read_text())
    [one] = found["entries"].values()
    assert one["counted"] == 3, one
    assert one["applied"]
    assert one["loss"] == pytest.approx(math.log(512), rel=0.1), "random ids cannot be learned"
    assert one["bytes_per_token"]["forward"] == pytest.approx(42 + 2, rel=0.1)
    assert one["bytes_per_token"]["backward"] == pytest.approx(42, rel=0.1)
    assert all(0 <= share <= 1 for part in one["shares"].values() for share in part)
    assert len(one["peak_memory"]) == len(one["forecast_memory"]) == 2
    assert 0.05 < found["ratios"][case.name]["of_bound"] < 1, "the line is what holds it up"
    assert one["wall_s"] <= time.monotonic() - started
    assert case.name in gpu_report.in_words(result, 1e12)
    gpu_report.plot(result, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes()[:4] == b"\x89PNG"
    asked = ["bench", "gpu", "--shape", "tiny", "--device", "cpu", "--link", LINK, "--json", str(path), "--list"]
    listed = CliRunner().invoke(app, [*asked, "--method", "reparam/int8"])
    assert listed.exit_code == 0, listed.output
    assert f"{case.name}  done" in listed.output


def plain_shape() -> dict[str, int]:
    return SHAPES["tiny"].model | {"head_dim": 16, "vocabulary": SHAPES["tiny"].vocabulary}


def test_plain_torch_has_the_size_of_the_dense_model():
    sizes = sum(p.numel() for p in Llama(plain_shape()).parameters())
    assert sizes == sum(unit_parameters(TINY.spec(Case(8, method=DENSE))).values())


def test_plain_torch_computes_a_llama():
    torch.manual_seed(0)
    model, shape = Llama(plain_shape()), plain_shape()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    inner = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    inner |= {f"attention.{a}": f"self_attn.{b}_proj" for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))}
    inner |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    names |= {f"blocks.{i}.{a}": f"model.layers.{i}.{b}" for i in range(shape["layers"]) for a, b in inner.items()}
    weights = {f"{names[n.removesuffix('.weight')]}.weight": p for n, p in model.named_parameters()}
    config = {
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    windows = torch.randint(shape["vocabulary"], (3, shape["context"] + 1))
    with torch.no_grad():
        _, logits = streams_and_logits(weights, config, windows[:, :-1])
        assert float(model(windows)) == pytest.approx(float(mean_loss(logits, windows[:, 1:])), rel=1e-5)


@pytest.mark.parametrize("way", ["eager", "float32"])
def test_plain_torch_trains(way):
    training = Training(plain_shape(), way, "cpu", windows=4, microbatch=2)
    losses = [training.step() for _ in range(4)]
    assert losses[0] == pytest.approx(math.log(512), rel=0.02)
    assert losses == sorted(losses, reverse=True), "it sees the same batch again and again"


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_stages_time_is_shared_out(tmp_path, index):
    spec = make_spec(stages=4, wire={"forward": "int8", "backward": "int8"})
    found = stage_profile.measure(spec, index, torch.device("cpu"), tmp_path / "trace.json")
    assert 0 < found["messages_share"] < 1
    assert found["messages_s"] < found["device_s"]
    saved = found["snapshot"]
    assert saved["bytes"] > 0
    assert saved["call_s"] <= saved["stall_s"] < saved["call_s"] + saved["step_s"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
