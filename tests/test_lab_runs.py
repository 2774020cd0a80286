"""The laboratory's runs: the text that they see, what they count, and the bench that they are trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lab_tools import DENSE, TINY, TWO_STREAM
from starting import ROOT

from protomodels_cli.codecs import Carrier
from protomodels_cli.codecs.crossing import Carrier as CrossingCarrier
from protomodels_cli.errors import UserError
from protomodels_cli.lab import bench as benches
from protomodels_cli.lab import scaling
from protomodels_cli.lab.bench import Bench
from protomodels_cli.lab.recipes import Recipe, carried, carried_back, dense, spec_of, with_rates
from protomodels_cli.lab.runs import Run, train
from protomodels_cli.lab.scales import SCALES, document_end, scaled, text_of
from protomodels_cli.lab.shared_anchor import SharedTable, Sharing, quantised
from protomodels_cli.lab.trained import Trained
from protomodels_cli.lab.wires import BY_RATIO
from protomodels_cli.model import rules
from protomodels_cli.model.reference import Reference
from protomodels_cli.protocol.messages import MessageKey
from protomodels_cli.protocol.steps import Outcome


def trained(recipe: Recipe, **changes: object) -> Trained:
    scale = replace(TINY, **changes)
    return Trained(spec_of(scale, recipe, 0), scale, recipe, "cpu")


# Text


def test_the_held_out_parts_are_the_texts_end_and_start_with_a_document():
    text = text_of(TINY)
    end = text.corpus.tokenizer().end_id
    parts = [text.corpus.train, text.tuning, text.corpus.held_out]
    assert all(part.read(len(part) - 1, 1)[0] == end for part in parts[:2])
    assert all(len(part) > TINY.eval_windows * TINY.context for part in parts)
    shard = text.corpus.train.shards[-1]
    for part in parts[1:]:  # in one file, one behind the other
        (here,) = part.shards
        assert (here.file, here.offset) == (shard.file, shard.offset + 2 * shard.tokens)
        shard = here


def test_a_document_ends_where_its_mark_is_or_nowhere():
    train = text_of(TINY).corpus.train
    end = text_of(TINY).corpus.tokenizer().end_id
    cut = document_end(train, len(train) - 5, end)
    assert train.read(cut - 1, 1)[0] == end
    assert end not in train.read(cut, len(train) - 5 - cut)
    assert document_end(train, 100, None) == 100


def test_no_token_is_trained_on_twice():
    reference = trained(DENSE)
    starts = {int(start) for start in reference.order}
    assert len(starts) == len(reference.order) == TINY.steps * TINY.batch
    with pytest.raises(UserError) as e:
        text_of(replace(TINY, steps=10**6))
    assert e.value.kind == "text_too_short"


def test_a_text_may_be_tokens_or_anything_that_data_files_takes():
    assert scaled("gpu", "tokens.bin").source == "bin"
    assert scaled("gpu", "a/**/*.py").files == ("a/**/*.py",)
    assert scaled("cpu", steps=7, seeds=None).steps == 7


# Runs


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "eden:4|eden:1"])
def test_every_codec_sends_what_arithmetic_says(codec):
    for recipe in (DENSE, TWO_STREAM):
        found = train(Run(replace(TINY, steps=2), replace(recipe, codec=codec), 0, "cpu"))
        assert found["bytes_per_token"] == pytest.approx(found["bytes_by_arithmetic"])


def test_a_run_is_the_reference_on_the_same_spec():
    run = Run(TINY, replace(TWO_STREAM, codec="int4"), 1, "cpu")
    spec, text = run.spec(), text_of(TINY)
    reference = Reference(spec, text.corpus, Carrier(spec))
    losses = [row["loss"] for row in reference.train() if row["event"] == "step"]
    found = train(run)
    assert found["loss"] == reference.evaluate()
    assert found["loss_tuning"] == reference.evaluate(held_out=text.tuning) != found["loss"]
    assert [point["loss"] for point in found["curve"]] == losses
    assert found["evals"][-1] == {"step": 6, "loss": found["loss"]}
    assert sum(found["parameters"].values()) == reference.parameters


def test_a_run_that_diverges_has_no_loss():
    found = train(Run(TINY, replace(DENSE, lr=1e30), 0, "cpu"))
    assert found["loss"] is None
    assert found["stopped"]
    assert json.dumps(found, allow_nan=False)


def test_rates_are_carried_and_carried_back():
    recipe = replace(dense("fp32"), lr=0.003, weight_decay=0.5)
    there = carried(recipe, TINY)
    assert there.lr == pytest.approx(0.003 * (512 / 16) ** 0.5)
    assert there.lr * there.weight_decay * TINY.steps == pytest.approx(0.003 * 0.5 * 800)
    back = carried_back(there, TINY)
    assert [back.lr, back.head_lr, back.weight_decay] == pytest.approx([0.003, recipe.head_lr, 0.5])
    shared = Recipe("two_stream", "shared", 4, "int8", sharing=Sharing(every=4))
    assert with_rates(shared, there).anchor_lr == pytest.approx(2 * there.anchor_lr)


def test_relay_passes_on_what_a_segment_adds():
    reference = trained(replace(TWO_STREAM, form="relay", codec="fp32"))
    stage, tokens = reference.stages[0], reference.windows(1, 0)[:, :-1]
    c = stage.embed.weight[tokens]
    anchor = stage.sections[0].anchor(tokens, None, stage.running)
    x = anchor + c @ stage.form.b
    for block in stage.layers.values():
        x = block(x, None, stage.running)
    normed = x / x.square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(stage(tokens, None, stage.running), c + normed @ stage.form.a, atol=1e-5)
    ends = [end for s in reference.stages for end in (s.form.a, s.form.b.T)]
    assert all(torch.allclose(end.T @ end, torch.eye(4), atol=1e-5) for end in ends)
    assert all(not torch.allclose(ends[0], other) for other in ends[1:])


def test_mapl_projects_what_its_anchor_does_not_know_and_trains_both_ends_on_the_manifold():
    reference = trained(replace(TWO_STREAM, form="mapl", codec="fp32"), microbatches=2)
    first, second = reference.stages[:2]
    tokens = reference.windows(1, 0)[:, :-1]
    x = first.embed.weight[tokens]
    for block in first.layers.values():
        x = block(x, None, first.running)
    anchor = first.sections[0].anchor(tokens, None, first.running)
    message = (x - anchor) @ first.form.a
    assert torch.allclose(first(tokens, None, first.running), message, atol=1e-5)
    start = second.form.decode(message, anchor)
    assert torch.allclose((start - anchor) @ second.form.b, message, atol=1e-5), "B has orthonormal columns"
    ends = reference.projectors.ends
    before = [end.detach().clone() for end in ends]
    assert torch.equal(first.form.a, second.form.b)
    reference.run_step()
    reference.run_step()
    assert all(torch.allclose(end.T @ end, torch.eye(4), atol=1e-5) for end in ends)
    assert not any(torch.allclose(end, was, atol=1e-5) for end, was in zip(ends, before, strict=True))
    assert not torch.allclose(first.form.a, second.form.b, atol=1e-5), "each end by its own gradient"
    before = [end.detach().clone() for end in ends]
    reference.accumulate(3)
    assert all(end.grad is not None for end in ends)
    reference._decide(3, Outcome(apply=False, lr=1.0, clip=1.0, loss=1.0, norm=1.0, tokens=1))
    assert all(end.grad is None and torch.equal(end, was) for end, was in zip(ends, before, strict=True))


# What makes it fast on a GPU


def test_a_crossing_that_does_not_wait_is_the_same(monkeypatch):
    """What CUDA takes, tried on the CPU."""
    spec = spec_of(TINY, replace(TWO_STREAM, codec="int8"), 0)
    waits, unread = Carrier(spec), Carrier(spec)
    message, key = torch.randn(2, 8, 4), MessageKey(1, 0, 0, "backward")
    for x in (message, message.clone().fill_(torch.nan)):
        ends = unread._ends[0]
        slot = ends[1].slot(key, x.shape, x.dtype, None)
        found = CrossingCarrier._cross_unread(unread, ends[1], ends[0], x, slot)
        assert torch.equal(found.nan_to_num(7.0), waits(x, key).nan_to_num(7.0))
    assert unread.payload_bytes["backward"] == 2 * waits.payload_bytes["backward"]  # poison counts as sent


def test_matrices_moved_together_move_as_they_do_alone():
    weights = []
    for batched in (False, True):
        reference = trained(TWO_STREAM)
        for trainer in reference.trainers:
            trainer.optimizer.batched = batched
        for _ in reference.train(until=3):
            pass
        assert bool(reference.trainers[0].optimizer._batches()) is True
        weights.append({name: p.detach() for s in reference.stages for name, p in s.named_parameters()})
    alone, together = weights
    assert all(torch.allclose(alone[name], together[name], rtol=1e-3, atol=1e-5) for name in alone)
    several = torch.randn(3, 6, 10)
    assert torch.allclose(rules.orthogonalise(several)[1], rules.orthogonalise(several[1]), atol=1e-5)


# Shared anchors


def shared(sharing: Sharing) -> tuple[Trained, SharedTable]:
    reference = trained(replace(TWO_STREAM, anchor="shared", codec="fp32", sharing=sharing))
    assert reference.shared is not None
    return reference, reference.shared


def test_a_shared_anchor_gets_the_sum_of_all_segments_gradients():
    reference, table = shared(Sharing())
    own = trained(replace(TWO_STREAM, codec="fp32"))
    reference.accumulate(1)
    own.accumulate(1)
    found = table.take()
    expected = torch.zeros_like(table.weight)
    anchors = [b.anchor for s in own.stages for b in s.layers.values() if hasattr(b, "anchor")]
    assert len(anchors) == TINY.segments
    for anchor in anchors:
        expected += anchor.take().rows(slice(None))
    assert torch.allclose(found.rows(slice(None)), expected, atol=1e-7)
    assert (found.place >= 0).sum() == (expected.abs().sum(1) > 0).sum()


@pytest.mark.parametrize(("sharing", "first"), [(Sharing(), 1), (Sharing(late=2), 3), (Sharing(8, every=2, late=1), 3)])
def test_all_segments_read_one_replica_which_moves_when_its_sum_is_due(sharing, first):
    reference, table = shared(sharing)
    moved = []
    for _ in range(TINY.steps):
        before = table.replica.detach().clone()
        reference.run_step()
        moved.append(not torch.equal(before, table.replica))
    assert moved.index(True) + 1 == first
    assert sum(moved[:-1]) == len(range(first, TINY.steps, sharing.every))  # the last step has no rate left
    anchors = [b.anchor for s in reference.stages for b in s.layers.values() if hasattr(b, "anchor")]
    assert all(anchor.weight is table.replica for anchor in anchors)
    if sharing == Sharing():
        seen = reference.windows(TINY.steps, 0)[:, :-1].unique()
        assert torch.equal(table.replica[seen], table.weight[seen])


def test_what_quantising_loses_is_sent_later():
    """Along the chain and back: with feedback the sums of what arrived are those of what was there."""
    reference, table = shared(Sharing(bits=4))
    exact = torch.zeros_like(table.weight)
    arrived = torch.zeros_like(table.weight)
    for step in range(1, 7):
        reference.accumulate(step)
        for anchor in table.anchors:
            exact += anchor.touched.rows(slice(None))
        arrived += table.take().rows(slice(None))
    errors = sum(table._errors)
    assert errors.abs().max() > 0
    assert torch.allclose(arrived + errors, exact, atol=1e-6)
    rows = torch.randn(5, 16)
    assert (quantised(rows, 8) - rows).abs().max() < rows.abs().max() / 100
    assert torch.equal(quantised(torch.zeros(2, 4), 4), torch.zeros(2, 4))


def test_the_bytes_of_sums_are_counted_both_ways():
    sharing = Sharing(bits=4, every=2)
    found = train(Run(TINY, replace(TWO_STREAM, anchor="shared", sharing=sharing), 0, "cpu"))
    plain = found["bytes_per_token"] - found["bytes_of_sums"]
    assert plain == pytest.approx(found["bytes_by_arithmetic"])
    row = 16 / 2 + 2
    rows = found["bytes_of_sums"] * TINY.tokens / (2 * row)
    assert 1 <= rows <= 3 * 2 * TINY.tokens_per_step
    assert rows == pytest.approx(round(rows))


# The bench


def test_finished_runs_are_kept_and_not_repeated(tmp_path, monkeypatch):
    runs = [Run(TINY, DENSE, seed, "cpu") for seed in (0, 1)]
    with Bench(1, tmp_path / "kept.jsonl") as bench:
        first = bench.results([*runs, runs[0]])
    assert bench.trained == 2
    with (tmp_path / "kept.jsonl").open("a") as file:
        file.write('{"key": "cut o')

    def refuse(run: Run) -> None:
        raise AssertionError(f"trained again: {run.name}")

    monkeypatch.setattr(benches, "train", refuse)
    with Bench(1, tmp_path / "kept.jsonl") as bench:
        assert bench.results([*runs, runs[0]]) == first
    (tmp_path / "other").write_text("{}\n{}\n")
    with pytest.raises(UserError) as e:
        Bench(1, tmp_path / "other")
    assert e.value.kind == "not_a_result"


GPU = SCALES["gpu"]
MEASURED = [(GPU, dense("fp32"), 5), (GPU, dense("fp32", "segment"), 3)]
MEASURED += [
    (GPU, Recipe("two_stream", "segment", k, codec), n) for k, codec, n in [(64, "int8", 5), (86, "eden:6", 3)]
]
MEASURED += [(GPU, Recipe("two_stream", "segment", 34, c), n) for c, n in zip(BY_RATIO[100], (5, 3), strict=True)]
MEASURED += [(GPU, Recipe(form, "segment", 64, "int8"), 1) for form in ("reparam", "relay")]
MEASURED += [(GPU, Recipe("constrained", "fixed", 64, "bf16"), 1), (GPU, dense("int8"), 1)]
MEASURED += [(p.scale, carried(recipe, p.scale), 1) for p in scaling.points(GPU) for recipe in p.recipes()]


@pytest.mark.parametrize(
    ("scale", "recipe", "seed"), [(scale, recipe, seed) for scale, recipe, n in MEASURED for seed in range(n)]
)
def test_results_in_the_docs_are_those_of_todays_runs(monkeypatch, scale, recipe, seed):
    """Or what a card took hours for would be trained once more, because a section of the spec has a new field."""
    tables = [json.loads((ROOT / f"docs/results/{name}.json").read_text()) for name in ("frontier-512", "scaling")]
    text = tables[0]["text_sha256"]
    monkeypatch.setattr("protomodels_cli.lab.runs.text_of", lambda scale: SimpleNamespace(sha256=text))
    bench = Bench(1, ROOT / "docs/results/gpu-runs.jsonl", budget=0)
    [found] = bench.results([Run(scale, recipe, seed, "cuda")])
    assert found is not None
    told = [
        row["loss"]
        for table in tables
        for row in table["rows"]
        if row["seed"] == seed and row["width"] == scale.width and row["name"] == recipe.name
    ]
    assert told == [found["loss"]] * len(told)
    assert told or seed > 2, "the fourth and fifth seed are in no table that is kept"


def test_no_run_is_started_that_there_is_no_time_for(monkeypatch):
    def instant(run: Run) -> dict:
        return {"loss": 1.0, "seconds": 60.0, "flops": run.flops, "width": run.scale.width}

    monkeypatch.setattr(benches, "train", instant)
    short, long = (Run(replace(TINY, steps=n), DENSE, 0, "cpu") for n in (6, 600))
    with Bench(1, budget=100) as bench:
        assert [found is not None for found in bench.results([short, long, replace(short, seed=1)])] == [
            True,
            False,
            True,
        ]
    assert list(bench.missing) == [long.name]
    assert bench.expected(long) == pytest.approx(100 * bench.expected(short))


@pytest.mark.full
def test_runs_side_by_side_give_the_same_numbers_and_one_that_fails_leaves_the_others():
    good, bad = Run(TINY, DENSE, 0, "cpu"), Run(TINY, DENSE, 1, "cuda:77")
    with Bench(2) as bench:
        found, failed = bench.results([good, bad])
    assert found["loss"] == train(good)["loss"]
    assert failed is None
    assert list(bench.missing) == [bad.name]
