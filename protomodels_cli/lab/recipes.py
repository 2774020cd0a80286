"""What differs between the runs of a sweep: a model's form, its wire, and the rates that it is trained with.

The start of all tuning is the recipe that did best at d = 512 in 800 steps. `carried` says what becomes of its rates at
another width and length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from protomodels_cli.codecs.base import CodecError
from protomodels_cli.codecs.registry import parse_codec
from protomodels_cli.forms import FORMS
from protomodels_cli.lab.mapl import Mapl
from protomodels_cli.lab.relay import Relay
from protomodels_cli.lab.scales import Scale, data_sections
from protomodels_cli.lab.shared_anchor import Sharing
from protomodels_cli.lab.wires import legs
from protomodels_cli.spec import spec_from
from protomodels_cli.spec.schema import RunSpec

EXACT = "fp32"  # the codec that rounds nothing
BETA1, BETA2 = 0.8, 0.95
WARM_UP = 1 / 20  # of all steps; from there linearly to 0
HOME_WIDTH, HOME_STEPS = 512, 800  # where the starting recipe is from
CARRIED = (
    "from d = 512 and 800 steps to width d and n steps: matrices' rate × √(512/d), so that Muon's updates keep their "
    "spectral norm; the head's × 512/d; embedding's and anchors' as they are; weight decay so that rate × decay × "
    "steps stays the same"
)
Anchor = Literal["fixed", "segment", "shared"]


@dataclass(frozen=True)
class Recipe:
    """Everything about a run but its scale and its seed."""

    form: str
    anchor: Anchor
    k: int | None  # none: dense
    codec: str  # both ways, or forward|backward
    lr: float = 4e-3  # the blocks' matrices, with Muon
    weight_decay: float = 1.0  # of the same
    embedding_lr: float = 0.016
    embedding_std: float = 0.1
    anchor_lr: float = 0.016
    t_fixed_scale: float = 0.1
    head_lr: float = 4e-3  # and the gains'
    segments: int | None = None  # other than the scale's
    anchor_rank: int | None = None  # none: the width
    anchor_tokens: int | None = None  # none: the default, of this and the next
    early_loss: float | None = None
    sharing: Sharing | None = None  # with anchor `shared`, which no pipeline has: the reference plays it
    hidden: Literal["auto"] | int = "auto"  # auto: as many parameters as the dense model

    @property
    def codecs(self) -> tuple[str, str]:
        """Forward and backward."""
        return legs(self.codec)

    @property
    def trains_anchors(self) -> bool:
        return self.anchor != "fixed"

    @property
    def name(self) -> str:
        words = [self.form]
        if self.k is not None or self.trains_anchors:
            words.append(self.anchor if self.sharing is None else f"{self.anchor} {self.sharing.name}")
        if self.anchor_rank is not None:
            words.append(f"rank={self.anchor_rank}")
        if self.anchor_tokens is not None:
            words.append(f"tokens={self.anchor_tokens}")
        if self.early_loss is not None:
            words.append(f"early={self.early_loss}")
        if self.k is not None:
            words.append(f"k={self.k}")
        words.append(self.codec)
        if self.segments is not None:
            words.append(f"in {self.segments} segments")
        return " ".join(words)

    @property
    def family(self) -> str:
        """What is tuned together: the wire, k and how an anchor is shared take their family's rates."""
        alike = {"constrained": "reparam", Relay.name: "two_stream", Mapl.name: "dense"}
        form = alike.get(self.form, self.form)
        return f"{form} {'segment' if self.trains_anchors else 'fixed'}"


def dense(codec: str, anchor: Anchor = "fixed", width: int = HOME_WIDTH) -> Recipe:
    # Half the decay is better at d = 512 and worse at d = 1024 (1.4333 for 1.4258); with anchors it was not tried.
    decay = 0.5 if anchor == "fixed" and width <= HOME_WIDTH else 1.0
    return Recipe("dense", anchor, None, codec, weight_decay=decay, embedding_lr=0.05, embedding_std=0.32)


def carried(recipe: Recipe, scale: Scale) -> Recipe:
    """The recipe of d = 512 at another scale, as CARRIED says."""
    narrower = HOME_WIDTH / scale.width
    lr = recipe.lr * math.sqrt(narrower)
    decay = recipe.weight_decay * recipe.lr * HOME_STEPS / (lr * scale.steps)
    return replace(recipe, lr=lr, head_lr=recipe.head_lr * narrower, weight_decay=decay)


def carried_back(recipe: Recipe, scale: Scale) -> Recipe:
    """What `carried` makes the recipe from."""
    narrower = HOME_WIDTH / scale.width
    lr = recipe.lr / math.sqrt(narrower)
    decay = recipe.weight_decay * recipe.lr * scale.steps / (lr * HOME_STEPS)
    return replace(recipe, lr=lr, head_lr=recipe.head_lr / narrower, weight_decay=decay)


def with_rates(recipe: Recipe, tuned: Recipe) -> Recipe:
    """A row of a family with the rates that were tuned for it."""
    names = ("lr", "weight_decay", "embedding_lr", "embedding_std", "anchor_lr", "t_fixed_scale", "head_lr")
    rates = {name: getattr(tuned, name) for name in names}
    if recipe.sharing is not None:  # one update for several steps' gradients
        rates["anchor_lr"] *= math.sqrt(recipe.sharing.every)
    return replace(recipe, **rates)


def is_installed(recipe: Recipe) -> bool:
    """Whether its codecs are."""
    try:
        for codec in recipe.codecs:
            parse_codec(codec)
    except CodecError:
        return False
    return True


def spec_of(scale: Scale, recipe: Recipe, seed: int) -> RunSpec:
    r, steps, segments = recipe, scale.steps, recipe.segments or scale.segments
    for form in (Relay, Mapl):
        FORMS.add(form.name, form)  # here, since each process of a sweep comes by
    subspace: dict[str, Any] = {"form": r.form, "anchor": "segment" if r.trains_anchors else "fixed"}
    subspace |= {name: getattr(r, name) for name in ("anchor_rank", "anchor_tokens", "early_loss")}
    if r.k is not None:
        subspace |= {"k": r.k, "t_fixed": {"scale": r.t_fixed_scale}}
    sizes = {name: getattr(scale, name) for name in ("layers", "width", "heads", "kv_heads", "context")}
    return spec_from(
        {
            "name": "lab",
            "seed": seed,
            "steps": steps,
            "stages": segments,
            "model": sizes | {"segments": segments, "hidden": r.hidden},
            "subspace": subspace,
            "optimizer": {
                "name": "muon",
                "lr": r.head_lr,
                "beta1": BETA1,
                "beta2": BETA2,
                "weight_decay": 0.0,
                "schedule": {
                    "warmup_steps": math.ceil(steps * WARM_UP),
                    "decay": "linear",
                    "final_fraction": 0.0,
                },
            },
            "groups": {
                "embedding": {"lr": r.embedding_lr, "std": r.embedding_std},
                "anchors": {"lr": r.anchor_lr},
                "matrices": {"lr": r.lr, "weight_decay": r.weight_decay},
                "writers": {"std": 0.0},
            },
            "batch": {"size": scale.batch, "microbatches": scale.microbatches},
            "wire": dict(zip(("forward", "backward"), r.codecs, strict=True)),
            "eval": {"interval": math.ceil(steps / scale.evals), "windows": scale.eval_windows},
            "compute": {"loss_chunk": scale.loss_chunk, "recompute": "none"},
            **data_sections(scale),
        }
    )
