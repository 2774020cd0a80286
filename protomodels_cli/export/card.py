"""The model card: what was trained, on what, how far, and with what compression. Nothing of the owner's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from protomodels_cli import __version__
from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.export.source import Source
from protomodels_cli.huggingface.config import MODELING
from protomodels_cli.huggingface.segments import Segments, segments_of
from protomodels_cli.quantities import count, figures, plural, size
from protomodels_cli.spec.schema import RunSpec


def kind_of(spec: RunSpec) -> str:
    """What transformers loads it as."""
    ordinary = "Qwen3" if spec.model.qk_norm else "Llama"
    return ordinary if segments_of(spec) is None else f"{ordinary} in segments"


def card(source: Source, dtype: str, parameters: int, weights_sha256: str) -> str:
    """README.md of an exported model."""
    spec, segments = source.spec, segments_of(source.spec)
    parts = [
        _front_matter(spec),
        f"# {spec.name}",
        _introduction(source, dtype, parameters),
        *(() if segments is None else ("## Segments\n\n" + _segments(spec, segments),)),
        "## How to load it\n\n" + _loading(source),
        "## Training\n\n" + _table(_training(source)),
        *(("## Who trained it\n\n" + _work(source),) if source.facts.work else ()),
        "## Data\n\n" + _table(_data(source)),
        "## What crossed between the stages\n\n" + _wire(source),
        "## Where it comes from\n\n" + _table(_origin(source, weights_sha256)),
        "## Spec\n\nOf a path that led out of the folder of the spec, the last part is given.",
        "```yaml\n" + _yaml(without_paths(spec)) + "```",
    ]
    return "\n\n".join(parts) + "\n"


def without_paths(spec: RunSpec) -> dict[str, Any]:
    """The spec for strangers: of a path that leads anywhere else than below the spec only the last part, and not where
    the owner's cache and copies are."""
    shown = _shown(spec.model_dump(mode="json"))
    shown["data"].pop("cache_dir")
    shown["snapshots"].pop("copy_to")
    return dict(shown)


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shown(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    if isinstance(value, str):
        path = Path(value)
        return path.name if path.is_absolute() or value.startswith("~") or ".." in path.parts else value
    return value


def _front_matter(spec: RunSpec) -> str:
    ordinary = "qwen3" if spec.model.qk_norm else "llama"
    about = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pmtrain", ordinary if segments_of(spec) is None else "custom_code"],
    }
    return f"---\n{_yaml(about)}---"


def _introduction(source: Source, dtype: str, parameters: int) -> str:
    m, kind = source.spec.model, kind_of(source.spec)
    return (
        f"A {kind} of {count(parameters)} parameters in {dtype}: {plural(m.layers, 'layer')} of width {m.width}, "
        f"{plural(m.heads, 'head')} ({m.kv_heads} for keys and values), feed-forward width {m.hidden}, a vocabulary of "
        f"{source.spec.vocab_size} and a context of {m.context} tokens. Trained with pmtrain, cut into "
        f"{plural(len(source.layers), 'stage')} ({'+'.join(map(str, source.layers))} layers)."
    )


def _segments(spec: RunSpec, segments: Segments) -> str:
    """What it is, why it needs code of its own, and what that costs."""
    width = spec.model.width
    numbers = segments.anchors * spec.vocab_size * width
    tables = f"{segments.anchors} × {spec.vocab_size} × {width} numbers, {count(numbers)} of all parameters"
    rows = "a row of its own" if segments.anchors > 1 else "the same row"
    lines = [
        f"The layers are cut into {len(segments.layers)} segments ({'+'.join(map(str, segments.layers))} layers). For "
        f"every token each segment adds {rows} to the stream ({tables})."
    ]
    if segments.carried is not None:
        lines.append(
            f"From segment to segment go {segments.carried} coordinates a token. Whatever else the layers of a segment "
            f"write, {width} numbers a token, ends with it."
        )
    lines.append(
        f"This is no plain {'Qwen3' if spec.model.qk_norm else 'Llama'}, and cannot be converted to one: there, what a "
        "layer writes stays in one stream to the end, and a token's row is added to it once. So programs that know "
        f"only plain models, such as converters to GGUF, cannot use it, and transformers needs `{MODELING}.py`, which "
        "lies beside the weights, and `trust_remote_code=True` to run it."
    )
    return "\n\n".join(lines)


def _loading(source: Source) -> str:
    trust = "" if segments_of(source.spec) is None else ", trust_remote_code=True"
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{trust})',
    ]
    after = "The model was trained on token ids, so there is no tokenizer here."
    if source.tokenizer is not None:
        lines += [
            f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})',
            'ids = tokenizer("The ", return_tensors="pt").input_ids',
            "print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))",
        ]
        after = "Or `pmtrain generate FOLDER --prompt 'The '`."
    return "```python\n" + "\n".join(lines) + f"\n```\n\n{after}"


def _training(source: Source) -> dict[str, str]:
    spec, facts = source.spec, source.facts
    at = "" if facts.eval_step in (None, source.step) else f" (after step {facts.eval_step:,})"
    return {
        "steps": f"{source.step:,} of {spec.steps:,}",
        "tokens": count(source.step * spec.batch.size * spec.model.context),
        "training loss": _loss(facts.loss),
        "held-out loss": _loss(facts.eval_loss) + at,
        "optimizer": f"{spec.optimizer.name}, learning rate {spec.optimizer.lr:g}",
        "batch": f"{spec.batch.size} windows of {spec.model.context} tokens",
    }


def _work(source: Source) -> str:
    """By the names that the peers gave themselves: text of strangers, so as code, without what ends it or a cell."""

    def shown(name: str) -> str:
        plain = "".join(" " if c in "`|" or not c.isprintable() else c for c in name).strip()
        return f"`{plain}`" if plain else "others"

    rows = [
        f"| {shown(name)} | {c.steps:,} | {count(c.tokens)} | {c.seconds / 3600:.1f} | {size(c.sent_bytes)} |"
        for name, c in source.facts.work.items()
    ]
    head = "| peer | steps | tokens | hours | sent to neighbours |\n|---|---|---|---|---|\n"
    return "Each held a stage of the model, in these steps of the run so far.\n\n" + head + "\n".join(rows)


def _loss(loss: float | None) -> str:
    return "not known" if loss is None else f"{loss:.4f}"


def _data(source: Source) -> dict[str, str]:
    spec, corpus = source.spec, source.facts.corpus or {}
    shown = without_paths(spec)
    rows = {
        "source": spec.data.source,
        "files": ", ".join([*shown["data"]["files"], *shown["data"]["val_files"]]),
        "tokenizer": spec.tokenizer.kind,
        "tokens to train on": _tokens(corpus.get("train_tokens")),
        "tokens held out": _tokens(corpus.get("held_out_tokens")),
        "sha256 of the tokens": str(corpus.get("sha256") or ""),
    }
    return {name: value for name, value in rows.items() if value}


def _tokens(n: Any) -> str:
    return count(n) if isinstance(n, int) else ""


def _wire(source: Source) -> str:
    """Bytes a token: measured where they were, otherwise by the codecs' own arithmetic."""
    spec, boundaries = source.spec, len(source.layers) - 1
    form = f"{spec.subspace.form}, k = {spec.subspace.k}" if spec.form.has_basis else spec.subspace.form
    if not boundaries:
        return f"Nothing: the model was trained in one stage (form: {form})."
    computed = boundary_bytes(spec)
    forward, backward, dense = computed["forward"], computed["backward"], computed["dense_bf16_each_way"]
    measured = ""
    there, back = source.facts.sent or (0, 0)
    if there or back:
        crossings = source.step * spec.batch.size * spec.model.context * boundaries
        forward, backward = there / crossings, back / crossings
        measured = f" (measured; {size(there + back)} in all)"
    rows = {
        "form of the stream": form,
        "codecs": f"{spec.wire.forward} forward, {spec.wire.backward} backward",
        "bytes a token over a boundary": f"{forward:.1f} forward, {backward:.1f} backward{measured}",
        "of a dense pipeline in bfloat16": f"{dense:.0f} each way: {figures(2 * dense / (forward + backward))} ×",
    }
    cost = (
        "What compression cost in loss is not known from this run alone: that takes the same run in the dense form "
        "with codec fp32. The held-out loss above was measured with the codecs in place."
    )
    return _table(rows) + "\n\n" + cost


def _origin(source: Source, weights_sha256: str) -> dict[str, str]:
    rows = {
        "snapshot": f"step {source.step:,}" + ("" if source.lineage is None else f", lineage {source.lineage}"),
        "weights sha256": f"{weights_sha256} (of the run's parameters, before they are multiplied out)",
        "spec sha256": source.spec.sha256(),
        "exported with": f"pmtrain {__version__}",
    }
    return rows | {f"part of stage {i}": f"sha256 {part.sha256}" for i, part in enumerate(source.parts)}


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _yaml(content: dict[str, Any]) -> str:
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
