"""A model at work, against transformers' own: logits, cache, greedy text, folders; and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import SIZES, make_model, make_tokenizer, save
from safetensors.torch import load_file, save_file

from protomodels_cli.errors import UserError
from protomodels_cli.huggingface.architecture import Architecture
from protomodels_cli.huggingface.files import INDEX, WEIGHTS, BadIndex, weight_files
from protomodels_cli.inference.folder import FolderError, architecture_in
from protomodels_cli.inference.generate import Sampling, generate, limit_threads
from protomodels_cli.inference.load import Loaded, load
from protomodels_cli.inference.model import Cache, Decoder

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("qwen3", {}),
    ("qwen3", {"num_key_value_heads": 1, "head_dim": 12}),
]
GREEDY = Sampling(tokens=30, temperature=0.0, top_p=1.0, seed=0)


def decoder_of(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load(str(save(model, folder)), "cpu", dtype).decoder


def described(folder: Path, config: dict[str, Any]) -> Architecture:
    (folder / "config.json").write_text(json.dumps(config))
    return architecture_in(folder)


def ids_of(rows: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SIZES["vocab_size"], (rows, tokens), generator=generator)


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_logits_are_those_of_transformers_with_and_without_a_cache(kind, config, tmp_path):
    theirs = make_model(kind, **config)
    ours, ids = decoder_of(theirs, tmp_path), ids_of(3, 40)
    with torch.no_grad():
        right = theirs(ids).logits
    assert right.abs().max() > 1, "weights that matter"
    assert (ours.head(ours.stream(ids)) - right).abs().max() <= 1e-5
    assert ours.parameters == sum(p.numel() for p in theirs.parameters())
    for cuts in ([1] * 40, [25, 15], [1, 38, 1], [40]):
        cache = Cache(ours, 3, 40)
        found = torch.cat([ours.head(ours.stream(part, cache)) for part in ids.split(cuts, dim=1)], dim=1)
        assert (found - right).abs().max() <= 1e-5, cuts


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bfloat16_it_is_as_near_to_the_truth_as_transformers(kind, tmp_path):
    theirs, ids = make_model(kind).bfloat16(), ids_of(4, 40)
    exact, ours = decoder_of(theirs, tmp_path), decoder_of(theirs, tmp_path, torch.bfloat16)
    right, found = (m.head(m.stream(ids)) for m in (exact, ours))
    with torch.no_grad():
        others = theirs(ids).logits.float()
    assert found.dtype == torch.float32
    assert torch.linalg.norm(found - right) < 1.1 * torch.linalg.norm(others - right) < 0.1 * torch.linalg.norm(right)


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_greedy_text_is_that_of_transformers(kind, config, tmp_path):
    theirs = make_model(kind, **config)
    loaded = load(str(save(theirs, tmp_path)))
    prompt = ids_of(1, 7)
    with torch.no_grad():
        right = theirs.generate(prompt, do_sample=False, max_new_tokens=GREEDY.tokens)[0, 7:].tolist()
    assert len(set(right)) > 3
    assert list(generate(loaded, prompt[0].tolist(), GREEDY)) == right
    [end] = {right[4]}
    ended = Loaded(loaded.decoder, None, (end,), (), None)
    assert list(generate(ended, prompt[0].tolist(), GREEDY)) == right[: right.index(end)]
    room = Sampling(tokens=1000, temperature=0.0, top_p=1.0, seed=0)
    assert len(list(generate(loaded, prompt[0].tolist(), room))) == SIZES["max_position_embeddings"] - 7


def test_the_same_seed_gives_the_same_text_and_another_another(tmp_path):
    loaded = load(str(save(make_model("llama"), tmp_path)))
    texts = [list(generate(loaded, [1, 2, 3], Sampling(40, 1.0, 0.9, seed))) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_loading_leaves_the_process_as_it_was_and_writing_takes_what_a_model_is_worth(tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        loaded = load(str(save(make_model("llama"), tmp_path)))
        assert torch.get_num_threads() == 2
        limit_threads(loaded.decoder)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_folder_may_have_many_files(tmp_path):
    theirs, ids = make_model("llama"), ids_of(2, 10)
    whole = load(str(save(theirs, tmp_path / "whole", make_tokenizer())))
    parts = load(str(save(theirs, tmp_path / "parts", max_shard_size="30KB")))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert torch.equal(*(m.decoder.head(m.decoder.stream(ids)) for m in (whole, parts)))
    assert whole.tokenizer is not None
    assert parts.tokenizer is None
    min((tmp_path / "parts").glob("*.safetensors")).unlink()
    with pytest.raises(UserError) as missing:
        load(str(tmp_path / "parts"))
    assert missing.value.kind == "checkpoint"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("use_sliding_window", True),
        ("quantization_config", {"bits": 4}),
        ("hidden_size", None),
        ("vocab_size", "many"),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("rms_norm_eps", -1),
        ("rope_theta", 0),
    ],
)
def test_what_cannot_be_represented_is_refused_by_its_field(field, value, tmp_path):
    plain = {"model_type": "llama", **SIZES}
    described(tmp_path, plain)
    with pytest.raises(FolderError) as refused:
        described(tmp_path, {**plain, field: value})
    assert f" {field} = " in str(refused.value)
    assert (refused.value.kind, refused.value.exit_code) == ("unsupported", 3)


def test_what_a_config_leaves_out_is_what_transformers_assumes(tmp_path):
    import transformers

    few = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    for kind, config in (("llama", transformers.LlamaConfig), ("qwen3", transformers.Qwen3Config)):
        whole = config(**few, num_attention_heads=4, num_key_value_heads=4).to_dict()
        heads = {"num_attention_heads": 4, "num_key_value_heads": None}
        assert described(tmp_path, {"model_type": kind, **few, **heads}) == described(tmp_path, whole)


def test_weights_that_do_not_belong_to_their_config(tmp_path):
    save(make_model("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(**changes: Any) -> tuple[str, str]:
        """The error's kind, and the tensor that it names."""
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError) as error:
            load(str(tmp_path))
        assert error.value.exit_code == 3
        [name] = re.findall(r"model\.\S+\.weight", str(error.value))
        return error.value.kind, name

    assert refused(num_hidden_layers=2) == ("checkpoint_tensor", "model.layers.2.input_layernorm.weight")
    assert refused(num_hidden_layers=4) == ("checkpoint_incomplete", "model.layers.3.input_layernorm.weight")
    assert refused(intermediate_size=40) == ("checkpoint_tensor", "model.layers.0.mlp.gate_proj.weight")
    assert refused(model_type="qwen3") == ("checkpoint_incomplete", "model.layers.0.self_attn.q_norm.weight")
    # Of which no machine has the memory: the files' headers are read before anything is made of it.
    assert refused(vocab_size=1 << 50) == ("checkpoint_tensor", "model.embed_tokens.weight")


@pytest.mark.parametrize(("dtype", "fits"), [("float16", True), ("bfloat16", True), ("float64", True), ("int8", False)])
def test_weights_are_floating_point_numbers(tmp_path, dtype, fits):
    save(make_model("llama"), tmp_path)
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    save_file(weights, tmp_path / WEIGHTS)
    if fits:
        norm = load(str(tmp_path)).decoder._norm
        assert torch.equal(norm, weights["model.norm.weight"].float())
        return
    with pytest.raises(UserError) as error:
        load(str(tmp_path))
    assert error.value.kind == "checkpoint_tensor"


@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        ("config.json", b"{", "json_damaged"),
        ("config.json", b"[]", "json_damaged"),
        ("model.safetensors", b"short", "checkpoint_damaged"),
        ("config.json", b"[" * 100_000, "json_damaged"),
        ("tokenizer.json", b"{}", "tokenizer_file"),
        ("tokenizer.json", b"{", "tokenizer_file"),
        ("tokenizer.json", b"\xff\xfe{", "json_damaged"),
        ("generation_config.json", b"\xff", "json_damaged"),
        ("model.safetensors", None, "checkpoint_no_weights"),
    ],
    ids=["cut", "list", "weights", "deep", "tokenizer", "no JSON", "no UTF-8", "generation", "none"],
)
def test_a_damaged_folder_is_one_error(file, content, kind, tmp_path):
    save(make_model("llama"), tmp_path)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError) as error:
        load(str(tmp_path))
    assert (error.value.kind, error.value.exit_code) == (kind, 3)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "/x"}}', "[" * 100_000])
def test_an_index_names_files_of_its_folder(tmp_path, index):
    (tmp_path / INDEX).write_text(index[:100_000])
    with pytest.raises(BadIndex):
        weight_files(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "1.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    (tmp_path / WEIGHTS).write_text("")  # saved again as one file: the old index is not believed
    assert weight_files(tmp_path) == [tmp_path / WEIGHTS]


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 10**9), ("max_position_embeddings", "many")])
def test_nothing_is_made_of_the_size_that_a_config_claims(tmp_path, field, value):
    config = json.loads((save(make_model("llama"), tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(FolderError) as error:
        load(str(tmp_path))
    assert error.value.kind == "unsupported"


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    from protomodels_cli.data.errors import DataError

    save(make_model("llama", vocab_size=200), tmp_path, make_tokenizer())
    with pytest.raises(DataError) as error:
        load(str(tmp_path))
    assert error.value.kind == "vocabulary"


def test_prompts_begin_as_the_tokenizers_own_template_says(tmp_path):
    tokenizer = make_tokenizer()
    loaded = load(str(save(make_model("llama"), tmp_path, tokenizer)))
    plain = tokenizer.encode(["the cat"])[0].tolist()
    assert loaded.prompt("the cat") == plain
    assert loaded.prompt("") == [tokenizer.end_id]
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    mark = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"id": "<|endoftext|>", "ids": [tokenizer.end_id], "tokens": ["<|endoftext|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [mark, text, mark],
        "pair": [mark, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": token},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load(str(tmp_path)).prompt("the cat") == [tokenizer.end_id, *plain]


def test_of_text_without_an_end_mark_an_empty_prompt_is_a_new_line(tmp_path: Path):
    content = json.loads(make_tokenizer()._text)
    content["added_tokens"] = []
    content["model"]["vocab"] = {t: i for t, i in content["model"]["vocab"].items() if t != "<|endoftext|>"}
    save(make_model("llama"), tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = load(str(tmp_path))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.prompt("")) == "\n"
