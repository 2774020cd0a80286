"""lm-evaluation-harness on an export, unchanged: its log-likelihoods are the reference's. Needs the extra `harness`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from exporting import logits_of, save_reference
from heavy import heavy

from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import export

ROOT = Path(__file__).parent.parent
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the harness is imported: nothing is to be fetched
lm_eval = heavy("lm_eval")


def test_the_harness_measures_what_the_reference_computes(tmp_path, monkeypatch):
    r = save_reference(tmp_path / "run", 3, model={"context": 64})
    with open_source(tmp_path / "run") as source:
        export(source, tmp_path / "out")
    monkeypatch.chdir(ROOT)  # the task names its file from here
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    found = lm_eval.simple_evaluate(
        "hf",
        model_args=f"pretrained={tmp_path / 'out'}",
        tasks=["pmtrain_next_word"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(ROOT / "tests" / "lm_eval_tasks")),
        device="cpu",
        batch_size=4,
        log_samples=True,
    )
    samples = found["samples"]["pmtrain_next_word"]
    assert len(samples) == 8
    right = 0
    for sample in samples:
        doc = sample["doc"]
        ours = [log_likelihood(r, doc["text"], f" {choice}") for choice in doc["choices"]]
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(ours, abs=1e-3)
        right += ours.index(max(ours)) == doc["answer"]
    assert found["results"]["pmtrain_next_word"]["acc,none"] == right / len(samples)


def log_likelihood(r, text: str, continuation: str) -> float:
    ids = torch.tensor([list((text + continuation).encode())])
    logs = torch.log_softmax(logits_of(r, ids[:, :-1])[0].double(), -1)
    told = logs.gather(1, ids[0, 1:, None])
    return float(told[-len(continuation) :].sum())
