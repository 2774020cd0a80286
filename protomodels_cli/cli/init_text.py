"""A chosen spec as YAML that says why each value is what it is, and what else it could be. Pure."""

from __future__ import annotations

import json
from typing import Any

from protomodels_cli.cli.init_choose import FILLING, THRIFT, TOKENS_EACH, Chosen
from protomodels_cli.cost.sizes import ModelSize
from protomodels_cli.cost.time_to_loss import times_the_steps
from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.cost.ways import SOURCE, WORST, expected_loss
from protomodels_cli.quantities import count, duration, figures, plural, rate, size

MARGIN = 30  # columns before a comment


def fewer_bytes(chosen: Chosen) -> float:
    """Than the dense model in float32 would send."""
    sent = boundary_bytes(chosen.spec)
    return 8 * chosen.spec.model.width / (sent["forward"] + sent["backward"])


def loss_in_words(chosen: Chosen) -> str:
    if chosen.stages == 1:
        return "nothing: there are no boundaries"
    if (loss := expected_loss(chosen.spec)) is None:
        return (
            f"not measured at this compression; reckoned with as {WORST:.1%} (docs/benchmarks.md has what was measured)"
        )
    more = figures(100 * (times_the_steps(loss) - 1))
    steps = f": {more} % more steps to dense's loss"
    much = f"{loss:.1%} at equal tokens{steps}" if loss > 0 else "nothing at equal tokens"
    return f"{much}; as measured at {SOURCE}, not at this size"


def text_of(chosen: Chosen, reading: str) -> str:
    """`reading`: how often the data are read, in words."""
    a, s, spec = chosen.answers, chosen.shape, chosen.spec
    m, sub, o = spec.model, spec.subspace, spec.optimizer
    own, saving = ModelSize.of(spec), chosen.saving
    peers, tokens = plural(a.peers, "peer"), spec.batch.size * m.context
    of_all = count(own.blocks + own.embedding + own.head + own.anchors)
    lines = [
        f"# {of_all} parameters for {peers} with {size(a.memory)} and about {rate(a.speed, 'FLOP/s')} each, "
        f"over {a.link.in_words}.",
        "# Written by `pmtrain init`; every field is in docs/spec.md. After a change:",
        "#   pmtrain validate FILE        every mistake, with line, rule and fix",
        f"#   pmtrain plan FILE --link {a.link.bandwidth or 'none'},{a.link.latency}        memory, bytes, step time",
        _line(f"name: {spec.name}", "also of the run's directory"),
        _line(f"steps: {spec.steps}", _steps_in_words(chosen)),
        _line(
            f"stages: {_stages(spec.stages)}",
            "cut when the peers have joined, by their memory and speed; or a number, or a list"
            if spec.stages == "auto"
            else "layers of each: the last has the head as well; auto cuts evenly when the peers have joined",
        ),
        _line(f"min_peers: {spec.min_peers}", _stages_in_words(chosen)),
        "",
        "model:",
        _line(
            f"  layers: {m.layers}",
            "more layers, or wider ones, learn more",
        ),
        _line(f"  width: {m.width}", "d, of the residual stream"),
        _line(f"  heads: {m.heads}", f"of {m.head_dim} numbers"),
        _line(f"  kv_heads: {m.kv_heads}", "fewer than heads: less memory and computing (grouped-query attention)"),
        _line("  hidden: auto", f"{m.hidden}: as many parameters as the dense model, whatever form is chosen below"),
        _line(f"  context: {m.context}", "tokens of a window; memory and computing grow with it"),
    ]
    if spec.has_segments:
        lines.append(_line(f"  segments: {_stages(m.segments)}", "one for each stage; a stage is whole segments"))
    lines += [
        "",
        "subspace:",
        _line(f"  form: {sub.form}", _form_in_words(chosen)),
    ]
    if spec.form.has_basis:
        lines.append(
            _line(f"  k: {sub.k}", f"of {m.width} numbers a token cross a boundary; more: closer to dense, slower")
        )
    if sub.anchor != "fixed":
        lines.append(_line(f"  anchor: {sub.anchor}", "each segment trains a table of its own, which is never sent"))
    lines += [
        "",
        "wire:",
        _line(f"  forward: {spec.wire.forward}", "codec of activations: docs/codecs.md has them all"),
        _line(f"  backward: {spec.wire.backward}", "and of gradients"),
        "",
        "optimizer:",
        _line(f"  name: {o.name}", "one moment a number where AdamW has two"),
        _line(
            f"  lr: {_number(o.lr)}", "by the width (1e-2 at 128, 1e-3 at 2048), not tuned: try half and twice of it"
        ),
    ]
    if chosen.thrift != THRIFT[0]:
        lines += [
            _line(f"  tables: {o.tables}", "half the memory of adamw, without which it would not fit"),
            _line(f"  moments: {o.moments}", "the same; float32 where there is memory"),
        ]
    lines.append(
        _line(f"  schedule: {{warmup_steps: {o.schedule.warmup_steps}}}", "then a cosine down to a tenth of lr")
    )
    if sub.anchor != "fixed":
        lines += [
            "",
            "groups:",
            _line(
                f"  anchors: {{lr: {_number(spec.groups.anchors.lr or 0.0)}}}",
                "three times the others': rows are seen seldom",
            ),
            _line("  writers: {std: 0}", "what blocks write starts at zero"),
        ]
    lines += [
        "",
        "batch:",
        _line(f"  size: {spec.batch.size}", f"windows a step: {tokens:,} tokens"),
        _line(
            f"  microbatches: {spec.batch.microbatches}",
            f"at least {FILLING} for each stage, so that stages seldom wait for each other",
        ),
        "",
        _line("data:", reading),
        *(f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in a.data.items()),
        "",
        _line(
            f"tokenizer: {{kind: {spec.tokenizer.kind}, vocab_size: {s.vocabulary}}}",
            "of the ids in the files"
            if spec.tokenizer.kind == "none"
            else "trained on the data; or file: tokenizer.json",
        ),
        _line(f"eval: {{interval: {spec.eval.interval}}}", "steps between losses on held-out text"),
        "",
        _line(f"snapshots: {{keep: {spec.snapshots.keep}}}", "as often as uploads and failures make it worth while;"),
        _line(
            "",
            f"about every {duration(saving.interval_seconds)}, {size(saving.snapshot_bytes)} each. Or every: 20min",
        ),
        _line("", "copy_to: s3://… keeps a second copy, from which another machine can go on"),
    ]
    return "\n".join(lines) + "\n"


def _line(text: str, why: str) -> str:
    return f"{text:{MARGIN}} # {why}"


def _number(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-").replace(".0e", "e")


def _steps_in_words(chosen: Chosen) -> str:
    spec = chosen.spec
    tokens = spec.steps * spec.batch.size * spec.model.context
    each = tokens / chosen.answers.parameters
    words = f"{count(tokens)} tokens, {figures(each)} for each parameter"
    if chosen.answers.steps is None:
        return f"{words}: about {TOKENS_EACH} are usual, more go on helping"
    return f"{words} (about {TOKENS_EACH} are usual)"


def _stages(value: object) -> str:
    return json.dumps(value) if isinstance(value, list) else str(value)


def _stages_in_words(chosen: Chosen) -> str:
    if not chosen.spares:
        return "each holds a stage"
    return f"each holds a stage; {plural(chosen.spares, 'peer')} more would be spares"


def _form_in_words(chosen: Chosen) -> str:
    times = f"{figures(fewer_bytes(chosen))} × fewer bytes than float32"
    if chosen.stages == 1:
        return "one stage sends nothing"
    known = "" if chosen.answers.any_recipe else ", of what was measured"
    return f"{times}: at dense's loss soonest{known}"


def data_of(text: str, relative: Any) -> tuple[dict[str, Any], bool]:
    """The section for what a user calls the data, and whether it names files. `relative` turns a path into one that is
    relative to the spec."""
    if text in ("builtin", "python"):
        return {"source": text}, False
    if text.startswith("hf:"):
        return {"source": "hf", "dataset": text.removeprefix("hf:")}, False
    files = [relative(part.strip()) for part in text.split(",")]
    return {"source": "bin" if all(f.endswith(".bin") for f in files) else "files", "files": files}, True
