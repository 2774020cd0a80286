"""Segments: two streams and anchors of their own, against a model written from the definition, and whatever the cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import corpus_of, make_spec
from tiers import first
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.codecs import Carrier
from protomodels_cli.huggingface.config import config_of
from protomodels_cli.lab import plain_llama
from protomodels_cli.lab.reconstruct import relative
from protomodels_cli.model.reference import Reference
from protomodels_cli.model.stage import t_fixed_of
from protomodels_cli.protocol.steps import early_weight
from protomodels_cli.spec import RunSpec, SpecError, parse_spec

KINDS = [("two_stream", "fixed"), ("two_stream", "segment"), ("reparam", "segment"), ("dense", "segment")]
KINDS += [("two_stream", "narrow"), ("dense", "narrow")]
NARROW = {"anchor": "segment", "anchor_rank": 7}


def a_spec(form: str, anchor: str, stages: Any = (1, 3, 2), segments: Any = (1, 1, 2, 2), **sections: Any) -> RunSpec:
    model = {"layers": 6, "segments": list(segments), **sections.pop("model", {})}
    groups = {"anchors": {"lr": 0.03}, **sections.pop("groups", {})}
    return make_spec(
        stages=list(stages) if isinstance(stages, tuple) else stages,
        model=model,
        subspace={"form": form, "early_loss": 0.3, **(NARROW if anchor == "narrow" else {"anchor": anchor})},
        groups=groups,
        **{"steps": 6} | sections,
    )


def trained(spec: RunSpec, steps: int | None = None) -> Reference:
    r = Reference(spec, corpus_of(spec), Carrier(spec))
    for _ in r.train(steps):
        pass
    return r


class Written:
    """The model from its definition, with weights by their names: c and r apart, T_fixed as a table of floats."""

    def __init__(self, r: Reference):
        self.spec, self.config = r.spec, config_of(r.spec)
        named = [pair for stage in r.stages for pair in stage.named_parameters()]
        self.w = {name.removesuffix(".weight"): p.detach().clone().requires_grad_() for name, p in named}
        every = torch.arange(r.spec.vocab_size)
        self.u = None if r.basis is None else r.basis.u
        self.fixed = 0.0 if r.basis is None else t_fixed_of(r.spec).rows(every, torch.float64)

    def logits(self, ids: Tensor) -> Tensor:
        spec, k = self.spec, self.spec.subspace.k
        free = spec.model.layers - (spec.subspace.unconstrained_layers or 0)
        ends = [0, *itertools.accumulate(spec.layers_per_segment)]
        self.sent: dict[int, Tensor] = {}  # by the last layer of a segment
        state = {"c": self.w["embed"][ids]}  # with r beside it, or x alone from the first free layer on
        for start, end in itertools.pairwise(ends):
            change = self.w.get(f"layers.{start}.anchor", torch.zeros(spec.vocab_size, spec.model.width))
            if spec.subspace.anchor_rank:
                change = change @ self.lift(start)
            state |= {"anchor": self._with_those_before((self.fixed + change)[ids], start)}
            state["r"] = torch.zeros_like(state["anchor"])
            for layer in range(start, end):
                if layer == free and spec.form.has_basis:
                    state = {"x": self._read(state)}
                for branch in (self._attention, self._mlp):
                    written = branch(layer, self._read(state))
                    if "x" in state:
                        state["x"] = state["x"] + written
                    elif spec.form.has_local_stream:
                        state["c"] = state["c"] + written[..., :k]
                        if branch == self._mlp and layer == end - 1:  # r ends here
                            assert written.shape[-1] == k
                        else:
                            state["r"] = state["r"] + written[..., k:]
                    else:
                        state["c"] = state["c"] + written
            if end < spec.model.layers:
                self.sent[end - 1] = state["c"]
        return plain_llama._norm(self._read(state), self.w["head.norm"], self.config) @ self.w["head.out"].T

    def _with_those_before(self, rows: Tensor, start: int) -> Tensor:
        taps = self.w.get(f"layers.{start}.anchor.taps", torch.zeros(0))
        found = rows
        for t, back in itertools.product(range(rows.shape[1]), range(1, 1 + len(taps))):
            if back <= t:
                here = torch.zeros_like(rows)
                here[:, t] = rows[:, t - back] * taps[back - 1]
                found = found + here
        return found

    def early_losses(self, ids: Tensor) -> Tensor:
        """Summed over segments and tokens."""
        total = torch.zeros((), dtype=torch.float64)
        for layer, c in self.sent.items():
            gain, out = self.w[f"layers.{layer}.early.norm"], self.w[f"layers.{layer}.early.out"]
            root = (c.square().mean(-1, keepdim=True) + self.spec.model.norm_eps).sqrt()
            scores = torch.log_softmax(c / root * gain @ out.T, -1)[:, :-1]
            total = total - scores.gather(-1, ids[:, 1:, None]).sum()
        return total

    def lift(self, layer: int) -> Tensor:
        """Signs from the counter, over the root of the rank, row by row."""
        rank, width = self.spec.anchor_width, self.spec.model.width
        stream = counter.subseed(counter.subseed(self.spec.subspace.t_fixed.seed, "lift", layer), "t_fixed", 1)
        bits = [[counter.word(stream, row) >> column & 1 for column in range(width)] for row in range(rank)]
        return (2.0 * torch.tensor(bits, dtype=torch.float64) - 1) / rank**0.5

    def _read(self, state: dict[str, Tensor]) -> Tensor:
        if "x" in state:
            return state["x"]
        carried = state["c"] if self.u is None else state["c"] @ self.u.T
        return state["anchor"] + carried + state["r"]

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        own = {n.removeprefix(f"layers.{layer}."): t for n, t in self.w.items() if n.startswith(f"layers.{layer}.")}
        names = {f"self_attn.{m}_proj": own[f"attn.{m}"] for m in "qkv"} | {"self_attn.o_proj": own["attn.o"].T}
        return plain_llama._attention(plain_llama._norm(x, own["attn_norm"], self.config), names, self.config)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        h = plain_llama._norm(x, self.w[f"layers.{layer}.mlp_norm"], self.config)
        gate, up, down = (self.w[f"layers.{layer}.mlp.{m}"] for m in ("gate", "up", "down"))
        y = h @ gate.T
        return (y * torch.sigmoid(y) * (h @ up.T)) @ down


@pytest.mark.parametrize(("form", "anchor"), KINDS)
def test_it_is_the_model_that_was_defined_forward_and_backward(form, anchor):
    r = trained(a_spec(form, anchor, compute={"dtype": "float64"}), 3)
    ids, targets = torch.arange(48).view(3, 16) * 5 % 256, torch.arange(48).view(3, 16) * 7 % 256
    for trainer in r.trainers:
        trainer.begin(1)  # where early losses have two thirds of their weight
    flights = r.forward(ids, 1, 0)
    right = Written(r)
    logits = right.logits(ids)
    assert relative(r.stages[-1].logits(flights[-1].output).detach(), logits.detach()) < 1e-12
    assert len(right.sent) == 3
    early = right.early_losses(ids) * 0.2 * r.stages[-1].loss_scale
    (plain_llama.mean_loss(logits, targets) + early).backward()
    _, gradient = r.stages[-1].run_loss(flights[-1], targets, 1 / targets.numel())
    for i in reversed(range(len(r.stages) - 1)):
        gradient = r.stages[i].run_backward(flights[i], gradient)
    for trainer in r.trainers:
        for p in trainer.optimizer.parameters:
            found = p.take_gradient()
            if p.touched is not None:
                found = p.touched.rows(slice(None))
            assert relative(found, right.w[p.name.removesuffix(".weight")].grad) < 1e-11, p.name


@pytest.mark.parametrize(("dtype", "kind"), first(2, [*itertools.product(["float32", "bf16"], KINDS)]))
def test_no_cut_into_whole_segments_changes_a_bit(kind, dtype):
    form, anchor = kind
    cuts = ([1, 1, 2, 2], [6], [2, 4], [4, 2], [1, 5], [1, 3, 2])
    assert len({trained(a_spec(form, anchor, cut, compute={"dtype": dtype})).weights_sha256() for cut in cuts}) == 1


def test_early_losses_fall_to_nothing_at_half_of_the_steps_and_leave_their_heads():
    spec = a_spec("two_stream", "segment", compute={"dtype": "float64"})
    assert [early_weight(spec, step) for step in range(1, 7)] == pytest.approx([0.2, 0.1, 0, 0, 0, 0])
    new = Reference(spec, corpus_of(spec), Carrier(spec)).stages[0]
    heads = [p for n, p in new.named_parameters() if ".early.out" in n]
    assert heads
    assert not any(p.any() for p in heads)  # one at random would lead its segment astray
    r = trained(spec, 2)
    assert all(p.any() for n, p in r.stages[0].named_parameters() if ".early." in n)
    for trainer in r.trainers:
        trainer.begin(3)
    r.accumulate(3)
    found = {p.name: p.take_gradient() for trainer in r.trainers for p in trainer.optimizer.parameters}
    assert {name for name, gradient in found.items() if not gradient.any()} == {n for n in found if ".early." in n}


def test_segments_are_the_models_and_not_the_cuts():
    hashes = {trained(a_spec("two_stream", "segment", 1, segments)).weights_sha256() for segments in ([3, 3], [2, 4])}
    assert len(hashes) == 2


@pytest.mark.parametrize(("form", "anchor"), first(2, KINDS))
def test_what_is_computed_again_changes_no_bit(form, anchor):
    ways = [a_spec(form, anchor, compute={"recompute": way}) for way in ("none", "block", "stage")]
    assert len({trained(spec).weights_sha256() for spec in ways}) == 1


def test_segments_are_the_stages_unless_the_spec_says_otherwise():
    text = "steps: 1\nmodel: {layers: 6, width: 32, heads: 4}\n"
    spec = parse_spec(text + "stages: [2, 3, 1]\nsubspace: {form: two_stream}\n")
    assert (spec.model.segments, spec.subspace.unconstrained_layers) == ([2, 3, 1], 1)
    spec = parse_spec(text.replace("heads: 4", "heads: 4, segments: 3") + "stages: auto\nsubspace: {form: two_stream}")
    assert (spec.model.segments, spec.subspace.unconstrained_layers) == ([2, 2, 2], 2)
    spec = parse_spec(text + "stages: 3\nsubspace: {form: reparam}\n")
    assert (spec.model.segments, spec.subspace.unconstrained_layers) == (None, 1), "they do not matter here"


TWO, OWN, FREE = {"form": "two_stream"}, {"anchor": "segment"}, "subspace.unconstrained_layers"
REFUSED = [
    ({"stages": "auto", "subspace": TWO}, "model.segments", "stages_are_whole_segments"),
    ({"stages": "auto", "subspace": OWN}, "model.segments", "stages_are_whole_segments"),
    ({"stages": "auto", "subspace": OWN, "model": {"segments": [1, 3]}}, "model.segments", "stages_are_whole_segments"),
    ({"stages": [1, 3], "subspace": OWN, "model": {"segments": 2}}, "stages", "stages_are_whole_segments"),
    ({"model": {"segments": 5}}, "model.segments", "every_segment_has_layers"),
    ({"model": {"segments": [1, 2]}}, "model.segments", "every_segment_has_layers"),
    ({"model": {"segments": 0}}, "model.segments", "segments"),
    ({"model": {"segments": [True]}}, "model.segments", "segments"),
    ({"subspace": {"anchor_rank": 4}}, "subspace.anchor_rank", "anchor_rank_fits"),
    ({"subspace": {**OWN, "anchor_rank": 33}}, "subspace.anchor_rank", "anchor_rank_fits"),
    ({"subspace": {**OWN, "form": "constrained"}}, "subspace.anchor", "form_takes_anchors"),
    (
        {"subspace": {**TWO, "unconstrained_layers": 2}},
        "subspace.unconstrained_layers",
        "unconstrained_layers_fit_form",
    ),
    ({"subspace": {**TWO, "update": {"interval": 40}}}, "subspace.update.interval", "update_fits"),
    (
        {"stages": 1, "subspace": {**OWN, "unconstrained_layers": 2}, "model": {"segments": 4}},
        FREE,
        "unconstrained_layers_in_last_stage",
    ),
    ({"subspace": TWO, "optimizer": {"name": "row_adamw"}}, "optimizer.name", "optimizer_fits_form"),
]


@pytest.mark.parametrize(("sections", "field", "kind"), REFUSED)
def test_what_segments_cannot_be_is_refused_by_its_field(sections, field, kind):
    with pytest.raises(SpecError) as refused:
        make_spec(**sections)
    assert [(p.field, p.kind) for p in refused.value.problems] == [(field, kind)]
