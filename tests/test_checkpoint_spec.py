"""`model.init` in a spec: what is taken from a checkpoint's config, and what is refused, with the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import SHAPE

from protomodels_cli.cli.run_plan import candidates
from protomodels_cli.errors import EXIT_SPEC
from protomodels_cli.spec import RunSpec, SpecError, parse_spec, spec_from
from protomodels_cli.spec.load import with_absolute_paths
from protomodels_cli.spec.vocabulary import VocabularyError, ids_in

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    **SHAPE,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
SPEC: dict[str, Any] = {
    "steps": 3,
    "model": {"init": "start"},
    "subspace": {"form": "dense"},
    "tokenizer": {"kind": "bytes"},
}


def changed(config: dict[str, Any]) -> dict[str, Any]:
    """Llama's with these fields; None: without them."""
    return {name: value for name, value in {**LLAMA, **config}.items() if value is not None}


def parsed(folder: Path, config: dict[str, Any] | None = None, **sections: Any) -> RunSpec:
    """From a file in this folder, beside a checkpoint with this config."""
    if config is not None:
        (folder / "start").mkdir(exist_ok=True)
        (folder / "start" / "config.json").write_text(json.dumps(config))
    data = {**SPEC, **sections}
    return parse_spec(yaml.safe_dump({k: v for k, v in data.items() if v is not None}), "run.yaml", folder)


def vocabulary(path: Path, ids: int) -> None:
    path.write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(ids)}}}))


def shape(spec: RunSpec) -> tuple[Any, ...]:
    m = spec.model
    sizes = m.layers, m.width, m.heads, m.kv_heads, m.head_dim, m.hidden
    return *sizes, m.qk_norm, m.rope_theta, m.norm_eps, spec.vocab_size


PLAIN = {"rope_type": "default", "rope_theta": 3e5}


@pytest.mark.parametrize(
    ("config", "right"),
    [
        ({}, (3, 32, 4, 2, 8, 48, False, 500000.0, 1e-6, 256)),
        ({"head_dim": 6}, (3, 32, 4, 2, 6, 48, False, 500000.0, 1e-6, 256)),
        ({"num_key_value_heads": None, "rope_theta": None}, (3, 32, 4, 4, 8, 48, False, 10000.0, 1e-6, 256)),
        ({"rope_theta": None, "rope_parameters": PLAIN}, (3, 32, 4, 2, 8, 48, False, 3e5, 1e-6, 256)),
        ({"model_type": "qwen3"}, (3, 32, 4, 2, 128, 48, True, 500000.0, 1e-6, 256)),
    ],
)
def test_the_shape_is_the_configs(tmp_path, config, right):
    assert shape(parsed(tmp_path, changed(config))) == right


def test_what_is_absent_is_what_transformers_takes(tmp_path):
    import transformers

    for kind, name in ((transformers.LlamaConfig, "llama"), (transformers.Qwen3Config, "qwen3")):
        left_out = {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling"}
        config = {n: v for n, v in LLAMA.items() if n not in left_out}
        if name == "qwen3":
            config["num_attention_heads"] = 64  # whose key/value heads its default divides
        theirs = kind(**{n: v for n, v in config.items() if n != "model_type"})
        ours = parsed(tmp_path, config | {"model_type": name}).model
        assert (ours.kv_heads, ours.norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
        assert ours.head_dim == theirs.head_dim
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_fields_that_agree_may_be_given(tmp_path):
    model = {"init": "start", "layers": 3, "width": 32, "kv_heads": 2, "norm_eps": 1e-6, "qk_norm": False}
    assert parsed(tmp_path, LLAMA, model=model) == parsed(tmp_path, LLAMA)


def test_a_plan_proposes_forms_that_can_start_from_it(tmp_path):
    assert {c.subspace.form for c in candidates(parsed(tmp_path, LLAMA, stages=2))} == {"dense"}


def test_a_resolved_spec_needs_no_checkpoint(tmp_path):
    spec = parsed(tmp_path, LLAMA)
    (tmp_path / "start" / "config.json").unlink()
    assert spec_from(spec.model_dump(mode="json")) == spec
    with pytest.raises(SpecError):
        parsed(tmp_path)


def test_its_path_is_relative_to_the_spec_file(tmp_path):
    spec = with_absolute_paths(parsed(tmp_path, LLAMA), tmp_path)
    assert spec.model.init == str(tmp_path / "start")


def test_the_checkpoints_tokenizer_is_used_where_none_is_given(tmp_path):
    (tmp_path / "start").mkdir()
    vocabulary(tmp_path / "start" / "tokenizer.json", 250)
    tokenizer = parsed(tmp_path, LLAMA, tokenizer=None).tokenizer
    assert (tokenizer.kind, tokenizer.file, tokenizer.vocab_size) == ("file", "start/tokenizer.json", 256)


def refused(folder: Path, config: dict[str, Any] | None, **sections: Any) -> list[tuple[str, Any, str]]:
    with pytest.raises(SpecError) as caught:
        parsed(folder, config, **sections)
    assert caught.value.exit_code == EXIT_SPEC
    assert all(p.rule and p.fix for p in caught.value.problems)
    return [(p.field, p.value, p.kind) for p in caught.value.problems]


UNLIKE: list[tuple[str, Any]] = [
    ("model_type", "gpt2"),
    ("model_type", "mistral"),
    ("model_type", "pmtrain"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("hidden_act", "gelu"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
    ("rope_parameters", {"full_attention": PLAIN, "sliding_attention": PLAIN}),
    ("partial_rotary_factor", 0.5),
    ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("quantization_config", {"quant_method": "fp8"}),
    ("hidden_size", "wide"),
    ("num_hidden_layers", 0),
    ("rope_theta", -1.0),
    ("rope_theta", 10**400),
    ("model_type", ["llama"]),
    ("layer_types", 5),
    ("layer_types", [["full_attention"]]),
]


@pytest.mark.parametrize(("name", "value"), UNLIKE, ids=str)
def test_what_cannot_be_represented_is_refused_with_the_configs_field_and_value(tmp_path, name, value):
    assert refused(tmp_path, changed({name: value})) == [("model.init", "start", "init")]
    with pytest.raises(SpecError) as caught:
        parsed(tmp_path)
    assert f"{name} = {json.dumps(value)}" in caught.value.problems[0].rule


@pytest.mark.parametrize("other", ["rope_scaling", "rope_parameters"])
def test_positions_that_either_field_scales_are_refused(tmp_path, other):
    """Readers differ in which of the two counts."""
    both = {"rope_scaling": PLAIN, "rope_parameters": PLAIN, "partial_rotary_factor": None}
    assert parsed(tmp_path, changed(both)).model.rope_theta == PLAIN["rope_theta"]
    scaled = {**both, other: {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5}}
    assert refused(tmp_path, changed(scaled)) == [("model.init", "start", "init")]


def test_a_tokenizers_file_of_strange_json_is_refused_as_one(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1e999}}}')
    with pytest.raises(VocabularyError):
        ids_in(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(VocabularyError):
        ids_in(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "model_type"])
def test_a_config_without_a_size_is_refused(tmp_path, name):
    assert refused(tmp_path, changed({name: None})) == [("model.init", "start", "init")]


def test_heads_that_do_not_divide_the_width_need_a_width_of_their_own(tmp_path):
    assert refused(tmp_path, changed({"hidden_size": 34})) == [("model.init", "start", "init")]


@pytest.mark.parametrize("content", [None, "", "[1]", "{", "\xff"], ids=["none", "empty", "list", "cut", "latin"])
def test_a_folder_without_a_readable_config_is_refused(tmp_path, content):
    (tmp_path / "start").mkdir()
    if content is not None:
        (tmp_path / "start" / "config.json").write_text(content, encoding="latin-1")
    assert refused(tmp_path, None) == [("model.init", "start", "init")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 4),
        ("width", 64),
        ("heads", 8),
        ("kv_heads", 4),
        ("head_dim", 16),
        ("hidden", 64),
        ("qk_norm", True),
        ("rope_theta", 10000.0),
        ("norm_eps", 1e-5),
    ],
)
def test_a_field_that_disagrees_is_refused_with_both_values(tmp_path, field, value):
    found = refused(tmp_path, LLAMA, model={"init": "start", field: value})
    assert found == [(f"model.{field}", value, "init_mismatch")]


@pytest.mark.parametrize(
    ("tokenizer", "config", "found"),
    [
        ({"kind": "bpe", "vocab_size": 300}, {}, ("tokenizer.vocab_size", "300", "init_mismatch")),
        ({"kind": "bytes"}, {"vocab_size": 1000}, ("tokenizer.kind", "bytes", "init_tokenizer")),
        ({"kind": "file", "file": "own.json"}, {"vocab_size": 99}, ("tokenizer.file", "own.json", "init_tokenizer")),
        (None, {}, ("tokenizer", "None", "init_tokenizer")),
        ({"kind": "file", "file": "no.json"}, {}, ("tokenizer.file", "no.json", "tokenizer_file")),
    ],
)
def test_a_tokenizer_with_other_ids_is_refused(tmp_path, tokenizer, config, found):
    vocabulary(tmp_path / "own.json", 100)
    [(field, value, kind)] = refused(tmp_path, changed(config), tokenizer=tokenizer)
    assert (field, str(value).replace(f"{tmp_path}/", ""), kind) == found


@pytest.mark.parametrize("form", ["reparam", "constrained"])
def test_forms_with_a_subspace_say_why_not(tmp_path, form):
    optimizer = {"name": "muon"}
    found = refused(tmp_path, LLAMA, subspace={"form": form, "k": 4}, optimizer=optimizer)
    assert found == [("subspace.form", form, "form_takes_a_checkpoint")]


def test_all_problems_are_found_at_once(tmp_path):
    found = refused(tmp_path, None, steps=0, subspace={"form": "reparam"})
    assert {field for field, _, _ in found} == {"steps", "model.init", "subspace.form"}
