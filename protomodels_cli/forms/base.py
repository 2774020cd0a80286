"""What a form of the residual stream is: the interface that spec, cost model, stages and optimizers ask.

A stage carries a *state* from block to block. What the state is, how a block reads the d-wide stream x from it and
writes to it, and what crosses a boundary is all that differs between forms. Facts are class methods on sizes and need
no torch; an instance belongs to one stage, with the basis in use, and its methods are plain operators on tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from protomodels_cli.spec.optimizer import OptimizerSpec
    from protomodels_cli.spec.schema import RunSpec

Rule = Literal["adamw", "row_adamw", "muon"]
Role = Literal["gain", "matrix", "writer", "embedding", "head", "anchor"]
Move = Literal["transport", "project"]
TABLES: tuple[Role, ...] = ("embedding", "head")  # a row a token: the largest matrices by far
START_DENSE = "set subspace.form to dense, with a codec as int8 where links are slow, or remove model.init"


@dataclass(frozen=True)
class Sizes:
    """What a form's own sizes may depend on."""

    width: int
    layers: int
    k: int
    unconstrained_layers: int
    last_segment: int  # its layers

    @classmethod
    def of(cls, spec: RunSpec) -> Sizes:
        free = spec.subspace.unconstrained_layers
        last = spec.layers_per_segment[-1]
        return cls(spec.model.width, spec.model.layers, spec.subspace.k, 1 if free is None else free, last)


@dataclass(frozen=True)
class Switch:
    """A change of basis: the old U, the new U, and how weights follow."""

    old: Tensor
    new: Tensor
    turn: Tensor  # UᵀU′, k×k
    move: Move


class Form:
    """By default state and message are the stream itself."""

    name: ClassVar[str]
    about: ClassVar[str]  # for docs/spec.md: completes "`name` …"
    # Computes with U and adds T_fixed to the embedding. The two come together: a sync hashes both.
    has_basis: ClassVar[bool] = False
    # Whether reading makes x anew from the state, in the type that matrices are multiplied in.
    remakes_stream: ClassVar[bool] = False
    # Whether something of the state ends with a segment, whether or not a boundary is there.
    has_local_stream: ClassVar[bool] = False
    # Whether segments train anchors of their own where the spec does not say.
    trains_anchors: ClassVar[bool] = False
    # The weight that their own losses have then at the start.
    early_loss: ClassVar[float] = 0.0

    def __init__(self, basis: Any = None):
        assert (basis is not None) == self.has_basis
        self.basis = basis

    @property
    def u(self) -> Tensor:
        return self.basis.u

    # Facts: no tensors.

    @classmethod
    def state_width(cls, sizes: Sizes) -> int:
        """Numbers a token from block to block, which is also the stored columns of matrices that write."""
        return sizes.width

    @classmethod
    def closing_width(cls, sizes: Sizes) -> int:
        """The same of the matrix that writes last in a segment: nobody reads what would end there."""
        return cls.state_width(sizes)

    @classmethod
    def embedding_width(cls, sizes: Sizes) -> int:
        """Numbers a token in the embedding's rows."""
        return cls.state_width(sizes)

    @classmethod
    def boundary_width(cls, sizes: Sizes) -> int:
        """Numbers a token over a boundary."""
        return sizes.width

    @classmethod
    def free_layers(cls, sizes: Sizes) -> int:
        """Last layers that are built as the dense form's: they read and write x itself, and only the head follows.
        Of the dense form itself: none, though all are."""
        return 0

    @classmethod
    def least_last_layers(cls, sizes: Sizes) -> int:
        """Layers that the last stage must have."""
        return 1

    @classmethod
    def optimizer_columns(cls, sizes: Sizes, stored: int) -> int:
        """Columns of a writing matrix's gradient and moments, as the optimizer sees them, of so many that it has."""
        return stored

    @classmethod
    def lifted_columns(cls, sizes: Sizes) -> int:
        """Columns of the tensor that an update is multiplied out to before it is applied; 0: it is not."""
        return 0

    @classmethod
    def reading_flops(cls, sizes: Sizes) -> int:
        """Operations a token in which both branches of a block read x from the state, forward and backward."""
        return 0

    @classmethod
    def optimizer_problem(cls, optimizer: str) -> tuple[str, str] | None:
        """Why an optimizer does not fit, and what to do: rule and fix."""
        if optimizer == "row_adamw":
            return (
                f"row AdamW is for full matrices in the subspace S, and the {cls.name} form has none",
                "use adamw or muon",
            )
        return None

    @classmethod
    def update_problem(cls) -> str | None:
        """Why U cannot move."""
        return None if cls.has_basis else f"the {cls.name} form has no subspace to move"

    @classmethod
    def anchor_problem(cls) -> tuple[str, str] | None:
        """Why anchors cannot be trained, and what to do: rule and fix."""
        return None

    @classmethod
    def free_layers_problem(cls, sizes: Sizes, asked: int) -> tuple[str, str] | None:
        """Why `unconstrained_layers` cannot be what a spec asks for, and what to do: rule and fix."""
        return None

    @classmethod
    def init_problem(cls) -> tuple[str, str] | None:
        """Why a run cannot start from the weights of an ordinary transformer, and what to do: rule and fix."""
        return f"the {cls.name} form has no place for the weights of an ordinary transformer", START_DENSE

    @classmethod
    def rule_for(cls, optimizer: str, role: Role) -> Rule:
        """Which rule moves a parameter of this form."""
        if role == "anchor":  # the largest table of all, on every stage: one second moment a row
            return "row_adamw"
        return "muon" if optimizer == "muon" and role in ("matrix", "writer") else "adamw"

    @classmethod
    def chosen_rule(cls, optimizer: OptimizerSpec, role: Role) -> Rule:
        """`rule_for`, and where AdamW would move a large table, what the spec has for those."""
        rule = cls.rule_for(optimizer.name, role)
        return optimizer.tables if rule == "adamw" and role in TABLES else rule

    # Operators. `anchor` is what a stage adds for tokens by itself: T_fixed[tokens], where the form has a basis, and
    # its trained change; None where there is neither. It is in the type that matrices are multiplied in, the state
    # in the weights' own.

    def start(self, rows: Tensor, anchor: Tensor | None) -> Tensor:
        """The state before the first block, from the embedding's rows."""
        return rows

    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        """The stream x, d numbers a token, from the state: in either's type."""
        return state

    def add(self, state: Tensor, written: Tensor) -> Tensor:
        """The state after a block has written to it."""
        return state + written

    def encode(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        """The message over a boundary. Its gradient is the method's backward message."""
        return state

    def decode(self, message: Tensor, anchor: Tensor | None) -> Tensor:
        return message

    def initial(self, draw: Callable[[int], Tensor], columns: int) -> Tensor:
        """A writing matrix at the start; `draw(n)` gives its rows with n columns of random numbers."""
        return draw(columns)

    def rows(self, weight: Tensor) -> Tensor:
        """What a writing matrix writes to x, d columns: for the exported model."""
        return weight

    def project(self, gradient: Tensor) -> Tensor:
        """A writing matrix's gradient as the optimizer sees it."""
        return gradient

    def lift(self, direction: Tensor) -> Tensor:
        """An optimizer's direction as it is added to the matrix: row by row, since large tables come in pieces."""
        return direction

    def reproject(self, weight: Tensor) -> None:
        """Put a writing matrix back into S, in place, against the rounding of many steps."""

    def follow(self, weight: Tensor, switch: Switch) -> None:
        """Move a writing matrix with U, in place."""

    def follow_moments(self, state: dict[str, Tensor], rule: Rule, switch: Switch) -> None:
        """Move the optimizer's moments of a writing matrix with U, in place."""
