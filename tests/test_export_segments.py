"""Exports of models in segments, which transformers loads with the one file that lies beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import starting_from
from exporting import logits_of, save_reference, save_run
from safetensors.torch import load_file
from typer.testing import CliRunner

from protomodels_cli.cli.main import app
from protomodels_cli.coordinator.history import History, Mark
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.snapshots.first import FirstSnapshot
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.export import write
from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import Exported, export
from protomodels_cli.inference.folder import FolderError, architecture_in
from protomodels_cli.inference.generate import Sampling, generate
from protomodels_cli.inference.load import load
from protomodels_cli.inference.model import Cache
from protomodels_cli.model.plain import multiplied_out

IDS = torch.arange(32).view(2, 16) * 7
KINDS = {
    "two streams": {"form": "two_stream", "anchor": "fixed"},
    "two streams, anchors": {"form": "two_stream", "anchor": "segment"},
    "reparam, anchors": {"form": "reparam", "anchor": "segment"},
    "dense, anchors": {"form": "dense", "anchor": "segment"},
    "two streams, narrow anchors": {"form": "two_stream", "anchor": "segment", "anchor_rank": 5},
}
UNEVEN = {"segments": [1, 2, 1]}
FAST = {"lr": 0.02}  # so that a few steps move every weight away from where it started
GREEDY = Sampling(tokens=8, temperature=0.0, top_p=1.0, seed=0)


def exported(run: Path, out: Path, **options: Any) -> Exported:
    with open_source(run) as source:
        return export(source, out, **options)


def loaded(out: Path, **options: Any) -> Any:
    """By transformers, with nothing missing and nothing left over."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("subspace", KINDS.values(), ids=KINDS)
def test_logits_are_the_references(tmp_path, subspace, qk_norm):
    """Segments of uneven lengths, several of them in a stage; by transformers and by us, of the run and its export."""
    shape = UNEVEN | {"qk_norm": qk_norm, "rope_theta": 500.0, "head_dim": 10}
    r = save_reference(tmp_path / "run", 3, subspace=subspace, model=shape, stages=[3, 1], optimizer=FAST)
    done = exported(tmp_path / "run", tmp_path / "out")
    assert done.weights_sha256 == r.weights_sha256()
    model = loaded(tmp_path / "out")
    assert type(model).__name__ == "PmtrainForCausalLM"
    assert done.parameters == sum(p.numel() for p in model.parameters())
    right = logits_of(r, IDS)
    with torch.no_grad():
        assert (model(IDS).logits - right).abs().max() <= 1e-4
        assert (model(IDS, use_cache=False).logits - right).abs().max() <= 1e-4
    for place in ("run", "out"):
        ours = load(str(tmp_path / place)).decoder
        assert ours.parameters == done.parameters
        assert (ours.head(ours.stream(IDS)) - right).abs().max() <= 1e-4
        cache = Cache(ours, 2, 16)
        parts = [ours.head(ours.stream(part, cache)) for part in IDS.split([7, 1, 8], dim=1)]
        assert (torch.cat(parts, dim=1) - right).abs().max() <= 1e-4


@pytest.fixture(scope="module", params=["two streams, anchors", "dense, anchors"])
def out(request, tmp_path_factory) -> Path:
    """An export in two shards."""
    folder = tmp_path_factory.mktemp("exported")
    sections = {"subspace": KINDS[request.param], "model": UNEVEN | {"context": 32}, "stages": [3, 1]}
    save_run(folder / "run", 2, optimizer=FAST, **sections)
    assert exported(folder / "run", folder / "out").files == 2
    return folder / "out"


def test_greedy_text_is_that_of_transformers(out):
    """With its cache, without one, and in a batch with padding on the left."""
    model, ours = loaded(out), load(str(out))
    prompts = [b"The state of", b"We"]
    texts = [list(generate(ours, list(prompt), GREEDY)) for prompt in prompts]
    assert len(texts[0]) == GREEDY.tokens
    asked = {"do_sample": False, "max_new_tokens": GREEDY.tokens}
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([list(prompt)])
        for use_cache in (True, False):
            assert model.generate(ids, use_cache=use_cache, **asked)[0, len(prompt) :].tolist() == text
    length = len(prompts[0])
    padded = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    both = model.generate(padded, attention_mask=(padded != 0).long(), **asked)
    assert both[:, length:].tolist() == texts
    fixed = model.generate(padded, attention_mask=(padded != 0).long(), cache_implementation="static", **asked)
    assert fixed[:, length:].tolist() == texts


def test_beams_that_change_places_take_their_tokens_along(out):
    model, prompt = loaded(out), torch.tensor([list(b"The state of"), list(b"Nor shall we")])
    asked = {"do_sample": False, "max_new_tokens": 12, "num_beams": 4}
    found = [model.generate(prompt, use_cache=use_cache, **asked).tolist() for use_cache in (True, False)]
    assert found[0] == found[1]


def test_a_cache_that_rounds_keys_does_not_round_tokens(out):
    from transformers.cache_utils import Cache, QuantizedLayer

    class Rounds(QuantizedLayer):
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return (tensor / 4).round() * 4

        def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    model, cache = loaded(out), Cache(layers=[])
    cache.layers = [Rounds(residual_length=1) for _ in range(model.config.num_hidden_layers)]
    for past in range(4):
        seen = model.seen(cache, IDS[:, past : past + 1], past, cache.update)
    assert seen.tolist() == IDS[:, :4].tolist()


def test_documents_in_one_window_do_not_see_each_other(out):
    model, lengths = loaded(out), (7, 9)
    ids = IDS[:1, : sum(lengths)]
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None, None]
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        both = model(ids, attention_mask=mask, position_ids=places).logits
        alone = [model(part).logits for part in ids.split(lengths, dim=1)]
    assert torch.allclose(both, torch.cat(alone, 1), atol=1e-5)


def test_the_loss_of_labels(out):
    model = loaded(out)
    labels = IDS.clone()
    labels[0, :5] = -100
    with torch.no_grad():
        found = model(IDS, labels=labels)
    right = F.cross_entropy(found.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert float(found.loss) == pytest.approx(float(right), rel=1e-6)


def test_saved_again_it_is_the_same_model(out, tmp_path):
    import transformers

    model = loaded(out)
    model.save_pretrained(tmp_path / "again", max_shard_size="100KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 2
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "again")(IDS).logits, model(IDS).logits)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert (config.model_type, config.segments) == ("pmtrain", UNEVEN["segments"])
    assert architecture_in(tmp_path / "again") == architecture_in(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert tokenizer("The").input_ids == list(b"The")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_of_numbers(tmp_path, dtype):
    """In the files, and in what is computed."""
    sections = {"subspace": KINDS["two streams, anchors"], "model": UNEVEN, "stages": [1, 2, 1]}
    r = save_reference(tmp_path / "run", 2, optimizer=FAST, **sections)
    assert exported(tmp_path / "run", tmp_path / "out", dtype=dtype, most_bytes=20_000).files > 3
    model, right = loaded(tmp_path / "out", dtype="auto"), multiplied_out(r.stages)
    assert model.state_dict().keys() == right.keys()
    for name, weight in right.items():
        assert torch.equal(model.state_dict()[name], weight.to(getattr(torch, dtype))), name
    with torch.no_grad():
        found, right = model(IDS).logits.float(), logits_of(r, IDS)
    assert torch.linalg.norm(found - right) < 0.03 * torch.linalg.norm(right)


def test_the_file_beside_the_weights_stands_alone(out):
    content = (out / "modeling_pmtrain.py").read_text()
    assert content == Path(write.__file__).with_name("modeling_pmtrain.py").read_text()
    assert "protomodels_cli" not in content


@pytest.mark.parametrize("subspace", KINDS.values(), ids=KINDS)
def test_a_single_segment_is_a_plain_llama(tmp_path, subspace):
    """No stream ends, and one anchor is a part of the embedding."""
    import transformers

    r = save_reference(tmp_path / "run", 3, subspace=subspace, stages=1, optimizer=FAST)
    exported(tmp_path / "run", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is transformers.LlamaForCausalLM
    with torch.no_grad():
        assert (model(IDS).logits - logits_of(r, IDS)).abs().max() <= 1e-4


def test_one_table_for_all_segments_or_one_for_each(tmp_path):
    for name, tables in (("two streams", [0]), ("two streams, anchors", [0, 1, 3])):
        save_reference(tmp_path / name, 1, subspace=KINDS[name], model=UNEVEN, stages=[1, 2, 1])
        exported(tmp_path / name, tmp_path / f"{name}.out")
        shapes = {n: w.shape for f in (tmp_path / f"{name}.out").glob("*.safetensors") for n, w in load_file(f).items()}
        assert {n for n in shapes if "anchor.w" in n} == {f"model.layers.{i}.anchor.weight" for i in tables}
        taps = tables if len(tables) > 1 else []
        assert {n for n in shapes if "taps" in n} == {f"model.layers.{i}.anchor_taps.weight" for i in taps}
        assert not any("early" in n for n in shapes)
        written = [shapes[f"model.layers.{i}.mlp.down_proj.weight"][0] for i in range(4)]
        assert written == [6, 6 + 32, 6, 32]  # the last matrix of a segment writes what goes on, and nothing else
        assert shapes["model.embed_tokens.weight"] == (256, 6)
        assert f"{len(tables)} × 256 × 32" in (tmp_path / f"{name}.out" / "README.md").read_text()


def test_a_run_with_anchors_may_begin_with_a_plain_checkpoint(tmp_path):
    """The first snapshot has them all, without a change yet."""
    r = save_reference(tmp_path / "run", 1, subspace={"form": "dense"})
    exported(tmp_path / "run", tmp_path / "out")
    spec = starting_from(
        tmp_path / "out", subspace=KINDS["dense, anchors"], model={"segments": [1, 2, 1]}, stages=[1, 3]
    )
    opened = open_run_dir(tmp_path / "again", spec, Path())
    snapshots = Snapshots(tmp_path / "again" / "snapshots", opened.identity, (0, ""), tmp_path / "again" / "basis")
    cut = FirstSnapshot(spec, tmp_path / "out", snapshots).cut((1, 3))
    snapshots.settle(lambda: History((Mark(0, 0, 0, "", parts=cut.parts, layers=(1, 3)),)))
    ours = load(str(tmp_path / "again")).decoder
    assert [layer.anchor is not None for layer in ours._layers] == [True, True, False, True]
    assert (ours.head(ours.stream(IDS)) - logits_of(r, IDS)).abs().max() <= 1e-4


# Generating and evaluating


@pytest.mark.parametrize("subspace", KINDS.values(), ids=KINDS)
def test_the_loss_is_the_references_on_its_own_held_out_windows(tmp_path, subspace):
    sections = {"subspace": subspace, "model": UNEVEN, "stages": [1, 2, 1], "wire": {"forward": "int4"}}
    r = save_run(tmp_path / "run", 2, optimizer=FAST, **sections)
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.exception
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["loss"] == pytest.approx(r.evaluate(codecs=False), abs=1e-5)


def test_a_run_directory_and_its_export_write_the_same_text_and_have_the_same_loss(out, tmp_path):
    (tmp_path / "a.txt").write_text("The cat sat on the mat.\n" * 20)
    texts, losses = set(), []
    for place in (out, out.with_name("run")):
        said = CliRunner().invoke(app, ["generate", str(place), "--prompt", "The", "--seed", "1", "--tokens", "20"])
        assert said.exit_code == 0, said.exception
        texts.add(said.stdout)
        command = ["eval", str(place), "--data", str(tmp_path / "a.txt"), "--json", str(tmp_path / "found.json")]
        assert CliRunner().invoke(app, command).exit_code == 0
        losses.append(json.loads((tmp_path / "found.json").read_text())["loss"])
    assert len(texts) == 1
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segments", None),
        ("segments", [1, 2]),
        ("segments", [0, 4]),
        ("segments", 4),
        ("num_anchors", 2),
        ("num_anchors", None),
        ("carried_width", 0),
        ("carried_width", "all"),
    ],
)
def test_segments_that_cannot_be_are_refused_by_their_field(out, tmp_path, field, value):
    config = json.loads((out / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(FolderError) as refused:
        architecture_in(tmp_path)
    assert f" {field} = " in str(refused.value)
    assert (refused.value.kind, refused.value.exit_code) == ("unsupported", 3)
