"""Rules that tie fields of the model, its training and its wire together."""

from __future__ import annotations

import math

from protomodels_cli.codecs.base import Surroundings
from protomodels_cli.codecs.registry import parse_codec
from protomodels_cli.forms import FORMS, Sizes
from protomodels_cli.protocol.messages import Leg
from protomodels_cli.quantities import plural
from protomodels_cli.spec.checking import Checks, Found
from protomodels_cli.spec.cut import is_whole, layers_per_stage
from protomodels_cli.spec.schema import ANCHOR_TOKENS, RunSpec

check = Checks()


@check("model.width", "model.heads", "model.head_dim")
def heads_divide_width(s: RunSpec) -> Found:
    m = s.model
    if m.head_dim is None and m.width % m.heads:
        yield (
            "model.heads",
            f"model.heads must divide model.width ({m.width}) unless model.head_dim is set",
            f"use {_nearest_divisor(m.width, m.heads)} heads, or set model.head_dim",
        )
    elif (head_dim := m.head_dim or m.width // m.heads) % 2:
        yield (
            "model.head_dim" if m.head_dim else "model.heads",
            f"rotary positions need heads of even width, and model.head_dim is {head_dim}",
            f"set model.head_dim to {head_dim + 1}, or change model.heads",
        )


@check("model.heads", "model.kv_heads")
def kv_heads_divide_heads(s: RunSpec) -> Found:
    m = s.model
    if m.kv_heads is not None and m.heads % m.kv_heads:
        yield (
            "model.kv_heads",
            f"model.kv_heads must divide model.heads ({m.heads})",
            f"set model.kv_heads to {_nearest_divisor(m.heads, m.kv_heads)}",
        )


@check("model.init", "subspace.form")
def form_takes_a_checkpoint(s: RunSpec) -> Found:
    if s.model.init is not None and (problem := s.form.init_problem()):
        yield "subspace.form", *problem


@check("model.layers", "stages")
def every_stage_has_layers(s: RunSpec) -> Found:
    layers = s.model.layers
    if isinstance(s.stages, list):
        if sum(s.stages) != layers:
            yield (
                "stages",
                f"the layers per stage add up to {sum(s.stages)}, and model.layers is {layers}",
                f"change the list so that it adds up to {layers}",
            )
    elif isinstance(s.stages, int) and s.stages > layers:
        yield (
            "stages",
            f"every stage needs at least one layer, and model.layers is {layers}",
            f"use {layers} stages or fewer, or more layers",
        )


@check("model.hidden", "model.dense_hidden")
def dense_hidden_is_filled_in(s: RunSpec) -> Found:
    m = s.model
    if isinstance(m.hidden, str) and m.dense_hidden is not None and m.hidden != f"auto:{m.dense_hidden}":
        yield (
            "model.dense_hidden",
            f"is filled in from model.hidden, which is {m.hidden}",
            f"remove `dense_hidden`, or set model.hidden to auto:{m.dense_hidden}",
        )


@check("model.layers", "model.segments")
def every_segment_has_layers(s: RunSpec) -> Found:
    layers, segments = s.model.layers, s.model.segments
    if isinstance(segments, list) and sum(segments) != layers:
        yield (
            "model.segments",
            f"the layers per segment add up to {sum(segments)}, and model.layers is {layers}",
            f"change the list so that it adds up to {layers}",
        )
    elif isinstance(segments, int) and segments > layers:
        yield (
            "model.segments",
            f"every segment needs at least one layer, and model.layers is {layers}",
            f"use {layers} segments or fewer, or more layers",
        )


@check("model.layers", "model.segments", "stages", "subspace.form", "subspace.anchor")
def stages_are_whole_segments(s: RunSpec) -> Found:
    if not s.has_segments or any(every_segment_has_layers(s)) or any(every_stage_has_layers(s)):
        return
    segments = s.layers_per_segment
    if s.stages == "auto" and s.model.segments is None:
        yield (
            "model.segments",
            f"is required with stages auto: what the {s.subspace.form} form with subspace.anchor {s.subspace.anchor} "
            "computes depends on it, and must not depend on who joins",
            f"set for example `segments: {_nearest_divisor(s.model.layers, max(1, s.model.layers // 2))}`",
        )
    elif s.stages == "auto" and len(set(segments)) > 1:
        yield (
            "model.segments",
            f"with stages auto all segments must have the same number of layers, and {segments} have not",
            "use a number of segments that divides model.layers, or write `stages` as a list",
        )
    elif s.stages != "auto" and not is_whole(layers_per_stage(s), segments):
        yield (
            "stages",
            f"a stage is made of whole segments, and stages of {layers_per_stage(s)} layers cut through segments of "
            f"{segments}",
            "change `stages` or model.segments so that every stage ends with a segment",
        )


@check("subspace.form", "subspace.anchor")
def form_takes_anchors(s: RunSpec) -> Found:
    if s.subspace.anchor != "fixed" and (problem := s.form.anchor_problem()):
        yield "subspace.anchor", *problem


@check("subspace.anchor", "subspace.anchor_rank", "model.width")
def anchor_rank_fits(s: RunSpec) -> Found:
    rank = s.subspace.anchor_rank
    if rank is None:
        return
    if s.subspace.anchor == "fixed":
        yield (
            "subspace.anchor_rank",
            "subspace.anchor is fixed, and there is no table of changes",
            "remove `anchor_rank`, or set subspace.anchor to segment",
        )
    elif rank > s.model.width:
        yield (
            "subspace.anchor_rank",
            f"a table's rows are lifted to model.width ({s.model.width}), and cannot be wider",
            f"use at most {s.model.width}, for example {max(1, s.model.width // 8)}, or remove `anchor_rank`",
        )


@check("subspace.anchor", "subspace.anchor_tokens", "model.context")
def anchor_tokens_fit(s: RunSpec) -> Found:
    tokens = s.subspace.anchor_tokens
    if tokens is None or tokens == 1:
        return
    if s.subspace.anchor == "fixed":
        yield (
            "subspace.anchor_tokens",
            "subspace.anchor is fixed, and has no weights to train",
            "remove `anchor_tokens`, or set subspace.anchor to segment",
        )
    elif tokens > s.model.context:
        yield (
            "subspace.anchor_tokens",
            f"a window has model.context ({s.model.context}) tokens",
            f"use at most {s.model.context}, for example {min(ANCHOR_TOKENS, s.model.context)}",
        )


@check("subspace.form", "subspace.anchor", "subspace.early_loss", "model.init")
def early_loss_has_heads(s: RunSpec) -> Found:
    if not s.subspace.early_loss:
        return
    if not s.has_segments:
        yield (
            "subspace.early_loss",
            f"segments have heads of their own where they matter, and with the {s.subspace.form} form and "
            "subspace.anchor fixed they do not",
            "remove `early_loss`, or set subspace.anchor to segment",
        )
    elif s.model.init is not None:
        yield (
            "subspace.early_loss",
            "the checkpoint in model.init has no heads for its segments",
            "remove `early_loss`, or model.init",
        )


@check("subspace.form", "subspace.unconstrained_layers", "model.layers", "model.segments", "stages")
def unconstrained_layers_fit_form(s: RunSpec) -> Found:
    asked = s.subspace.unconstrained_layers
    if asked is None or any(every_segment_has_layers(s)) or any(every_stage_has_layers(s)):
        return
    if problem := s.form.free_layers_problem(Sizes.of(s), asked):
        yield "subspace.unconstrained_layers", *problem


@check("subspace.form", "subspace.k", "model.width")
def k_fits_width(s: RunSpec) -> Found:
    if s.subspace.has_basis and s.subspace.k > s.model.width:
        yield (
            "subspace.k",
            f"the subspace can have at most model.width ({s.model.width}) dimensions",
            f"set subspace.k to {s.model.width} or less, for example {max(1, s.model.width // 8)}",
        )


@check("subspace.form", "subspace.anchor", "subspace.unconstrained_layers", "model.layers", "model.segments", "stages")
def unconstrained_layers_in_last_stage(s: RunSpec) -> Found:
    if any(every_segment_has_layers(s)) or any(every_stage_has_layers(s)) or any(unconstrained_layers_fit_form(s)):
        return
    free, layers = s.form.least_last_layers(Sizes.of(s)), s.model.layers
    if free > layers:
        yield (
            "subspace.unconstrained_layers",
            f"the model has only {layers} layers",
            f"use at most {layers}",
        )
        return
    segment = s.layers_per_segment[-1]
    if s.has_segments and free > segment:
        yield (
            "subspace.unconstrained_layers",
            f"unconstrained layers must be in one segment, and the last one has {plural(segment, 'layer')}",
            f"use at most {segment}, or change model.segments",
        )
        return
    last = layers_per_stage(s)[-1]
    if s.stages != "auto" and last < free:
        yield (
            "subspace.unconstrained_layers",
            "the output of unconstrained layers cannot be sent over a boundary, so "
            f"all {free} must be in the last stage, and the last stage has only {last}",
            f"use at most {last}, or write `stages` as a list whose last entry is at least {free}",
        )


@check("subspace.form", "subspace.update.interval", "subspace.update.window", "subspace.update.delay")
def update_fits(s: RunSpec) -> Found:
    u = s.subspace.update
    if u.interval == 0:
        return
    if rule := s.form.update_problem():
        movable = [name for name, form in FORMS.builtin.items() if form.update_problem() is None]
        fix = f"set subspace.update.interval to 0, or subspace.form to {' or '.join(movable)}"
        yield "subspace.update.interval", rule, fix
    if u.window > u.interval:
        yield (
            "subspace.update.window",
            f"the window must fit between two updates, which are {u.interval} steps apart",
            f"use at most {u.interval}",
        )
    if u.delay >= u.interval:
        yield (
            "subspace.update.delay",
            f"a new U must be in use before the next U is computed, {u.interval} steps later",
            f"use at most {u.interval - 1}",
        )


@check("subspace.form", "optimizer.name")
def optimizer_fits_form(s: RunSpec) -> Found:
    problem = s.form.optimizer_problem(s.optimizer.name)
    if problem is not None:
        yield ("optimizer.name", *problem)


@check("compute.dtype", "subspace.form")
def products_fit_form(s: RunSpec) -> Found:
    if s.compute.dtype == "tf32" and s.form.lifted_columns(Sizes.of(s)):
        yield (
            "compute.dtype",
            f"the {s.form.name} form keeps matrices in S by products with U, and products rounded to TF32 leave S",
            "use bf16, float32 or auto, or set subspace.form to reparam",
        )


@check("compute.dtype", "optimizer.moments")
def moments_fit_dtype(s: RunSpec) -> Found:
    if s.compute.dtype == "float64" and s.optimizer.moments != "float32":
        yield (
            "optimizer.moments",
            f"compute.dtype is float64, and moments rounded to {s.optimizer.moments} would undo its precision",
            "remove `moments`, or set compute.dtype to float32, bf16 or auto",
        )


@check("batch.size", "batch.microbatches")
def microbatches_divide_batch(s: RunSpec) -> Found:
    b = s.batch
    if b.size % b.microbatches:
        yield (
            "batch.microbatches",
            f"batch.microbatches must divide batch.size ({b.size})",
            f"use {_nearest_divisor(b.size, b.microbatches)} microbatches",
        )


@check("wire.forward", "wire.backward", "data.sampling")
def codecs_fit_their_legs(s: RunSpec) -> Found:
    codecs = {"forward": parse_codec(s.wire.forward).codec, "backward": parse_codec(s.wire.backward).codec}
    legs: tuple[tuple[Leg, Leg], ...] = (("forward", "backward"), ("backward", "forward"))
    for leg, other in legs:
        for rule, fix in codecs[leg].contradictions(Surroundings(leg, codecs[other], s.data.sampling)):
            yield f"wire.{leg}", rule, fix


@check("steps", "optimizer.schedule.warmup_steps", "optimizer.schedule.decay_steps")
def schedule_fits_steps(s: RunSpec) -> Found:
    c = s.optimizer.schedule
    if c.warmup_steps > s.steps:
        yield (
            "optimizer.schedule.warmup_steps",
            f"the run has only {s.steps} steps",
            f"use at most {s.steps}; about {max(1, s.steps // 20)} is usual",
        )
    elif c.decay_steps is not None and c.warmup_steps + c.decay_steps > s.steps:
        yield (
            "optimizer.schedule.decay_steps",
            f"warm-up ({c.warmup_steps} steps) and decay together are longer than the run ({s.steps} steps)",
            f"use at most {max(1, s.steps - c.warmup_steps)}",
        )


def _nearest_divisor(n: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return min({*small, *(n // d for d in small)}, key=lambda d: (abs(d - wanted), d))
