"""Trained anchors: rows that a step touches, what they take, and how they move; and parameter groups."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import corpus_of, make_spec

from protomodels_cli.codecs import Carrier
from protomodels_cli.model import optim
from protomodels_cli.model.anchor import Anchor
from protomodels_cli.model.products import summed_by_place
from protomodels_cli.model.reference import Reference
from protomodels_cli.model.shape import Shape


def test_gradients_of_touched_rows_are_those_of_the_table():
    generator = torch.Generator().manual_seed(1)
    shape = Shape.of(make_spec(subspace={"anchor": "segment"}, compute={"dtype": "float64"}))
    anchor = Anchor(replace(shape, vocab_size=50, width=3, anchor_width=3, tokens_in_step=40), 0)
    torch.nn.init.normal_(anchor.weight)
    table = anchor.weight.detach().clone().requires_grad_()
    seen = []
    for tokens in torch.randint(0, 50, (4, 2, 5), generator=generator):
        weights = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator)
        (anchor(tokens) * weights).sum().backward()
        (table[tokens] * weights).sum().backward()
        seen += tokens.flatten().tolist()
    touched = anchor.take()
    assert int(touched.count) == len(set(seen))
    assert touched.gradients.shape == (40, 3), "no more rows than a step has tokens"
    for rows in (slice(0, 50), slice(7, 20)):
        assert torch.allclose(touched.rows(rows), table.grad[rows], rtol=0, atol=1e-14)
    assert anchor.take() is None


@pytest.mark.parametrize(("rows", "most"), [(1, 1), (1, 9), (30, 1), (30, 9), (200, 1000)])
def test_rows_are_summed_by_place_before_they_are_added(rows, most):
    """As a GPU does it: there, rows of one place would otherwise be added in any order."""
    places, values = torch.randint(0, most, (rows,)), torch.randn(rows, 3, dtype=torch.float64)
    found, sums = summed_by_place(places, values)
    assert len(found) == rows
    assert len(set(places.tolist())) == len({p for p, s in zip(found.tolist(), sums, strict=True) if s.any()})
    expected = torch.zeros(most, 3, dtype=torch.float64).index_add_(0, places, values)
    added = torch.zeros_like(expected).index_add_(0, found, sums)
    assert torch.allclose(added, expected, rtol=0, atol=1e-12)


def anchored(**sections) -> Reference:
    sections = {"subspace": {"anchor": "segment"}, "tokenizer": {"kind": "bpe", "vocab_size": 400}} | sections
    spec = make_spec(stages=2, **sections)
    return Reference(spec, corpus_of(spec), Carrier(spec))


def tables(r: Reference):
    return [p for trainer in r.trainers for p in trainer.optimizer.parameters if p.anchor is not None]


@pytest.mark.parametrize("beta1", [0.0, 0.8])
def test_all_rows_move_by_row_adamws_rule_whether_or_not_a_step_saw_their_tokens(beta1, monkeypatch):
    monkeypatch.setattr(optim, "STEP_NUMBERS", 1000)  # in several pieces
    groups = {"anchors": {"lr": 0.02, "beta1": beta1, "beta2": 0.9, "weight_decay": 0.5}}
    r = anchored(groups=groups, compute={"dtype": "float64"}, optimizer={"lr": 3e-3, "clip": 0.0})
    trained = tables(r)
    right = [torch.zeros_like(p.parameter) for p in trained]
    firsts = [torch.zeros_like(w) for w in right]
    seconds = [torch.zeros(len(w), 1, dtype=torch.float64) for w in right]
    for step in range(1, 5):
        r.accumulate(step)
        gradients = [p.anchor.touched.rows(slice(None)) for p in trained]
        r.prepare()
        for trainer in r.trainers:
            trainer.decide(step, True, lr=3e-3, clip=1.0)
        for w, m, v, g in zip(right, firsts, seconds, gradients, strict=True):
            assert 5 < int(g.any(1).sum()) < len(w), "some rows have a gradient, and not all"
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(0.9 * v + 0.1 * g.square().mean(1, keepdim=True))
            w *= 1 - 0.02 * 0.5
            w -= 0.02 * m / (1 - beta1**step) / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
    for p, w in zip(trained, right, strict=True):
        assert torch.allclose(p.parameter, w, rtol=0, atol=1e-12)
        assert set(p.state) == ({"first", "second"} if beta1 else {"second"}), "without β₁ there is nothing to keep"


def test_what_an_anchor_takes():
    r = anchored()
    r.run_step()
    for p in tables(r):
        assert p.anchor.touched is None
        assert p.gradient is None
        kinds = {key: (t.dtype, tuple(t.shape)) for key, t in p.state.items()}
        rows, width = p.parameter.shape
        assert kinds["first"] == (torch.bfloat16, (rows, width))
        assert kinds["second"] == (torch.float32, (rows, 1))


def test_a_skipped_step_leaves_no_trace():
    r, undisturbed = anchored(), anchored()
    for one in (r, undisturbed):
        one.run_step()
    r.accumulate(2)
    r.prepare()
    for trainer in r.trainers:
        trainer.decide(2, apply=False, lr=1.0, clip=1.0)
    assert r.weights_sha256() == undisturbed.weights_sha256()
    assert all(p.gradient is None and p.touched is None for p in tables(r))
    r.accumulate(2)
    for trainer in r.trainers:
        trainer.abandon()
    assert all(p.anchor.touched is None for p in tables(r))


@pytest.mark.full
def test_a_trained_anchor_learns_what_a_fixed_one_cannot():
    sizes = {"steps": 60, "batch": {"size": 16}, "groups": {"anchors": {"lr": 0.03}}}
    losses = [list(anchored(subspace={"anchor": a}, **sizes).train())[-1]["loss"] for a in ("fixed", "segment")]
    assert losses[1] < losses[0] - 0.05


# Parameter groups

ROLES = {
    "embedding": "embed.weight",
    "head": "head.out.weight",
    "gains": "layers.1.mlp_norm.weight",
    "matrices": "layers.1.attn.q.weight",
    "writers": "layers.1.attn.o.weight",
    "anchors": "layers.0.anchor.weight",
}


@pytest.mark.parametrize("group", ROLES)
def test_a_groups_rate_moves_its_parameters_and_no_others(group):
    def moved(**groups) -> dict[str, float]:
        r = anchored(optimizer={"name": "adamw", "weight_decay": 0.0}, groups=groups, compute={"dtype": "float64"})
        before = {n: p.detach().clone() for s in r.stages for n, p in s.named_parameters()}
        r.run_step()
        return {n: float((p.detach() - before[n]).abs().max()) for s in r.stages for n, p in s.named_parameters()}

    usual = moved()
    found = moved(**{group: {"lr": 6e-3}})
    faster = {name for name in found if found[name] > 1.5 * usual[name]}
    assert ROLES[group] in faster
    expected = {
        "embedding": {"embed.weight"},
        "head": {"head.out.weight"},
        "gains": {n for n in usual if "norm" in n or "taps" in n},
        "matrices": {n for n in usual if n.split(".")[-2] in ("q", "k", "v", "o", "gate", "up", "down")},
        "writers": {n for n in usual if n.split(".")[-2] in ("o", "down")},
        "anchors": {n for n in usual if "anchor.weight" in n},
    }
    assert faster == expected[group]


def test_writers_may_start_at_zero_and_groups_have_their_own_spread():
    r = anchored(groups={"writers": {"std": 0.0}, "embedding": {"std": 0.3}, "head": {"std": 0.05}})
    by_name = {n: p for s in r.stages for n, p in s.named_parameters()}
    assert not any(p.any() for n, p in by_name.items() if n.split(".")[-2] in ("o", "down", "anchor"))
    for name, std in (("embed.weight", 0.3), ("head.out.weight", 0.05), ("layers.1.attn.q.weight", 0.02)):
        assert float(by_name[name].detach().std()) == pytest.approx(std, rel=0.1)
    usual = {n: p for s in anchored().stages for n, p in s.named_parameters()}
    assert float(usual["layers.1.attn.o.weight"].detach().std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.2)
    assert math.isfinite(r.run_step()[0]["loss"])
