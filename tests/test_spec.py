"""The spec: every mistake at once, with its place, rule and fix; contradictions before anything starts."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import pytest
import yaml
from conftest import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st

from protomodels_cli.spec import RunSpec, SpecError, load_spec, parse_spec, spec_from
from protomodels_cli.spec.cut import even_cut
from protomodels_cli.spec.load import all_fields, with_absolute_paths
from protomodels_cli.spec.refused import REFUSED

UNCONSTRAINED, SCHEDULE, VOCABULARY = "subspace.unconstrained_layers", "optimizer.schedule", "tokenizer.vocab_size"
IN_LAST_STAGE = "unconstrained_layers_in_last_stage"
SMALLEST = {"steps": 10, "model": {"layers": 4, "width": 64, "heads": 4}}


def problems(text: str) -> list:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "run.yaml")
    return caught.value.problems


def with_field(path: str, value: object) -> dict:
    data = copy.deepcopy(SMALLEST)
    at = data
    *sections, last = path.split(".")
    for part in sections:
        at = at.setdefault(part, {})
    at[last] = value
    return data


def test_only_steps_and_the_shape_are_required():
    spec = spec_from(SMALLEST)
    assert spec.model.kv_heads == 4
    assert spec.model.head_dim == 16
    assert spec.model.hidden == 192
    assert spec.vocab_size == 4096
    assert {p.field for p in problems("{}")} == {"steps", "model"}
    assert {p.field for p in problems("steps: 1\nmodel: {}")} == {"model.layers", "model.width", "model.heads"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_examples_are_valid_and_survive_being_saved(path):
    spec = load_spec(path)
    again = parse_spec(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False))
    assert again == spec
    assert again.sha256() == spec.sha256()
    assert path.read_text().startswith("# ")


def test_examples_reach_from_tiny_to_8b():
    from protomodels_cli.cost.units import unit_parameters

    dense = {}
    for path in CONFIGS:
        data = {**yaml.safe_load(path.read_text()), "subspace": {"form": "dense"}, "optimizer": {}}
        dense[path.name] = sum(unit_parameters(parse_spec(yaml.safe_dump(data))).values())
    assert dense["tiny.yaml"] < 3e6
    assert dense["llama-8b.yaml"] == 8_030_261_248  # LLaMA-3 8B's own count


BAD = """\
name: my run
steps: 0
stages: 5
model:
  layers: 4
  width: 60
  heads: 7
  contxt: 3
  dropout: 0.1
subspace:
  k: 128
  form: constrained
optimizer:
  name: adamw
  lr: "fast"
batch: {size: 10, microbatches: 4}
snapshots:
  interval: 1.5
stage: 3
"""


def test_all_problems_at_once_with_line_value_rule_and_fix():
    found = {p.field: p for p in problems(BAD)}
    lines = {
        "name": 1, "steps": 2, "stages": 3, "model.heads": 7, "model.contxt": 8, "model.dropout": 9, "subspace.k": 11,
        "optimizer.name": 14, "optimizer.lr": 15, "batch.microbatches": 16, "snapshots.interval": 18, "stage": 19,
    }  # fmt: skip
    assert {f: p.line for f, p in found.items()} == lines
    assert all(p.file == "run.yaml" and p.rule and p.fix for p in found.values())
    assert "'context'" in found["model.contxt"].fix
    assert "'stages'" in found["stage"].fix
    assert found["subspace.k"].value == 128
    assert "60" in found["subspace.k"].rule
    assert str(found["subspace.k"]).startswith("run.yaml:11: subspace.k = 128\n")


@pytest.mark.parametrize(
    ("changes", "field", "kind", "named"),
    [
        ({"subspace": {"k": 65}}, "subspace.k", "k_fits_width", "64"),
        ({"model": {"layers": 4, "width": 64, "heads": 6}}, "model.heads", "heads_divide_width", "64"),
        ({"model": {"layers": 4, "width": 63, "heads": 7}}, "model.heads", "heads_divide_width", "9"),
        (
            {"model": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 3}},
            "model.kv_heads",
            "kv_heads_divide_heads",
            "4",
        ),
        ({"stages": 5}, "stages", "every_stage_has_layers", "4"),
        ({"stages": [1, 2]}, "stages", "every_stage_has_layers", "3"),
        ({"stages": 4, "subspace": {"form": "reparam", "unconstrained_layers": 2}}, UNCONSTRAINED, IN_LAST_STAGE, "1"),
        ({"subspace": {"form": "reparam", "unconstrained_layers": 5}}, UNCONSTRAINED, IN_LAST_STAGE, "4"),
        (
            {"stages": "auto", "subspace": {"form": "reparam", "unconstrained_layers": 5}},
            UNCONSTRAINED,
            IN_LAST_STAGE,
            "4",
        ),
        ({"batch": {"size": 10, "microbatches": 4}}, "batch.microbatches", "microbatches_divide_batch", "10"),
        (
            {"subspace": {"form": "constrained"}, "optimizer": {"name": "adamw"}},
            "optimizer.name",
            "optimizer_fits_form",
            "AdamW",
        ),
        ({"optimizer": {"name": "row_adamw"}}, "optimizer.name", "optimizer_fits_form", "two_stream"),
        (
            {"compute": {"dtype": "float64"}, "optimizer": {"moments": "bf16"}},
            "optimizer.moments",
            "moments_fit_dtype",
            "float64",
        ),
        (
            {"subspace": {"form": "dense", "update": {"interval": 10}}},
            "subspace.update.interval",
            "update_fits",
            "dense",
        ),
        (
            {"subspace": {"form": "reparam", "update": {"interval": 5, "window": 6}}},
            "subspace.update.window",
            "update_fits",
            "5",
        ),
        (
            {"subspace": {"form": "reparam", "update": {"interval": 5, "window": 1, "delay": 5}}},
            "subspace.update.delay",
            "update_fits",
            "5",
        ),
        ({"optimizer": {"schedule": {"warmup_steps": 11}}}, f"{SCHEDULE}.warmup_steps", "schedule_fits_steps", "10"),
        (
            {"optimizer": {"schedule": {"warmup_steps": 5, "decay_steps": 6}}},
            f"{SCHEDULE}.decay_steps",
            "schedule_fits_steps",
            "10",
        ),
        ({"wire": {"forward": "topk:mask"}}, "wire.forward", "codecs_fit_their_legs", "topk:mask"),
        ({"wire": {"backward": "topk:mask"}}, "wire.backward", "codecs_fit_their_legs", "int8"),
        ({"wire": {"backward": "int8+aqsgd"}}, "wire.backward", "codecs_fit_their_legs", "AQ-SGD"),
        (
            {"wire": {"forward": "topk:0.1+aqsgd", "backward": "topk:mask"}},
            "wire.backward",
            "codecs_fit_their_legs",
            "AQ-SGD",
        ),
        (
            {"wire": {"forward": "int8+aqsgd"}, "data": {"sampling": "random"}},
            "wire.forward",
            "codecs_fit_their_legs",
            "random",
        ),
        ({"wire": {"forward": "int9"}}, "wire.forward", "codec", "'int9'"),
        ({"wire": {"link": {"bandwidth": "80 miles"}}}, "wire.link.bandwidth", "quantity", "80mbit"),
        ({"wire": {"link": {"bandwidth": "0mbit"}}}, "wire.link.bandwidth", "quantity", "0"),
        ({"wire": {"link": {"latency": "25"}}}, "wire.link.latency", "quantity", "25ms"),
        ({"wire": {"link": {"loss": 1.0}}}, "wire.link.loss", "less_than", "1"),
        ({"snapshots": {"copy_to": "ftp://me:secret@store/runs"}}, "snapshots.copy_to", "store_has_no_password", "URL"),
        ({"data": {"source": "text"}}, "data.files", "files_match_source", "text"),
        ({"data": {"files": ["x"]}}, "data.files", "files_match_source", "builtin"),
        ({"data": {"source": "hf"}}, "data.dataset", "dataset_matches_source", "hf"),
        ({"data": {"revision": "x"}}, "data.revision", "dataset_matches_source", "hf"),
        ({"data": {"source": "bin", "files": ["x"]}}, "tokenizer.kind", "tokenizer_matches_source", "bin"),
        ({"tokenizer": {"kind": "none", "vocab_size": 9}}, "tokenizer.kind", "tokenizer_matches_source", "none"),
        (
            {"data": {"source": "bin", "files": ["x"]}, "tokenizer": {"kind": "none"}},
            "tokenizer.vocab_size",
            "tokenizer_matches_source",
            "none",
        ),
        ({"tokenizer": {"kind": "bytes", "vocab_size": 300}}, VOCABULARY, "tokenizer_matches_source", "256"),
        ({"tokenizer": {"kind": "bpe", "vocab_size": 100}}, VOCABULARY, "tokenizer_matches_source", "256"),
        ({"tokenizer": {"kind": "file"}}, "tokenizer.file", "tokenizer_matches_source", "tokenizer.kind"),
        (
            {"tokenizer": {"kind": "file", "file": "no.json"}},
            "tokenizer.file",
            "tokenizer_file",
            os.strerror(errno.ENOENT),
        ),
    ],
)
def test_contradictions(changes, field, kind, named):
    with pytest.raises(SpecError) as caught:
        spec_from({**SMALLEST, **changes})
    [problem] = caught.value.problems
    assert (problem.field, problem.kind) == (field, kind)
    assert named in problem.rule


def test_a_contradiction_next_to_a_malformed_field_is_still_found():
    found = problems("steps: x\nmodel: {layers: 4, width: 64, heads: 4}\nsubspace: {k: 100}")
    assert [p.field for p in found] == ["steps", "subspace.k"]


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_fields_that_would_break_the_subspace_are_refused_with_the_reason(field):
    with pytest.raises(SpecError) as caught:
        spec_from(with_field(field, True))
    [problem] = caught.value.problems
    assert (problem.field, problem.kind, problem.rule) == (field, "refused", REFUSED[field])
    assert field not in all_fields()


def test_yaml_numbers_and_words():
    base = "steps: 1_000\nmodel: {layers: 4, width: 64, heads: 4}\n"
    assert parse_spec(base + "optimizer: {lr: 1e-4}").optimizer.lr == 1e-4
    assert parse_spec(base + "optimizer: {lr: 3.5E-4}").optimizer.lr == 3.5e-4
    assert parse_spec(base).steps == 1000
    for value in ("off", False):
        [p] = problems(base + f"optimizer: {{schedule: {{decay: {str(value).lower()}}}}}")
        assert (p.kind, p.value) == ("word", value)
        assert all(word in p.rule for word in ("constant", "linear", "cosine"))
    base = "steps: 1000\nmodel: {layers: 4, width: 64, heads: 4, qk_norm: %s}"
    assert parse_spec(base % "true").model.qk_norm is True
    assert [p.kind for p in problems(base % "off")] == ["bool_type"]
    assert [p.kind for p in problems(base % "'true'")] == ["bool_type"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a: [1", "yaml"),
        ("- 1", "mapping"),
        ("steps: 3\nsteps: 4", "twice"),
        ("a: &a [*a, *a]", "too_large"),
        ("[" * 5000, "too_large"),
        ("a: &a {b: [1,1,1,1,1,1,1,1,1]}\nc: *a", "unknown"),
        ("\x00", "yaml"),
        ("5", "mapping"),
    ],
)
def test_broken_yaml_is_a_spec_error(text, kind):
    assert kind in {p.kind for p in problems(text)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer.lr", "._"),
        ("steps", "9" * 5000),
        ("compute.threads", 10**10),
        ("compute.loss_chunk", 10**10),
        ("optimizer.clip", ".inf"),
    ],
)
def test_values_that_would_fail_later_are_refused_now(field, value):
    section, _, name = field.rpartition(".")
    text = f"{section}: {{{name}: {value}}}" if section else f"{name}: {value}"
    base = "model: {layers: 2, width: 32, heads: 2}\n" + ("" if field == "steps" else "steps: 1\n")
    assert [p.field for p in problems(base + text)] == [field]


def test_one_mistake_does_not_hide_another():
    base = "steps: 10\nmodel: {layers: 4, width: 64, heads: 4}\n"
    assert {p.field for p in problems(base + "batch: {size: 10, microbatches: 4, sise: 1}")} == {
        "batch.sise",
        "batch.microbatches",
    }
    assert {p.field for p in problems(base + "steps: 9\nstages: 7")} == {"steps", "stages"}
    found = problems(base + "stages: 7\ntokenizer: {kind: file, file: absent.json}")
    assert {p.field for p in found} == {"stages", "tokenizer.file"}


@pytest.mark.parametrize(
    ("section", "field", "huge", "most"),
    [
        ("", "steps", 10**38, 10**9),
        ("model", "width", 10**30, 1 << 24),
        ("model", "layers", 1 << 17, 1 << 16),
        ("batch", "size", 10**39 + 1, 1 << 24),
        ("tokenizer", "vocab_size", (1 << 24) + 1, 1 << 24),
        ("data", "max_bytes", 1 << 63, 1 << 62),
        ("eval", "interval", 10**10, 10**9),
    ],
)
def test_numbers_beyond_any_run_are_refused(section, field, huge, most):
    data = {"steps": 1, "model": {"layers": 2, "width": 32, "heads": 2}}
    (data.setdefault(section, {}) if section else data)[field] = huge
    [p] = problems(yaml.safe_dump(data))
    assert p.field == f"{section}.{field}".lstrip(".")
    assert p.kind == "less_than_equal"
    assert str(most) in p.rule
    assert str(most) in p.fix


def test_warm_up_may_fill_the_run():
    spec = spec_from({**SMALLEST, "optimizer": {"schedule": {"warmup_steps": 10}}})
    assert parse_spec(yaml.safe_dump(spec.model_dump(mode="json"))) == spec


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_no_text_makes_a_traceback(text):
    for candidate in (text, f"steps: {text}", f"model: {{layers: {text}}}"):
        try:
            parse_spec(candidate)
        except SpecError as e:
            str(e)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(field=st.sampled_from(all_fields()), value=junk)
@settings(max_examples=300)
def test_any_value_in_any_field_is_taken_or_explained(field, value):
    try:
        spec = spec_from(with_field(field, value))
    except SpecError as e:
        problems = e.problems
        spec = None
    assert isinstance(spec, RunSpec) or all(p.rule and p.fix for p in problems)


@given(layers=st.integers(1, 200), stages=st.integers(1, 50))
def test_even_cut(layers, stages):
    cut = even_cut(layers, stages)
    assert sum(cut) == layers
    assert len(cut) == stages
    assert max(cut) - min(cut) <= 1
    assert cut == sorted(cut, reverse=True)


def test_vocabulary_is_read_from_a_tokenizer_file(tmp_path: Path):
    from protomodels_cli.data.tokenizers import train_bpe

    train_bpe(["some text to learn from, some more text"] * 9, 270).save(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "steps: 1\nmodel: {layers: 2, width: 32, heads: 2}\ntokenizer: {kind: file, file: tokenizer.json}"
    )
    assert 257 < load_spec(tmp_path / "run.yaml").vocab_size <= 270


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("copies", "/home/me/copies"),
        ("/mnt/copies", "/mnt/copies"),
        ("s3://bucket/runs", "s3://bucket/runs"),
        (None, None),
    ],
)
def test_a_store_that_is_a_folder_is_relative_to_the_spec(written, kept):
    spec = with_absolute_paths(spec_from(with_field("snapshots.copy_to", written)), Path("/home/me"))
    assert spec.snapshots.copy_to == kept


def test_a_field_of_before_is_refused_with_those_that_took_its_place():
    with pytest.raises(SpecError) as caught:
        spec_from({**SMALLEST, "limits": {"place_seconds": 60.0}})
    [problem] = caught.value.problems
    assert (problem.field, problem.kind) == ("limits.place_seconds", "replaced")
    assert all(f"limits.{what}_seconds" in problem.fix for what in ("build", "reuse", "link", "device"))
