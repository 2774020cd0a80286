"""The same code on a CUDA device: to tolerance, not to the bit."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import make_spec
from exporting import save_reference
from starting import pmtrain

from protomodels_cli.codecs import Carrier, End
from protomodels_cli.data.prepare import prepare
from protomodels_cli.export.source import open_source
from protomodels_cli.export.write import export
from protomodels_cli.lab.reconstruct import compare
from protomodels_cli.model import rules
from protomodels_cli.model.moments import round_stochastically
from protomodels_cli.model.reference import Reference
from protomodels_cli.protocol.messages import MessageKey

pytestmark = pytest.mark.cuda


def on(device, **sections):
    spec = make_spec(**sections)
    return Reference(spec, prepare(spec), Carrier(spec), device)


@pytest.mark.parametrize("form", ["reparam", "constrained", "dense"])
def test_losses_follow_the_cpus(form):
    losses = []
    for device in ("cpu", "cuda"):
        r = on(device, subspace={"form": form}, steps=20)
        losses.append([row["loss"] for row in r.train() if row["event"] == "step"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("form", ["reparam", "constrained"])
def test_the_method_is_exact_there_too(form):
    r = on("cuda", subspace={"form": form}, compute={"dtype": "float64"}, steps=8)
    for _ in r.train():
        pass
    errors = compare(r)
    assert max(*errors["forward"].values(), *errors["backward"].values()) <= 1e-12


def test_orthogonalise_uses_bf16_and_agrees():
    g = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    found = rules.orthogonalise(g.cuda()).cpu()
    assert torch.linalg.norm(found - rules.orthogonalise(g)) / torch.linalg.norm(found) < 2e-2


def test_moments_are_rounded_as_on_the_cpu():
    wide = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    kept = [torch.empty(300, 7, dtype=torch.bfloat16, device=device) for device in ("cpu", "cuda")]
    for to in kept:
        round_stochastically(wide.to(to.device), to, seed=5, start=21)
    assert torch.equal(kept[0], kept[1].cpu())


@pytest.mark.parametrize("choice", [{}, {"moments": "bf16", "tables": "row_adamw"}])
@pytest.mark.parametrize(("form", "name"), [("constrained", "row_adamw"), ("reparam", "muon"), ("dense", "adamw")])
def test_an_applied_step_does_not_wait_for_the_device(form, name, choice):
    r = on("cuda", stages=1, subspace={"form": form}, optimizer={"name": name, **choice})
    for step in (1, 2):
        r.accumulate(step)
        r.prepare()
        torch.cuda.set_sync_debug_mode("error")
        try:
            r.trainers[0].optimizer.apply(1e-3, 0.5)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_four_peers_on_one_gpu_train_as_on_the_cpu(tmp_path):
    """The demo on both: float32 losses within 1e-3 over 25 steps."""
    losses = {}
    for device in ("cpu", "cuda:0"):
        run_dir = tmp_path / device.replace(":", "")
        command = [sys.executable, "-m", "protomodels_cli", "demo", "--steps", "25", "--device", device]
        subprocess.run([*command, "--run-dir", str(run_dir)], check=True, timeout=400)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        losses[device] = [r["loss"] for r in rows if r["event"] == "step"]
    assert len(losses["cpu"]) == 25
    worst = max(abs(a - b) / b for a, b in zip(losses["cuda:0"], losses["cpu"], strict=True))
    print(f"largest relative difference of a step's loss: {worst:.2e}")
    assert worst < 1e-3


@pytest.mark.parametrize(("codec", "home"), [("int4+ef21", "cuda"), ("int4+aqsgd", "cpu")])
def test_a_restored_memory_is_where_it_was(codec, home):
    """A cache of all samples has no room on the device, after a restore as before."""
    device, x = torch.device("cuda"), torch.randn(2, 4, 6, device="cuda")
    ends = [End(make_spec(wire={"forward": codec})) for _ in range(2)]
    slot = ends[0].slot(MessageKey(1, 0, 0, "forward"), x.shape, x.dtype, torch.arange(2)[:, None].expand(-1, 5))
    ends[0].pack(x, slot)
    ends[0].decide(apply=True)
    ends[1].load({name: t.cpu() for name, t in ends[0].state().items()}, device)
    for end in ends:
        assert {t.device.type for t in end.state().values()} == {home}
    assert ends[0].pack(0.5 * x, slot) == ends[1].pack(0.5 * x, slot)


def test_a_model_writes_and_scores_there_as_on_the_cpu(tmp_path):
    tokenizer, far = {"kind": "bpe", "vocab_size": 320}, {"lr": 0.3}  # from guessing, which is the same everywhere
    save_reference(tmp_path / "run", tokenizer=tokenizer, model={"context": 64, "qk_norm": True}, optimizer=far)
    with open_source(str(tmp_path / "run"), None, tmp_path) as source:
        export(source, tmp_path / "model", None)
    (tmp_path / "a.txt").write_text("The cat sat on the mat, and the dog — 狗 🐕 — ate the cat's déjeuner.\n" * 40)
    found, texts = {}, set()
    for device in ("cpu", "cuda:0"):
        options = {"cwd": tmp_path, "seconds": 200, "OMP_NUM_THREADS": "1"}  # which starts it afresh
        on = ["--device", device]
        written = pmtrain("generate", "model", "--prompt", "The cat", "--temperature", "0", *on, **options)
        assert written.returncode == 0, written.stderr
        texts.add(written.stdout)
        scored = pmtrain("eval", "model", "--data", "a.txt", "--json", "found.json", *on, **options)
        assert scored.returncode == 0, scored.stderr
        found[device] = json.loads((tmp_path / "found.json").read_text())
    assert len(texts) == 1
    assert found["cuda:0"]["loss"] == pytest.approx(found["cpu"]["loss"], rel=1e-4)
    assert found["cuda:0"]["bytes"] == found["cpu"]["bytes"]
