"""What breaks the method, one by one: each is refused, or shown to be caught.

The list is that of METHOD: element-wise optimizers and raw gradients; gains, biases, norms and dropout on what is
written; learned positions, tied heads, skips; unequal U or T_fixed; ids in floats; subtraction in bf16.
"""

import pytest
import torch
from conftest import make_reference
from torch import nn

from protomodels_cli.errors import RunStopped
from protomodels_cli.forms.constrained import Constrained
from protomodels_cli.lab.optimizer import drift, leaver
from protomodels_cli.lab.reconstruct import relative
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.llama import Matrix, RMSNorm, Writer
from protomodels_cli.model.t_fixed import TFixed
from protomodels_cli.spec import SpecError, spec_from


def boundary_error(reference) -> float:
    """How much of a constrained stage's stream is lost when it crosses the first boundary."""
    stage = reference.stages[0]
    kept = []
    last = stage.layers[str(stage.slice.layers[-1])]
    with last.register_forward_hook(lambda _m, _a, out: kept.append(out.detach())):
        tokens = torch.arange(16)[None]
        message = stage.run_forward(tokens, None).output
    anchor = stage.t_fixed.rows(tokens, torch.float32)
    return relative(stage.form.decode(message.detach(), anchor), kept[0])


# 1. An element-wise optimizer on a constrained matrix; unprojected gradients.


def test_an_elementwise_optimizer_on_a_constrained_matrix_is_refused():
    shape = {"steps": 1, "model": {"layers": 2, "width": 32, "heads": 2}, "subspace": {"form": "constrained"}}
    with pytest.raises(SpecError) as refused:
        spec_from({**shape, "optimizer": {"name": "adamw"}})
    assert [(p.field, p.kind) for p in refused.value.problems] == [("optimizer.name", "optimizer_fits_form")]
    assert spec_from(shape).optimizer.name == "muon", "the default suits every form"
    with pytest.raises(ValueError, match="row_adamw"):
        Constrained.rule_for("adamw", "writer")
    assert Constrained.rule_for("muon", "embedding") == "row_adamw", "Muon's AdamW half would leave S"


@pytest.mark.full
def test_and_rightly_so():
    good, bad = (make_reference(subspace={"form": "constrained"}, steps=60) for _ in range(2))
    step = leaver(bad, "adamw")
    for _ in range(60):
        good.run_step()
        step()
    assert drift(good) < 1e-6
    assert boundary_error(good) < 1e-6
    assert drift(bad) > 1e-2
    assert boundary_error(bad) > 1e-2


def test_raw_gradients_lie_outside_s_and_prepare_projects_them(reference):
    r = reference(subspace={"form": "constrained"}, stages=1, steps=20)
    for _ in r.train():
        pass
    r.accumulate(1)
    tied = [s for t in r.trainers for s in t.optimizer.parameters if s.form.has_basis]
    raw = {s.name: s.parameter.grad.clone() for s in tied}
    norms = r.prepare()
    outside = []
    for trained in tied:
        u = trained.form.basis.u
        g = raw[trained.name]
        outside.append(relative((g @ u) @ u.T, g))
        assert torch.allclose(trained.gradient, g @ u)
        assert trained.gradient.shape[1] == u.shape[1]
    assert max(outside) > 0.5, "most of a raw gradient lies outside S"
    right = float((raw["embed.weight"].double() @ r.basis.u.double()).square().sum())
    assert norms["embed"] == pytest.approx(right, rel=1e-5), "norms are taken after projection"


# 2. A gain, bias, norm or dropout on what a branch writes. 3. Learned positions, a tied head, skips.
# The spec refuses them by name (test_spec.py). The model has no place for them:


@pytest.mark.parametrize("form", ["constrained", "reparam"])
def test_only_writers_write_and_only_branch_inputs_have_gains(reference, form):
    r = reference(subspace={"form": form}, model={"qk_norm": True})
    allowed_gains = {"attn_norm", "mlp_norm", "q_norm", "k_norm", "norm"}
    for stage in r.stages:
        for name, module in stage.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if isinstance(module, RMSNorm):
                assert name.split(".")[-1] in allowed_gains
            elif own:
                assert isinstance(module, Matrix | Writer)
                assert set(own) == {"weight"}, "no bias"
            assert not isinstance(module, nn.Dropout | nn.LayerNorm | nn.Embedding)
    assert r.stages[0].embed.weight is not r.stages[-1].head.out.weight


@pytest.mark.parametrize("broken", ["gain", "bias", "layer norm", "dropout"])
def test_and_each_of_them_would_lose_part_of_the_stream(reference, broken):
    r = reference(subspace={"form": "constrained"})
    assert boundary_error(r) < 1e-6
    torch.manual_seed(0)
    width = r.spec.model.width
    extra = {
        "gain": lambda y: y * (1 + 0.1 * torch.randn(width)),
        "bias": lambda y: y + 0.01 * torch.randn(width),
        "layer norm": lambda y: nn.functional.layer_norm(y, (width,), 1 + 0.1 * torch.randn(width)),
        "dropout": lambda y: nn.functional.dropout(y, 0.1),
    }[broken]
    r.stages[0].layers["0"].mlp.down.register_forward_hook(lambda _m, _a, y: extra(y))
    assert boundary_error(r) > 1e-4


def test_positions_enter_inside_attention_only(reference):
    """The stream at the first boundary depends on a token's place only through attention: with one token
    repeated, it is the same at every place."""
    stage = reference(subspace={"form": "reparam"}).stages[0]
    coordinates = stage.run_forward(torch.full((1, 16), 65), None).output
    assert torch.allclose(coordinates, coordinates[:, :1].expand_as(coordinates), atol=1e-6)


# 4. U or T_fixed that differ between stages.


@pytest.mark.parametrize("what", ["U", "T_fixed", "version"])
def test_a_flipped_bit_is_found_at_the_next_sync(reference, what):
    r = reference(subspace={"sync_interval": 2}, steps=10)
    r.run_step()
    stage = r.stages[2]
    if what == "U":
        stage.form.basis.u.view(torch.int32)[3, 2] ^= 1  # the last bit of one entry
    elif what == "T_fixed":
        stage.t_fixed.signs[77, 1] ^= 1
    else:
        stage.form.basis = type(stage.basis)(stage.basis.version + 1, stage.basis.u)
    with pytest.raises(RunStopped, match=r"stage 2 .*step 2") as stopped:
        list(r.train())
    assert stopped.value.kind == "hash_mismatch"


def test_stages_do_not_share_the_bytes_they_are_checked_on(reference):
    """Otherwise a flip in one would be a flip in all, and the check above could not fail."""
    r = reference()
    assert len({s.t_fixed.signs.data_ptr() for s in r.stages}) == 4
    assert len({s.basis.u.data_ptr() for s in r.stages}) == 4


def test_unequal_bases_are_garbage_not_noise(reference):
    r = reference(subspace={"form": "reparam"})
    before = r.evaluate()
    r.stages[1].form.basis = initial_basis(32, 6, seed=99)
    tokens = torch.arange(16)[None]
    message = r.stages[0].run_forward(tokens, None).output
    right, wrong = (stage.evaluate(tokens, message) for stage in (r.stages[2], r.stages[1]))
    assert relative(wrong - message, right - message) > 0.1
    assert r.evaluate() != before


# 5. Token ids in a float channel.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_float_token_ids_are_refused(reference, dtype):
    assert torch.tensor(257.0, dtype=torch.bfloat16).item() != 257
    stage = reference().stages[1]
    with pytest.raises(TypeError, match=str(dtype)):
        stage.evaluate(torch.arange(16, dtype=dtype)[None], torch.zeros(1, 16, 6))


# 6. x − T_fixed in bf16.


def test_subtracting_in_bf16_cancels_and_no_spec_can_ask_for_it():
    basis, table = initial_basis(64, 8, 0), TFixed(256, 64, 1.0, 0)
    form, tokens = Constrained(basis), torch.arange(256)
    anchor = table.rows(tokens, torch.float32)
    coordinates = 0.05 * torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    x = form.decode(coordinates, anchor)
    assert relative(form.encode(x, anchor), coordinates) < 1e-5
    in_bf16 = (x.bfloat16() - anchor.bfloat16()).float() @ basis.u
    assert relative(in_bf16, coordinates) > 1e-2
    shape = {"steps": 1, "model": {"layers": 2, "width": 32, "heads": 2}}
    with pytest.raises(SpecError) as refused:
        spec_from({**shape, "compute": {"dtype": "bfloat16"}})
    assert [(p.field, p.kind, p.value) for p in refused.value.problems] == [("compute.dtype", "word", "bfloat16")]
