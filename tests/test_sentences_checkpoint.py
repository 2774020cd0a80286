"""The one place that checks how it reads that a run cannot start from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_spec import changed, parsed, vocabulary
from test_first_snapshot import BAD, folder  # noqa: F401 (a fixture)
from wording import check_wording

from protomodels_cli.coordinator.failing import no_beginning
from protomodels_cli.errors import UserError
from protomodels_cli.huggingface.checkpoint import Checkpoint
from protomodels_cli.spec import SpecError

OTHER = "start from another checkpoint, or without model.init"
TAKEN = "it is taken from the checkpoint"
SPEC: list[tuple[dict[str, Any] | None, dict[str, Any], str]] = [
    (
        None,
        {},
        "model.init = 'start' | there is no Hugging Face checkpoint: FOLDER/start/config.json cannot be read "
        "(No such file or directory) | check the path, which is relative to the spec file; a run that has begun "
        "does not need the checkpoint any more, and continues with `pmtrain coordinator --resume --dir runs/NAME`",
    ),
    (
        {"model_type": "mistral"},
        {},
        "model.init = 'start' | config.json has model_type = \"mistral\", and a run can start from llama and qwen3 "
        f"checkpoints | {OTHER}",
    ),
    (
        {"model_type": "pmtrain"},
        {},
        "model.init = 'start' | config.json has model_type = \"pmtrain\", and the dense form cannot represent that: "
        "segments of such a model have separate anchors, or a stream that ends with each of them, and dense is one "
        f"stream through all layers | {OTHER}",
    ),
    (
        {"attention_bias": True},
        {},
        "model.init = 'start' | config.json has attention_bias = true, and there are no biases here | " + OTHER,
    ),
    (
        {"rope_scaling": {"rope_type": "llama3"}},
        {},
        'model.init = \'start\' | config.json has rope_scaling = {"rope_type": "llama3"}, and rotary positions are not '
        f"scaled here | {OTHER}",
    ),
    (
        {"hidden_size": None},
        {},
        f"model.init = 'start' | config.json has hidden_size = null, and that is not a size | {OTHER}",
    ),
    (
        {},
        {"model": {"init": "start", "width": 64}},
        "model.width = 64 | the checkpoint in start has another value (config.json has hidden_size: 32) | "
        f"remove `width`: {TAKEN}",
    ),
    (
        {},
        {"tokenizer": {"kind": "bpe", "vocab_size": 300}},
        "tokenizer.vocab_size = 300 | the checkpoint in start has another value (config.json has vocab_size: 256) | "
        f"remove `vocab_size`: {TAKEN}",
    ),
    (
        {"vocab_size": 90},
        {"tokenizer": {"kind": "file", "file": "own.json"}},
        "tokenizer.file = 'own.json' | has 100 ids, and the checkpoint's embedding has 90 rows (config.json has "
        "vocab_size: 90) | use the tokenizer that the checkpoint was trained with",
    ),
    (
        {},
        {"tokenizer": None},
        "tokenizer | is required: the checkpoint in start has no tokenizer.json, and the embedding was not trained "
        "with the ids of a new vocabulary | set tokenizer.kind, and tokenizer.file where that is file, to what the "
        "checkpoint was trained with",
    ),
    (
        {},
        {"subspace": {"form": "reparam"}},
        "subspace.form = 'reparam' | what the blocks of an ordinary transformer write does not lie in a subspace S of "
        "k dimensions, as the reparam form needs it | set subspace.form to dense, with a codec as int8 where links are "
        "slow, or remove model.init",
    ),
]


@pytest.mark.parametrize(("config", "sections", "text"), SPEC)
def test_spec(tmp_path: Path, config: dict[str, Any] | None, sections: dict[str, Any], text: str):
    vocabulary(tmp_path / "own.json", 100)
    with pytest.raises(SpecError) as caught:
        parsed(tmp_path, None if config is None else changed(config), **sections)
    [problem] = caught.value.problems
    where, rule, fix = text.split(" | ")
    said = str(problem).replace(str(tmp_path), "FOLDER").split(": ", 1)[1]
    assert said == f"{where}\n    rule: {rule}\n    fix:  {fix}"


FETCH = "fetch the checkpoint again, all files of it, or export the run again"
PLAIN = "use a plain Llama or Qwen3, its weights with its own config.json"
FILES = {
    "another config": (
        "the checkpoint in FOLDER/start is not the one that the run began with: config.json gives rope_theta = 1.0, "
        "and the run has 500000.0",
        "put the checkpoint of then there",
    ),
    "no weights": (
        "FOLDER/start has neither model.safetensors nor model.safetensors.index.json",
        "name a folder with all files of a checkpoint, its weights as safetensors (save_pretrained of transformers "
        "writes them so)",
    ),
    "cut short": (
        "FOLDER/start/model.safetensors is damaged: the tensors end at byte 161608, and the file has 90000",
        FETCH,
    ),
    "a folder for a file": (
        "cannot read FOLDER/start/model.safetensors: Is a directory",
        "check the path and the disk",
    ),
    "one missing": ("FOLDER/start has no weight model.layers.1.mlp.up_proj.weight", FETCH),
    "a bias": (
        "model.layers.0.self_attn.q_proj.bias in FOLDER/start is no weight of the model that config.json describes",
        PLAIN,
    ),
    "another shape": (
        "model.norm.weight in FOLDER/start is F32 of the shape [31], and config.json asks for floating-point numbers "
        "of the shape [32]",
        PLAIN,
    ),
    "no map": ("FOLDER/start/model.safetensors.index.json does not say which file has which weights", FETCH),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, folder: Path, name: str):  # noqa: F811
    spec = parsed(tmp_path)
    BAD[name][0](folder)
    with pytest.raises(UserError) as caught:
        Checkpoint(folder, spec)
    what, fix = str(caught.value).replace(str(tmp_path), "FOLDER").split("\n    fix:  ")
    assert (what, fix) == FILES[name]


def test_a_beginning_that_is_lost():
    assert str(no_beginning(1, "start")).split("\n    fix:  ") == [
        "stage 1's part of the first snapshot is missing or damaged, and cannot be cut from start again",
        "put the checkpoint that the run began with at start, and start the coordinator again",
    ]


@pytest.mark.parametrize("text", [*(t for *_, t in SPEC), *(t for pair in FILES.values() for t in pair)])
def test_a_sentence_stands_on_its_own(text: str):
    for part in text.split(" | ")[1:]:
        check_wording(part)
