"""The model against independent ones: a plain Llama written apart, and Hugging Face's transformers."""

from functools import partial

import pytest
import torch
from tiers import first
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.cost.units import stage_parameters, t_fixed_bytes, unit_parameters
from protomodels_cli.huggingface.config import config_of
from protomodels_cli.lab import plain_llama
from protomodels_cli.lab.reconstruct import compare, relative
from protomodels_cli.model import loss
from protomodels_cli.model.llama import Head, Running
from protomodels_cli.model.operators import EAGER
from protomodels_cli.model.plain import multiplied_out
from protomodels_cli.model.shape import Shape
from protomodels_cli.model.state import weights

FORMS = ("reparam", "constrained", "dense")


def logits_of(reference, ids):
    with torch.no_grad():
        return reference.stages[-1].logits(reference.forward(ids, 1, 0)[-1].output)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_equals_transformers_once_multiplied_out(reference, form, qk_norm):
    import transformers

    r = reference(subspace={"form": form}, model={"qk_norm": qk_norm, "rope_theta": 500.0})
    for _ in range(3):
        r.run_step()
    config = config_of(r.spec)
    kind = transformers.Qwen3Config if qk_norm else transformers.LlamaConfig
    model_class = transformers.Qwen3ForCausalLM if qk_norm else transformers.LlamaForCausalLM
    theirs = model_class(kind(**{k: v for k, v in config.items() if k != "architectures"}))
    # strict: same names, same shapes, nothing missing and nothing left over
    theirs.load_state_dict(multiplied_out(r.stages), strict=True)
    ids = torch.arange(32).view(2, 16) * 7
    with torch.no_grad():
        assert relative(logits_of(r, ids), theirs(ids).logits) < 1e-5


@pytest.mark.parametrize("unconstrained", [0, 1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_plain_llama_for_any_number_of_unconstrained_layers(reference, form, unconstrained):
    r = reference(
        subspace={"form": form, "unconstrained_layers": unconstrained},
        compute={"dtype": "float64"},
        stages=[1, 1, 2],
        model={"qk_norm": True},
    )
    r.run_step()
    ids = torch.arange(48).view(3, 16)
    _, right = plain_llama.streams_and_logits(multiplied_out(r.stages), config_of(r.spec), ids)
    assert relative(logits_of(r, ids), right) < 1e-12


@pytest.mark.parametrize(
    ("form", "optimizer", "dtype"),
    first(
        1,
        [
            (*kind, dtype)
            for kind in (("reparam", "muon"), ("constrained", "row_adamw"), ("constrained", "muon"))
            for dtype in ("float64", "float32")
        ],
    ),
)
def test_cut_equals_uncut_forward_and_backward_after_60_steps(reference, form, optimizer, dtype):
    """The method's claim, in full: nothing is lost at a boundary, in either direction, for any parameter."""
    sections = {"subspace": {"form": form}, "optimizer": {"name": optimizer}, "compute": {"dtype": dtype}}
    r = reference(**sections, steps=60, batch={"size": 8})
    first = r.run_step()[0]["loss"]
    for _ in r.train():
        pass
    assert r.evaluate() < first - 1, "it did train"
    errors = compare(r)
    assert len([k for k in errors["backward"] if "boundary" in k]) == 3
    assert len(errors["backward"]) == 3 + 1 + 4 * 9 + 2  # boundaries, embedding, layers, head
    assert max(errors["forward"].values()) <= (1e-12 if dtype == "float64" else 1e-5)
    assert max(errors["backward"].values()) <= (1e-12 if dtype == "float64" else 2e-5)


def test_both_forms_start_as_the_same_function_wherever_they_are_cut(reference):
    ids = torch.arange(32).view(2, 16)
    right = logits_of(reference(subspace={"form": "reparam"}, stages=1), ids)
    for stages in (1, [2, 2], [1, 1, 1, 1]):
        assert torch.equal(logits_of(reference(subspace={"form": "reparam"}, stages=stages), ids), right)
        assert relative(logits_of(reference(subspace={"form": "constrained"}, stages=stages), ids), right) < 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_sizes_from_the_spec_are_the_models(reference, form, qk_norm):
    r = reference(subspace={"form": form}, model={"qk_norm": qk_norm, "head_dim": 10}, stages=[1, 1, 2])
    assert stage_parameters(r.spec) == [sum(p.numel() for p in s.parameters()) for s in r.stages]
    assert sum(unit_parameters(r.spec).values()) == r.parameters
    assert t_fixed_bytes(r.spec) == (0 if form == "dense" else r.stages[0].t_fixed.signs.nbytes)
    width = r.forward(torch.zeros(1, 16, dtype=torch.int64), 1, 0)[0].output.shape[-1]
    assert boundary_bytes(r.spec)["backward"] == 4 * width == 4 * r.spec.boundary_width


def test_weights_have_the_same_names_in_the_same_order_for_every_cut(reference):
    names = [list(weights(reference(stages=stages).stages)) for stages in (1, 2, 4, [3, 1])]
    assert all(n == names[0] for n in names)


class LargestOutput(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


def test_the_loss_in_chunks_is_the_loss_and_the_whole_logits_never_exist(spec):
    shape = Shape.of(spec(compute={"dtype": "float64"}, tokenizer={"kind": "bpe", "vocab_size": 5000}))
    head, x = Head(shape, shape.width), torch.randn(3, 50, shape.width, dtype=torch.float64, requires_grad=True)
    torch.nn.init.normal_(head.out.weight, std=0.3)
    targets, run = torch.randint(5000, (3, 50)), Running(EAGER, torch.float64, torch.empty(0), torch.empty(0))
    right = torch.nn.functional.cross_entropy(head(x, run).flatten(0, 1), targets.flatten(), reduction="sum")
    (right * 0.5).backward()
    right_gradients = [x.grad, head.out.weight.grad, head.norm.weight.grad]
    head.out.weight.grad = head.norm.weight.grad = None
    with LargestOutput() as seen:
        found, gradient = loss.loss_and_gradient(head, run, x, targets, chunk=16, scale=0.5)
        assert torch.isclose(loss.loss_sum(partial(head, run=run), x, targets, chunk=16), right)
    assert torch.isclose(found, right)
    for ours, theirs in zip([gradient, head.out.weight.grad, head.norm.weight.grad], right_gradients, strict=True):
        assert relative(ours, theirs) < 1e-13
    assert seen.largest <= 5000 * max(16, shape.width), "a chunk of logits, or the gradient of the head"
    assert seen.largest < 150 * 5000
