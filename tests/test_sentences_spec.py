"""The one place that checks how the errors of a spec read. Everywhere else the field, the kind and the value are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protomodels_cli.codecs.base import CodecError
from protomodels_cli.codecs.registry import parse_codec
from protomodels_cli.spec import SpecError, load_spec, parse_spec, spec_from
from protomodels_cli.spec.load import all_fields
from protomodels_cli.spec.refused import REFUSED, REPLACED

SMALLEST = {"steps": 10, "model": {"layers": 4, "width": 64, "heads": 4}}


# The spec: (changes, what `validate` says).


def model(**fields: object) -> dict[str, object]:
    return {"model": {"layers": 4, "width": 64, "heads": 4, **fields}}


SPEC: list[tuple[dict[str, Any], str]] = [
    # fields by themselves
    ({"steps": 0}, "steps = 0 | must be at least 1 | use a number at least 1"),
    ({"steps": 10**38}, f"steps = {10**38} | must be at most 1000000000 | use a number at most 1000000000"),
    ({"steps": "many"}, "steps = 'many' | must be a whole number | write digits only, without quotes"),
    (
        {"optimizer": {"lr": "fast"}},
        "optimizer.lr = 'fast' | must be a finite number | write a number like 0.001 or 1e-3, without quotes",
    ),
    ({"optimizer": {"lr": 0.0}}, "optimizer.lr = 0.0 | must be above 0 | use a number above 0"),
    ({"wire": {"link": {"loss": 1.0}}}, "wire.link.loss = 1.0 | must be below 1 | use a number below 1"),
    (
        model(qk_norm="on"),
        "model.qk_norm = 'on' | must be true or false | write true or false; on, off, yes and no are not booleans here",
    ),
    ({"data": 5}, "data = 5 | must be a section with fields of its own | write the fields below `data:`, indented"),
    ({"data": {"files": "a.txt"}}, "data.files = 'a.txt' | must be a list | write the values as [a, b]"),
    ({"data": {"field": 5}}, "data.field = 5 | must be text | put the value in quotes"),
    (
        {"name": "my run"},
        "name = 'my run' | must be 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter or "
        "digit | choose a simpler name",
    ),
    (
        {"stages": 0},
        "stages = 0 | must be a number of stages from 1, a list of layers per stage, or auto | "
        "write for example `stages: 4`, `stages: [3, 3, 2]` or `stages: auto`",
    ),
    (
        {"compute": {"dtype": "half"}},
        "compute.dtype = 'half' | must be one of auto, bf16, tf32, float32, float64 | write one of these words",
    ),
    (
        {"optimizer": {"schedule": {"decay": "cosin"}}},
        "optimizer.schedule.decay = 'cosin' | must be one of constant, linear, cosine | did you mean 'cosine'?",
    ),
    (
        {"subspace": {"form": "densee"}},
        "subspace.form = 'densee' | must be one of reparam, two_stream, constrained, dense | did you mean 'dense'?",
    ),
    (
        {"compute": {"dtype": "bfloat16"}},
        "compute.dtype = 'bfloat16' | must be one of auto, bf16, tf32, float32, float64 | did you mean 'bf16'?",
    ),
    (
        {"compute": {"dtype": "flaot64"}},
        "compute.dtype = 'flaot64' | must be one of auto, bf16, tf32, float32, float64 | did you mean 'float64'?",
    ),
    ({"stage": 3}, "stage = 3 | is not a field of the spec | did you mean 'stages'?"),
    ({"context": 3}, "context = 3 | is not a field of this section | did you mean 'model.context'?"),
    (
        {"eval": {"zebra": 3}},
        "eval.zebra = 3 | is not a field of the spec | remove `zebra`, or use a field of eval: interval, windows",
    ),
    (
        model(dropout=0.1),
        "model.dropout = 0.1 | dropout on a branch or on the stream would write outside the subspace S, so k "
        "numbers per token would no longer carry the whole residual stream | remove `dropout`",
    ),
    (
        {"limits": {"place_seconds": 60.0}},
        "limits.place_seconds = 60.0 | was replaced: limits.place_seconds set four limits at once | set the ones you "
        "need: limits.build_seconds, limits.reuse_seconds, limits.link_seconds, limits.device_seconds (this one "
        "was twice the old value)",
    ),
    (
        {"wire": {"link": {"bandwidth": "80 miles"}}},
        "wire.link.bandwidth = '80 miles' | must be a bandwidth like 80mbit (bit, kbit, mbit, gbit) | "
        "write for example 80mbit",
    ),
    (
        {"snapshots": {"max_bandwidth": "0mbit"}},
        "snapshots.max_bandwidth = '0mbit' | must be above 0 | remove the field for no limit",
    ),
    (
        {"snapshots": {"every": "20 moons"}},
        "snapshots.every = '20 moons' | must be a time like 20min (s, min, h, d) | write for example 20min",
    ),
    (
        {"snapshots": {"every": "0h"}},
        "snapshots.every = '0h' | must be above 0 | write for example 20min",
    ),
    (
        {"wire": {"link": {"latency": "25"}}},
        "wire.link.latency = '25' | must be a time like 25ms (s, ms, us) | write for example 25ms",
    ),
    # contradictions
    (
        {"compute": {"dtype": "tf32"}, "subspace": {"form": "constrained"}},
        "compute.dtype = 'tf32' | the constrained form keeps matrices in S by products with U, and products rounded "
        "to TF32 leave S | use bf16, float32 or auto, or set subspace.form to reparam",
    ),
    (
        {"compute": {"dtype": "float64"}, "optimizer": {"moments": "bf16"}},
        "optimizer.moments = 'bf16' | compute.dtype is float64, and moments rounded to bf16 would undo its precision | "
        "remove `moments`, or set compute.dtype to float32, bf16 or auto",
    ),
    (
        model(heads=6),
        "model.heads = 6 | model.heads must divide model.width (64) unless model.head_dim is set | "
        "use 4 heads, or set model.head_dim",
    ),
    (
        model(width=63, heads=7),
        "model.heads = 7 | rotary positions need heads of even width, and model.head_dim is 9 | "
        "set model.head_dim to 10, or change model.heads",
    ),
    (model(kv_heads=3), "model.kv_heads = 3 | model.kv_heads must divide model.heads (4) | set model.kv_heads to 2"),
    (
        {"stages": [1, 2]},
        "stages = [1, 2] | the layers per stage add up to 3, and model.layers is 4 | "
        "change the list so that it adds up to 4",
    ),
    (
        {"stages": 5},
        "stages = 5 | every stage needs at least one layer, and model.layers is 4 | "
        "use 4 stages or fewer, or more layers",
    ),
    (
        {"subspace": {"k": 65}},
        "subspace.k = 65 | the subspace can have at most model.width (64) dimensions | "
        "set subspace.k to 64 or less, for example 8",
    ),
    (
        {"subspace": {"form": "reparam", "unconstrained_layers": 5}},
        "subspace.unconstrained_layers = 5 | the model has only 4 layers | use at most 4",
    ),
    (
        {"stages": 4, "subspace": {"form": "reparam", "unconstrained_layers": 2}},
        "subspace.unconstrained_layers = 2 | the output of unconstrained layers cannot be sent over a boundary, "
        "so all 2 must be in the last stage, and the last stage has only 1 | "
        "use at most 1, or write `stages` as a list whose last entry is at least 2",
    ),
    (
        {"subspace": {"form": "dense", "update": {"interval": 10}}},
        "subspace.update.interval = 10 | the dense form has no subspace to move | "
        "set subspace.update.interval to 0, or subspace.form to reparam or constrained",
    ),
    (
        {"subspace": {"form": "two_stream", "update": {"interval": 10}}},
        "subspace.update.interval = 10 | with two streams, what lies outside the subspace is written beside it, and "
        "moving U gains nothing | set subspace.update.interval to 0, or subspace.form to reparam or constrained",
    ),
    (
        {"subspace": {"form": "reparam", "update": {"interval": 5, "window": 6}}},
        "subspace.update.window = 6 | the window must fit between two updates, which are 5 steps apart | use at most 5",
    ),
    (
        {"subspace": {"form": "reparam", "update": {"interval": 5, "window": 1, "delay": 5}}},
        "subspace.update.delay = 5 | a new U must be in use before the next U is computed, 5 steps later | use "
        "at most 4",
    ),
    (
        {"subspace": {"form": "constrained"}, "optimizer": {"name": "adamw"}},
        "optimizer.name = 'adamw' | AdamW scales every entry separately, which moves constrained matrices out of the "
        "subspace S | use row_adamw or muon, or set subspace.form to reparam, where every optimizer stays in S",
    ),
    (
        {"optimizer": {"name": "row_adamw"}},
        "optimizer.name = 'row_adamw' | row AdamW is for full matrices in the subspace S, and the two_stream form "
        "has none | use adamw or muon",
    ),
    (
        {"batch": {"size": 10, "microbatches": 4}},
        "batch.microbatches = 4 | batch.microbatches must divide batch.size (10) | use 5 microbatches",
    ),
    (
        {"optimizer": {"schedule": {"warmup_steps": 11}}},
        "optimizer.schedule.warmup_steps = 11 | the run has only 10 steps | use at most 10; about 1 is usual",
    ),
    (
        {"optimizer": {"schedule": {"warmup_steps": 5, "decay_steps": 6}}},
        "optimizer.schedule.decay_steps = 6 | warm-up (5 steps) and decay together are longer than the run (10 "
        "steps) | use at most 5",
    ),
    (
        {"wire": {"forward": "topk:mask"}},
        "wire.forward = 'topk:mask' | topk:mask reuses the positions of the activations, and this leg carries the "
        "activations | give a share, as in topk:0.1",
    ),
    (
        {"wire": {"backward": "topk:mask"}},
        "wire.backward = 'topk:mask' | topk:mask reuses the positions of the activations, and int8 sends all "
        "positions | give a share, as in topk:0.1, or use topk alone on the forward leg",
    ),
    (
        {"wire": {"forward": "topk:0.1+aqsgd", "backward": "topk:mask"}},
        "wire.backward = 'topk:mask' | topk:mask reuses the positions of the activations, and AQ-SGD sends new samples "
        "whole, without positions | give a share, as in topk:0.1, or use topk alone on the forward leg",
    ),
    (
        {"wire": {"forward": "topk:0.1 then topk:0.2", "backward": "topk:mask"}},
        "wire.backward = 'topk:mask' | topk:mask reuses the positions of the activations, and in topk:0.1 then "
        "topk:0.2 positions change with the codec | give a share, as in topk:0.1, or use topk alone on the forward leg",
    ),
    (
        {"wire": {"backward": "int8+aqsgd"}},
        "wire.backward = 'int8+aqsgd' | AQ-SGD is for activations: the gradients of a sample are not alike from "
        "epoch to epoch | use +aqsgd on the forward leg only, and for example int8 here",
    ),
    (
        {"wire": {"forward": "int8+aqsgd"}, "data": {"sampling": "random"}},
        "wire.forward = 'int8+aqsgd' | AQ-SGD sends how a sample's activations have changed since the last epoch, and "
        "data.sampling random does not revisit samples | set data.sampling to epochs, or use another codec",
    ),
    (
        {"snapshots": {"copy_to": "ftp://me:secret@store/runs"}},
        "snapshots.copy_to = 'ftp://me:secret@store/runs' | the URL contains a password, and the spec is sent to every "
        "peer | remove the password from the URL, and set it in the coordinator's environment: FSSPEC_FTP_USERNAME and "
        "FSSPEC_FTP_PASSWORD for ftp",
    ),
    (
        {"data": {"source": "text"}},
        "data.files = [] | data.source is text, which needs files | list paths or globs, as in `files: [corpus/*.txt]`",
    ),
    (
        {"data": {"files": ["x"]}},
        "data.files = ['x'] | data.source is builtin, which reads no files | remove `files`, or set data.source "
        "to files",
    ),
    (
        {"data": {"source": "hf"}},
        "data.dataset | data.source is hf, which reads a dataset | name a folder, or a dataset on the hub",
    ),
    (
        {"data": {"source": "hf", "dataset": "x", "val_split": "train"}},
        "data.val_split = 'train' | data.split is train too, and training and held-out text must be disjoint | name "
        "another split, or remove `val_split`: then data.val_fraction of the text is held out",
    ),
    (
        {"data": {"revision": "x"}},
        "data.revision = 'x' | belongs to data.source hf | remove `revision`, or set data.source to hf",
    ),
    (
        {"data": {"source": "bin", "files": ["x"]}},
        "tokenizer.kind = 'bpe' | files of the source bin hold token ids and need tokenizer.kind none; other "
        "sources are text and need a tokenizer | set tokenizer.kind to none",
    ),
    (
        {"data": {"source": "bin", "files": ["x"]}, "tokenizer": {"kind": "none"}},
        "tokenizer.vocab_size | is required for tokenizer.kind none: token ids do not say how large their "
        "vocabulary is | set tokenizer.vocab_size (50257 for GPT-2's tokens)",
    ),
    (
        {"tokenizer": {"kind": "bytes", "vocab_size": 300}},
        "tokenizer.vocab_size = 300 | tokenizer.kind bytes has 256 ids, one per byte | remove `vocab_size`",
    ),
    (
        {"tokenizer": {"kind": "bpe", "vocab_size": 100}},
        "tokenizer.vocab_size = 100 | a byte-pair vocabulary starts with 256 bytes and one end-of-text token | "
        "use 257 or more, or set tokenizer.kind to bytes",
    ),
    (
        {"tokenizer": {"kind": "file"}},
        "tokenizer.file | tokenizer.file belongs to tokenizer.kind file, and to no other kind | "
        "set tokenizer.file to the path of a tokenizer.json",
    ),
    (
        {"tokenizer": {"kind": "bytes", "file": "t.json"}},
        "tokenizer.file = 't.json' | tokenizer.file belongs to tokenizer.kind file, and to no other kind | "
        "remove `file`, or set tokenizer.kind to file",
    ),
    (
        {"tokenizer": {"kind": "file", "file": "no.json"}},
        "tokenizer.file = 'no.json' | must be readable: No such file or directory | "
        "check the path (relative to the spec file), or set tokenizer.vocab_size",
    ),
]


@pytest.mark.parametrize(("changes", "text"), SPEC)
def test_spec(changes: dict[str, Any], text: str):
    check(changes, text)


def check(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_from({**SMALLEST, **changes})
    where, rule, fix = text.split(" | ")
    assert str(caught.value) == f"spec: {where}\n    rule: {rule}\n    fix:  {fix}"


FILES: dict[str, str] = {
    "steps: 1": "run.yaml:1: model | is required: there is no default | add `model:`",
    "- 1": "run.yaml:1: the file = [1] | must be a mapping of fields to values | start with `steps:` and `model:`",
    "a: [1": "run.yaml:1: the file | must be YAML: expected ',' or ']', but got '<stream end>' | "
    "check indentation, colons and quotes",
    "[" * 5000: "run.yaml:1: the file | must be nested at most 20 levels deep | remove brackets",
    "a: &a [*a, *a]": "run.yaml:1: the file | must have at most 20000 values, nested at most 20 levels deep | "
    "write the values out instead of using YAML aliases",
    "steps: 3\nsteps: 4\nmodel: {layers: 1, width: 32, heads: 1}": "run.yaml:2: steps | is given twice | "
    "remove one of the two",
}


@pytest.mark.parametrize(("content", "text"), FILES.items(), ids=range(len(FILES)))
def test_file(content: str, text: str):
    with pytest.raises(SpecError) as caught:
        parse_spec(content, "run.yaml")
    where, rule, fix = text.split(" | ")
    assert str(caught.value) == f"{where}\n    rule: {rule}\n    fix:  {fix}"


def test_unreadable_files(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    for name, why in (("absent", "No such file or directory"), ("latin", "the text is not UTF-8")):
        path = tmp_path / f"{name}.yaml"
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        told = f"{path}: the file\n    rule: must be a readable file: {why}\n    fix:  check the path"
        assert str(caught.value) == told


HOW = (
    "write one of bf16, eden:BITS, fp32, int4, int8, lowrank:RANK, topk:SHARE, topk:mask; then perhaps +aqsgd or +ef "
    "or +ef21; then perhaps +zstd"
)
CODECS = {
    "int9": f"there is no codec 'int9' | {HOW}",
    "int8+int8": f"'+int8' cannot follow a codec | {HOW}",
    "int8:3": "int8 takes no parameter | write int8",
    "eden:7": "the bits per number must be 1 to 6, not '7' | write for example eden:4",
    "topk:2": "the share of numbers to send must be above 0 and at most 1, not '2' | write for example topk:0.1",
    "lowrank:1.5": "the rank must be a whole number of at least 1, not '1.5' | write for example lowrank:4",
    "int8 then int9": f"there is no codec 'int9' | {HOW}",
    "int8+zstd then bf16": "codecs in turn must be packed alike | write +zstd behind each codec, or behind none",
    "int4+ef then int8": "int4+ef remembers what it sent, which is of no use to another codec | write int4+ef alone, "
    "or codecs without feedback around `then`",
    "int8 then topk:mask": "topk:mask needs the positions of the other leg, which change with a codec | "
    "write topk:mask alone",
    "fp32+ef": "fp32 is exact, so ef has no error to correct | remove +ef, or use a lossy codec",
}


@pytest.mark.parametrize(("word", "text"), CODECS.items())
def test_codec(word: str, text: str):
    with pytest.raises(CodecError) as caught:
        parse_codec(word)
    assert f"{caught.value.rule} | {caught.value.fix}" == text


def test_what_takes_the_place_of_a_field_is_a_field():
    for _, fix in REPLACED.values():
        named = {word.strip(",") for word in fix.split() if word.startswith(("limits.", "groups."))}
        assert named
        assert named <= set(all_fields())


@pytest.mark.parametrize("text", [*(text for _, text in SPEC), *FILES.values(), *CODECS.values(), *REFUSED.values()])
def test_a_sentence_stands_on_its_own(text: str):
    words = text.replace("its own", "").split()
    assert not {"they", "them", "he", "she", "thing"} & set(words), "name what is meant"
    assert not any(part.startswith(("it ", "its ", "this ", "that ")) for part in text.split(" | "))
    assert not text.endswith(".")
