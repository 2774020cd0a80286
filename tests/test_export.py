"""An export against transformers' own classes, which load it without any code of ours."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
import yaml
from checkpoints import starting_from
from export_memory import a_spec, write_run
from exporting import logits_of, save_reference, save_run
from hypothesis import strategies as st
from safetensors.torch import load_file

from protomodels_cli.coordinator.history import History, Mark
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.snapshots.first import FirstSnapshot
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.data.tokenizers import Bytes, Json
from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_SPEC, UserError
from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import Exported, export
from protomodels_cli.huggingface.tokenizer import RunTokenizer, bytes_tokenizer
from protomodels_cli.model.plain import multiplied_out

MOVES = {"update": {"interval": 2, "window": 1, "delay": 1}}
IDS = torch.arange(32).view(2, 16) * 7


def exported(run: Path, out: Path, **options) -> Exported:
    with open_source(run) as source:
        return export(source, out, **options)


def loaded(out: Path):
    """By transformers, with nothing missing and nothing left over."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("form", "subspace"),
    [("dense", {}), ("reparam", {}), ("reparam", MOVES), ("constrained", {}), ("constrained", MOVES)],
    ids=["dense", "reparam", "reparam moves", "constrained", "constrained moves"],
)
def test_logits_are_the_references(tmp_path, form, subspace, qk_norm):
    shape = {"qk_norm": qk_norm, "rope_theta": 500.0, "head_dim": 10}
    r = save_reference(tmp_path / "run", 5, subspace={"form": form} | subspace, model=shape, stages=[1, 2, 1])
    assert r.basis is None or (r.basis.version > 0) == bool(subspace)
    done = exported(tmp_path / "run", tmp_path / "out")
    assert done.weights_sha256 == r.weights_sha256()
    model = loaded(tmp_path / "out")
    assert type(model).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    assert done.parameters == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        found = model(IDS).logits
    assert found.dtype == torch.float32
    assert (found - logits_of(r, IDS)).abs().max() <= 1e-4


def test_one_file_per_stage_and_more_for_a_large_one(tmp_path):
    r = save_run(tmp_path / "run", 1, stages=[3, 1])
    right = multiplied_out(r.stages)
    total = sum(w.nbytes for w in right.values())
    assert exported(tmp_path / "run", tmp_path / "out").files == 2
    assert exported(tmp_path / "run", tmp_path / "split", most_bytes=40_000).files > 2
    for out in (tmp_path / "out", tmp_path / "split"):
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == total
        files = {path.name: load_file(path) for path in out.glob("*.safetensors")}
        assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
        for name, weight in right.items():
            assert torch.equal(files[index["weight_map"][name]][name], weight), name
    sizes = [path.stat().st_size for path in (tmp_path / "split").glob("*.safetensors")]
    assert max(sizes) < 45_000
    save_run(tmp_path / "whole", 1, stages=1)
    exported(tmp_path / "whole", tmp_path / "one")
    assert [p.name for p in (tmp_path / "one").glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_of_numbers(tmp_path, dtype):
    r = save_reference(tmp_path / "run", 1)
    exported(tmp_path / "run", tmp_path / "out", dtype=dtype)
    model = loaded(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    for name, weight in multiplied_out(r.stages).items():
        assert torch.equal(model.state_dict()[name], weight.to(getattr(torch, dtype))), name


def test_a_float64_run_keeps_its_numbers(tmp_path):
    r = save_reference(tmp_path / "run", 1, compute={"dtype": "float64"})
    exported(tmp_path / "run", tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    exported(tmp_path / "run", tmp_path / "single", dtype="float32")
    weights = load_file(next((tmp_path / "single").glob("model-00001*")))
    right = multiplied_out(r.stages)
    assert all(torch.equal(w, right[name].float()) for name, w in weights.items())


def test_what_float16_cannot_hold_is_refused(tmp_path):
    r = save_reference(tmp_path / "run", 0)
    with torch.no_grad():
        r.stages[1].layers["1"].mlp.up.weight[3, 4] = 1e5
    from protomodels_cli.model.snapshot import write_snapshot

    write_snapshot(tmp_path / "run" / "snapshots", 1, r.trainers, r.carry, keep=1)
    with pytest.raises(UserError) as refused:
        exported(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert (refused.value.kind, refused.value.exit_code) == ("overflow", EXIT_SPEC)
    assert "model.layers.1.mlp.up_proj.weight" in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    exported(tmp_path / "run", tmp_path / "out", dtype="bfloat16")


# Tokenizers

SAMPLES = ("The cat sat.\n", "  two  spaces\t", "naïve Ā Ġ “quotes” 𝄞 日本", "a\0b", "", "don't <|endoftext|> stop")


def ids_by_transformers(out: Path, text: str) -> list[int]:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(out)(text).input_ids


def test_the_tokenizer_of_bytes(tmp_path):
    save_reference(tmp_path / "run", 1)
    exported(tmp_path / "run", tmp_path / "out")
    for text in SAMPLES:
        assert ids_by_transformers(tmp_path / "out", text) == list(text.encode()), text
    model = loaded(tmp_path / "out")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == Bytes.end_id == 0


@hypothesis.given(st.text())
def test_bytes_as_byte_pairs_without_pairs(text):
    tokenizer = Json(bytes_tokenizer())
    [ids] = tokenizer.encode([text])
    assert ids.tolist() == list(text.encode("utf-8"))
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.vocab_size == 256


def test_the_tokenizer_that_was_trained(tmp_path):
    import transformers

    r = save_run(tmp_path / "run", 1, tokenizer={"kind": "bpe", "vocab_size": 300})
    exported(tmp_path / "run", tmp_path / "out")
    ours = r.corpus.tokenizer()
    for text in SAMPLES:
        assert ids_by_transformers(tmp_path / "out", text) == ours.encode([text])[0].tolist(), text
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == ours.end_id
    assert theirs.model_max_length == r.spec.model.context
    assert loaded(tmp_path / "out").config.eos_token_id == ours.end_id


def test_marks_that_a_tokenizer_would_add_are_left_out(tmp_path):
    """The model has never seen them: a run's data are the ids of the text alone."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    inner = tokenizers.Tokenizer.from_str(bytes_tokenizer())
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    inner.enable_truncation(3)
    text = inner.to_str()
    for name, content in RunTokenizer.of_json(text).files(16).items():
        (tmp_path / name).write_text(content)
    assert ids_by_transformers(tmp_path, "abcdef") == Json(text).encode(["abcdef"])[0].tolist() == [*b"abcdef"]


def test_a_run_on_ids_has_no_tokenizer(tmp_path):
    import numpy as np

    np.arange(20_000, dtype="<u2").__mod__(500).astype("<u2").tofile(tmp_path / "ids.bin")
    data = {"source": "bin", "files": [str(tmp_path / "ids.bin")], "max_bytes": None}
    save_reference(tmp_path / "run", 1, data=data, tokenizer={"kind": "none", "vocab_size": 500})
    exported(tmp_path / "run", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*token*"))
    assert loaded(tmp_path / "out").config.eos_token_id is None
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()


# The card


def test_the_card_says_what_was_trained_and_nothing_of_the_machine(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "poem.txt").write_text("The cat sat on the mat.\n" * 400)
    data = {"source": "text", "files": [str(tmp_path / "secret" / "poem.txt")], "cache_dir": str(tmp_path / "cache")}
    store = str(tmp_path / "secret" / "store")
    r = save_run(tmp_path / "run", 2, data=data, snapshots={"copy_to": store}, wire={"forward": "int8"})
    rows = [
        {"event": "step", "lineage": 1, "step": 2, "loss": 5.4321},
        {"event": "eval", "lineage": 1, "step": 2, "loss": 5.1234},
        {"event": "step", "lineage": 1, "step": 3, "loss": 9.9999},
        {"event": "eval", "lineage": 1, "step": 3, "loss": 8.8888},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = exported(tmp_path / "run", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    for known in ("5.4321", "5.1234", "poem.txt", r.corpus.sha256, r.weights_sha256(), "int8", r.spec.sha256()):
        assert known in text
    assert done.weights_sha256 == r.weights_sha256()
    token = json.loads((tmp_path / "run" / "private.json").read_text())["token"]
    for hidden in (str(tmp_path), "secret", "9.9999", "8.8888", token):
        assert hidden not in text, hidden
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers"
    spec = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert spec["data"]["files"] == ["poem.txt"]
    assert spec["model"]["width"] == r.spec.model.width


# Whole or not at all


@pytest.mark.full
def test_memory_stays_near_the_largest_tensor(tmp_path):
    """Measured by the process itself: loading two stages, or one twice, would be above."""
    sizes = 768, 8, 2048, 16000
    write_run(tmp_path / "run", a_spec(*sizes))
    command = [sys.executable, Path(__file__).parent / "export_memory.py", tmp_path / "run", *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["largest_stage_bytes"] > 100_000_000
    assert found["ratio"] < 1.5


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Stop])
def test_an_interrupted_export_leaves_nothing(tmp_path, stop):
    save_run(tmp_path / "run", 1)

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise stop

    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(stop):
        exported(tmp_path / "run", tmp_path / "out", tell=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    exported(tmp_path / "run", tmp_path / "out")


def test_what_a_kill_leaves_is_cleared_away_by_the_next_export(tmp_path):
    save_run(tmp_path / "run", 1)
    child = os.fork()
    if not child:
        exported(tmp_path / "run", tmp_path / "out", tell=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(list(tmp_path.glob(".out.partial-*"))) == 1
    assert not (tmp_path / "out").exists()
    left = []

    def look(done: int, total: int) -> None:
        left.append(len(list(tmp_path.glob(".out.partial-*"))))

    def another(done: int, total: int) -> None:
        """Two exports to one folder do not touch each other's files; the first to finish wins."""
        if done == total:
            exported(tmp_path / "run", tmp_path / "out", tell=look)

    with pytest.raises(UserError) as late:
        exported(tmp_path / "run", tmp_path / "out", tell=another)
    assert late.value.kind == "out_exists"
    assert set(left) == {2}, "the killed one's is gone, the other's is not"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
    loaded(tmp_path / "out")


def test_a_disk_without_room(tmp_path):
    save_run(tmp_path / "run", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError) as full:
            exported(tmp_path / "run", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (full.value.kind, full.value.exit_code) == ("disk_full", EXIT_OUTSIDE)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_an_out_that_exists(tmp_path):
    save_run(tmp_path / "run", 1)
    for taken in ("file", "full"):
        (tmp_path / "full").mkdir(exist_ok=True)
        (tmp_path / "full" / "mine").write_text("")
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError) as refused:
            exported(tmp_path / "run", tmp_path / taken)
        assert (refused.value.kind, refused.value.exit_code) == ("out_exists", EXIT_OUTSIDE)
    (tmp_path / "empty").mkdir()
    exported(tmp_path / "run", tmp_path / "empty")
    exported(tmp_path / "run", tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o777
    with pytest.raises(UserError) as refused:
        exported(tmp_path / "run", tmp_path / "file" / "below")
    assert refused.value.kind == "out_not_writable"


# There and back


@pytest.mark.parametrize(("form", "qk_norm"), [("dense", False), ("reparam", True)])
def test_exported_imported_and_exported_again(tmp_path, form, qk_norm):
    """As a coordinator cuts it: the weights of the second export are the first's, to the byte."""
    save_reference(tmp_path / "run", 3, subspace={"form": form}, model={"qk_norm": qk_norm}, stages=[1, 3])
    exported(tmp_path / "run", tmp_path / "out")
    spec = starting_from(tmp_path / "out", stages=[1, 3])
    opened = open_run_dir(tmp_path / "again", spec, Path())
    snapshots = Snapshots(tmp_path / "again" / "snapshots", opened.identity, (0, ""), tmp_path / "again" / "basis")
    cut = FirstSnapshot(spec, tmp_path / "out", snapshots).cut((1, 3))
    snapshots.settle(lambda: History((Mark(0, 0, 0, "", parts=cut.parts, layers=(1, 3)),)))
    exported(tmp_path / "again", tmp_path / "back")
    files = sorted(path.name for path in (tmp_path / "out").glob("model*"))
    assert len(files) == 3
    for name in files:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    configs = [json.loads((tmp_path / out / "config.json").read_text()) for out in ("out", "back")]
    assert configs[0] == configs[1]
