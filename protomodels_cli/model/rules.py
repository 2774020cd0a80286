"""The optimizers' arithmetic on one parameter: gradient and state in, update direction out.

A rule moves the tensors of `state` (model/moments.py) in place. The caller scales by −lr, applies weight decay, and,
for a constrained matrix, passes coordinates g·U and multiplies the direction by Uᵀ: in S, whatever the rule did. All
but Muon treat rows by themselves, so a parameter may come in pieces. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from protomodels_cli.model.moments import State
from protomodels_cli.spec.groups import Settings

# Quintic Newton–Schulz coefficients of Jordan et al. (Muon): steepest at 0, singular values end in about [0.7, 1.2].
MUON_RMS = 0.2  # of an update, before the rate
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def adamw(g: Tensor, state: State, t: int, o: Settings) -> Tensor:
    return _adam(g, g.square(), state, t, o)


def fused_adamw(
    group: list[tuple[torch.nn.Parameter, Tensor, State]],
    t: int,
    o: Settings,
    lr: float,
    coefficient: float,
) -> None:
    """AdamW's whole step on these parameters, gradients × coefficient; uses the gradients up."""
    if not group:
        return
    device = group[0][0].device
    torch_adamw(
        params=[p for p, _, _ in group],
        grads=[g for _, g, _ in group],
        exp_avgs=[state["first"] for _, _, state in group],
        exp_avg_sqs=[state["second"] for _, _, state in group],
        max_exp_avg_sqs=[],
        state_steps=list(torch.full((len(group),), t - 1.0, device=device).unbind()),
        grad_scale=None if coefficient == 1 else torch.full((), 1 / coefficient, device=device),
        found_inf=None,
        fused=True,
        amsgrad=False,
        beta1=o.beta1,
        beta2=o.beta2,
        lr=lr,
        weight_decay=o.weight_decay,
        eps=o.eps,
        maximize=False,
    )


def row_adamw(g: Tensor, state: State, t: int, o: Settings, width: int) -> Tensor:
    """AdamW with one second moment per row: the mean over the row's `width` entries.

    g holds the row's coordinates; U is orthonormal, so its squares add up to those of the d-wide row.
    """
    return _adam(g, g.square().sum(1, keepdim=True) / width, state, t, o)


def _adam(g: Tensor, g_squared: Tensor, state: State, t: int, o: Settings) -> Tensor:
    first = state["first"].lerp_(g, 1 - o.beta1) if "first" in state else g  # not kept where β₁ is 0
    second = state["second"].lerp_(g_squared, 1 - o.beta2)
    denominator = (second / (1 - o.beta2**t)).sqrt_().add_(o.eps)
    return (first / (1 - o.beta1**t)).div_(denominator)


def muon(g: Tensor, state: State, o: Settings) -> Tensor:
    """Nesterov momentum, orthogonalised; scaled so that its RMS is that of a typical AdamW update."""
    momentum = state["first"].lerp_(g, 1 - o.momentum)
    return orthogonalise(g.lerp(momentum, o.momentum)).mul_(MUON_RMS * math.sqrt(max(g.shape)))


def muon_batch(gradients: list[Tensor], states: list[State], o: Settings) -> list[Tensor]:
    """`muon` for matrices of one shape: a small one keeps a GPU waiting for the next, several do not."""
    momenta = [state["first"] for state in states]
    torch._foreach_lerp_(momenta, gradients, 1 - o.momentum)
    ahead = torch._foreach_lerp(gradients, momenta, o.momentum)
    return list(orthogonalise(torch.stack(ahead)).mul_(MUON_RMS * math.sqrt(max(gradients[0].shape))).unbind())


def orthogonalise(g: Tensor) -> Tensor:
    """The nearest matrix with singular values near 1, or of several on top of each other the nearest of each. bf16 on
    CUDA; elsewhere in g's own precision."""
    a, b, c = NEWTON_SCHULZ
    x = g.to(torch.bfloat16) if g.is_cuda else g.clone()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    product, norm = (torch.addmm, x.norm()) if x.ndim == 2 else (torch.baddbmm, x.norm(dim=(1, 2), keepdim=True))
    x = x / norm.clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(g.dtype)
