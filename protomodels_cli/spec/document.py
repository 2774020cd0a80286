"""docs/spec.md from the schema: every field, its default and its meaning.   scripts/docs.sh"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from protomodels_cli.codecs.base import BaseCodec, Feedback, Packing, Word
from protomodels_cli.codecs.in_turn import InTurn
from protomodels_cli.codecs.registry import registry
from protomodels_cli.spec.fields import Section
from protomodels_cli.spec.schema import RunSpec

EXAMPLE = """\
name: friends               # also of the run's directory
steps: 30_000
stages: 4                   # slices of the model; or `auto`: cut to fit the peers that join
model:
  layers: 8
  segments: 4               # of the model; a stage is one or more of them
  width: 768                # d, of the residual stream
  heads: 12
  hidden: auto
  context: 1024             # tokens that the model sees at once
subspace:
  k: 96                     # numbers a token that cross from peer to peer: an eighth of the width
wire: {forward: int8, backward: int8}          # docs/benchmarks.md: what others cost
batch: {size: 64, microbatches: 16}            # 65,536 tokens a step
optimizer: {lr: 3e-3, schedule: {warmup_steps: 1000}}
data: {source: text, files: [texts/*.txt]}      # your own files; docs/data.md has other sources
tokenizer: {kind: bpe, vocab_size: 16384}      # trained on the data
snapshots: {keep: 2}
eval: {interval: 1000}
"""
HEAD = """\
# The run spec

One YAML file describes a run. Only `steps` and the model's `layers`, `width` and `heads` (or `init`, which says them)
must be given; every other field has a default. `pmtrain validate SPEC` checks a file and prints every mistake with its
line, rule and fix. Numbers may be written as `1e-4` or `8_000_000`; only `true` and `false` are booleans. Paths are
relative to the spec file. Examples with comments are in `configs/`, and `pmtrain init` writes one for your group.

The fields that people change, in a spec of 126 M parameters for four peers:

```yaml
{EXAMPLE}```

This page is made from `protomodels_cli/spec/` and `protomodels_cli/codecs/` by `scripts/docs.sh`.
"""

CODECS = """
## Codecs

What `wire.forward` and `wire.backward` may be: a base, as `int8`; feedback on top, as `int8+ef`; packing at the end, as
`int8+ef+zstd`; or several of those in turn, as `eden:3 then eden:5`. Installed packages may add others (entry points of
`pmtrain.codecs`).

| written | | what it does |
|---|---|---|
"""
KINDS: tuple[tuple[type[Word], str], ...] = ((BaseCodec, "base"), (Feedback, "feedback"), (Packing, "packing"))


def document() -> str:
    return (
        HEAD.replace("{EXAMPLE}", EXAMPLE) + "".join(_section(RunSpec, "", "Top level")) + CODECS + "".join(_codecs())
    )


def _codecs() -> Iterator[str]:
    for kind, called in KINDS:
        for word in registry().builtin.values():
            if issubclass(word, kind):
                written = ", ".join(f"`{usage}`" for usage in word.usage.split(", "))
                yield f"| {written} | {called} | {word.help} |\n"
    yield f"| `{InTurn.usage}` | in turn | {InTurn.help} |\n"


def _section(section: type[BaseModel], prefix: str, title: str) -> list[str]:
    about = inspect.cleandoc(section.__doc__ or "")
    parts = [f"\n## {title}\n", f"\n{about}\n" if about else "", "\n| field | default | meaning |\n|---|---|---|\n"]
    inner: list[str] = []
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            inner += _section(info.annotation, f"{prefix}{name}.", f"`{prefix}{name}`")
            continue
        meaning = (info.description or "").replace("|", "\\|")
        words = [str(w) for w in get_args(info.annotation) if isinstance(w, str)]
        if words and name != "stages":
            meaning += f" One of {', '.join(f'`{w}`' for w in words)}."
        parts.append(f"| `{name}` | {_default(info)} | {meaning} |\n")
    return parts + inner


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, bool):
        value = str(value).lower()  # as YAML writes it
    return "" if value is None or value is PydanticUndefined else f"`{value}`"


if __name__ == "__main__":
    print(document(), end="")
